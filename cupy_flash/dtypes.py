"""The element types the library computes with, and what each one implies."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class ElementType:
    """One supported dtype.

    Attributes
    ----------
    name : str
        NumPy's name of the dtype.
    short : str
        The name in kernel symbols and tile tables.
    cuda : str
        The C++ type in ``cuda_src``.
    accumulator : np.dtype
        What products and sums are kept in; also the dtype of lse.
    """

    name: str
    short: str
    cuda: str
    accumulator: np.dtype


_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)

ELEMENT_TYPES: dict[np.dtype, ElementType] = {
    np.dtype(np.float16): ElementType("float16", "fp16", "fp16", _FLOAT32),
    np.dtype(ml_dtypes.bfloat16): ElementType("bfloat16", "bf16", "bf16", _FLOAT32),
    np.dtype(np.float32): ElementType("float32", "fp32", "float", _FLOAT32),
    np.dtype(np.float64): ElementType("float64", "fp64", "double", _FLOAT64),
}

FLOAT_NAMES = ", ".join(t.name for t in ELEMENT_TYPES.values())


def accumulator(dtype: np.dtype) -> np.dtype:
    """Return the dtype that sums over `dtype` are kept in."""
    return ELEMENT_TYPES[dtype].accumulator


def parse_dtype(name: object) -> np.dtype:
    """Return the dtype of that name, such as "bfloat16" or "bf16", or of that kind.

    Raises
    ------
    TypeError
        If it isn't one the library computes with.
    """
    for dtype, element in ELEMENT_TYPES.items():
        if name in (element.name, element.short):
            return dtype
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = None
    if dtype not in ELEMENT_TYPES:
        raise TypeError(f"dtype is {name!r}; accepted: {FLOAT_NAMES}")
    return dtype
