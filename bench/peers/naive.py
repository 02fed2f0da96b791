"""Attention as it is written without a fused kernel: every S × S array is made."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Inputs, Peer, lengths_of, module

if TYPE_CHECKING:
    from ..workloads import Case


class Naive(Peer):
    """matmul, softmax, matmul, in CuPy or NumPy.

    Products are in the dtype of the inputs, the softmax in float32 (float64 for
    float64). Backward is written out and reads the probabilities that forward kept.
    """

    name = "naive"

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.clock = "stream" if device == "cuda" else "wall"

    def build(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """Return a call of `forward`, `backward` or both."""
        xp = np if self.device == "cpu" else module("cupy")
        q, k, v, dout = (inputs.native[name] for name in ("q", "k", "v", "dout"))
        visible = make_mask(xp, case)

        def both() -> Any:
            out, p = forward(xp, q, k, v, visible)
            return out, *backward(xp, dout, q, k, v, p)

        if case.direction == "both":
            return both
        if case.direction == "forward":
            return lambda: forward(xp, q, k, v, visible)[0]
        _, p = forward(xp, q, k, v, visible)
        return lambda: backward(xp, dout, q, k, v, p)


def make_mask(xp: ModuleType, case: Case) -> Any:
    """Return which pairs of query and key see each other, (B or 1, 1, 1, Sq, Sk).

    None if all do.
    """
    lengths = lengths_of(case)
    if lengths is None and not case.causal:
        return None
    row, key = xp.arange(case.seqlen)[:, None], xp.arange(case.kv_seqlen)
    if lengths is None:
        return (key <= row + case.kv_seqlen - case.seqlen)[None, None, None]
    queries, keys = (xp.asarray(x)[:, None, None, None, None] for x in lengths)
    visible = (row < queries) & (key < keys)
    return visible & (key <= row + keys - queries) if case.causal else visible


def forward(
    xp: ModuleType, q: Any, k: Any, v: Any, visible: Any = None
) -> tuple[Any, Any]:
    """Return the output (B, Sq, H, Dv) and the probabilities (B, Hkv, G·Sq, Sk)."""
    kv_heads = k.shape[2]
    keys, values = _heads_first(xp, k, kv_heads), _heads_first(xp, v, kv_heads)
    wide = xp.float64 if q.dtype == xp.float64 else xp.float32
    logits = matmul(xp, _heads_first(xp, q, kv_heads), keys.swapaxes(-1, -2))
    s = logits.astype(wide)
    del logits
    s *= wide(q.shape[-1] ** -0.5)
    if visible is not None:
        grouped = s.reshape(*s.shape[:2], -1, q.shape[1], s.shape[-1])
        s = xp.where(visible, grouped, wide(-np.inf)).reshape(s.shape)
        del grouped
    top = s.max(axis=-1, keepdims=True)
    s -= xp.where(xp.isfinite(top), top, wide(0))  # a row that sees nothing
    xp.exp(s, out=s)
    total = s.sum(axis=-1, keepdims=True)
    s /= xp.where(total == 0, wide(1), total)
    p = s.astype(q.dtype)
    del s
    return _heads_last(matmul(xp, p, values), q.shape[1]), p


def backward(
    xp: ModuleType, dout: Any, q: Any, k: Any, v: Any, p: Any
) -> tuple[Any, Any, Any]:
    """Return dq, dk and dv, shaped as q, k and v."""
    kv_heads = k.shape[2]
    queries, keys, values, dout = (
        _heads_first(xp, x, kv_heads) for x in (q, k, v, dout)
    )
    wide = xp.float64 if q.dtype == xp.float64 else xp.float32
    # The query heads of a group lie one after the other in the rows, so that these
    # products sum over them.
    dv = matmul(xp, p.swapaxes(-1, -2), dout)
    dp = matmul(xp, dout, values.swapaxes(-1, -2))
    ds = dp.astype(wide)
    del dp
    weight = p.astype(wide)
    ds -= (weight * ds).sum(axis=-1, keepdims=True)
    ds *= weight
    del weight
    ds *= wide(q.shape[-1] ** -0.5)
    ds = ds.astype(q.dtype)
    dq = matmul(xp, ds, keys)
    dk = matmul(xp, ds.swapaxes(-1, -2), queries)
    return (
        _heads_last(dq, q.shape[1]),
        _heads_last(dk, k.shape[1]),
        _heads_last(dv, k.shape[1]),
    )


def matmul(xp: ModuleType, a: Any, b: Any) -> Any:
    """Multiply (B, H, M, K) by (B, H, K, N), or (M, K) by (K, N), in their dtype.

    Halves are summed in float32.
    """
    if a.dtype.itemsize > 2 or (xp is not np and a.ndim == 2):
        return xp.matmul(a, b)
    if xp is np:  # NumPy has no fast product of halves
        return np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
    # CuPy has tensor cores for halves in two dimensions only; with more of them it
    # computes float16 in float32, and bfloat16 not by cuBLAS.
    out = xp.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            xp.matmul(a[i, j], b[i, j], out=out[i, j])
    return out


def _heads_first(xp: ModuleType, x: Any, kv_heads: int) -> Any:
    """Return (B, Hkv, G·S, D) from (B, S, Hkv·G, D)."""
    x = xp.ascontiguousarray(x.swapaxes(1, 2))
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


def _heads_last(x: Any, seqlen: int) -> Any:
    """Return (B, S, Hkv·G, D) from (B, Hkv, G·S, D)."""
    return x.reshape(x.shape[0], -1, seqlen, x.shape[-1]).swapaxes(1, 2)
