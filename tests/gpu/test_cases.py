"""Inputs that broke other attention libraries, as their users reported them.

Each test is of a whole kind of failure, forward and backward, not only of the numbers
that somebody ran into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import flash_attention, flash_attention_backward

from ..cases import (
    EXACT_FAMILIES,
    FAMILIES,
    SINGLE,
    Array,
    Case,
    Inputs,
    Truth,
    assert_same,
    compare,
    expect,
    expect_case,
    make,
    normal,
)
from .running import (
    PeakMemory,
    check,
    check_case,
    cp,
    fetch,
    fetch_all,
    pool_bytes,
    run,
    run_backward,
    to_gpu,
    usual_dtype,
)

families = pytest.mark.parametrize("family", FAMILIES)
any_head_size = pytest.mark.parametrize("family", ["simt"])
nan_and_inf = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])

# Head sizes whose kernels the reference grid uses with every option.
SMALL = {"d": 24, "dv": 20}


def over(*grid: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", grid, ids=str)


def each(case: Case, *dtypes: str) -> tuple[Case, ...]:
    return tuple(replace(case, dtype=dtype) for dtype in dtypes)


def finite(*arrays: Array) -> bool:
    return all(np.isfinite(x.astype(np.float64)).all() for x in arrays)


# --- Rows that see nothing, or nothing but huge numbers -------------------------------


@families
@over(
    Case("8x8", **SINGLE, layout="bhsd", sq=8, sk=8, d=8, mask="11qk"),
    Case("130x130", "bfloat16", layout="bhsd", sq=130, sk=130, mask="11qk"),
)
def test_mask_that_leaves_rows_empty(case: Case, family: str) -> None:
    inputs = make(case)
    half = case.sq // 2
    mask = np.zeros((1, 1, case.sq, case.sk), bool)
    mask[..., :half, :half] = True
    results = check(inputs.with_options(mask=mask), family)
    assert not results["out"][..., half:, :].any()
    assert np.isneginf(results["lse"][..., half:]).all()
    for name in ("dq", "dk", "dv"):
        assert not results[name][..., half:, :].any(), name
        assert results[name][..., :half, :].any(), name


@families
@over(
    Case("8x8", **SINGLE, layout="bhsd", sq=8, sk=8, d=8, bias="11qk"),
    Case("130x130", "bfloat16", layout="bhsd", sq=130, sk=130, bias="11qk",
         bias_dtype="float32"),
    Case("8x8", "float16", layout="bhsd", sq=8, sk=8, bias="11qk",
         bias_dtype="float32"),
)  # fmt: skip
def test_bias_of_the_smallest_number_gives_the_mean(case: Case, family: str) -> None:
    inputs = make(case)
    half = case.sq // 2
    bias = np.zeros((1, 1, case.sq, case.sk), np.float32)
    # Times log2(e) it is -inf.
    bias[..., half:, :] = np.finfo(np.float32).min
    results = check(inputs.with_options(bias=bias), family, huge=True)
    np.testing.assert_array_equal(
        results["lse"][..., half:], np.finfo(np.float32).min
    )  # fmt: skip


@families
@over(Case("bias", **SMALL, sq=70, sk=70, bias="qk"))
@pytest.mark.parametrize("hidden", [-np.inf, float(np.finfo(np.float32).min)])
def test_bias_that_hides_keys(case: Case, hidden: float, family: str) -> None:
    """A very small bias is a mask for rows that see something else."""
    bias = np.where(normal(1, 70, 70) > 0.3, np.float32(hidden), np.float32(0.5))
    bias[:, 0] = 0
    check(make(case).with_options(bias=bias), family)


# --- What hidden keys and rows hold ---------------------------------------------------

Index = Any


def _past(lengths: tuple[int, ...], tokens: int) -> Array:
    return np.arange(tokens) >= np.array(lengths)[:, None]


_200 = {"sq": 200, "sk": 200}
_SHORT_KEYS = {"k_lengths": (150, 3)}
_SHORT_BOTH = {"q_lengths": (200, 70), "k_lengths": (150, 3)}
_MASKED = [0, 13, *range(64, 140), 199]
# A case, and which keys and rows (batch, tokens) nobody sees in it.
HIDDEN: tuple[tuple[Case, Index, Index], ...] = (
    (Case("lengths", **SMALL, **_200, **_SHORT_KEYS), _past((150, 3), 200), None),
    (
        Case("causal_lengths", **SMALL, **_200, **_SHORT_BOTH, causal=True, dlse=True),
        _past((150, 3), 200),
        _past((200, 70), 200),
    ),
    (
        Case("top_left", **SMALL, **_200, causal="top_left", q_lengths=(60, 60)),
        np.s_[:, 60:],
        np.s_[:, 60:],
    ),
    (
        # The diagonal of row 0 is key 170.
        Case("window", **SMALL, **_200, window=(5, -1), q_lengths=(30, 30)),
        np.s_[:, :165],
        np.s_[:, 30:],
    ),
    (Case("mask", **SMALL, **_200, mask="b11k"), np.s_[:, _MASKED], None),
    (
        Case("everything", **SMALL, **_200, **_SHORT_BOTH, causal=True,
             window=(150, 3), softcap=3.0, alibi="heads", bias="h1k", mask="b11k",
             scale=-0.2),
        np.s_[:, _MASKED],
        None,
    ),
    (
        Case("lengths", "bfloat16", **_200, **_SHORT_KEYS),
        _past((150, 3), 200),
        None,
    ),
    (Case("mask", "bfloat16", **_200, mask="b11k"), np.s_[:, _MASKED], None),
)  # fmt: skip


@families
@nan_and_inf
@pytest.mark.parametrize("name", ["k", "v", "dout"])
def test_past_the_lengths_all_is_zero(name: str, value: float, family: str) -> None:
    """Whatever the valid part holds, with no other option that hides anything."""
    q_length, k_length = 5, 7
    lengths = {"q_lengths": (q_length, q_length), "k_lengths": (k_length, k_length)}
    inputs = make(Case("short", usual_dtype(family), **lengths))
    {"k": inputs.k, "v": inputs.v, "dout": inputs.dout}[name][:, 0] = value
    results = run(inputs, family)
    for key, length in (
        ("out", q_length),
        ("dq", q_length),
        ("dk", k_length),
        ("dv", k_length),
    ):
        assert not results[key][:, length:].any(), key


@families
@pytest.mark.parametrize("causal", [False, True])
def test_nan_that_is_seen_shows(causal: bool, family: str) -> None:
    """A NaN in a key that every row sees is not turned into a wrong number."""
    inputs = make(Case("seen", usual_dtype(family), sq=40, sk=40, causal=causal))
    inputs.k[:, 0] = np.nan
    results = run(inputs, family)
    for name in ("out", "lse", "dv"):
        assert np.isnan(results[name].astype(np.float64)).all(), name


@families
def test_lowest_float64_in_a_bias_of_float32_arrays(family: str) -> None:
    """A very low logit, not a hidden key: NumPy's default dtype must do no harm."""
    inputs = make(Case("lowest", sq=9, sk=33, bias="qk", bias_dtype="float64"))
    inputs.options["bias"][...] = np.finfo(np.float64).min
    results = run(inputs, family)
    group = inputs.q.shape[-2] // inputs.v.shape[-2]
    mean = inputs.v.astype(np.float64).mean(axis=-3, keepdims=True).repeat(group, -2)
    np.testing.assert_allclose(
        results["out"], np.broadcast_to(mean, results["out"].shape), atol=1e-6
    )
    assert np.isfinite(results["lse"]).all()


@families
@pytest.mark.parametrize("scale", [1e-37, 1e-40, 5e-324])
def test_scales_next_to_zero(scale: float, family: str) -> None:
    """Gradients of q and k may be flushed to 0, since they are subnormal numbers."""
    inputs = make(Case("tiny", usual_dtype(family), sq=20, sk=30))
    inputs = inputs.with_options(scale=scale)
    results = run(inputs, family)
    compare({name: results[name] for name in ("out", "lse", "dv")}, expect(inputs))
    for name in ("dq", "dk"):
        assert not np.any(np.abs(results[name].astype(np.float64)) > 1e-35), name


@families
@nan_and_inf
@pytest.mark.parametrize(
    ("case", "keys", "rows"), HIDDEN, ids=[str(case) for case, *_ in HIDDEN]
)
def test_what_nobody_sees_may_be_anything(
    case: Case, keys: Index, rows: Index, value: float, family: str
) -> None:
    inputs = make(case)
    if "mask" in inputs.options:
        inputs.options["mask"][..., _MASKED] = False
    clean = check(inputs, family)
    inputs.k[keys], inputs.v[keys] = value, value
    if rows is not None:
        inputs.q[rows], inputs.dout[rows] = value, value
        if inputs.dlse is not None:
            inputs.dlse.swapaxes(1, 2)[rows] = value
    assert_same(run(inputs, family), clean)


@families
@over(
    *each(Case("margin", **SMALL, memory="margin"), "float32"),
    *each(Case("margin", memory="margin", causal=True), "bfloat16", "float16"),
)
def test_nan_around_the_arrays(case: Case, family: str) -> None:
    """As when k and v are parts of a larger buffer that isn't filled yet."""
    assert_same(
        run(make(case), family), run(make(replace(case, memory="dense")), family)
    )
    check_case(case, family)


@pytest.mark.parametrize("family", EXACT_FAMILIES)
@nan_and_inf
@over(
    Case("mask", **SMALL, sq=100, sk=100, mask="qk"),
    Case("mask", "bfloat16", sq=100, sk=100, mask="qk"),
    Case("causal", **SMALL, sq=100, sk=100, causal=True),
    Case("causal", "bfloat16", sq=100, sk=100, causal=True),
)
def test_a_bad_key_reaches_only_rows_that_see_it(
    case: Case, value: float, family: str
) -> None:
    inputs = make(case)
    key, first = 50, 50  # rows before `first` don't see the key
    if case.mask is not None:
        key = 5
        mask = np.ones((100, 100), bool)
        mask[:first, key] = False
        inputs = inputs.with_options(mask=mask)
    clean = check(inputs, family)
    inputs.k[:, key], inputs.v[:, key] = value, value
    dirty = run(inputs, family)
    for name in ("out", "dq"):
        np.testing.assert_array_equal(dirty[name][:, :first], clean[name][:, :first])
    np.testing.assert_array_equal(dirty["lse"][..., :first], clean["lse"][..., :first])
    if np.isnan(value):
        assert np.isnan(dirty["out"][:, first:].astype(np.float32)).all()
        assert np.isnan(dirty["lse"][..., first:]).all()


# --- Extreme logits -------------------------------------------------------------------


@families
@over(
    Case("one", "bfloat16", **SINGLE, sq=1, sk=1, causal=True),
    Case("many", "bfloat16", **SINGLE, sq=70, sk=200),
)
def test_huge_equal_logits(case: Case, family: str) -> None:
    inputs = make(case)
    for x in (inputs.q, inputs.k, inputs.v):
        x[...] = 133120
    results = run(inputs, family)
    np.testing.assert_array_equal(results["out"].astype(np.float64), 133120)
    np.testing.assert_allclose(results["lse"], 1.41767e11, rtol=1e-5)
    for name, x in results.items():
        assert not np.isnan(x.astype(np.float64)).any(), name


@families
@over(
    *each(Case("one", **SINGLE, sq=1, sk=1, d=128, causal=True), "float32", "bfloat16")
)
def test_very_negative_logit(case: Case, family: str) -> None:
    inputs = make(case)
    inputs.q[...], inputs.k[...], inputs.v[...] = 64, -64, 1
    results = check(inputs, family, huge=True)
    np.testing.assert_array_equal(results["out"].astype(np.float32), 1)
    np.testing.assert_allclose(results["lse"], -46340.95, rtol=3e-7)
    assert finite(*results.values())


@families
@over(
    Case("scale", **SINGLE, sq=150, sk=150, **SMALL),
    Case("negative", **SINGLE, sq=150, sk=150, **SMALL, scale=-0.3),
    Case("softcap", **SINGLE, sq=150, sk=150, **SMALL, softcap=2.0),
    Case("causal", "bfloat16", **SINGLE, sq=150, sk=150, causal=True),
)
def test_logits_of_1e5(case: Case, family: str) -> None:
    """Maxima that rise from tile to tile in some rows and fall in others."""
    inputs = make(case)
    sign = np.where(np.arange(150) % 2, -1.0, 1.0)
    inputs.q[...] = sign[:, None, None]
    inputs.k[...] = (np.arange(150) - 70.0)[:, None, None]
    inputs.q[...] *= inputs.q.dtype.type(1e5 / (70 * math.sqrt(case.d)))
    results = check(inputs, family, huge=not case.softcap)
    assert finite(*results.values())


@families
@over(
    *(
        Case(f"{name}_{s}", "bfloat16", **SINGLE, layout="bhsd", sq=s, sk=s, mask=mask)
        for s in (64, 192, 704)
        for name, mask in (("tril", "qk"), ("no_mask", None))
    )
)
def test_rows_whose_lse_is_far_below_zero(case: Case, family: str) -> None:
    """Where a padded part of a tile would overflow: exp(0 - lse) with lse < -88."""
    inputs = make(case)
    for x in (inputs.q, inputs.k):
        x[...] = 0.1 * x.astype(np.float32)
    inputs.q[..., 0], inputs.k[..., 0] = 1, -120 * 8
    if case.mask is not None:
        inputs = inputs.with_options(mask=np.tri(case.sq, dtype=bool))
    results = check(inputs, family)
    assert results["lse"].max() < -88
    assert finite(*results.values())


# --- Few keys, many rows, ragged sizes ------------------------------------------------


@families
@over(Case("one_key", "float16", **SINGLE, sq=1, sk=1, d=16, causal=True))
def test_one_key(case: Case, family: str) -> None:
    """Softmax over one key is 1, so nothing flows into q and k."""
    inputs = make(case)
    results = check(inputs, family)
    np.testing.assert_array_equal(results["out"], inputs.v)
    np.testing.assert_array_equal(results["dv"], inputs.dout)
    for name in ("dq", "dk"):
        np.testing.assert_allclose(results[name], 0, atol=1e-6)


@families
@over(
    *(
        Case(f"rows_{rows}", "float16", **SINGLE, sq=rows, sk=1, d=16, causal=True)
        for rows in (76, 34, 146)
    )
)
def test_one_key_seen_by_the_last_row(case: Case, family: str) -> None:
    inputs = make(case)
    results = check(inputs, family)
    assert not results["out"][:, :-1].any()
    assert np.isneginf(results["lse"][..., :-1]).all()
    np.testing.assert_array_equal(results["out"][:, -1:], inputs.v)
    np.testing.assert_array_equal(results["dv"], inputs.dout[:, -1:])
    for name in ("dq", "dk"):
        np.testing.assert_allclose(results[name], 0, atol=1e-6)


@families
@over(
    Case("1025", "bfloat16", **SINGLE, layout="bhsd", sq=1025, sk=1025, causal=True,
         bias="qk", bias_dtype="float32")
)  # fmt: skip
def test_bias_of_distances_beyond_a_tile(case: Case, family: str) -> None:
    i = np.arange(1025)
    bias = (i[:, None] - i).astype(np.float32)
    results = check(make(case).with_options(bias=bias), family)
    assert finite(*results.values())


@families
@over(
    Case("half", "bfloat16", batch=(8,), sq=128, sk=128, hkv=4, d=32, bias="1hqk",
         bias_dtype="float32"),
    Case("half", "float16", batch=(3,), sq=70, sk=90, bias="b1qk",
         bias_dtype="float32"),
)  # fmt: skip
def test_only_the_bias_needs_a_gradient(case: Case, family: str) -> None:
    dbias = check_case(case, family)["dbias"]
    assert dbias.dtype == np.float32


@families
@over(
    *(
        Case(f"{sq}x{sk}", **SINGLE, sq=sq, sk=sk, d=8, causal=causal)
        for sq, sk in ((2, 5), (5, 2), (1, 8), (8, 1), (300, 301))
        for causal in (True, "top_left")
    ),
    Case("2048x1024", **SINGLE, sq=2048, sk=1024, d=8, causal=True),
)
def test_causal_is_bottom_right(case: Case, family: str) -> None:
    results = check_case(case, family)
    empty = max(0, case.sq - case.sk) if case.causal is True else 0
    assert not results["out"][:, :empty].any()
    assert np.isneginf(results["lse"][..., :empty]).all()
    assert np.isfinite(results["lse"][..., empty:]).all()
    assert not results["dq"][:, :empty].any()


@families
@over(
    *(
        Case(f"d{d}", dtype, batch=(1,), sq=70, sk=90, hq=2, hkv=1, d=d, causal=True)
        for d in (8, 24, 40, 72, 80, 96, 112, 128, 192, 256, 512)
        for dtype in ("float16", "bfloat16", "float32")
    )
)
def test_signal_in_the_last_8_channels(case: Case, family: str) -> None:
    inputs = make(case)
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[..., :-8] = 0
    results = check(inputs, family)
    for name in ("out", "dq", "dk", "dv"):
        assert results[name][..., -8:].any(), name
        assert not results[name][..., :-8].any(), name


@families
@over(*each(Case("decode", **SINGLE, sq=1, sk=300), "float32", "bfloat16"))
def test_one_query_and_any_number_of_keys(case: Case, family: str) -> None:
    inputs = make(case)
    q, k, v = (to_gpu(x) for x in (inputs.q, inputs.k, inputs.v))
    for n in range(1, 301):
        out, lse = flash_attention(
            q, k[:, :n], v[:, :n], return_lse=True, config=family
        )
        part = replace(inputs, k=inputs.k[:, :n], v=inputs.v[:, :n])
        truths = expect(part, gradients=False)
        compare(fetch_all({"out": out, "lse": lse}), truths)
    for n in (1, 2, 63, 64, 65, 127, 129, 255, 257, 300):
        check(replace(inputs, k=inputs.k[:, :n], v=inputs.v[:, :n]), family)


@families
@over(
    Case("1001x503", **SINGLE, sq=1001, sk=503),
    Case("503x1001", "bfloat16", **SINGLE, sq=503, sk=1001, causal=True),
)
def test_ragged_sizes(case: Case, family: str) -> None:
    assert finite(*check_case(case, family).values())


# --- Options --------------------------------------------------------------------------


@families
@over(
    Case("softcap", **SMALL, sq=100, sk=100, causal=True, softcap=1.0),
    Case("softcap", "bfloat16", sq=100, sk=100, causal=True, softcap=1.0),
)
def test_softcap_leaks_no_future(case: Case, family: str) -> None:
    inputs = make(case)
    inputs.v[:, 50:] = 1e4
    out = check(inputs, family)["out"]
    assert np.abs(out[:, :50]).max() < 10
    # The slope 1 - tanh² is far from 1 here, so leaving it out would show.
    inputs = make(case)
    inputs.q[...] *= 4
    check(inputs, family)


@families
@pytest.mark.parametrize("slopes", ["heads", "batch"])
@over(Case("decode", **SMALL, sq=1, sk=100, hq=8, hkv=2, alibi="heads"))
def test_alibi_is_a_bias_of_distances(case: Case, slopes: str, family: str) -> None:
    inputs = make(replace(case, alibi=slopes))
    results = check(inputs, family)
    # The one query stands at position 99.
    factor = np.broadcast_to(inputs.options["alibi_slopes"], (2, 8))[..., None, None]
    bias = -factor * np.float32(99 - np.arange(100))
    as_bias = replace(inputs, options={"bias": bias})
    other = run(as_bias, family)
    for name in results:
        np.testing.assert_allclose(results[name], other[name], rtol=1e-4, atol=1e-5)


@families
@over(Case("window", **SMALL), Case("window", "bfloat16"))
def test_unlimited_windows(case: Case, family: str) -> None:
    inputs = make(case)
    whole = check(inputs, family)
    for window in ((-1, -1), (None, None)):
        assert_same(run(inputs.with_options(window=window), family), whole)
    causal = run(inputs.with_options(causal=True), family)
    for window in ((-1, -1), (None, 4), (-1, 0)):
        options = {"window": window, "causal": True}
        assert_same(run(inputs.with_options(**options), family), causal)
    # Limits beyond every distance, and beyond 32 bits.
    compare(run(inputs.with_options(window=(10**12, 2**31)), family), expect_case(case))


@pytest.mark.parametrize("window", [(-1, -3), (7, -8), (-2, 0)])
def test_negative_windows(window: tuple[int, int]) -> None:
    x = cp.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match="window"):
        flash_attention(x, x, x, window=window)
    lse = cp.zeros((1, 2, 4), np.float32)
    with pytest.raises(ValueError, match="window"):
        flash_attention_backward(x, x, x, x, x, lse, window=window)


@pytest.mark.parametrize(("hq", "hkv"), [(8, 0), (33, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_heads_that_form_no_groups(hq: int, hkv: int, layout: str) -> None:
    def zeros(heads: int) -> Any:
        shape = (1, 5, heads, 8) if layout == "bshd" else (1, heads, 5, 8)
        return cp.zeros(shape, np.float32)

    q, k = zeros(hq), zeros(hkv)
    with pytest.raises(ValueError, match=rf"\b{hq}\b.*\b{hkv}\b"):
        flash_attention(q, k, k, layout=layout)
    lse = cp.zeros((1, hq, 5), np.float32)
    with pytest.raises(ValueError, match=rf"\b{hq}\b.*\b{hkv}\b"):
        flash_attention_backward(q, q, k, k, q, lse, layout=layout)


@families
@over(
    *(
        Case(f"{batch}_{sq}_{sk}_{layout}", batch=batch, sq=sq, sk=sk, d=24,
             layout=layout, bias="qk", causal=causal)
        for layout in ("bshd", "bhsd")
        for batch, sq, sk in (((2,), 5, 0), ((2,), 0, 5), ((0,), 5, 5), ((), 0, 0))
        for causal in (False, True)
    ),
    *(
        Case(f"{batch}_{sq}_{sk}", "bfloat16", batch=batch, sq=sq, sk=sk, causal=True)
        for batch, sq, sk in (((2,), 5, 0), ((2,), 0, 5), ((0,), 5, 5), ((), 0, 0))
    ),
)  # fmt: skip
def test_empty_axes(case: Case, family: str) -> None:
    """No key or no row: whatever exists is 0, and -inf."""
    results = check_case(case, family)
    assert not results.pop("out").any()
    assert np.isneginf(results.pop("lse")).all()
    assert not any(x.any() for x in results.values())


@families
@over(
    *(
        Case("lengths", **head, batch=(3,), q_lengths=(100, 0, 100),
             k_lengths=(0, 130, 130), causal=True)
        for head in (SMALL, {"dtype": "bfloat16"})
    )
)  # fmt: skip
def test_lengths_on_the_device_are_clamped(
    case: Case, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host never reads them, so a wrong one must not reach outside an array."""
    inputs = make(case)
    wrong = {
        "q_lengths": np.array([2**31 - 1, -5, 101], np.int32),
        "k_lengths": np.array([-(2**62), 131, 2**62], np.int64),
    }
    bad = inputs.with_options(**wrong)
    assert_same(run(bad, family), check(inputs, family))
    monkeypatch.setattr(cupy_flash.settings, "debug", True)
    run(inputs, family)
    with pytest.raises(ValueError, match="_lengths has values"):
        run(bad, family)


# --- Layouts in memory ----------------------------------------------------------------


@families
@pytest.mark.parametrize("offset", [1, 2, 3])
@over(
    Case("fp32", batch=(6,), sq=64, sk=64, hkv=4, layout="bhsd", causal=True),
    Case("46", "float16", batch=(2,), d=46, causal=True),
    Case("46", "bfloat16", batch=(2,), d=46, causal=True),
)
def test_offsets_into_one_buffer(case: Case, offset: int, family: str) -> None:
    """q, k and v lie behind each other, each `offset` elements past alignment."""
    inputs = make(case)
    names = ("q", "k", "v", "dout")
    sizes = [getattr(inputs, name).size + 64 for name in names]
    buffer = cp.zeros(sum(sizes) + 64, inputs.q.dtype)
    arrays = {}
    start = offset
    for name, size in zip(names, sizes, strict=True):
        host = getattr(inputs, name)
        arrays[name] = buffer[start : start + host.size].reshape(host.shape)
        arrays[name].data.copy_from_host(host.ctypes.data, host.nbytes)
        misalignment = arrays[name].data.ptr % (16 * host.itemsize)
        assert misalignment == offset * host.itemsize
        start += -(-size // 16) * 16
    q, k, v, dout = (arrays[name] for name in names)
    out, lse = flash_attention(
        q, k, v, **inputs.options, return_lse=True, config=family
    )
    gradients = run_backward(dout, q, k, v, out, lse, **inputs.options, config=family)
    results = dict(
        zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)
    )
    compare(fetch_all(results), expect_case(case))


@families
@over(Case("transposed", **SMALL, sq=33, sk=33, layout="bhsd", mask="bhqk"))
def test_transposed_views_and_a_mask_of_stride_0(case: Case, family: str) -> None:
    inputs = make(replace(case, memory="swapped"))
    mask = np.broadcast_to(normal(5, 2, 1, 33, 1) < 0.5, (2, 4, 33, 33))
    assert mask.strides[-1] == 0
    check(inputs.with_options(mask=mask), family)


@families
@over(*each(Case("dout", sq=100, sk=100, causal=True), "float32", "bfloat16"))
def test_dout_transposed_or_expanded_from_a_scalar(case: Case, family: str) -> None:
    inputs = make(case)
    transposed = np.ascontiguousarray(inputs.dout.swapaxes(1, 2)).swapaxes(1, 2)
    expanded = np.broadcast_to(inputs.dout[0, 0, 0, 0], inputs.dout.shape)
    for dout in (transposed, expanded):
        got = check(replace(inputs, dout=dout), family)
        dense = replace(inputs, dout=np.ascontiguousarray(dout))
        assert_same(run(dense, family), got)


def _views() -> dict[str, tuple[Array, Array, Array]]:
    """Views of arrays (batch, tokens, heads, channels)."""
    x = normal(1, 3, 60, 6, 24)
    keys = normal(2, 3, 6, 24, 60).transpose(0, 3, 1, 2)
    packed = normal(3, 3, 60, 3, 6, 24)
    shared = np.broadcast_to(normal(4, 1, 60, 2, 24), (3, 60, 2, 24))
    one_head = np.broadcast_to(normal(5, 3, 60, 1, 24), (3, 60, 6, 24))
    one_key = np.broadcast_to(normal(6, 3, 1, 6, 24), (3, 60, 6, 24))
    return {
        "slices": (x[:, :4], x[:, 1:50], x[:, 1:50, :, :20]),
        "steps": (x[::2], x[::-2], x[1::-1]),
        "channels": (x[..., ::2], x[..., 1::2], x[..., ::-1]),
        "transposed": (x, keys, keys),
        "packed": (packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]),
        "shared_by_sequences": (x, shared, shared),
        "shared_by_heads": (x, one_head, one_head),
        "one_key_repeated": (x, one_key, x),
        "the_same_array": (x, x, x),
    }


@families
@pytest.mark.parametrize("name", _views())
def test_slices_transposes_steps_and_broadcasts(name: str, family: str) -> None:
    q, k, v = _views()[name]
    dout = normal(9, *q.shape[:-1], v.shape[-1])
    inputs = Inputs(q, k, v, dout, None, {"causal": True})
    dense = Inputs(*(np.ascontiguousarray(x) for x in (q, k, v, dout)), None,
                   inputs.options)  # fmt: skip
    assert_same(run(inputs, family), check(dense, family))


# --- Sizes at the limits of a GPU -----------------------------------------------------


def repeated(x: Array, times: int, axis: int) -> Any:
    """Return an array on the GPU that repeats x along an axis."""
    # As integers, which every function of CuPy's takes.
    integers = x.view(f"u{x.itemsize}")
    reps = [1] * x.ndim
    reps[axis] = times
    return cp.tile(cp.asarray(integers), reps).view(x.dtype)


def check_repeated(
    inputs: Inputs, truths: dict[str, Truth], times: int, axis: int, family: str
) -> dict[str, Array]:
    """Run inputs that are repeated along the batch axis (0) or the heads (2).

    Every repetition must give the same bits, and the first one what is right, which is
    returned.
    """
    q, k, v, dout = (
        repeated(x, times, axis) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    out, lse = flash_attention(
        q, k, v, **inputs.options, return_lse=True, config=family
    )
    gradients = run_backward(
        dout, q, k, v, out, lse, **inputs.options, config=family, deterministic=True
    )
    first = {}
    for name, x in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True
    ):
        at = {0: 0, 2: 1}[axis] if name == "lse" else axis
        size = x.shape[at] // times
        parts = x.view(f"u{x.itemsize}").reshape(
            *x.shape[:at], times, size, *x.shape[at + 1 :]
        )
        part = parts.take(cp.array([0]), axis=at)
        assert bool((parts == part).all()), f"{name} differs between repetitions"
        first[name] = fetch(part.squeeze(at)).view(x.dtype)
    compare(first, truths)
    return first


@families
@over(Case("sequences", "float16", batch=(64,), sq=8, sk=8, hkv=4))
def test_more_sequences_than_a_grid_axis_holds(case: Case, family: str) -> None:
    check_repeated(make(case), expect_case(case), 1024, 0, family)


@families
@over(
    Case("heads", "float16", batch=(1,), sq=3, sk=3, hq=60, hkv=60, d=128, causal=True)
)
def test_more_heads_than_a_grid_axis_holds(case: Case, family: str) -> None:
    check_repeated(make(case), expect_case(case), 1188, 2, family)


@families
@over(
    Case("one_token", "bfloat16", batch=(83,), sq=1, sk=1, hq=16, hkv=16, d=128,
         causal=True)
)  # fmt: skip
def test_many_sequences_of_one_token(case: Case, family: str) -> None:
    """One key: dv is dout, and nothing flows into q and k."""
    inputs = make(case)
    results = check_repeated(inputs, expect_case(case), 100, 0, family)
    np.testing.assert_array_equal(results["out"], inputs.v)
    np.testing.assert_array_equal(results["dv"], inputs.dout)
    for name in ("dq", "dk"):
        np.testing.assert_allclose(results[name].astype(np.float32), 0, atol=1e-4)


@families
@over(Case("cache", "float16", d=128, causal=True))
def test_offsets_past_2_to_the_31(case: Case, family: str) -> None:
    """k, v, dk and dv are one layer's part of caches with a batch stride of 2^30."""
    shape = (5, 4096, 32, 2, 32, 128)
    tokens, layer, rows = 512, 17, 40
    dtype = np.dtype(case.dtype)
    q, dout = (normal(n, 5, rows, 32, 128, dtype=dtype) for n in (1, 4))
    k, v = (normal(n, 5, tokens, 32, 128, dtype=dtype) for n in (2, 3))

    def layer_of(cache: Any) -> tuple[Any, Any]:
        part = cache[:, 1000 : 1000 + tokens, layer]
        return part[:, :, 0], part[:, :, 1]

    cache, gradients = (cp.empty(shape, dtype) for _ in range(2))
    cache.data.memset(0xFF, cache.nbytes)  # NaN
    gradients.data.memset(0x11, gradients.nbytes)
    keys, values = layer_of(cache)
    assert keys.strides[0] == dtype.itemsize * 2**30
    keys[...], values[...] = cp.asarray(k), cp.asarray(v)
    dk, dv = layer_of(gradients)
    arrays = [cp.asarray(x) for x in (q, dout)]
    options = {"causal": True, "config": family}
    backward = options | {"deterministic": True}

    def both(k: Any, v: Any, **given: Any) -> dict[str, Array]:
        q, dout = arrays
        out, lse = flash_attention(q, k, v, **options, return_lse=True)
        got = run_backward(dout, q, k, v, out, lse, **backward, **given)
        names = ("out", "lse", "dq", "dk", "dv")
        return fetch_all(dict(zip(names, (out, lse, *got), strict=True)))

    results = both(keys, values, dk=dk, dv=dv)
    assert_same(results, both(cp.asarray(k), cp.asarray(v)))
    untouched = gradients.view(np.uint16)
    for x in layer_of(untouched):
        x[...] = 0x1111
    assert bool((untouched == 0x1111).all()), "written outside the view"
    # The last sequence is the one that lies past 2^31.
    part = np.s_[4:, :, 30:]
    truths = expect(
        Inputs(q[part], k[part], v[part], dout[part], None, {"causal": True})
    )
    results = {n: x[4:, 30:] if n == "lse" else x[part] for n, x in results.items()}
    compare(results, truths)


@any_head_size
@over(
    Case("long_cross", "bfloat16", batch=(1,), sq=256, sk=1024, hq=16, hkv=2, d=512,
         causal=True)
)  # fmt: skip
def test_memory_of_a_large_backward(case: Case, family: str) -> None:
    """Beside the gradients one number for each row; nothing is of size Sq x Sk."""
    inputs = make(case)
    # Of each group of heads only the first one contributes to dk and dv, so that the
    # reference needs that head only.
    inputs.dout[:, :, np.arange(16) % 8 != 0] = 0
    sequences, repeats = 24, 12
    q, dout = (repeated(x, sequences, 0) for x in (inputs.q, inputs.dout))
    k, v = (
        repeated(np.tile(x.view(np.uint16), (1, repeats, 1, 1)).view(x.dtype),
                 sequences, 0)
        for x in (inputs.k, inputs.v)
    )  # fmt: skip
    assert k.shape == (24, 12288, 2, 512)
    options = {"causal": True, "config": family}
    with PeakMemory() as hook:
        out, lse = flash_attention(q, k, v, **options, return_lse=True)
    assert hook.peak == pool_bytes(out, lse)
    with PeakMemory() as hook:
        gradients = run_backward(dout, q, k, v, out, lse, **options)
    assert hook.peak <= 3.5 * 2**30
    assert hook.peak <= pool_bytes(*gradients, lse) + 2**20

    last, head, kv_head = 23, 8, 1
    keys, values = (fetch(x[last, :, kv_head]) for x in (k, v))
    one = Inputs(
        inputs.q[0, :, head], keys, values, inputs.dout[0, :, head], None,
        {"causal": True},
    )  # fmt: skip
    dq, dk, dv = gradients
    results = {
        "out": out[last, :, head],
        "lse": lse[last, head],
        "dq": dq[last, :, head],
        "dk": dk[last, :, kv_head],
        "dv": dv[last, :, kv_head],
    }
    compare(fetch_all(results), expect(one))


# --- Races ----------------------------------------------------------------------------


@families
@over(
    Case("d512", "float16", batch=(1,), sq=129, sk=129, hq=16, hkv=2, d=512,
         causal=True),
    Case("d72", "float16", batch=(1,), sq=512, sk=512, hq=16, hkv=16, d=72,
         causal=True),
)  # fmt: skip
def test_a_hundred_runs_give_the_same_bits(case: Case, family: str) -> None:
    """Whatever is in memory before: the runner fills the pool with NaN each time."""
    inputs = make(case)
    first = check_case(case, family)
    for _ in range(100):
        assert_same(run(inputs, family), first)


# --- Several GPUs ---------------------------------------------------------------------


@pytest.fixture
def two_devices() -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second GPU")


@families
@pytest.mark.usefixtures("two_devices")
@over(Case("bias", **SMALL, bias="hqk"), Case("mask", **SMALL, mask="bhqk"))
def test_arrays_on_a_device_that_is_not_current(case: Case, family: str) -> None:
    inputs = make(case)
    truths = expect_case(case)
    with cp.cuda.Device(1):
        arrays = {name: to_gpu(x) for name, x in inputs.arrays.items()}
    q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
    options = inputs.scalars | arrays | {"config": family}
    with cp.cuda.Device(0):
        out, lse = flash_attention(q, k, v, **options, return_lse=True)
        gradients = run_backward(
            dout, q, k, v, out, lse, **options, bias_grad=case.bias is not None
        )
        assert cp.cuda.runtime.getDevice() == 0
    results = dict(
        zip(("out", "lse", "dq", "dk", "dv", "dbias"), (out, lse, *gradients),
            strict=False)
    )  # fmt: skip
    assert all(x.device.id == 1 for x in results.values())
    with cp.cuda.Device(1):
        compare(fetch_all(results), truths)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "out"])
def test_arrays_on_two_devices(name: str) -> None:
    def build(where: Callable[[str], int]) -> dict[str, Any]:
        arrays = {}
        for argument in ("q", "k", "v", "bias", "mask", "out"):
            with cp.cuda.Device(where(argument)):
                shape = (5, 5) if argument in ("bias", "mask") else (5, 2, 8)
                dtype = np.bool_ if argument == "mask" else np.float32
                arrays[argument] = cp.zeros(shape, dtype)
        return arrays

    arrays = build(lambda argument: int(argument == name))
    before = cp.cuda.runtime.getDevice()
    with pytest.raises(ValueError, match="device"):
        flash_attention(**arrays)
    assert cp.cuda.runtime.getDevice() == before


# --- Element types --------------------------------------------------------------------


@families
@over(
    Case("long", **SINGLE, sq=2, sk=60_000, d=8),
    Case("tall", **SINGLE, sq=60_000, sk=2, d=8),
)
def test_float32_stays_exact_at_any_length(case: Case, family: str) -> None:
    """About 1e-6 relative error, whatever the number of keys or rows."""
    inputs = make(case)
    # No two terms cancel in the long sums of out, lse and dv.
    for x in (inputs.v, inputs.dout):
        x[...] = 1 + 0.1 * x
    truths = expect(inputs)
    results = check(inputs, family, lambda: truths)
    for name in ("out", "lse") if case.sk > case.sq else ("dv",):
        exact = truths[name].exact
        error = np.linalg.norm(results[name] - exact)
        assert error < 2e-6 * np.linalg.norm(exact), name


@families
@over(Case("products", "float16", **SINGLE, sq=3, sk=6))
def test_products_beyond_float16(case: Case, family: str) -> None:
    """q·k is 640 000 here, which only float32 holds."""
    inputs = make(case)
    inputs.q[...], inputs.k[:, :3], inputs.k[:, 3:] = 100, 100, -100
    results = check(inputs, family, huge=True)
    np.testing.assert_allclose(results["lse"], 80000 + math.log(3), rtol=1e-6)


def test_dtypes_that_differ() -> None:
    q = cp.zeros((1, 4, 2, 8), np.float32)
    half = cp.zeros((1, 4, 2, 8), ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=r"q is float32.*bfloat16"):
        flash_attention(q, half, q)
