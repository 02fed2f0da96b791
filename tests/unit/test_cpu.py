"""The public functions on NumPy arrays against the float64 reference."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupy_flash import flash_attention, flash_attention_backward, flash_attention_vjp

from ..reference import (
    assert_close,
    attention,
    attention_backward,
    error_terms,
    unfused,
    unfused_backward,
)

# A warning of NumPy's (overflow, invalid value) is as bad as an error: users have them
# turned into errors, and none of them says anything about their data.
pytestmark = pytest.mark.filterwarnings("error")

bfloat16 = ml_dtypes.bfloat16
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
layouts = pytest.mark.parametrize("layout", ["bshd", "bhsd"])


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def lse_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray | None = None,
    *,
    dlse: np.ndarray | None = None,
    outputs: dict[str, np.ndarray] | None = None,
    huge: bool = False,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Forward and backward against the reference.

    The error may be twice that of the plain implementation. That holds for lse too,
    which is float32 for half inputs, so its plain implementation is the float32 one.

    Parameters
    ----------
    dout : random if None
    outputs : arrays to be given as out, dq, dk, dv
    huge : the logits are so large that one ulp of lse is far from 0. Weights made from
        lse are then off by exp(ulp), so that of the gradients only NaN is checked.
    **options : of the reference

    Returns
    -------
    out, lse, dq, dk, dv and, with a bias, dbias
    """
    outputs = outputs or {}
    dtype = q.dtype
    if dout is None:
        dout = normal(99, *q.shape[:-1], v.shape[-1], dtype=dtype)
    out, lse = flash_attention(
        q, k, v, return_lse=True, out=outputs.get("out"), **options
    )
    assert out.dtype == dtype and lse.dtype == lse_dtype(dtype)
    bias_grad = "bias" in options
    gradients = flash_attention_backward(
        dout, q, k, v, out, lse,
        dlse=dlse, bias_grad=bias_grad, **options,
        **{name: x for name, x in outputs.items() if name != "out"},
    )  # fmt: skip
    results = dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))
    assert ("dbias" in results) == bias_grad
    for name, like in (("dq", q), ("dk", k), ("dv", v), ("dbias", options.get("bias"))):
        if name in results:
            assert type(results[name]) is np.ndarray
            assert results[name].dtype == like.dtype
    results = {"out": out, "lse": lse, **results}
    for name, x in outputs.items():
        assert results[name] is x

    expected = dict(zip(("out", "lse"), attention(q, k, v, **options), strict=True))
    plain = {
        "out": unfused(q, k, v, **options)[0],
        "lse": unfused(*(x.astype(lse_dtype(dtype)) for x in (q, k, v)), **options)[1],
    }
    names = ("dq", "dk", "dv", "dbias")
    exact = attention_backward(dout, q, k, v, dlse=dlse, **options)
    rounded = unfused_backward(dout, q, k, v, dlse=dlse, **options)
    expected |= zip(names, exact, strict=True)
    plain |= zip(names, rounded, strict=True)
    amounts = None if huge else error_terms(dout, q, k, v, dlse=dlse, **options)
    for name, x in results.items():
        if huge and name.startswith("d"):
            assert not np.isnan(x.astype(np.float64)).any(), name
            continue
        assert_close(
            x,
            expected[name],
            plain[name],
            lse.dtype if name == "lse" else dtype,
            terms=None if huge else getattr(amounts, name),
            name=name,
        )
    return tuple(results.values())


# --- A random grid over everything ----------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What hypothesis varies; the arrays follow from it."""

    seed: int
    dtype: str
    layout: str
    batch: tuple[int, ...] | None  # None: 2-D arrays
    sq: int
    sk: int
    hkv: int
    group: int
    d: int
    dv: int
    causal: bool | str
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float
    alibi: str | None
    bias: tuple[bool, ...] | None  # which axes are 1, from the last one on
    bias_dtype: str
    bias_holes: bool
    mask: tuple[bool, ...] | None
    q_lengths: bool
    k_lengths: bool
    dlse: bool
    memory: tuple[str, ...]
    given: bool


MEMORY = ("dense", "reversed", "stepped", "fortran", "offset", "packed", "unaligned")
sizes = st.sampled_from([0, 1, 2, 3, 5, 7, 13, 17, 31, 64, 67])
head_dims = st.sampled_from([1, 2, 3, 5, 8, 13, 16, 24, 33, 40])
ones = st.none() | st.tuples(*[st.booleans()] * 5)
sides = st.sampled_from([None, -1, 0, 1, 2, 5, 30])

cases = st.builds(
    Case,
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(list(DTYPES)),
    layout=st.sampled_from(["bshd", "bhsd"]),
    batch=st.sampled_from([None, (), (1,), (2,), (3,), (0,), (2, 1), (2, 3)]),
    sq=sizes,
    sk=sizes,
    hkv=st.integers(1, 3),
    group=st.integers(1, 3),
    d=head_dims,
    dv=head_dims,
    causal=st.sampled_from([False, True, "top_left"]),
    window=st.none() | st.tuples(sides, sides),
    scale=st.sampled_from([None, 1.0, 0.3, 0.0, -0.7]),
    softcap=st.sampled_from([0.0, 0.0, 1.0, 5.0]),
    alibi=st.sampled_from([None, None, "heads", "batch"]),
    bias=ones,
    bias_dtype=st.sampled_from(["same", "same", *DTYPES]),
    bias_holes=st.booleans(),
    mask=ones,
    q_lengths=st.booleans(),
    k_lengths=st.booleans(),
    dlse=st.booleans(),
    memory=st.tuples(*[st.sampled_from(MEMORY)] * 3),
    given=st.booleans(),
)


def lay_out(x: np.ndarray, memory: str) -> np.ndarray:
    """The same values, held in memory in some other way."""
    # The ellipsis keeps an array without axes an array.
    backwards = (..., *[slice(None, None, -1)] * x.ndim)
    if memory == "reversed":
        return np.ascontiguousarray(x[backwards])[backwards]
    if memory == "stepped":
        wide = np.full([2 * n for n in x.shape], np.nan).astype(x.dtype)
        held = wide[(..., *[slice(1, None, 2)] * x.ndim)]
    elif memory == "fortran":
        held = np.empty(x.shape, x.dtype, order="F")
    elif memory == "offset":
        held = np.empty(x.size + 1, x.dtype)[1:].reshape(x.shape)
    elif memory == "packed" and x.ndim > 1:
        held = np.empty((*x.shape[:-2], 3, *x.shape[-2:]), x.dtype)[..., 1, :, :]
    elif memory == "unaligned":
        raw = np.empty(x.nbytes + 1, np.uint8)[1:]
        held = np.ndarray(x.shape, x.dtype, raw)
    else:
        held = np.empty(x.shape, x.dtype)
    held[...] = x
    return held


def build(case: Case) -> tuple[list[np.ndarray], dict[str, Any]]:
    """q, k, v, dout and the options of a case."""
    rng = np.random.default_rng(case.seed)
    dtype = DTYPES[case.dtype]
    batch = case.batch or ()
    hkv, group = (1, 1) if case.batch is None else (case.hkv, case.group)
    hq = hkv * group

    def sequence(tokens: int, heads: int, size: int, memory: str) -> np.ndarray:
        axes = (tokens, heads) if case.layout == "bshd" else (heads, tokens)
        shape = (tokens, size) if case.batch is None else (*batch, *axes, size)
        return lay_out(rng.standard_normal(shape).astype(dtype), memory)

    arrays = [
        sequence(case.sq, hq, case.d, case.memory[0]),
        sequence(case.sk, hkv, case.d, case.memory[1]),
        sequence(case.sk, hkv, case.dv, case.memory[2]),
        sequence(case.sq, hq, case.dv, case.memory[0]),
    ]

    def broadcast(is_one: tuple[bool, ...]) -> tuple[int, ...]:
        full = (*batch, hq, case.sq, case.sk)[::-1]
        shape = [1 if one else n for n, one in zip(full, is_one, strict=False)]
        while shape and is_one[len(shape) - 1]:
            shape.pop()
        return tuple(shape[::-1])

    options: dict[str, Any] = {
        "causal": case.causal,
        "window": case.window,
        "scale": case.scale,
        "softcap": case.softcap,
        "layout": case.layout,
    }
    if case.alibi:
        shape = (hq,) if case.alibi == "heads" else (*batch, hq)
        slopes = rng.uniform(0.0, 0.5, shape).astype(np.float32)
        options["alibi_slopes"] = lay_out(slopes, case.memory[1])
    if case.bias is not None:
        bias = np.asarray(rng.standard_normal(broadcast(case.bias)))
        if case.bias_holes:
            bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
        name = case.dtype if case.bias_dtype == "same" else case.bias_dtype
        options["bias"] = lay_out(bias.astype(DTYPES[name]), case.memory[2])
    if case.mask is not None:
        mask = np.asarray(rng.random(broadcast(case.mask)) < 0.7)
        options["mask"] = lay_out(mask, case.memory[0])
    if case.q_lengths:
        lengths = np.asarray(rng.integers(0, case.sq + 1, batch), np.int32)
        options["q_lengths"] = lengths
    if case.k_lengths:
        lengths = np.asarray(rng.integers(0, case.sk + 1, batch), np.int64)
        options["k_lengths"] = lengths
    return arrays, options


@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases)
def test_grid(case: Case) -> None:
    (q, k, v, dout), options = build(case)
    rng = np.random.default_rng(case.seed + 1)
    lse_shape = unfused(q, k, v, **options)[1].shape
    dlse = None
    if case.dlse:
        dlse = np.asarray(rng.standard_normal(lse_shape), lse_dtype(q.dtype))
    outputs = {}
    if case.given:
        for name, like in (("out", dout), ("dq", q), ("dk", k), ("dv", v)):
            # What stands in a given array before the call must not matter.
            filled = np.full(like.shape, np.nan).astype(like.dtype)
            memory = case.memory[0] if case.memory[0] != "unaligned" else "stepped"
            outputs[name] = lay_out(filled, memory)
    inputs = [q, k, v, dout, dlse, *options.values()]
    before = [x.copy() if isinstance(x, np.ndarray) else x for x in inputs]

    results = check(q, k, v, dout, dlse=dlse, outputs=outputs, **options)

    for x, y in zip(inputs, before, strict=True):
        if isinstance(x, np.ndarray):
            assert x.tobytes() == y.tobytes(), "an input was written"
    # The functional form is the same computation.
    bias_grad = "bias" in options
    out, vjp = flash_attention_vjp(q, k, v, bias_grad=bias_grad, **options)
    gradients = vjp(dout) if dlse is None else vjp(dout, dlse)
    wanted = (results[0], *results[2:])
    for x, y in zip((out, *gradients), wanted, strict=True):
        np.testing.assert_array_equal(x, y)


# --- Sizes beyond a tile --------------------------------------------------------------

LARGE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # B, Sq, Sk, Hq, Hkv, D, Dv
    "plain": ((1, 1031, 1200, 1, 1, 64, 64), {}),
    "causal": ((1, 1500, 1500, 1, 1, 32, 32), {"causal": True}),
    "causal_fewer_keys": ((1, 1600, 700, 1, 1, 16, 24), {"causal": True}),
    "top_left": ((1, 600, 1700, 1, 1, 16, 8), {"causal": "top_left"}),
    "window": ((1, 1300, 1400, 1, 1, 16, 16), {"window": (70, 33)}),
    "lengths": (
        (2, 1100, 1300, 2, 1, 16, 16),
        {
            "causal": True,
            "q_lengths": np.array([1025, 64]),
            "k_lengths": np.array([1111, 1300]),
        },
    ),
    "everything": (
        (2, 701, 1153, 2, 2, 24, 20),
        {
            "causal": True,
            "window": (600, 5),
            "scale": 0.3,
            "softcap": 4.0,
            "alibi_slopes": np.float32([0.01, 0.003]),
            "bias": normal(5, 2, 1, 1, 1153),
            "mask": normal(6, 2, 701, 1) < 2,
            "q_lengths": np.array([701, 650]),
            "k_lengths": np.array([900, 1153]),
        },
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_beyond_a_tile(name: str) -> None:
    (b, sq, sk, hq, hkv, d, dv), options = LARGE[name]
    q, k, v = (
        normal(1, b, sq, hq, d),
        normal(2, b, sk, hkv, d),
        normal(3, b, sk, hkv, dv),
    )
    check(q, k, v, dlse=normal(4, b, hq, sq), **options)


@dtypes
def test_every_dtype_beyond_a_tile(dtype: np.dtype) -> None:
    q, k, v = (normal(n, 1, 1100, 1, 32, dtype=dtype) for n in range(3))
    check(q, k, v, causal=True)


def test_float32_stays_exact_at_any_length() -> None:
    """About 1e-6 relative error, whatever the number of keys or rows."""
    n = 60_000
    q, k, v = normal(1, 2, 8), normal(2, n, 8), 1 + 0.1 * normal(3, n, 8)
    dout = 1 + 0.1 * normal(4, 2, 8)
    out, lse = flash_attention(q, k, v, return_lse=True)
    expected, expected_lse = attention(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6)
    # And with as many rows, which the sums for dk and dv run over.
    q, k, v, dout = k, q, 1 + normal(5, 2, 8), 1 + 0.1 * normal(6, n, 8)
    check(q, k, v, dout)
    out, lse = flash_attention(q, k, v, return_lse=True)
    _, dk, dv = flash_attention_backward(dout, q, k, v, out, lse)
    _, dk_64, dv_64, _ = attention_backward(dout, q, k, v)
    for x, y in ((dk, dk_64), (dv, dv_64)):
        assert np.linalg.norm(x - y) < 2e-6 * np.linalg.norm(y)


def peak_bytes(function: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["plain", "options"])
def test_memory_is_linear(name: str) -> None:
    """Nothing grows as S x S does, and nothing is near that size where it matters."""
    peaks = {}
    for s in (2048, 4096):
        q, k, v, dout = (normal(n, s, 2, 8) for n in range(4))
        options: dict[str, Any] = {}
        if name == "options":
            # The gradient of a bias of length S is summed as it arises.
            options = {
                "mask": np.broadcast_to(normal(5, s) < 2, (2, s, s)),
                "bias": normal(6, s, dtype=bfloat16),
                "alibi_slopes": np.float32([0.5, 0.25]),
                "softcap": 5.0,
                "window": (s, s),
            }
        out, lse = flash_attention(q, k, v, return_lse=True, **options)

        def forward(a: Any = (q, k, v), o: Any = options) -> None:
            flash_attention(*a, **o)

        def backward(a: Any = (dout, q, k, v, out, lse), o: Any = options) -> None:
            flash_attention_backward(*a, bias_grad="bias" in o, **o)

        peaks[s] = peak_bytes(forward), peak_bytes(backward)
    for direction in (0, 1):
        assert peaks[4096][direction] < 4096 * 4096 * 4 // 2, peaks
        assert peaks[4096][direction] < 2.2 * peaks[2048][direction], peaks


# --- Memory layouts and given arrays --------------------------------------------------


@layouts
@pytest.mark.parametrize("memory", MEMORY)
def test_layout_in_memory_changes_nothing(memory: str, layout: str) -> None:
    """Also for dout, and every result equals that of contiguous arrays."""
    shapes = [(2, 37, 4, 12), (2, 41, 2, 12), (2, 41, 2, 10), (2, 37, 4, 10)]
    dense = [normal(n, *shape) for n, shape in enumerate(shapes)]
    if layout == "bhsd":
        dense = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in dense]
    mask = normal(9, 4, 37, 41) < 1
    wanted = check(*dense, layout=layout, mask=mask, causal=True)
    other = [lay_out(x, memory) for x in dense]
    got = check(*other, layout=layout, mask=lay_out(mask, memory), causal=True)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@dtypes
def test_both_layouts_agree(dtype: np.dtype) -> None:
    q, k, v, dout = (normal(n, 2, 19, 3, 8, dtype=dtype) for n in range(4))
    wanted = check(q, k, v, dout, causal=True)
    # Views: nothing has to be copied for it.
    q, k, v, dout = (x.swapaxes(1, 2) for x in (q, k, v, dout))
    out, lse, *gradients = check(q, k, v, dout, causal=True, layout="bhsd")
    np.testing.assert_array_equal(lse, wanted[1])
    got = (out, *gradients)
    for x, y in zip(got, (wanted[0], *wanted[2:]), strict=True):
        np.testing.assert_array_equal(x.swapaxes(1, 2), y)


def test_transposed_views_and_a_mask_with_a_zero_stride() -> None:
    q, k, v = (normal(n, 2, 33, 4, 16).swapaxes(1, 2) for n in range(3))
    mask = np.broadcast_to(normal(5, 2, 1, 33, 1) < 0.5, (2, 4, 33, 33))
    assert mask.strides[-1] == 0
    check(q, k, v, layout="bhsd", mask=mask)


def test_dout_transposed_or_expanded_from_a_scalar() -> None:
    q, k, v = (normal(n, 2, 21, 3, 8) for n in range(3))
    transposed = normal(4, 2, 3, 21, 8).swapaxes(1, 2)
    expanded = np.broadcast_to(np.float32(1.0), q.shape)
    for dout in (transposed, expanded):
        got = check(q, k, v, dout, causal=True)
        wanted = check(q, k, v, np.ascontiguousarray(dout), causal=True)
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(x, y)


def test_slices_transposes_steps_and_broadcasts() -> None:
    base = normal(1, 3, 40, 6, 8)
    check(base[:, :4], base[:, 1:30], base[:, 1:30, :, :5])
    check(base[::2], base[::-2], base[1:].repeat(2, 0)[::2], causal=True)
    check(base[..., ::2], base[..., 1::2], base[:, :, :, ::-1])
    keys = normal(2, 3, 6, 8, 40)
    check(base, keys.transpose(0, 3, 1, 2), keys.transpose(0, 3, 1, 2))
    shared = np.broadcast_to(normal(3, 1, 25, 2, 8), (3, 25, 2, 8))
    check(base, shared, shared, q_lengths=np.array([40, 0, 7]))
    one_head = np.broadcast_to(normal(4, 3, 25, 1, 8), (3, 25, 6, 8))
    check(base, one_head, one_head)
    packed = normal(5, 2, 17, 3, 4, 8)
    check(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])
    check(base, base, base)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_alignment(offset: int) -> None:
    def at(seed: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        held = np.empty(math.prod(shape) + offset, dtype)[offset:].reshape(shape)
        held[...] = normal(seed, *shape)
        return held

    check(*(at(n, (2, 4, 64, 64), np.float32) for n in range(3)), layout="bhsd")
    check(*(at(n, (2, 24, 3, 46), np.float16) for n in range(3)))


def test_given_arrays_are_returned_and_filled() -> None:
    q, k, v, dout = (normal(n, 2, 9, 3, 8) for n in range(4))
    out, dq, dk, dv = (np.full((2, 3, 9, 8), np.nan, np.float32) for _ in range(4))
    given = {
        "out": out.swapaxes(1, 2),
        "dq": dq.swapaxes(1, 2)[:, ::-1],
        "dk": dk.swapaxes(1, 2)[..., ::-1],
        "dv": dv.swapaxes(1, 2),
    }
    check(q, k, v, dout, outputs=given, causal=True)
    only = np.full_like(q, np.nan)
    assert flash_attention(q, k, v, out=only) is only
    np.testing.assert_array_equal(only, flash_attention(q, k, v))
    _, lse = flash_attention(q, k, v, out=only, return_lse=True)
    # One of the three alone; the others are made.
    grads = flash_attention_backward(dout, q, k, v, only, lse, dk=dk.swapaxes(1, 2))
    assert np.shares_memory(grads[1], dk)
    for x, y in zip(grads, attention_backward(dout, q, k, v)[:3], strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("shape", [(2, 9, 3, 2, 8), (3, 130, 3, 5, 40)], ids=str)
def test_given_arrays_are_parts_of_a_packed_one(shape: tuple[int, ...]) -> None:
    """dq, dk and dv interleave in memory without sharing any of it."""
    packed, gradients = normal(1, *shape), np.full(shape, np.nan, np.float32)
    q, k, v = (packed[:, :, n] for n in range(3))
    given = {name: gradients[:, :, n] for n, name in enumerate(("dq", "dk", "dv"))}
    check(q, k, v, outputs=given, causal=True)
    assert np.isfinite(gradients).all()
    # The same along the last axis, and out beside its own inputs.
    held = np.concatenate([packed, np.full_like(packed, np.nan)], -1)
    d = shape[-1]
    q, k, v = (held[:, :, n, :, :d] for n in range(3))
    check(q, k, v, outputs={"out": held[:, :, 0, :, d:]})


def test_out_is_given_to_vjp() -> None:
    q, k, v, dout = (normal(n, 9, 3, 8) for n in range(4))
    out = np.full_like(q, np.nan)
    got, vjp = flash_attention_vjp(q, k, v, out=out)
    assert got is out
    for x, y in zip(vjp(dout), attention_backward(dout, q, k, v)[:3], strict=True):
        assert_close(x, y)


def test_read_only_inputs() -> None:
    arrays = [normal(n, 2, 9, 3, 8) for n in range(4)]
    for x in arrays:
        x.flags.writeable = False
    check(*arrays)


def test_subclass_and_byte_order() -> None:
    """Right, or refused; never wrong."""
    q = normal(1, 9, 2, 8)
    try:
        out = flash_attention(*[q.astype(q.dtype.newbyteorder())] * 3)
    except TypeError as error:
        assert "dtype" in str(error)
    else:
        assert_close(out.astype(np.float32), attention(q, q, q)[0])


# --- The functional form --------------------------------------------------------------


def test_vjp() -> None:
    q, k, v, dout = (normal(n, 2, 9, 3, 8) for n in range(4))
    dlse, bias = normal(5, 2, 3, 9), normal(6, 3, 1, 9)
    out, vjp = flash_attention_vjp(q, k, v, causal=True)
    assert_close(out, attention(q, k, v, causal=True)[0])
    for _ in range(2):  # it can be called again
        gradients = vjp(dout)
        assert len(gradients) == 3
        wanted = attention_backward(dout, q, k, v, causal=True)[:3]
        for x, y in zip(gradients, wanted, strict=True):
            assert_close(x, y)

    (out, lse), vjp = flash_attention_vjp(
        q, k, v, bias=bias, bias_grad=True, return_lse=True
    )
    assert_close(lse, attention(q, k, v, bias=bias)[1])
    gradients = vjp(dout, dlse)
    wanted = attention_backward(dout, q, k, v, bias=bias, dlse=dlse)
    for x, y in zip(gradients, wanted, strict=True):
        assert_close(x, y)
    # The gradient of lse alone.
    wanted = attention_backward(0 * dout, q, k, v, bias=bias, dlse=dlse)
    for x, y in zip(vjp(0 * dout, dlse), wanted, strict=True):
        assert_close(x, y)


def test_lse_comes_only_when_asked_for() -> None:
    q = normal(1, 9, 2, 8)
    out = flash_attention(q, q, q)
    assert type(out) is np.ndarray
    both = flash_attention(q, q, q, return_lse=True)
    assert isinstance(both, tuple) and len(both) == 2
    np.testing.assert_array_equal(out, both[0])


def test_bias_gradient_comes_only_when_asked_for() -> None:
    q, bias = normal(1, 9, 2, 8), normal(2, 9, 9)
    out, lse = flash_attention(q, q, q, bias=bias, return_lse=True)
    assert len(flash_attention_backward(q, q, q, q, out, lse, bias=bias)) == 3


@dtypes
def test_the_same_bits_every_time(dtype: np.dtype) -> None:
    q, k, v = (normal(n, 2, 130, h, 16, dtype=dtype) for n, h in enumerate((4, 2, 2)))
    bias = normal(5, 1, 130, 130, dtype=dtype)

    def run() -> list[bytes]:
        out, lse = flash_attention(q, k, v, causal=True, bias=bias, return_lse=True)
        gradients = flash_attention_backward(
            out, q, k, v, out, lse,
            causal=True, bias=bias, bias_grad=True, deterministic=True,
        )  # fmt: skip
        return [x.tobytes() for x in (out, lse, *gradients)]

    first = run()
    for _ in range(4):
        assert run() == first


# --- Masked rows and empty axes -------------------------------------------------------


def test_mask_leaves_rows_empty() -> None:
    q, k, v = (normal(n, 1, 1, 8, 8) for n in range(3))
    mask = np.zeros((1, 1, 8, 8), bool)
    mask[..., :4, :4] = True
    out, lse, dq, dk, dv = check(q, k, v, layout="bhsd", mask=mask)
    assert not out[..., 4:, :].any() and np.isneginf(lse[..., 4:]).all()
    assert not dq[..., 4:, :].any() and not dk[..., 4:, :].any()
    assert not dv[..., 4:, :].any() and dv[..., :4, :].all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, bfloat16], ids=str)
def test_bias_of_the_smallest_number_gives_the_mean(dtype: Any) -> None:
    q, k, v = (normal(n, 1, 1, 8, 8, dtype=dtype) for n in range(3))
    smallest = float(ml_dtypes.finfo(dtype).min)
    bias = np.zeros((1, 1, 8, 8), dtype)
    bias[..., 4:, :] = smallest
    out, lse, *_ = check(q, k, v, layout="bhsd", bias=bias, huge=True)
    mean = v.astype(np.float64).mean(-2, keepdims=True)
    assert_close(out[..., 4:, :], np.broadcast_to(mean, (1, 1, 4, 8)))
    np.testing.assert_array_equal(lse[..., 4:], smallest)


def test_bias_of_float32_min_with_half_inputs() -> None:
    """It would be -inf in float16, and the rows then empty."""
    q, k, v = (normal(n, 1, 1, 8, 8, dtype=np.float16) for n in range(3))
    bias = np.zeros((8, 8), np.float32)
    bias[4:] = np.finfo(np.float32).min
    out, lse, *_ = check(q, k, v, layout="bhsd", bias=bias, huge=True)
    mean = v.astype(np.float64).mean(-2, keepdims=True)
    assert_close(out[..., 4:, :], np.broadcast_to(mean, (1, 1, 4, 8)))
    np.testing.assert_array_equal(lse[..., 4:], np.finfo(np.float32).min)


def test_bias_of_the_smallest_number_hides_keys_of_other_rows() -> None:
    q, k, v = (normal(n, 2, 12, 2, 8) for n in range(3))
    for hidden in (np.finfo(np.float32).min, -np.inf):
        bias = np.where(normal(4, 12, 12) > 0.3, np.float32(hidden), np.float32(0.5))
        bias[:, 0] = 0
        check(q, k, v, bias=bias, softcap=2.0)


def test_bias_of_minus_inf_leaves_rows_empty() -> None:
    q, k, v = (normal(n, 7, 2, 8) for n in range(3))
    bias = normal(5, 7, 7)
    bias[3] = -np.inf
    bias[:, 2] = -np.inf
    out, lse, dq, dk, dv, dbias = check(q, k, v, bias=bias, dlse=normal(6, 2, 7))
    assert not out[3].any() and np.isneginf(lse[:, 3]).all() and not dq[3].any()
    assert not dk[2].any() and not dv[2].any()
    assert not dbias[3].any() and not dbias[:, 2].any()


@dtypes
def test_no_gradient_passes_through_an_empty_row(dtype: np.dtype) -> None:
    """Whatever stands there in dout and dlse, NaN included."""
    q, k, v = (normal(n, 2, 6, 2, 8, dtype=dtype) for n in range(3))
    options = {"q_lengths": np.array([6, 4]), "k_lengths": np.array([0, 5])}
    bias = normal(7, 6, 6, dtype=dtype)
    dout, dlse = normal(3, 2, 6, 2, 8, dtype=dtype), normal(4, 2, 2, 6)
    dout[0], dout[1, 4:] = np.nan, np.nan
    dlse[0], dlse[1, :, 4:] = np.nan, np.nan
    dlse = dlse.astype(lse_dtype(dtype))
    results = check(q, k, v, dout, dlse=dlse, bias=bias, causal=True, **options)
    for x in results[2:]:
        assert np.isfinite(x).all()
    assert not results[2][0].any() and not results[2][1, 4:].any()


@layouts
@pytest.mark.parametrize(
    ("batch", "sq", "sk"), [((2,), 5, 0), ((2,), 0, 5), ((0,), 5, 5), ((), 0, 0)]
)
def test_empty_axes(batch: tuple[int, ...], sq: int, sk: int, layout: str) -> None:
    q, k, v = (normal(n, *batch, s, 2, 8) for n, s in enumerate((sq, sk, sk)))
    if layout == "bhsd":
        q, k, v = (x.swapaxes(-3, -2) for x in (q, k, v))
    for causal in (False, True, "top_left"):
        bias = normal(5, sq, sk)
        results = check(q, k, v, layout=layout, causal=causal, bias=bias)
        out, lse = results[:2]
        assert out.shape == q.shape and lse.shape == (*batch, 2, sq)
        # No key or no row: whatever exists is 0, and -inf.
        assert not out.any() and np.isneginf(lse).all()
        assert not any(x.any() for x in results[2:])


@pytest.mark.parametrize(
    ("sq", "sk"), [(2, 5), (5, 2), (1, 8), (8, 1), (2048, 1024), (300, 301)]
)
def test_causal_is_bottom_right(sq: int, sk: int) -> None:
    q, k, v = normal(1, sq, 1, 8), normal(2, sk, 1, 8), normal(3, sk, 1, 8)
    out, lse, dq, *_ = check(q, k, v, causal=True)
    empty = max(0, sq - sk)
    assert not out[:empty].any() and np.isneginf(lse[:, :empty]).all()
    assert np.isfinite(lse[:, empty:]).all() and not dq[:empty].any()
    # The last row sees every key, and top-left only as many as there are rows.
    _, whole, *_ = check(q[-1:], k, v)
    np.testing.assert_allclose(lse[:, -1:], whole, rtol=1e-6)
    check(q, k, v, causal="top_left")


def test_window_sides() -> None:
    q, k, v = normal(1, 20, 2, 8), normal(2, 27, 2, 8), normal(3, 27, 2, 8)
    whole = check(q, k, v)
    for window in ((-1, -1), (None, None), (-1, None), (10**12, 2**31)):
        for x, y in zip(check(q, k, v, window=window), whole, strict=True):
            np.testing.assert_array_equal(x, y)
    causal = check(q, k, v, causal=True)
    for window in ((-1, -1), (-1, 0), (None, 4), (100, 100)):
        got = check(q, k, v, window=window, causal=True)
        for x, y in zip(got, causal, strict=True):
            np.testing.assert_array_equal(x, y)
    for window in ((0, 0), (3, 0), (0, 3), (2, 1), (-1, 2), (2, -1), (50, 0)):
        for alignment in (False, True, "top_left"):
            check(q, k, v, window=window, causal=alignment)
            check(k, q, q, window=window, causal=alignment)


# --- Hidden keys may hold anything ----------------------------------------------------


def dirty_equals_clean(
    hide: dict[str, Any], bad_keys: Any, *, value: float, rows: Any = None
) -> None:
    """NaN or inf in what ``hide`` hides changes nothing, forward and backward.

    Parameters
    ----------
    hide : options
    bad_keys : index into k and v (batch, tokens) of keys that no row sees
    rows : index into q and dout (batch, tokens) of rows that see no key
    """
    q, k, v, dout = (normal(n, 2, 70, 4, 8) for n in range(4))
    k, v = k[:, :, :2].copy(), v[:, :, :2].copy()
    clean = check(q, k, v, dout, **hide)
    k[bad_keys], v[bad_keys] = value, value
    if rows is not None:
        q[rows], dout[rows] = value, value
    dirty = check(q, k, v, dout, **hide)
    for x, y in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(x, y)


nan_and_inf = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])


@nan_and_inf
def test_keys_past_the_length(value: float) -> None:
    lengths = {"k_lengths": np.array([50, 3])}
    past = (np.arange(70) >= lengths["k_lengths"][:, None],)
    dirty_equals_clean(lengths, past, value=value)
    dirty_equals_clean({**lengths, "causal": True}, past, value=value)
    lengths["q_lengths"] = np.array([70, 31])
    rows = (np.arange(70) >= lengths["q_lengths"][:, None],)
    dirty_equals_clean({**lengths, "causal": True}, past, value=value, rows=rows)


@nan_and_inf
def test_keys_outside_the_band(value: float) -> None:
    hide = {"causal": "top_left", "q_lengths": np.array([20, 20])}
    dirty_equals_clean(hide, np.s_[:, 20:], value=value, rows=np.s_[:, 20:])
    hide = {"window": (5, -1), "q_lengths": np.array([30, 30])}
    # The diagonal of row 0 is key 40.
    dirty_equals_clean(hide, np.s_[:, :35], value=value, rows=np.s_[:, 30:])


@nan_and_inf
def test_keys_masked_from_every_row(value: float) -> None:
    mask = np.ones((70, 70), bool)
    mask[:, [0, 13, 69]] = False
    dirty_equals_clean({"mask": mask}, np.s_[:, [0, 13, 69]], value=value)
    # With every other option, so that none of them brings the NaN back.
    hide = {
        "mask": mask,
        "bias": normal(7, 4, 1, 70),
        "alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.4]),
        "softcap": 3.0,
        "scale": -0.2,
    }
    dirty_equals_clean(hide, np.s_[:, [0, 13, 69]], value=value)


def test_keys_masked_from_some_rows() -> None:
    """On the CPU the rows that don't see the key are exact."""
    q, k, v, dout = (normal(n, 1, 12, 2, 8) for n in range(4))
    k[0, 5], v[0, 5] = np.nan, np.nan
    mask = np.ones((12, 12), bool)
    mask[:7, 5] = False
    out, lse, dq, _, _ = check(q, k, v, dout, mask=mask)
    assert np.isfinite(out[0, :7]).all() and np.isnan(out[0, 7:]).all()
    assert np.isfinite(lse[..., :7]).all() and np.isfinite(dq[0, :7]).all()
    # Causal rows before a bad key, the everyday case of it.
    q, k, v, dout = (normal(n, 1, 12, 2, 8) for n in range(4))
    k[0, 8], v[0, 8] = np.inf, np.nan
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    wanted, wanted_lse = attention(q[:, :8], k[:, :8], v[:, :8], causal=True)
    assert_close(out[:, :8], wanted)
    assert_close(lse[..., :8], wanted_lse)
    dq, _, _ = flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    wanted_dq = attention_backward(
        dout[:, :8], q[:, :8], k[:, :8], v[:, :8], causal=True
    )[0]
    assert_close(dq[:, :8], wanted_dq)


# --- Extreme logits -------------------------------------------------------------------


def test_huge_equal_logits() -> None:
    x = np.full((1, 1, 1, 64), 133120, bfloat16)
    out, lse = flash_attention(x, x, x, return_lse=True)
    np.testing.assert_array_equal(out.astype(np.float32), 133120)
    np.testing.assert_allclose(lse, 1.41767e11, rtol=1e-5)
    x = np.full((1, 9, 1, 64), 133120, bfloat16)
    out, *_ = check(x, x, x, huge=True)
    np.testing.assert_array_equal(out.astype(np.float32), 133120)


def test_very_negative_logits() -> None:
    q, k = np.full((1, 1, 1, 128), 64, np.float32), np.full((1, 1, 1, 128), -64)
    k, v = k.astype(np.float32), np.ones((1, 1, 1, 128), np.float32)
    out, lse, dq, dk, dv = check(q, k, v)
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, -46340.95, rtol=1e-7)
    np.testing.assert_allclose(dv, normal(99, 1, 1, 1, 128), rtol=1e-3)
    for x in (dq, dk):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("scale", [None, -0.1, 3.0])
def test_logits_of_1e5(scale: float | None) -> None:
    """One key wins each row outright; the rows before it must not overflow."""
    n = 150
    q = np.where(np.arange(n)[:, None] % 2, -1.0, 1.0).astype(np.float32)
    q = np.broadcast_to(q, (n, 4)).copy()
    k = (np.arange(n, dtype=np.float32)[:, None] - 70) * np.ones(4, np.float32)
    v = normal(3, n, 5)
    factor = 1e5 / 140
    out, lse, *gradients = check(q * np.float32(factor), k, v, scale=scale)
    positive = scale is None or scale > 0
    np.testing.assert_allclose(out[0], v[-1] if positive else v[0], rtol=1e-6)
    np.testing.assert_allclose(out[1], v[0] if positive else v[-1], rtol=1e-6)
    assert all(np.isfinite(x).all() for x in gradients)
    # Rising maxima from tile to tile, and falling ones.
    assert np.isfinite(lse).all()


def test_products_beyond_float16() -> None:
    """q·k is 640 000 here, which only float32 holds."""
    q = np.full((3, 2, 64), 100, np.float16)
    k = np.concatenate([q, -q])
    v = normal(1, 6, 2, 8, dtype=np.float16)
    out, lse, *_ = check(q, k, v)
    np.testing.assert_allclose(lse, 80000 + math.log(3), rtol=1e-6)
    assert_close(out, np.tile(v[:3].astype(np.float64).mean(0), (3, 1, 1)))


@pytest.mark.parametrize("s", [64, 192, 704])
@pytest.mark.parametrize("masked", [True, False], ids=["tril", "no_mask"])
def test_rows_whose_lse_is_far_below_zero(s: int, masked: bool) -> None:
    """Where a padded part of a tile would overflow: exp(0 - lse) with lse < -88."""
    q, k = (0.1 * normal(n, 1, 1, s, 64) for n in range(2))
    q[..., 0], k[..., 0] = 1, -120 * 8
    q, k = q.astype(bfloat16), k.astype(bfloat16)
    v = normal(2, 1, 1, s, 64, dtype=bfloat16)
    options = {"mask": np.tri(s, dtype=bool)} if masked else {}
    results = check(q, k, v, layout="bhsd", **options)
    assert results[1].max() < -88
    assert all(np.isfinite(x.astype(np.float32)).all() for x in results)


def test_one_key() -> None:
    """Softmax over one key is 1, so nothing flows into q and k."""
    q, k, v, dout = (normal(n, 1, 1, 1, 16, dtype=np.float16) for n in range(4))
    out, _, dq, dk, dv = check(q, k, v, dout)
    np.testing.assert_array_equal(out, v)
    np.testing.assert_array_equal(dv, dout)
    np.testing.assert_allclose(dq, 0, atol=1e-6)
    np.testing.assert_allclose(dk, 0, atol=1e-6)
    # Causal with one key: only the last row of each sequence sees it.
    for rows in (76, 34, 146):
        q, dout = (normal(n, rows, 1, 16, dtype=np.float16) for n in (5, 6))
        out, lse, dq, dk, dv = check(q, k[0], v[0], dout, causal=True)
        assert not out[:-1].any() and np.isneginf(lse[:, :-1]).all()
        np.testing.assert_array_equal(out[-1:], v[0])
        np.testing.assert_array_equal(dv, dout[-1:])
        np.testing.assert_allclose(dq, 0, atol=1e-6)
        np.testing.assert_allclose(dk, 0, atol=1e-6)


# --- Options --------------------------------------------------------------------------


def test_bias_of_distances_beyond_a_tile() -> None:
    q, k, v = (normal(n, 1, 1, 1025, 64, dtype=bfloat16) for n in range(3))
    i = np.arange(1025)
    bias = (i[:, None] - i).astype(np.float32)
    results = check(q, k, v, layout="bhsd", causal=True, bias=bias)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in results)


def test_bias_of_another_dtype() -> None:
    q, k, v = (normal(n, 8, 128, 4, 32, dtype=bfloat16) for n in range(3))
    bias = normal(4, 1, 4, 128, 128)
    *_, dbias = check(q, k, v, bias=bias)
    assert dbias.dtype == np.float32 and dbias.shape == bias.shape


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (21,),
        (17, 1),
        (17, 21),
        (4, 1, 1),
        (4, 17, 21),
        (3, 1, 1, 21),
        (1, 4, 1, 21),
        (3, 4, 17, 21),
        (1, 1, 1, 1),
    ],
    ids=str,
)
@dtypes
def test_bias_gradient_is_summed_over_broadcast_axes(
    shape: tuple[int, ...], dtype: np.dtype
) -> None:
    q, k = normal(1, 3, 17, 4, 8, dtype=dtype), normal(2, 3, 21, 2, 8, dtype=dtype)
    bias = np.asarray(normal(3, *shape, dtype=dtype))
    *_, dbias = check(q, k, k, bias=bias, softcap=2.0, window=(9, 6))
    assert dbias.shape == shape


def test_a_bias_view_of_stride_0_is_not_broadcasting() -> None:
    """The bias has the full shape, however it lies in memory, so has its gradient."""
    q = normal(1, 2, 9, 3, 8)
    bias = np.broadcast_to(normal(2, 9), (2, 3, 9, 9))
    *_, dbias = check(q, q, q, bias=bias)
    assert dbias.shape == (2, 3, 9, 9)


def test_softcap_does_not_leak_the_future() -> None:
    q, k = (normal(n, 1, 40, 2, 16) for n in range(2))
    v = np.full((1, 40, 2, 16), 1e4, np.float32)
    v[:, :20] = normal(3, 1, 20, 2, 16)
    out, *_ = check(q, k, v, softcap=1.0, causal=True)
    assert np.abs(out[:, :20]).max() < 10
    # The slope 1 - tanh² is far from 1 here, so leaving it out would show.
    check(4 * q, k, normal(4, 1, 40, 2, 16), softcap=1.0, causal=True)
    check(4 * q, k, normal(4, 1, 40, 2, 16), softcap=30.0)


def test_alibi() -> None:
    q, k, v = normal(1, 2, 1, 8, 16), normal(2, 2, 100, 2, 16), normal(3, 2, 100, 2, 16)
    slopes = (2.0 ** -np.arange(1, 9)).astype(np.float32)
    wanted = check(q, k, v, alibi_slopes=slopes)
    both = check(q, k, v, alibi_slopes=np.stack([slopes, slopes]))
    for x, y in zip(wanted, both, strict=True):
        np.testing.assert_array_equal(x, y)
    # The same as the bias that it stands for: the query is at position 99.
    bias = -slopes[:, None, None] * np.float32(99 - np.arange(100))
    out, lse = flash_attention(q, k, v, bias=bias, return_lse=True)
    np.testing.assert_allclose(out, wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-6)
    # A slope for each sequence, and positions that follow from the lengths.
    slopes = np.stack([slopes, slopes[::-1]])
    check(q, k, v, alibi_slopes=slopes, k_lengths=np.array([37, 100]))
    rows = normal(4, 2, 50, 8, 16)
    lengths = {"q_lengths": np.array([50, 20]), "k_lengths": np.array([30, 100])}
    for causal in (False, True, "top_left"):
        check(rows, k, v, alibi_slopes=slopes, causal=causal, **lengths)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_lengths_have_the_batch_axes(batch: tuple[int, ...]) -> None:
    q, k, v = (normal(n, *batch, s, 2, 8) for n, s in enumerate((11, 14, 14)))
    rng = np.random.default_rng(3)
    for dtype in (np.int32, np.int64):
        q_lengths = np.asarray(rng.integers(0, 12, batch), dtype)
        k_lengths = np.asarray(rng.integers(0, 15, batch), dtype)
        for causal in (False, True, "top_left"):
            check(q, k, v, q_lengths=q_lengths, causal=causal)
            check(q, k, v, k_lengths=k_lengths, causal=causal)
            check(q, k, v, q_lengths=q_lengths, k_lengths=k_lengths, causal=causal)


def test_lengths_equal_the_sequences_alone() -> None:
    q, k, v, dout = (normal(n, 2, 30, 2, 8) for n in range(4))
    q_lengths, k_lengths = np.array([12, 30]), np.array([30, 7])
    results = check(
        q, k, v, dout, q_lengths=q_lengths, k_lengths=k_lengths, causal=True
    )
    for b, (m, n) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        alone = check(q[b, :m], k[b, :n], v[b, :n], dout[b, :m], causal=True)
        parts = [results[0][b, :m], results[1][b, :, :m], results[2][b, :m]]
        parts += [results[3][b, :n], results[4][b, :n]]
        for x, y in zip(parts, alone, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        for x, end in zip(results[2:], (m, n, n), strict=True):
            assert not x[b, end:].any()


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-30, 2.0])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_scale(scale: float, softcap: float) -> None:
    q, k, v = (normal(n, 2, 19, 3, 8) for n in range(3))
    mask = normal(4, 19, 19) < 0
    mask[3] = False
    check(q, k, v, scale=scale, softcap=softcap, mask=mask)
    check(q, k, v, scale=scale, softcap=softcap, causal=True)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 300])
@layouts
def test_groups_of_query_heads(group: int, layout: str) -> None:
    q, k, v = (normal(n, 2, 15, h, 8) for n, h in enumerate((2 * group, 2, 2)))
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    bias = normal(5, 2 * group, 1, 15)
    check(q, k, v, layout=layout, bias=bias, causal=True)


# --- Sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("d", [8, 24, 40, 72, 80, 96, 112, 128, 192, 256, 512])
def test_head_dims_with_the_signal_at_the_end(d: int) -> None:
    dtype = np.float16 if d % 16 else bfloat16
    for kind in (np.float32, dtype):
        q, k, v, dout = (np.zeros((1, 40, 2, d), kind) for _ in range(4))
        for n, x in enumerate((q, k, v, dout)):
            x[..., -8:] = normal(n, 1, 40, 2, 8)
        results = check(q, k, v, dout, causal=True)
        for x in (results[0], *results[2:]):
            assert x[..., -8:].any() and not x[..., :-8].any()


@pytest.mark.parametrize(
    ("d", "dv"), [(192, 128), (576, 512), (64, 256), (128, 96), (1, 7), (1030, 3)]
)
@dtypes
def test_head_dim_of_v_differs(d: int, dv: int, dtype: np.dtype) -> None:
    q, k, v = (
        normal(n, 1, 45, 2, size, dtype=dtype) for n, size in enumerate((d, d, dv))
    )
    check(q, k[:, :, :1], v[:, :, :1], causal=True)


def test_one_query_and_any_number_of_keys() -> None:
    k, v, q = (normal(n, 300, 2, 8) for n in range(3))
    for n in range(1, 301):
        out, lse = flash_attention(q[:1], k[:n], v[:n], return_lse=True)
        wanted, wanted_lse = attention(q[:1], k[:n], v[:n])
        terms, _ = attention(q[:1], k[:n], np.abs(v[:n]))
        assert_close(out, wanted, terms=terms, name=f"out of {n} keys")
        assert_close(lse, wanted_lse, name=f"lse of {n} keys")
    for n in (1, 2, 63, 64, 65, 127, 129, 255, 257, 300):
        check(q[:1], k[:n], v[:n])
        check(q[:1], k[:n], v[:n], causal=True)


def test_ragged_sizes() -> None:
    x = normal(1, 2, 9, 2, 16)
    check(x, x, x)
    q, k = normal(2, 1, 1001, 1, 16), normal(3, 1, 503, 1, 16)
    check(q, k, k)
    check(q, k, k, causal=True)


def test_many_sequences_of_one_token() -> None:
    """One key: dv is dout, and nothing flows into q and k."""
    q, k, v, dout = (normal(n, 700, 1, 4, 32, dtype=bfloat16) for n in range(4))
    out, _, dq, dk, dv = check(q, k, v, dout)
    np.testing.assert_array_equal(out, v)
    np.testing.assert_array_equal(dv, dout)
    for x in (dq, dk):
        np.testing.assert_allclose(x.astype(np.float32), 0, atol=1e-5)


@dtypes
def test_batch_axes(dtype: np.dtype) -> None:
    for batch in ((), (1,), (2, 1), (2, 1, 3)):
        shape = (*batch, 6, 2, 8)
        q, k, v = (normal(n, *shape, dtype=dtype) for n in range(3))
        out, lse, *_ = check(q, k, v, bias=normal(5, *batch, 2, 6, 6, dtype=dtype))
        assert out.shape == shape and lse.shape == (*batch, 2, 6)
    q, k, v = (normal(n, s, 8, dtype=dtype) for n, s in enumerate((6, 9, 9)))
    for layout in ("bshd", "bhsd"):
        out, lse, *_ = check(
            q, k, v, layout=layout, causal=True, bias=normal(5, 6, 9, dtype=dtype),
            k_lengths=np.array(8), alibi_slopes=np.float32([0.3]),
        )  # fmt: skip
        assert out.shape == (6, 8) and lse.shape == (6,)


def test_numpy_may_be_told_to_raise() -> None:
    """As a user's code does to find its own mistakes."""
    q, k, v = (normal(n, 2, 30, 2, 8) for n in range(3))
    lengths = np.array([0, 17])
    with np.errstate(all="raise"):
        out, lse = flash_attention(q, k, v, k_lengths=lengths, return_lse=True)
        flash_attention_backward(q, q, k, v, out, lse, k_lengths=lengths)


# --- The ends of the number range -----------------------------------------------------


@pytest.mark.parametrize("scale", [1e-37, 1e-40, 5e-324])
def test_scales_next_to_zero(scale: float) -> None:
    """The weights are then equal."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((9, 2, 8), dtype=np.float32) for _ in range(3))
    out = flash_attention(q, k, v, scale=scale)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(0), out.shape), atol=1e-6)


def test_lowest_float64_in_a_bias_of_float32_arrays() -> None:
    """A very low logit, not a hidden key: NumPy's default dtype must do no harm."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((9, 2, 8), dtype=np.float32) for _ in range(3))
    bias = np.full((9, 9), np.finfo(np.float64).min)
    out, lse = flash_attention(q, k, v, bias=bias, return_lse=True)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(0), out.shape), atol=1e-6)
    assert np.isfinite(lse).all()
    bias[:, 1:] = -np.inf
    out = flash_attention(q, k, v, bias=bias)
    np.testing.assert_allclose(out, np.broadcast_to(v[0], out.shape), atol=1e-6)
