"""Attention problems as data, the arrays they stand for, and what is right.

A `Case` says everything about one problem, so that tests of any kernel family, and the
step that compiles kernels before the tests, see the same one. `make` turns it into
NumPy arrays, `expect` computes what `compare` then holds results against.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_flash.configs import FAMILIES

from .reference import (
    assert_close,
    attention,
    attention_backward,
    error_terms,
    unfused,
    unfused_backward,
)

Array = NDArray[Any]

# The kernel families that leave hidden keys out of sums instead of giving them the
# weight 0, so that a NaN in a key reaches no row that doesn't see the key.
EXACT_FAMILIES = tuple(family for family in FAMILIES if family in ("simt",))

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# How an array lies in memory. Where it has gaps they hold NaN.
MEMORY = (
    "dense",
    "fortran",
    "swapped",  # the axes -3 and -2 in the other order, as of the other layout
    "reversed",  # every axis backwards
    "stepped",  # every second element along every axis
    "margin",  # NaN before and after it along every axis
    "packed",  # the middle one of (..., 3, heads, head_dim)
    "offset",  # one element past an aligned address
    "misaligned",  # one byte past an aligned address
    "broadcast",  # the first axis has stride 0
)


@dataclass(frozen=True)
class Case:
    """One attention problem.

    Attributes
    ----------
    batch : the batch axes; None for 2-D arrays
    dv : None for `d`
    alibi : "heads" for slopes of shape (hq,), "batch" for (*batch, hq)
    bias, mask : one letter for each axis of the array, aligned to the right with
        (batch axes, heads, queries, keys): "1" for an axis of size 1, any other letter
        for one of full size. None: no such array
    bias_dtype : None for `dtype`
    bias_holes : some elements of the bias are -inf
    q_lengths, k_lengths : one for each sequence
    memory : how q, k, v and dout, or each of the four, lie in memory; see `MEMORY`
    gradients : False if only the forward pass is of interest
    """

    name: str
    dtype: str = "float32"
    batch: tuple[int, ...] | None = (2,)
    sq: int = 100
    sk: int = 130
    hq: int = 4
    hkv: int = 2
    d: int = 64
    dv: int | None = None
    layout: str = "bshd"
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    bias_holes: bool = False
    mask: str | None = None
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    dlse: bool = False
    memory: str | tuple[str, str, str, str] = "dense"
    gradients: bool = True
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call, as NumPy arrays.

    Attributes
    ----------
    options : those that `flash_attention` and the reference have in common
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by argument name."""
        named = {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout}
        named |= {} if self.dlse is None else {"dlse": self.dlse}
        return named | {n: x for n, x in self.options.items() if hasattr(x, "shape")}

    @property
    def scalars(self) -> dict[str, Any]:
        """The options that aren't arrays."""
        return {n: x for n, x in self.options.items() if not hasattr(x, "shape")}

    def with_options(self, **options: Any) -> Inputs:
        """Return the same arguments with some options replaced."""
        return replace(self, options=self.options | options)


def lse_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of lse for inputs of a dtype."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def normal(seed: int, *shape: int, dtype: DTypeLike = np.float32) -> Array:
    """Return normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# --- From a case to arrays ------------------------------------------------------------


def allocate(shape: tuple[int, ...], dtype: DTypeLike, memory: str = "dense") -> Array:
    """Return an array that lies in memory as `memory` says; every byte is 0xFF.

    That is NaN in every floating dtype. Elements that lie at the same place, and kinds
    that need more axes than there are, come as they may.
    """
    assert memory in MEMORY, memory
    dtype = np.dtype(dtype)
    order = list(range(len(shape)))
    if memory == "fortran":
        order.reverse()
    elif memory == "swapped" and len(shape) > 2:
        order[-3], order[-2] = order[-2], order[-3]
    step = 2 if memory == "stepped" else 1
    margin = 1 if memory == "margin" else 0
    strides = [0] * len(shape)
    offset = 0
    size = dtype.itemsize
    for axis in reversed(order):
        strides[axis] = size * step
        offset += size * margin
        size *= max(1, shape[axis] * step + 2 * margin)
        if memory == "packed" and axis == len(shape) - 2:
            offset += size
            size *= 3
    if memory == "offset":
        offset += dtype.itemsize
    elif memory == "misaligned" and dtype.itemsize > 1:
        offset += 1
    elif memory == "broadcast" and shape:
        strides[0] = 0
    elif memory == "reversed" and 0 not in shape:
        offset = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        strides = [-s for s in strides]
    held = np.full(size + dtype.itemsize, 0xFF, np.uint8)
    return np.ndarray(shape, dtype, held, offset, strides)


def lay_out(x: Array, memory: str) -> Array:
    """Return the same values in an array that lies in memory as `memory` says."""
    held = allocate(x.shape, x.dtype, memory)
    held[...] = x
    return held


def make(case: Case) -> Inputs:
    """Return the arrays of a case."""
    rng = np.random.default_rng(case.seed)
    dtype = DTYPES[case.dtype]
    batch = case.batch or ()
    dv = case.d if case.dv is None else case.dv
    memory = (case.memory,) * 4 if isinstance(case.memory, str) else case.memory

    def sequence(tokens: int, heads: int, size: int, memory: str) -> Array:
        axes = (tokens, heads) if case.layout == "bshd" else (heads, tokens)
        shape = (tokens, size) if case.batch is None else (*batch, *axes, size)
        return lay_out(rng.standard_normal(shape).astype(dtype), memory)

    q = sequence(case.sq, case.hq, case.d, memory[0])
    k = sequence(case.sk, case.hkv, case.d, memory[1])
    v = sequence(case.sk, case.hkv, dv, memory[2])
    dout = sequence(case.sq, case.hq, dv, memory[3])
    dlse = None
    if case.dlse:
        shape = (*batch, case.hq, case.sq) if case.batch is not None else (case.sq,)
        dlse = rng.standard_normal(shape).astype(lse_dtype(dtype))

    options: dict[str, Any] = {}
    for name in ("causal", "window", "scale", "softcap", "layout"):
        value = getattr(case, name)
        if value != Case.__dataclass_fields__[name].default:
            options[name] = value
    if case.alibi is not None:
        shape = (case.hq,) if case.alibi == "heads" else (*batch, case.hq)
        options["alibi_slopes"] = rng.uniform(0.0, 0.5, shape).astype(np.float32)
    if case.bias is not None:
        bias = np.asarray(rng.standard_normal(_broadcast_shape(case, case.bias)))
        if case.bias_holes:
            bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
        options["bias"] = bias.astype(DTYPES[case.bias_dtype or case.dtype])
    if case.mask is not None:
        shape = _broadcast_shape(case, case.mask)
        mask = np.asarray(rng.random(shape) < 0.7)
        # One row sees no key, and one key is seen by no row.
        if len(shape) > 1 and shape[-2] > 4:
            mask[..., 3, :] = False
        if len(shape) > 0 and shape[-1] > 5:
            mask[..., 4] = False
        options["mask"] = mask
    for name, kind in (("q_lengths", np.int32), ("k_lengths", np.int64)):
        lengths = getattr(case, name)
        if lengths is not None:
            options[name] = np.array(lengths, kind).reshape(batch)
    return Inputs(q, k, v, dout, dlse, options)


def _broadcast_shape(case: Case, pattern: str) -> tuple[int, ...]:
    full = (*(case.batch or ()), case.hq, case.sq, case.sk)
    return tuple(
        1 if letter == "1" else size
        for letter, size in zip(reversed(pattern), reversed(full), strict=False)
    )[::-1]


# --- What is right --------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What `assert_close` wants to know about one result."""

    exact: Array
    plain: Array
    terms: Array | None
    dtype: np.dtype


def expect(
    inputs: Inputs, *, gradients: bool = True, terms: bool = True
) -> dict[str, Truth]:
    """Return the float64 results of a call, with the errors that are to be expected.

    The plain implementation that lse is measured with works in the dtype of lse.

    Parameters
    ----------
    gradients : False for out and lse only
    terms : False for logits that `error_terms` isn't made for
    """
    q, k, v, options = inputs.q, inputs.k, inputs.v, inputs.options
    wide = lse_dtype(q.dtype)
    exact = dict(zip(("out", "lse"), attention(q, k, v, **options), strict=True))
    plain = {
        "out": unfused(q, k, v, **options)[0],
        "lse": unfused(*(x.astype(wide) for x in (q, k, v)), **options)[1],
    }
    arguments = (inputs.dout, q, k, v)
    if gradients:
        names = ("dq", "dk", "dv", "dbias")
        of_exact = attention_backward(*arguments, dlse=inputs.dlse, **options)
        of_plain = unfused_backward(*arguments, dlse=inputs.dlse, **options)
        exact |= zip(names, of_exact, strict=True)
        plain |= zip(names, of_plain, strict=True)
    amounts = None
    if terms:
        amounts = error_terms(*arguments, dlse=inputs.dlse, **options)
    of_terms = {name: getattr(amounts, name, None) for name in exact}
    if q.dtype.itemsize == 2:
        # Tensor cores cut off the sum of each 16 channels.
        least = np.abs(exact["lse"]) if of_terms["lse"] is None else of_terms["lse"]
        of_terms["lse"] = least * max(1, q.shape[-1] / 128)
    return {
        name: Truth(x, plain[name], of_terms[name], wide if name == "lse" else q.dtype)
        for name, x in exact.items()
        if x is not None
    }


@functools.lru_cache(maxsize=4)
def expect_case(case: Case) -> dict[str, Truth]:
    """`expect` of a case, kept for the next family and the next tile."""
    return expect(make(case), gradients=case.gradients)


def compare(results: Mapping[str, Array], truths: Mapping[str, Truth]) -> None:
    """Raise AssertionError unless every result is close to what is right.

    That includes gradients that are 0 because their terms cancel, such as that of a
    bias that is broadcast over the keys: they are measured by the size of the terms.
    """
    for name, x in results.items():
        truth = truths[name]
        assert_close(
            x, truth.exact, truth.plain, truth.dtype, terms=truth.terms, name=name
        )


def compare_closely(results: Mapping[str, Array], inputs: Inputs) -> None:
    """Compare with the reference alone.

    A plain implementation rounds large logits so much that it excuses anything.
    """
    truths = expect(inputs, gradients=False)
    compare(results, {name: replace(x, plain=None) for name, x in truths.items()})


def assert_same(results: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Raise AssertionError unless all results are equal; NaN equals NaN."""
    assert results.keys() == wanted.keys()
    for name, x in results.items():
        np.testing.assert_array_equal(x, wanted[name], err_msg=name)


# --- Logits that grow -----------------------------------------------------------------

# What levels are multiplied with in each row. Warps have 16 rows, lanes two of them.
ROWS = {
    "all": np.ones(16),
    "one": np.arange(16) == 11,
    "half": np.arange(16) < 8,
    "apart": np.array([1, 0, -1, 0.5, 0, 1, 0, 0.1, 0, -1, 1, 0, 0.7, 0, -0.3, 1]),
}  # fmt: skip


def raised(case: Case, levels: Array, rows: str = "all") -> Inputs:
    """Return the arrays of a case with levels, in bits, added to the logits of keys."""
    inputs = make(case)
    scale = case.d**-0.5 if case.scale is None else case.scale
    inputs.q[..., 0] = 8 * np.resize(ROWS[rows], case.sq)[:, None]
    inputs.k[..., 0] = (levels * np.log(2) / (8 * scale))[:, None]
    return inputs


# --- The grid -------------------------------------------------------------------------


def _each(cases: Iterable[Case], *dtypes: str) -> tuple[Case, ...]:
    return tuple(replace(case, dtype=dtype) for case in cases for dtype in dtypes)


_HALF = ("float16", "bfloat16")
SINGLE = {"batch": (1,), "hq": 1, "hkv": 1}

# From one token to long sequences, then to batches and heads.
LADDER = _each(
    (
        Case("one_token", **SINGLE, sq=1, sk=1),
        Case("one_token_causal", **SINGLE, sq=1, sk=1, causal=True),
        Case("n64", **SINGLE, sq=64, sk=64),
        Case("n64_causal", **SINGLE, sq=64, sk=64, causal=True),
        Case("n512", **SINGLE, sq=512, sk=512),
        Case("n512_causal", **SINGLE, sq=512, sk=512, causal=True),
        Case("n2048_causal", **SINGLE, sq=2048, sk=2048, causal=True),
        Case("batch_and_heads", batch=(3,), sq=200, sk=200, hq=6),
        Case("batch_and_heads_causal", batch=(3,), sq=200, sk=200, hq=6, causal=True),
    ),
    *DTYPES,
)

_EVERYTHING = {
    "causal": True,
    "window": (70, 5),
    "softcap": 4.0,
    "alibi": "batch",
    "bias": "b1qk",
    "bias_holes": True,
    "mask": "1hqk",
    "q_lengths": (100, 83),
    "k_lengths": (111, 130),
    "dlse": True,
}
_PLAIN = Case("plain")
_CAUSAL = Case("causal", causal=True)
_LENGTHS = Case("lengths", q_lengths=(100, 37), k_lengths=(64, 130))
_SOFTCAP = Case("softcap", softcap=2.0)
_OTHER_BIAS = Case("bias_of_another_dtype", bias="b1qk", bias_dtype="float32")
_NEGATIVE_SCALE = Case("negative_scale", scale=-0.3)
_ALL = Case("everything", **_EVERYTHING, scale=0.3)
_ALONE = (
    _PLAIN,
    _CAUSAL,
    Case("causal_fewer_keys", causal=True, sq=130, sk=100),
    Case("top_left", causal="top_left"),
    Case("window_left", window=(20, -1)),
    Case("window_right", window=(None, 5)),
    Case("window", window=(20, 7)),
    Case("window_causal", window=(30, 9), causal=True),
    _SOFTCAP,
    Case("alibi", alibi="heads"),
    Case("alibi_of_each_sequence", alibi="batch"),
    Case("bias", bias="hqk"),
    _OTHER_BIAS,
    Case("mask", mask="bhqk"),
    Case("mask_of_keys", mask="b11k"),
    Case("scale", scale=2.0),
    Case("scale_0", scale=0.0),
    _NEGATIVE_SCALE,
    _LENGTHS,
    Case("causal_lengths", causal=True, q_lengths=(100, 37), k_lengths=(64, 130)),
    Case("empty_sequences", q_lengths=(0, 100), k_lengths=(130, 0)),
    Case("dlse", dlse=True),
)
_COMBINED = (
    Case("causal_alibi", causal=True, alibi="heads"),
    Case("window_mask", window=(40, 20), mask="1hqk"),
    Case("softcap_bias", softcap=2.0, bias="qk", bias_holes=True, dlse=True),
    Case("causal_softcap", causal=True, softcap=1.0),
    Case("everything_negative", **_EVERYTHING, scale=-0.3),
)


def _small_heads(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The same options in the kernels for small heads, ragged ones."""
    return tuple(replace(case, d=24, dv=20) for case in cases)


# float32 and bfloat16 take every option alone; the other two differ from them in the
# conversion of elements and in the width of the arithmetic, not in the options.
OPTIONS = (
    *_each(_small_heads((*_ALONE, _ALL, *_COMBINED)), "float32"),
    *_each((_ALL,), "float32"),
    *_each((*_ALONE, _ALL), "bfloat16"),
    *_each((_PLAIN, _CAUSAL, _LENGTHS, _OTHER_BIAS, _ALL), "float16"),
    *_each(
        _small_heads((_PLAIN, _CAUSAL, _SOFTCAP, _NEGATIVE_SCALE, _LENGTHS, _ALL)),
        "float64",
    ),
)

# Which axes of the bias are broadcast, and so summed over in its gradient.
_FEW = {"d": 24, "sq": 70, "sk": 90}
BIAS = (
    *(
        Case(f"bias_{pattern or 'scalar'}", **_FEW, bias=pattern)
        for pattern in (
            "", "1", "k", "q1", "qk", "h11", "1q1", "b11k", "1h1k", "b1q1", "bhqk",
            "1111",
        )
    ),
    # Sums so long that several blocks share them.
    Case("bias_long_sum", batch=(5,), sq=200, sk=200, hq=6, d=24, bias="1"),
    Case("bias_long_sum_of_keys", batch=(5,), sq=200, sk=200, hq=6, d=24, bias="k"),
    Case("bias_long_sum_of_heads", batch=(5,), sq=70, sk=90, hq=6, d=24, bias="qk"),
    *_each(
        (Case("bias_1hqk", bias="1hqk"), Case("bias_scalar", bias="")),
        "bfloat16",
    ),
    *_each((Case("bias_1h1k", **_FEW, bias="1h1k", mask="1qk"),), "float64"),
)  # fmt: skip

# Batch axes of any number, and arrays that are broadcast over some of them.
_SHORT = {"sq": 33, "sk": 47, "d": 24}
BATCH = (
    *(
        Case(f"batch_{'x'.join(map(str, batch)) or 'none'}", batch=batch, **_SHORT,
             causal=True)
        for batch in ((), (1,), (3,), (2, 3), (2, 1, 3))
    ),
    Case("one_head", batch=None, hq=1, hkv=1, **_SHORT, causal=True),
    Case("one_head_bias", batch=None, hq=1, hkv=1, **_SHORT, bias="qk", dlse=True),
    Case("one_head_lengths", batch=None, hq=1, hkv=1, **_SHORT, q_lengths=(30,),
         k_lengths=(21,)),
    Case("no_batch_alibi", batch=(), **_SHORT, alibi="heads"),
    Case("no_batch_bias", batch=(), **_SHORT, bias="h1k"),
    Case("two_axes_lengths", batch=(2, 3), **_SHORT, causal=True,
         q_lengths=(33, 1, 0, 20, 33, 7), k_lengths=(47, 0, 12, 47, 1, 30)),
    Case("two_axes_alibi", batch=(2, 3), **_SHORT, alibi="batch"),
    Case("two_axes_bias_of_first", batch=(2, 3), **_SHORT, bias="b1hqk"),
    Case("two_axes_bias_of_second", batch=(2, 3), **_SHORT, bias="b11k"),
    Case("two_axes_bias_of_both", batch=(2, 3), **_SHORT, bias="bb1qk"),
    Case("three_axes_bias", batch=(2, 3, 2), **_SHORT, bias="b1bhq1"),
    Case("two_axes_fortran", batch=(2, 3), **_SHORT, memory="fortran"),
)  # fmt: skip

# Groups of query heads that share a kv head.
GROUPS = (
    *(
        Case(f"heads_{hq}_{hkv}", hq=hq, hkv=hkv, d=24, causal=True)
        for hq, hkv in ((1, 1), (3, 3), (6, 3), (6, 2), (8, 1))
    ),
    *_each((Case("heads_8_1", hq=8, hkv=1), Case("heads_6_3", hq=6, hkv=3)), *_HALF),
)

# Arrays that lie in memory in other ways.
LAYOUTS = (
    *(
        Case(f"{layout}_{memory}", batch=(3,), sq=40, sk=70, d=24, layout=layout,
             causal=True, memory=memory)
        for layout in ("bshd", "bhsd")
        for memory in MEMORY
    ),
    Case("bshd_mixed", batch=(3,), sq=40, sk=70, d=24, causal=True,
         memory=("fortran", "packed", "reversed", "swapped")),
    *_each(
        (
            Case("packed_bhsd", layout="bhsd", memory="packed"),
            Case("margin", memory="margin"),
            Case("offset_46", d=46, memory="offset"),
            # Strides of axes of size 1 are no multiples of 16 bytes.
            Case("one_row_46", batch=(1,), hq=1, hkv=1, sq=1, sk=1, d=46),
            Case("misaligned", memory="misaligned"),
            Case("reversed", memory="reversed"),
        ),
        *_HALF,
    ),
    *_each((Case("misaligned", d=24, memory="misaligned"),
            Case("stepped", d=24, memory="stepped")), "float64"),
)  # fmt: skip

# Head sizes, and different ones for v.
_HEADS = {"batch": (1,), "hq": 2, "hkv": 1, "causal": True}
HEAD_DIMS = _each(
    (
        *(
            Case(f"d{d}", **_HEADS, sq=70, sk=90, d=d)
            for d in (1, 8, 24, 40, 46, 64, 72, 80, 96, 112, 128, 192, 256)
        ),
        *(Case(f"d{d}", **_HEADS, sq=66, sk=70, d=d) for d in (512, 1024)),
    ),
    *DTYPES,
)
HEAD_DIMS_V = _each(
    tuple(
        Case(f"d{d}v{dv}", **_HEADS, sq=70, sk=90, d=d, dv=dv)
        for d, dv in (
            (192, 128), (576, 512), (64, 256), (128, 96), (1, 7), (40, 24), (24, 130),
            (260, 8),
        )
    ),
    "bfloat16",
    "float32",
    "float64",
)  # fmt: skip

# Tails of tiles in every combination.
RAGGED = _each(
    tuple(
        Case(f"{sq}x{sk}{'_causal' if causal else ''}", **SINGLE, sq=sq, sk=sk,
             causal=causal)
        for sq, sk in (
            (1, 1), (1, 63), (1, 64), (1, 65), (9, 9), (63, 64), (64, 63), (65, 129),
            (127, 1), (128, 128), (129, 257), (200, 31),
        )
        for causal in (False, True)
    ),
    "bfloat16",
    "float32",
)  # fmt: skip

# For a tile that is forced. The head sizes come from the tile.
TILES = (
    Case("causal", **SINGLE, sq=100, sk=150, causal=True),
    Case("everything", **_EVERYTHING, scale=0.3),
)
