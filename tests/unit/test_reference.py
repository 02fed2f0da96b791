"""The reference is checked here, by means that share nothing with it.

Forward against a loop over single numbers, backward against finite differences, both
against results that can be worked out by hand.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ..reference import (
    assert_close,
    attention,
    attention_backward,
    error_terms,
    unfused,
    unfused_backward,
)

bfloat16 = ml_dtypes.bfloat16
INF = math.inf


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# Each option alone, then together. No two axes have the same size, but
# for the batch and Hkv.
BATCH, SQ, SK, HQ, HKV, D, DV = 2, 4, 5, 6, 2, 3, 1
SLOPES = np.array([0.5, 0.25, 1.0, 0.125, 0.75, 0.3])
HIDING = normal(7, BATCH, 1, SQ, SK) > -0.5
MINUS_INF = np.where(normal(8, SQ, SK) > 1.0, -INF, normal(9, SQ, SK))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal_top_left": {"causal": "top_left"},
    "window": {"window": (1, 2)},
    "window_left": {"window": (1, -1)},
    "window_right_top_left": {"window": (None, 0), "causal": "top_left"},
    "scale": {"scale": 1.7},
    "scale_negative": {"scale": -0.4},
    "scale_zero": {"scale": 0.0},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi_batch": {"alibi_slopes": np.stack([SLOPES, 2 * SLOPES]), "causal": True},
    "bias_full": {"bias": normal(1, BATCH, HQ, SQ, SK)},
    "bias_heads": {"bias": normal(2, 1, HQ, 1, SK)},
    "bias_rows": {"bias": normal(3, SQ, 1)},
    "bias_keys": {"bias": normal(4, BATCH, 1, 1, SK)},
    "bias_minus_inf": {"bias": MINUS_INF},
    "mask": {"mask": HIDING},
    "mask_heads": {"mask": normal(5, HQ, 1, SK) > -0.7},
    "lengths": {"q_lengths": np.array([3, 4]), "k_lengths": np.array([5, 2])},
    "lengths_zero": {"q_lengths": np.array([0, 4]), "k_lengths": np.array([5, 0])},
    "lengths_causal": {
        "q_lengths": np.array([2, 4]),
        "k_lengths": np.array([5, 3]),
        "causal": True,
        "alibi_slopes": SLOPES,
    },
    "all": {
        "causal": True,
        "window": (2, 1),
        "scale": 0.9,
        "softcap": 1.5,
        "alibi_slopes": SLOPES,
        "bias": normal(6, HQ, 1, SK),
        "mask": HIDING,
        "q_lengths": np.array([4, 3]),
        "k_lengths": np.array([4, 5]),
    },
}


def arrays(layout: str = "bshd") -> tuple[np.ndarray, ...]:
    q, k = normal(11, BATCH, SQ, HQ, D), normal(12, BATCH, SK, HKV, D)
    v, dout = normal(13, BATCH, SK, HKV, DV), normal(14, BATCH, SQ, HQ, DV)
    if layout == "bhsd":
        q, k, v, dout = (x.swapaxes(1, 2) for x in (q, k, v, dout))
    return q, k, v, dout


def one_number_at_a_time(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    q_lengths: np.ndarray | None = None,
    k_lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The definition for (B, S, H, D) without one array operation."""
    full = (BATCH, HQ, SQ, SK)
    out, lse = np.zeros((BATCH, SQ, HQ, DV)), np.zeros((BATCH, HQ, SQ))
    bias = np.broadcast_to(0.0 if bias is None else bias, full)
    mask = np.broadcast_to(True if mask is None else mask, full)
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, (BATCH, HQ))
    scale = D**-0.5 if scale is None else scale
    left, right = (INF if n in (None, -1) else n for n in window)
    for b, h, i in np.ndindex(BATCH, HQ, SQ):
        q_len = SQ if q_lengths is None else int(q_lengths[b])
        k_len = SK if k_lengths is None else int(k_lengths[b])
        off = 0 if causal == "top_left" else k_len - q_len
        logits = {}
        for j in range(k_len if i < q_len else 0):
            kv = h // (HQ // HKV)
            s = scale * sum(float(q[b, i, h, d] * k[b, j, kv, d]) for d in range(D))
            if softcap:
                s = softcap * math.tanh(s / softcap)
            s += -slopes[b, h] * abs(i + off - j) + bias[b, h, i, j]
            seen = mask[b, h, i, j] and i + off - left <= j <= i + off + right
            if seen and not (causal and j > i + off) and s > -INF:
                logits[j] = s
        total = sum(math.exp(s) for s in logits.values())
        lse[b, h, i] = math.log(total) if logits else -INF
        for c in range(DV):
            out[b, i, h, c] = sum(
                math.exp(s) / total * v[b, j, h // (HQ // HKV), c]
                for j, s in logits.items()
            )
    return out, lse


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_forward_is_the_definition(name: str, layout: str) -> None:
    q, k, v, _ = arrays()
    expected, expected_lse = one_number_at_a_time(q, k, v, **OPTIONS[name])
    q, k, v, _ = arrays(layout)
    out, lse = attention(q, k, v, layout=layout, **OPTIONS[name])
    out = out.swapaxes(1, 2) if layout == "bhsd" else out
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-14)


def finite_difference(x: np.ndarray, loss: Any) -> np.ndarray:
    """Central differences of ``loss()`` in each element of x, which it changes."""
    step = 1e-5
    gradient = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        kept = x[at]
        x[at] = kept + step
        above = loss()
        x[at] = kept - step
        below = loss()
        x[at] = kept
        # An infinite bias stays what it is; no gradient flows into it.
        gradient[at] = (above - below) / (2 * step) if np.isfinite(kept) else 0.0
    return gradient


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out_and_lse"])
def test_backward_is_the_derivative(name: str, with_dlse: bool) -> None:
    # One layout for each half of the grid.
    layout = "bhsd" if with_dlse else "bshd"
    q, k, v, dout = (np.ascontiguousarray(x) for x in arrays(layout))
    options = dict(OPTIONS[name], layout=layout)
    bias = options.get("bias")
    if bias is not None:
        bias = options["bias"] = bias.copy()
    dlse = normal(15, BATCH, HQ, SQ) if with_dlse else None

    def loss() -> float:
        out, lse = attention(q, k, v, **options)
        lse = np.where(np.isfinite(lse), lse, 0.0)
        return float((out * dout).sum() + (0.0 if dlse is None else (lse * dlse).sum()))

    dq, dk, dv, dbias = attention_backward(dout, q, k, v, dlse=dlse, **options)
    wanted = [(q, dq), (k, dk), (v, dv)]
    if bias is None:
        assert dbias is None
    else:
        wanted.append((bias, dbias))
    for x, gradient in wanted:
        assert gradient.shape == x.shape
        np.testing.assert_allclose(
            gradient, finite_difference(x, loss), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=["3d", "4d", "5d"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_batch_axes(shape: tuple[int, ...], layout: str) -> None:
    def make(seed: int, heads: int, tokens: int, size: int) -> np.ndarray:
        axes = (tokens, heads) if layout == "bshd" else (heads, tokens)
        return normal(seed, *shape, *axes, size)

    q, k, v = make(1, HQ, SQ, D), make(2, HKV, SK, D), make(3, HKV, SK, DV)
    dout, dlse = make(4, HQ, SQ, DV), normal(5, *shape, HQ, SQ)
    bias = normal(6, *shape[-1:], HQ, 1, SK)
    out, lse = attention(q, k, v, bias=bias, layout=layout)
    gradients = attention_backward(dout, q, k, v, dlse=dlse, bias=bias, layout=layout)
    assert out.shape == dout.shape and lse.shape == dlse.shape
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v, bias)]
    dbias = np.zeros_like(bias)
    for at in np.ndindex(*shape):
        one = bias[at[-1]] if shape else bias
        out_1, lse_1 = attention(q[at], k[at], v[at], bias=one, layout=layout)
        np.testing.assert_allclose(out[at], out_1, rtol=1e-13)
        np.testing.assert_allclose(lse[at], lse_1, rtol=1e-13)
        *grads_1, dbias_1 = attention_backward(
            dout[at], q[at], k[at], v[at], dlse=dlse[at], bias=one, layout=layout
        )
        for x, x_1 in zip(gradients, grads_1, strict=False):
            np.testing.assert_allclose(x[at], x_1, rtol=1e-12, atol=1e-14)
        dbias[at[-1:]] += dbias_1
    np.testing.assert_allclose(gradients[3], dbias, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_one_head_of_two_axes(layout: str) -> None:
    q, k, v, dout = normal(1, 4, 3), normal(2, 5, 3), normal(3, 5, 2), normal(4, 4, 2)
    axis = 1 if layout == "bshd" else 0
    bias, dlse = normal(5, 4, 5), normal(6, 4)
    out, lse = attention(q, k, v, bias=bias, layout=layout)
    assert out.shape == (4, 2) and lse.shape == (4,)
    headed = [np.expand_dims(x, axis) for x in (dout, q, k, v)]
    out_1, lse_1 = attention(*headed[1:], bias=bias, layout=layout)
    np.testing.assert_array_equal(out, out_1.squeeze(axis))
    np.testing.assert_array_equal(lse, lse_1[0])
    grads = attention_backward(dout, q, k, v, bias=bias, dlse=dlse, layout=layout)
    *grads_1, dbias_1 = attention_backward(
        *headed, bias=bias, dlse=dlse[None], layout=layout
    )
    for x, x_1 in zip(grads, grads_1, strict=False):
        np.testing.assert_array_equal(x, x_1.squeeze(axis))
    np.testing.assert_array_equal(grads[3], dbias_1)


def test_many_heads_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = arrays()
    whole = (*attention(q, k, v), *attention_backward(dout, q, k, v)[:3])
    monkeypatch.setattr("tests.reference._PART", 50)
    parts = (*attention(q, k, v), *attention_backward(dout, q, k, v)[:3])
    for x, y in zip(whole, parts, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-13)


# --- By hand --------------------------------------------------------------------------


def test_one_key() -> None:
    """Softmax over one key is 1, so nothing flows into q and k."""
    q, k, v, dout = (normal(n, 3, 1, 2) for n in range(4))
    k, v = k[:1], v[:1]
    out, lse = attention(q, k, v, scale=2.0)
    np.testing.assert_array_equal(out, np.broadcast_to(v, out.shape))
    np.testing.assert_allclose(lse[0], 2 * (q[:, 0] @ k[0, 0]), rtol=1e-14)
    dq, dk, dv, _ = attention_backward(dout, q, k, v, scale=2.0)
    np.testing.assert_array_equal(dq, 0)
    np.testing.assert_array_equal(dk, 0)
    np.testing.assert_allclose(dv[0], dout.sum(0), rtol=1e-14)


def test_equal_keys_give_the_mean() -> None:
    q, v = np.zeros((1, 1, 4)), normal(0, 7, 1, 3)
    out, lse = attention(q, normal(1, 7, 1, 4), v)
    np.testing.assert_allclose(out[0], v.mean(0), rtol=1e-14)
    np.testing.assert_allclose(lse, math.log(7), rtol=1e-14)


def test_huge_logits() -> None:
    x = np.full((1, 1, 1, 64), 133120, bfloat16)
    out, lse = attention(x, x, x)
    np.testing.assert_array_equal(out, 133120)
    assert lse.item() == 8 * 133120.0**2


def test_very_negative_logits() -> None:
    q, k = np.full((1, 128), 64.0), np.full((1, 128), -64.0)
    out, lse = attention(q, k, np.ones((1, 128)))
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, -46340.95, rtol=1e-7)


def test_bias_of_the_smallest_number_gives_the_mean() -> None:
    q, k, v = (normal(n, 1, 8, 1, 8) for n in range(3))
    bias = np.zeros((8, 8), np.float32)
    bias[4:] = np.finfo(np.float32).min
    out, lse = attention(q, k, v, bias=bias)
    np.testing.assert_allclose(out[0, 4:, 0], np.tile(v[0].mean(0), (4, 1)), rtol=1e-12)
    np.testing.assert_array_equal(lse[0, 0, 4:], np.finfo(np.float32).min)


@pytest.mark.parametrize(
    ("sq", "sk", "first_keys"), [(2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2]), (1, 8, [8])]
)
def test_causal_counts(sq: int, sk: int, first_keys: list[int]) -> None:
    """With equal logits exp(lse) is the number of keys that a row sees."""
    q, k, v = np.zeros((sq, 1, 1)), np.zeros((sk, 1, 1)), np.ones((sk, 1, 1))
    out, lse = attention(q, k, v, causal=True)
    np.testing.assert_allclose(np.exp(lse[0]), first_keys, rtol=1e-14)
    np.testing.assert_allclose(out[:, 0, 0], np.sign(first_keys), rtol=1e-14)
    _, lse = attention(q, k, v, causal="top_left")
    np.testing.assert_allclose(np.exp(lse[0]), [min(i + 1, sk) for i in range(sq)])


def test_window_counts() -> None:
    q, k = np.zeros((4, 1, 1)), np.zeros((6, 1, 1))
    # The diagonal of row i is key i + 2; both ends count.
    for window, causal, keys in [
        ((1, 1), False, [3, 3, 3, 2]),
        ((0, 0), False, [1, 1, 1, 1]),
        ((-1, 1), False, [4, 5, 6, 6]),
        ((None, None), True, [3, 4, 5, 6]),
        ((1, 3), True, [2, 2, 2, 2]),
    ]:
        _, lse = attention(q, k, k, window=window, causal=causal)
        np.testing.assert_allclose(np.exp(lse[0]), keys, rtol=1e-14)


def test_lengths_move_the_diagonal() -> None:
    q, k = np.zeros((2, 4, 1, 1)), np.zeros((2, 6, 1, 1))
    lengths = {"q_lengths": np.array([2, 3]), "k_lengths": np.array([5, 1])}
    _, lse = attention(q, k, k, causal=True, **lengths)
    np.testing.assert_allclose(
        np.exp(lse[:, 0]), [[4, 5, 0, 0], [0, 0, 1, 0]], rtol=1e-14
    )


def test_alibi_values() -> None:
    """One query after 3 keys: off = 2, logits 0, -m, -2m from the last key on."""
    q, k = np.zeros((1, 2, 1)), np.zeros((3, 1, 1))
    _, lse = attention(q, k, k, alibi_slopes=np.array([1.0, 0.5], np.float32))
    expected = [math.log(sum(math.exp(-m * n) for n in range(3))) for m in (1.0, 0.5)]
    np.testing.assert_allclose(lse[:, 0], expected, rtol=1e-14)


def test_query_heads_of_a_group_are_neighbours() -> None:
    q, k, v = np.zeros((1, 6, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [2.0]]])
    out, _ = attention(q, k, v)
    np.testing.assert_array_equal(out[0, :, 0], [1, 1, 1, 2, 2, 2])


def test_softcap_value() -> None:
    q, k = np.array([[3.0]]), np.array([[2.0]])
    _, lse = attention(q, k, k, softcap=4.0)
    np.testing.assert_allclose(lse, 4 * math.tanh(6 / 4), rtol=1e-14)


def test_empty_rows_and_axes() -> None:
    q, k, v, dout = arrays()
    mask = np.ones((SQ, SK), bool)
    mask[1] = False
    out, lse = attention(q, k, v, mask=mask)
    assert not out[:, 1].any() and np.isneginf(lse[:, :, 1]).all()
    # What comes from above for an empty row doesn't matter, NaN included.
    dout[:, 1] = np.nan
    dlse = np.zeros((BATCH, HQ, SQ))
    dlse[:, :, 1] = np.nan
    dq, dk, dv, _ = attention_backward(dout, q, k, v, dlse=dlse, mask=mask)
    assert not dq[:, 1].any() and np.isfinite(dk).all() and np.isfinite(dv).all()

    out, lse = attention(q, k[:, :0], v[:, :0])
    assert not out.any() and np.isneginf(lse).all()
    dq, dk, dv, _ = attention_backward(np.ones_like(out), q, k[:, :0], v[:, :0])
    assert not dq.any() and dk.shape == (BATCH, 0, HKV, D) and dv.size == 0
    out, lse = attention(q[:, :0], k, v)
    assert out.shape == (BATCH, 0, HQ, DV) and lse.shape == (BATCH, HQ, 0)
    _, dk, dv, _ = attention_backward(out, q[:, :0], k, v)
    assert not dk.any() and not dv.any()
    out, lse = attention(q[:0], k[:0], v[:0])
    assert out.shape == (0, SQ, HQ, DV) and lse.shape == (0, HQ, SQ)


def test_nan_in_hidden_keys_stays_there() -> None:
    q, k, v, dout = arrays()
    lengths = np.array([3, 4])
    clean = attention(q, k, v, k_lengths=lengths)
    clean += attention_backward(dout, q, k, v, k_lengths=lengths)[:3]
    for b, n in enumerate(lengths):
        k[b, n:] = np.nan
        v[b, n:] = np.inf
    dirty = attention(q, k, v, k_lengths=lengths)
    dirty += attention_backward(dout, q, k, v, k_lengths=lengths)[:3]
    for x, y in zip(clean, dirty, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-15)
    # A row that does see the key is NaN, and only such a row.
    mask = np.ones((SQ, SK), bool)
    mask[:2, 3:] = False
    out, lse = attention(q, k, v, mask=mask)
    assert np.isfinite(out[:, :2]).all() and np.isnan(out[0, 2:]).all()
    assert np.isfinite(lse[:, :, :2]).all() and np.isnan(lse[0, :, 2:]).all()


# --- The same dtype -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["plain", "softcap", "bias_heads", "lengths", "all"])
def test_unfused_is_off_by_its_dtype(dtype: type, name: str) -> None:
    q, k, v, dout = (x.astype(dtype) for x in arrays())
    options = dict(OPTIONS[name])
    if "bias" in options:
        options["bias"] = options["bias"].astype(dtype)
    dlse = normal(15, BATCH, HQ, SQ).astype(np.float32)
    out, lse = unfused(q, k, v, **options)
    grads = unfused_backward(dout, q, k, v, dlse=dlse, **options)
    assert out.dtype == grads[0].dtype == grads[1].dtype == grads[2].dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    expected = attention(q, k, v, **options)
    expected += attention_backward(dout, q, k, v, dlse=dlse, **options)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for x, y in zip((out, lse, *grads), expected, strict=True):
        if y is None:
            assert x is None
            continue
        seen = np.isfinite(y)
        error = np.abs(x.astype(np.float64)[seen] - y[seen]).max()
        assert error < 8 * eps * np.abs(y[seen]).max()
        if dtype != np.float64:
            assert error > 0


def test_unfused_rounds_where_halves_are_stored() -> None:
    """4 + 2^-10 rounds to 4 in float16: the product is stored before the softmax."""
    q, k = np.float16([[1.0, 1.0]]), np.float16([[4.0, 2**-10]])
    _, lse = unfused(q, k, k, scale=1.0)
    assert lse.item() == 4.0
    _, lse = unfused(*(x.astype(np.float32) for x in (q, k, k)), scale=1.0)
    assert lse.item() == 4.0 + 2**-10


# --- Comparison -----------------------------------------------------------------------


def test_assert_close_takes_what_rounding_explains() -> None:
    expected = normal(1, 100)
    assert_close(expected.astype(np.float32), expected)
    assert_close(expected.astype(bfloat16), expected)
    assert_close(expected, expected)
    baseline = expected + 1e-3
    assert_close((expected + 1.9e-3).astype(np.float32), expected, baseline)
    with pytest.raises(AssertionError, match=r"rms error 0\.0021, allowed 0\.002 "):
        assert_close((expected + 2.1e-3).astype(np.float32), expected, baseline)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close((expected + 1e-5).astype(np.float32), expected)
    assert_close(np.zeros((0, 3), np.float32), np.zeros((0, 3)))


def test_assert_close_names_the_worst_element() -> None:
    expected = normal(1, 10, 10)
    actual = expected.astype(np.float32)
    actual[3, 4] += 0.5
    with pytest.raises(AssertionError, match=r"dq: largest .*\(3, 4\).*1 elements"):
        assert_close(actual, expected, name="dq")


def test_assert_close_measures_the_whole_as_well() -> None:
    """An error that is everywhere may be small enough at each place on its own."""
    expected = normal(1, 1000)
    baseline = expected.copy()
    baseline[0] += 1e-3
    with pytest.raises(AssertionError, match="rms error"):
        assert_close((expected + 1.5e-3).astype(np.float32), expected, baseline)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_assert_close_compares_what_is_not_finite(value: float) -> None:
    expected = normal(1, 5)
    actual = expected.astype(np.float32)
    actual[2] = value
    baseline = np.full(5, np.nan)
    with pytest.raises(AssertionError, match=r"wrong places.*\(2,\)"):
        assert_close(actual, expected, baseline)
    with pytest.raises(AssertionError, match="wrong places"):
        assert_close(expected, actual.astype(np.float64))
    assert_close(actual, actual.astype(np.float64))


def test_assert_close_on_overflow_of_the_dtype() -> None:
    expected = np.array([1.0, 7e4])
    assert_close(np.array([1.0, np.inf], np.float16), expected)
    with pytest.raises(AssertionError, match="wrong places"):
        assert_close(np.array([1.0, 65504], np.float16), expected)


def test_assert_close_wants_the_shape() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.zeros((2, 1), np.float32), np.zeros(2))


@pytest.mark.parametrize("name", ["plain", "softcap", "alibi", "bias_heads", "all"])
def test_terms_bound_the_rounding(name: str) -> None:
    """Larger than every float32 error, and not so large that they'd hide one."""
    q, k, v, dout = (x.astype(np.float32) for x in arrays())
    options = dict(OPTIONS[name])
    dlse = normal(15, BATCH, HQ, SQ).astype(np.float32)
    exact = attention(q, k, v, **options)
    exact += attention_backward(dout, q, k, v, dlse=dlse, **options)
    rounded = unfused(q, k, v, **options)
    rounded += unfused_backward(dout, q, k, v, dlse=dlse, **options)
    terms = error_terms(dout, q, k, v, dlse=dlse, **options)
    amounts = (terms.out, terms.lse, terms.dq, terms.dk, terms.dv, terms.dbias)
    for x, y, amount in zip(exact, rounded, amounts, strict=True):
        if x is None:
            continue
        assert amount.shape == x.shape
        seen = np.isfinite(x)
        error = np.abs(y[seen] - x[seen])
        assert (error <= 4 * 1.2e-7 * amount[seen] + 1e-30).all()
        assert amount[seen].max() < 200 * np.abs(x[seen]).max()
