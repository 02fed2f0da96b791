"""Attention and its gradients in float64, written straight from the definition.

Every array that the definition names is made in full, the S x S ones included. Speed
and memory don't matter here; being obviously right does.

`attention` and `attention_backward` compute in float64. `unfused` and
`unfused_backward` take the very same steps in the dtype of the inputs, which is what a
plain matmul + softmax implementation does; their error is the yardstick that
`assert_close` measures another implementation with.

The options of all of them, by keyword:

causal : bool or "top_left"
window : (left, right) or None
scale : float or None, for 1 / sqrt(D)
softcap : float, 0 for none
alibi_slopes : (Hq,) or (..., Hq)
bias : floating, broadcastable to (..., Hq, Sq, Sk)
mask : bool, broadcastable to (..., Hq, Sq, Sk), True keeps
q_lengths, k_lengths : integers, one for each sequence: their shape is the batch axes
layout : "bshd" or "bhsd"

A 2-D array is one head. Keys that a row may not see are left out by selection, never by
a multiplication with 0, so that a NaN in them can't reach the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

# How many elements an S x S array may have before the heads are taken in parts.
_PART = 1 << 22
# Rounding errors that `assert_close` grants to each of the `Terms`, in eps.
_TERMS_EPS = 4


def attention(
    q: Array, k: Array, v: Array, **options: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention of q over k and v in float64.

    Parameters
    ----------
    q, k, v : arrays of any floating dtype
        (..., Sq, Hq, D), (..., Sk, Hkv, D), (..., Sk, Hkv, Dv), or as `layout` says.
    **options
        Those that the head of this module lists.

    Returns
    -------
    out : (..., Sq, Hq, Dv), or as `layout` says
    lse : (..., Hq, Sq); (Sq,) for 2-D arrays
    """
    return _forward(_problem(q, k, v, np.dtype(np.float64), **options))


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    **options: Any,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` in float64.

    Parameters
    ----------
    dout : as the output of `attention`
    q, k, v, **options : as for `attention`
    dlse : as the lse of `attention`, or None for zeros

    Returns
    -------
    dq, dk, dv : shaped like q, k, v
    dbias : shaped like the bias, summed over its broadcast axes; None without a bias
    """
    p = _problem(q, k, v, np.dtype(np.float64), **options)
    return _backward(p, dout, dlse)


def unfused(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """`attention` in the dtype of the inputs: out in that dtype, lse at least float32.

    In float16 and bfloat16 the products accumulate in float32, and S and P are rounded
    to the dtype wherever a chain of array operations would store them. The logits stay
    in float32 from where a float32 bias or ALiBi is added, by type promotion.
    """
    p = _problem(q, k, v, _compute_dtype(q.dtype), store=_storing(q.dtype), **options)
    out, lse = _forward(p)
    return out.astype(q.dtype), lse


def unfused_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    **options: Any,
) -> tuple[Array, Array, Array, Array | None]:
    """`attention_backward` in the dtype of the inputs, rounded as `unfused` is."""
    p = _problem(q, k, v, _compute_dtype(q.dtype), store=_storing(q.dtype), **options)
    dq, dk, dv, dbias = _backward(p, dout, dlse)
    if dbias is not None:
        dbias = dbias.astype(options["bias"].dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dbias


# --- One problem, in one form for every layout and every number of axes ---------------


@dataclass(frozen=True)
class _Problem:
    """The arguments, heads before tokens and query heads grouped by their kv head.

    q : (..., Hkv, G, Sq, D)
    k, v : (..., Hkv, 1, Sk, D or Dv)
    alibi_slopes : (..., Hkv, G, 1, 1) or None
    bias, mask : broadcast to (..., Hkv, G, Sq, Sk) or None
    q_lengths, k_lengths : (...)
    """

    q: Array
    k: Array
    v: Array
    causal: bool | str
    window: tuple[int, int]
    scale: float
    softcap: float
    alibi_slopes: Array | None
    bias: Array | None
    mask: Array | None
    q_lengths: Array
    k_lengths: Array
    layout: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    bias_shape: tuple[int, ...]
    bias_is_wider: bool
    store: Callable[[Array], Array]


def _problem(
    q: Array,
    k: Array,
    v: Array,
    dtype: np.dtype,
    *,
    store: Callable[[Array], Array] = lambda x: x,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    q_lengths: ArrayLike | None = None,
    k_lengths: ArrayLike | None = None,
    layout: str = "bshd",
) -> _Problem:
    assert causal in (False, True, "top_left") and layout in ("bshd", "bhsd")
    heads_q, heads_k, heads_v = (_heads_first(x, layout) for x in (q, k, v))
    *batch, hq, sq, d = heads_q.shape
    hkv, sk = heads_k.shape[-3:-1]
    # No head at all is legal as long as both counts agree about it.
    group = hq // hkv if hkv else 1
    assert hq == hkv * group
    full = (*batch, hkv, group, sq, sk)
    left, right = window or (None, None)

    def to_full(x: Array) -> Array:
        x = np.broadcast_to(x, np.broadcast_shapes(x.shape, (1, 1, 1)))
        heads = (hkv, group) if x.shape[-3] == hq else (1, 1)
        return np.broadcast_to(x.reshape(x.shape[:-3] + heads + x.shape[-2:]), full)

    if alibi_slopes is not None:
        alibi_slopes = np.broadcast_to(alibi_slopes, (*batch, hq)).astype(dtype)
        alibi_slopes = alibi_slopes.reshape(*batch, hkv, group, 1, 1)
    return _Problem(
        q=heads_q.astype(dtype).reshape(*batch, hkv, group, sq, d),
        k=heads_k.astype(dtype)[..., None, :, :],
        v=heads_v.astype(dtype)[..., None, :, :],
        causal=causal,
        window=(
            sq + sk if left in (None, -1) else left,
            sq + sk if right in (None, -1) else right,
        ),
        scale=1 / math.sqrt(d) if scale is None else float(scale),
        softcap=float(softcap),
        alibi_slopes=alibi_slopes,
        bias=None if bias is None else to_full(bias.astype(dtype)),
        mask=None if mask is None else to_full(mask),
        q_lengths=np.broadcast_to(sq if q_lengths is None else q_lengths, batch),
        k_lengths=np.broadcast_to(sk if k_lengths is None else k_lengths, batch),
        layout=layout,
        q_shape=q.shape,
        k_shape=k.shape,
        v_shape=v.shape,
        bias_shape=() if bias is None else bias.shape,
        bias_is_wider=bias is not None and bias.dtype.itemsize > q.dtype.itemsize,
        store=store,
    )


def _heads_first(x: Array, layout: str) -> Array:
    """(..., heads, tokens, size) from either layout, or from one (tokens, size)."""
    if x.ndim == 2:
        return x[None]
    return x.swapaxes(-3, -2) if layout == "bshd" else x


def _as_caller(x: Array, shape: tuple[int, ...], layout: str) -> Array:
    """From (..., Hkv, G or 1, tokens, size) to the caller's layout and shape."""
    *batch, hkv, group, tokens, size = x.shape
    x = x.reshape(*batch, hkv * group, tokens, size)
    if len(shape) == 2:
        return x[0]
    return x.swapaxes(-3, -2) if layout == "bshd" else x


def _lse_as_caller(lse: Array, shape: tuple[int, ...]) -> Array:
    """From (..., Hkv, G, Sq) to (..., Hq, Sq), or (Sq,) for one head."""
    *batch, hkv, group, sq = lse.shape
    lse = lse.reshape(*batch, hkv * group, sq)
    return lse[0] if len(shape) == 2 else lse


def _parts(p: _Problem) -> Iterator[tuple[Array, ...]]:
    """Indices into the axes (..., Hkv), a few heads at a time, to bound the memory."""
    heads = p.q.shape[:-3]
    size = p.q.shape[-3] * p.q.shape[-2] * p.k.shape[-2]
    step = max(1, _PART // max(1, size))
    count = math.prod(heads)
    for start in range(0, count, step):
        part = np.arange(start, min(start + step, count))
        yield np.unravel_index(part, heads)


# --- The definition -------------------------------------------------------------------


def _logits(p: _Problem, index: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """The masked logits of some heads.

    Returns
    -------
    s : (n, G, Sq, Sk), -inf where hidden
    slope : derivative of the softcap there, 1 without one
    visible : bool, where the row sees the key
    """
    sq, sk = p.q.shape[-2], p.k.shape[-2]
    # (n, 1, 1, 1), to be broadcast over G, Sq, Sk.
    q_len = p.q_lengths[index[:-1]].reshape(-1, 1, 1, 1)
    k_len = p.k_lengths[index[:-1]].reshape(-1, 1, 1, 1)
    offset = 0 if p.causal == "top_left" else k_len - q_len
    i = np.arange(sq)[:, None]
    j = np.arange(sk)
    # How far the key lies behind the diagonal.
    distance = i + offset - j

    with np.errstate(invalid="ignore", over="ignore"):
        s = p.store(p.q[index] @ p.k[index].swapaxes(-1, -2))
        s = p.store(s * s.dtype.type(p.scale))
        slope = np.ones_like(s)
        if p.softcap:
            t = p.store(np.tanh(s / s.dtype.type(p.softcap)))
            s = p.store(t * s.dtype.type(p.softcap))
            slope = 1 - t * t
        if p.alibi_slopes is not None:
            s = s - p.alibi_slopes[index] * np.abs(distance).astype(s.dtype)
        if p.bias is not None:
            s = s + p.bias[index]
            if p.alibi_slopes is None and not p.bias_is_wider:
                s = p.store(s)

    visible = (i < q_len) & (j < k_len)
    if p.causal:
        visible = visible & (distance >= 0)
    left, right = p.window
    visible = visible & (distance <= left) & (distance >= -right)
    if p.mask is not None:
        visible = visible & p.mask[index]
    # A logit of -inf is as good as a mask: its weight is exactly 0.
    visible = visible & (s != -np.inf)
    return np.where(visible, s, s.dtype.type(-np.inf)), slope, visible


def _softmax(s: Array, visible: Array) -> tuple[Array, Array]:
    """P and the log of the sum over the last axis; 0 and -inf in a row with no key."""
    largest = s.max(-1, keepdims=True, initial=-np.inf)
    largest = np.where(largest == -np.inf, s.dtype.type(0), largest)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.where(visible, np.exp(s - largest), s.dtype.type(0))
        total = weight.sum(-1, keepdims=True)
        lse = largest + np.log(total)
        weight = np.where(visible, weight / total, s.dtype.type(0))
    return weight, lse[..., 0]


def _sum_visible(weight: Array, visible: Array, rows: Array) -> Array:
    """``weight @ rows``, each row of it over its visible terms only.

    weight, visible : (n, G, I, J), the weight 0 where hidden
    rows : (n, G or 1, J, size)
    """
    if np.isfinite(rows).all():
        return weight @ rows
    rows = np.broadcast_to(rows, weight.shape[:-2] + rows.shape[-2:])
    result = np.zeros(weight.shape[:-1] + rows.shape[-1:], weight.dtype)
    with np.errstate(invalid="ignore"):
        for n, g, i in np.ndindex(weight.shape[:-1]):
            seen = visible[n, g, i]
            result[n, g, i] = weight[n, g, i, seen] @ rows[n, g, seen]
    return result


def _forward(p: _Problem) -> tuple[Array, Array]:
    out = np.zeros(p.q.shape[:-1] + p.v.shape[-1:], p.q.dtype)
    lse = np.zeros(p.q.shape[:-1], p.q.dtype)
    for index in _parts(p):
        s, _, visible = _logits(p, index)
        weight, lse[index] = _softmax(s, visible)
        out[index] = _sum_visible(p.store(weight), visible, p.v[index])
    return _as_caller(out, p.q_shape, p.layout), _lse_as_caller(lse, p.q_shape)


def _row_gradients(p: _Problem, dout: Array, dlse: Array | None) -> tuple[Array, Array]:
    """dout (..., Hkv, G, Sq, Dv) and dlse (..., Hkv, G, Sq, 1)."""
    rows = p.q.shape[:-1]
    dout = _heads_first(dout, p.layout).astype(p.q.dtype)
    dlse = np.zeros(rows) if dlse is None else dlse
    dlse = dlse.astype(p.q.dtype).reshape(*rows, 1)
    return dout.reshape(*rows, p.v.shape[-1]), dlse


def _backward(
    p: _Problem, dout: Array, dlse: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    zero = p.q.dtype.type(0)
    dout, dlse = _row_gradients(p, dout, dlse)
    dq, dk, dv = np.zeros_like(p.q), np.zeros_like(p.k), np.zeros_like(p.v)
    dbias = None if p.bias is None else np.zeros(p.bias.shape, p.q.dtype)
    for index in _parts(p):
        s, slope, visible = _logits(p, index)
        weight, _ = _softmax(s, visible)
        stored = p.store(weight)
        with np.errstate(invalid="ignore", over="ignore"):
            dweight = p.store(dout[index] @ p.v[index].swapaxes(-1, -2))
            dweight = np.where(visible, dweight, zero)
            # The same as sum(dout * out, -1).
            delta = (weight * dweight).sum(-1, keepdims=True)
            ds = weight * (dweight - delta + dlse[index])
            ds = p.store(np.where(visible, ds, zero))
            dlogit = p.store(
                np.where(visible, ds * slope * zero.dtype.type(p.scale), zero)
            )
        if dbias is not None:
            dbias[index] = ds
        swapped = visible.swapaxes(-1, -2)
        dq[index] = _sum_visible(dlogit, visible, p.k[index])
        # One result for each query head, which the heads of a group then add up.
        dk_heads = _sum_visible(dlogit.swapaxes(-1, -2), swapped, p.q[index])
        dv_heads = _sum_visible(stored.swapaxes(-1, -2), swapped, dout[index])
        dk[index] = p.store(dk_heads).sum(-3, keepdims=True)
        dv[index] = p.store(dv_heads).sum(-3, keepdims=True)
    return (
        _as_caller(dq, p.q_shape, p.layout),
        _as_caller(dk, p.k_shape, p.layout),
        _as_caller(dv, p.v_shape, p.layout),
        None if dbias is None else _sum_to(dbias, p.bias_shape),
    )


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """(..., Hkv, G, Sq, Sk), summed to the shape that was broadcast to it."""
    x = x.reshape((*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:]))
    padded = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(a for a, n in enumerate(padded) if n == 1)
    return x.sum(axes, keepdims=True).reshape(shape)


# --- The same dtype -------------------------------------------------------------------


def _compute_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _storing(dtype: np.dtype) -> Callable[[Array], Array]:
    """Rounds a float32 array as if it had been stored in dtype."""
    if dtype.itemsize >= 4:
        return lambda x: x

    def store(x: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype).astype(np.float32)

    return store


# --- Comparison -----------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """For each result, how much its terms amount to, all with the same sign.

    An implementation that rounds every product and every logit once, in any order, has
    an error of a small multiple of its eps times this. None of it cancels, so it stays
    positive where the exact result is 0 because its terms cancel: dq with one key, for
    instance, whose exact value no rounded computation has to hit.

    What a backward pass is given is rounded already: out, to float16 in the worst case.
    That is part of dq, dk and dbias here.
    """

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None


def error_terms(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    **options: Any,
) -> Terms:
    """`Terms` of a call to `attention_backward`, by first-order error propagation.

    Not for logits that are far outside the range of exp, such as a whole row at
    finfo.min: their rounding errors are equal and cancel, which this can't see.
    """
    p = _problem(q, k, v, np.dtype(np.float64), **options)
    dout, dlse = (np.abs(x) for x in _row_gradients(p, dout, dlse))
    q_abs, k_abs, v_abs = (np.abs(x) for x in (p.q, p.k, p.v))
    scale = abs(p.scale)
    eps_sum = np.finfo(_compute_dtype(q.dtype)).eps
    of_rounding = float(ml_dtypes.finfo(q.dtype).eps) / 2 / (_TERMS_EPS * eps_sum)
    out, lse = np.zeros_like(dout), np.zeros_like(dlse)
    dq, dk, dv = np.zeros_like(p.q), np.zeros_like(p.k), np.zeros_like(p.v)
    dbias = None if p.bias is None else np.zeros(p.bias.shape)
    for index in _parts(p):
        s, slope, visible = _logits(p, index)
        weight, _ = _softmax(s, visible)
        with np.errstate(invalid="ignore", over="ignore"):
            products = scale * (q_abs[index] @ k_abs[index].swapaxes(-1, -2))
            of_logit = np.where(visible, slope * products + np.abs(s), 0)
            of_lse = (weight * of_logit).sum(-1, keepdims=True)
            of_weight = weight * (1 + of_logit + of_lse)
            dweight = dout[index] @ v_abs[index].swapaxes(-1, -2)
            dweight = np.where(visible, dweight, 0)
            delta = (weight * dweight).sum(-1, keepdims=True)
            of_delta = ((weight + of_weight) * dweight).sum(-1, keepdims=True)
            # The backward pass gets out as it was rounded to the dtype of the inputs.
            # These errors are independent of each other, so their squares add up.
            exact_out = _sum_visible(weight, visible, p.v[index])
            of_out = np.sqrt(((dout[index] * exact_out) ** 2).sum(-1, keepdims=True))
            of_delta += (
                np.where(visible.any(-1, keepdims=True), of_out, 0) * of_rounding
            )
            ds = of_weight * (dweight + delta + dlse[index])
            ds += weight * (dweight + of_delta + dlse[index])
            dlogit = ds * slope
            if p.softcap:
                # 1 - t * t is off by what t is off, from rounding and from the logit.
                of_slope = 1 + 2 * slope * products / p.softcap
                dlogit += weight * (dweight + delta + dlse[index]) * of_slope
            dlogit = np.where(visible, dlogit * scale, 0)
            ds = np.where(visible, ds, 0)
        swapped = visible.swapaxes(-1, -2)
        lse[index] = of_lse + 1
        out[index] = _sum_visible(of_weight, visible, v_abs[index])
        dq[index] = _sum_visible(dlogit, visible, k_abs[index])
        dk_heads = _sum_visible(dlogit.swapaxes(-1, -2), swapped, q_abs[index])
        dv_heads = _sum_visible(of_weight.swapaxes(-1, -2), swapped, dout[index])
        dk[index] = dk_heads.sum(-3, keepdims=True)
        dv[index] = dv_heads.sum(-3, keepdims=True)
        if dbias is not None:
            dbias[index] = ds
    return Terms(
        out=_as_caller(out, p.q_shape, p.layout),
        lse=_lse_as_caller(lse[..., 0], p.q_shape),
        dq=_as_caller(dq, p.q_shape, p.layout),
        dk=_as_caller(dk, p.k_shape, p.layout),
        dv=_as_caller(dv, p.v_shape, p.layout),
        dbias=None if dbias is None else _sum_to(dbias, p.bias_shape),
    )


def _largest(x: Array) -> float:
    return float(np.abs(x).max(initial=0))


def _rms(x: Array) -> float:
    largest = _largest(x)
    # Divided first, because the square of finfo.max is inf.
    return largest * float(np.sqrt(np.mean((x / largest) ** 2))) if largest else 0.0


def assert_close(
    actual: Array,
    expected: NDArray[np.float64],
    baseline: Array | None = None,
    dtype: np.dtype | type | None = None,
    *,
    terms: Array | None = None,
    factor: float = 2.0,
    name: str = "result",
) -> None:
    """Checks a result against the float64 reference.

    NaN and inf must stand at the same places (an expected value that the result's dtype
    can't hold counts as inf). On the rest two errors are measured, the largest one and
    the root of the mean square, and each is allowed to be as large as the larger of

    - ``factor`` times the same error of ``baseline``, the plain implementation in the
      same dtype. Its largest error counts as at least 3 times its rms error, because
      the largest of few says little. Places where the baseline itself is NaN or inf
      don't count, so that a baseline that overflows excuses nothing.
    - a floor, for inputs so small or so benign that the baseline is exact by luck:
      one eps of ``dtype`` times the size of the expected values, which is twice what
      rounding the exact result costs, plus 4 eps of the accumulator (float32, or
      float64 for float64) times ``terms``, which is what reordering the exact formula
      may cost. Without ``terms`` the size of the expected values stands in for them.

    With random inputs of size 1 the floor is about 1e-5 in float32 and 1e-14 in
    float64, while a forgotten option moves the results by 1e-2 and more.

    Parameters
    ----------
    actual : the result to check
    expected : from `attention` or `attention_backward`
    baseline : from `unfused` or `unfused_backward`
    dtype : what the inputs were, by default the dtype of ``actual``
    terms : from `error_terms`, for results whose terms cancel
    name : of the result, for the message
    """
    actual = np.asarray(actual)
    dtype = np.dtype(actual.dtype if dtype is None else dtype)
    assert actual.shape == expected.shape, (
        f"{name}: shape {actual.shape}, expected {expected.shape}"
    )
    if actual.size == 0:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        held = expected.astype(actual.dtype).astype(np.float64)
        got = actual.astype(np.float64)
    expected = np.where(np.isfinite(held), expected, held)
    for kind, test in (
        ("NaN", np.isnan),
        ("+inf", np.isposinf),
        ("-inf", np.isneginf),
    ):
        wrong = np.argwhere(test(got) != test(expected))
        if len(wrong):
            at = tuple(int(n) for n in wrong[0])
            raise AssertionError(
                f"{name}: {kind} at the wrong places, {len(wrong)} of {got.size}; "
                f"first at {at}: got {got[at]}, expected {expected[at]}"
            )
    finite = np.isfinite(expected)
    if not finite.any():
        return

    size = np.abs(expected[finite])
    eps = float(ml_dtypes.finfo(dtype).eps)
    tiny = float(ml_dtypes.finfo(actual.dtype).smallest_subnormal)
    eps_sum = float(np.finfo(_compute_dtype(dtype)).eps)
    amount = size if terms is None else np.nan_to_num(np.abs(terms[finite]), nan=0.0)
    error = np.where(finite, np.abs(got - np.where(finite, expected, 0)), 0)
    base = None
    if baseline is not None:
        base = baseline.astype(np.float64) - np.where(finite, expected, 0)
        base = base[finite & np.isfinite(base)]
    for label, measure in (("largest error", _largest), ("rms error", _rms)):
        floor = eps * measure(size) + _TERMS_EPS * eps_sum * measure(amount) + tiny
        of_baseline = 0.0
        if base is not None:
            of_baseline = max(
                measure(base), (3 if measure is _largest else 1) * _rms(base)
            )
        allowed = max(floor, factor * of_baseline)
        if not measure(error[finite]) <= allowed:
            at = tuple(int(n) for n in np.unravel_index(error.argmax(), error.shape))
            plain = "none" if base is None else f"{of_baseline:.3g}"
            raise AssertionError(
                f"{name}: {label} {measure(error[finite]):.3g}, allowed {allowed:.3g} "
                f"(plain implementation: {plain}, floor: {floor:.3g}); worst element "
                f"{at} of {got.shape}: got {got[at]!r}, expected {expected[at]!r}; "
                f"{int((error > allowed).sum())} elements are off by more"
            )
