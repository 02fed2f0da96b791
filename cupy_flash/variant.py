"""The features of a call that are compiled into its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .dtypes import ELEMENT_TYPES

_FLAGS = (
    "left", "right", "softcap", "alibi", "mask", "scale_first", "tf32",
    "ragged",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """The features that are compiled into a kernel.

    `tf32` and `ragged` are set only where a kernel makes use of them: `tf32` for
    float32 on tensor cores, `ragged` if a head isn't a multiple of 16 bytes, which is
    the unit in which they load.
    """

    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    bias: np.dtype | None = None
    mask: bool = False
    scale_first: bool = False
    tf32: bool = False
    ragged: bool = False

    @property
    def name(self) -> str:
        """The features in a kernel's name; empty if there are none."""
        parts = [name for name in _FLAGS if getattr(self, name)]
        if self.bias is not None:
            parts.append(f"bias_{ELEMENT_TYPES[self.bias].short}")
        return "_".join(parts)
