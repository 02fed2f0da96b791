"""Attention on NumPy arrays: the algorithm of the kernels, to run and to read.

`_forward` and `_backward` are FlashAttention-2 [1]_, [2]_ with the paper's letters.
The logits of a few query rows against a few keys are made, used and forgotten; of a
row only its running maximum m, sum l and output O are kept, and the backward pass
makes the logits again. `_Sequence` holds everything around that: which tiles there
are, which keys a row sees, and where the arrays lie.

A tile has three axes: kv heads, rows, and keys or head_dim. The query heads that
share a kv head stand below each other in the rows of one tile, so that K and V
serve all of them in one matrix product and are never repeated.

.. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
   Partitioning", arXiv:2307.08691, algorithms 1 and 2.
.. [2] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax",
   arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .dtypes import accumulator
from .problem import Operand, Options, Problem
from .validate import (
    check_length_values,
    check_overlap,
    describe_host,
    make_problem,
    output_shape,
)

Arrays = dict[str, np.ndarray]

# A tile of logits is about _ROWS x _KEYS for each of several kv heads, _TILE elements
# in all: long enough for a fast matrix product, small enough for the cache.
_ROWS = 512
_KEYS = 512
_TILE = 1 << 18


def run(arrays: Arrays, options: Options) -> tuple[np.ndarray, ...]:
    """Compute a call whose arrays lie on the host.

    Parameters
    ----------
    arrays : dict of str to ndarray
        The array arguments of `flash_attention` or `flash_attention_backward` by
        name, absent ones left out. Only outputs are written.
    options : Options
        All other arguments.

    Returns
    -------
    tuple of ndarray
        (out,) or (out, lse); (dq, dk, dv) or (dq, dk, dv, dbias). An output array
        that was given comes back as the same object.

    Raises
    ------
    TypeError, ValueError
        As `make_problem`; ValueError too for a length out of range and for an output
        that is read-only or overlaps another array.
    """
    infos = {name: describe_host(array) for name, array in arrays.items()}
    problem = make_problem(infos, options)
    for name, limit in (
        ("q_lengths", problem.seqlen_q),
        ("k_lengths", problem.seqlen_k),
    ):
        if name in arrays:
            check_length_values(name, arrays[name], limit)
    results = {}
    for name in problem.outputs:
        if name in arrays:
            _check_output(name, arrays)
            results[name] = arrays[name]
        else:
            shape, dtype = output_shape(problem, name), problem.operand(name).dtype
            results[name] = np.empty(shape, dtype)
    compute = _forward if options.direction == "forward" else _backward
    compute(problem, {**arrays, **results})
    return tuple(results.values())


def _check_output(name: str, arrays: Arrays) -> None:
    if not arrays[name].flags.writeable:
        raise ValueError(f"{name} is read-only; an output must be writable")
    check_overlap(name, arrays)


# Legal inputs make numbers overflow, underflow and turn into NaN below: a bias of -inf,
# tiny weights, NaN in hidden keys, the logarithm of the sum of a row that sees no key,
# results too large for float16. None of it is worth a warning.
@np.errstate(all="ignore")
def _forward(problem: Problem, arrays: Arrays) -> None:
    """Write out, and lse if it is asked for."""
    for sequence in _sequences(problem, arrays):
        sequence.clear("out", 0.0)
        sequence.clear("lse", -np.inf)
        for rows in sequence.row_tiles():
            Q = sequence.load("q", rows) * problem.scale
            m = np.full_like(Q[..., :1], -np.inf)
            l = np.zeros_like(m)
            O = np.zeros_like(Q, shape=(*Q.shape[:2], problem.head_dim_v))
            for keys, visible in sequence.key_tiles(rows):
                K, V = sequence.load("k", keys), sequence.load("v", keys)
                S, _ = sequence.logits(Q, K, rows, keys, visible)

                m_new = np.maximum(m, S.max(-1, keepdims=True))
                # While a row has seen no key, -inf - -inf would be NaN.
                shift = np.where(m_new == -np.inf, 0, m_new)
                P = _exp(S - shift)
                rescale = np.exp(m - shift)
                l = l * rescale + P.sum(-1, keepdims=True)
                O = O * rescale + _product(P, V, S)
                m = m_new
            sequence.store("out", rows, O / np.where(l == 0, 1, l))
            sequence.store_row_values("lse", rows, m + np.log(l))


@np.errstate(all="ignore")
def _backward(problem: Problem, arrays: Arrays) -> None:
    """Write dq, dk, dv, and dbias if it is asked for."""
    sums = {}
    if problem.bias_grad:
        dtype = accumulator(problem.dtype)
        sums["dbias"] = np.zeros(problem.bias_shape, dtype)
    for sequence in _sequences(problem, {**arrays, **sums}):
        for name in ("dq", "dk", "dv"):
            sequence.clear(name, 0.0)
        dK, dV = sequence.zeros("k"), sequence.zeros("v")
        for rows in sequence.row_tiles():
            Q = sequence.load("q", rows) * problem.scale
            O, dO = sequence.load("out", rows), sequence.load("dout", rows)
            lse = sequence.load_row_values("lse", rows)
            # A row that sees no key then gets the weights exp(-inf - inf) = 0.
            lse = np.where(lse == -np.inf, np.inf, lse)
            delta = (dO * O).sum(-1, keepdims=True)
            delta -= sequence.load_row_values("dlse", rows)
            dQ = np.zeros_like(Q)
            for keys, visible in sequence.key_tiles(rows):
                K, V = sequence.load("k", keys), sequence.load("v", keys)
                S, slope = sequence.logits(Q, K, rows, keys, visible)
                # What a row doesn't see is set to 0 rather than multiplied by it,
                # because lse, dP or the slope may be NaN there.
                hidden = S == -np.inf

                # Rounding may put a logit a little above its row's lse: where both
                # are huge, this little is enough for exp to overflow.
                P = _exp(np.minimum(S - lse, 0))
                P[hidden] = 0
                dP = dO @ _transposed(V)
                dS = P * (dP - delta)
                dS[hidden] = 0
                sequence.add_to_dbias(dS, rows, keys)
                if slope is not None:
                    dS *= slope
                    dS[hidden] = 0

                dQ += _product(dS, K, S)
                dK[:, keys] += _product(_transposed(dS), Q, _transposed(S))
                dV[:, keys] += _product(_transposed(P), dO, _transposed(S))
            sequence.store("dq", rows, dQ * problem.scale)
        sequence.store("dk", sequence.all_keys, dK)
        sequence.store("dv", sequence.all_keys, dV)
    for name, total in sums.items():
        arrays[name][...] = total


def _exp(x: np.ndarray) -> np.ndarray:
    """Return exp(x), or 0 where that is too small for a normal number.

    A matrix product over subnormal numbers can take ten times as long, and far keys
    make many of them under ALiBi.
    """
    result = np.exp(x)
    result[result < np.finfo(x.dtype).tiny] = 0
    return result


def _product(weights: np.ndarray, x: np.ndarray, S: np.ndarray) -> np.ndarray:
    """Return ``weights @ x`` with x[j] left out of row i where S[i, j] is -inf.

    The weight is 0 there, which doesn't suffice if x[j] holds NaN or inf.

    Parameters
    ----------
    weights, S : array, shape (heads, i, j)
    x : array, shape (heads, j, size)
    """
    finite = np.isfinite(x)
    if finite.all():
        return weights @ x
    finite = finite.all(-1)
    result = weights @ np.where(finite[..., None], x, 0)
    for head, j in np.argwhere(~finite):
        seen = S[head, :, j] != -np.inf
        result[head, seen] += weights[head, seen, j, None] * x[head, j]
    return result


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


@dataclass(frozen=True)
class _Sequence:
    """Some kv heads of one batch entry, and the query heads that read them.

    Attributes
    ----------
    views : dict of str to ndarray
        The arrays of the call, cut to these heads: (seqlen, heads, head_dim) for q, k,
        v and their like, (heads, seqlen) for lse, (heads, seqlen_q, seqlen_k) for bias
        and mask, (heads,) for ALiBi slopes.
    q_len, k_len : int
        Valid queries and keys.
    block_q, block_k : int
        Queries and keys of a tile.
    """

    problem: Problem
    views: Arrays
    q_len: int
    k_len: int
    block_q: int
    block_k: int

    @property
    def offset(self) -> int:
        """Key minus query on the diagonal."""
        return 0 if self.problem.top_left else self.k_len - self.q_len

    @property
    def all_keys(self) -> slice:
        """Every valid key."""
        return slice(0, self.k_len)

    def row_tiles(self) -> Iterator[slice]:
        """Yield the tiles of queries; those past q_len see nothing and are left out."""
        return _steps(0, self.q_len, self.block_q)

    def key_tiles(self, rows: slice) -> Iterator[tuple[slice, np.ndarray | None]]:
        """Yield the keys that some of these queries see, and which query sees which.

        Yields
        ------
        keys : slice
        visible : bool array broadcastable to (query heads, queries, keys), or None
            True where the query sees the key; None if each of them sees all.
        """
        left, right = self.problem.left, self.problem.right
        first, last = rows.start + self.offset, rows.stop - 1 + self.offset
        start = 0 if left is None else max(0, first - left)
        stop = self.k_len if right is None else min(self.k_len, last + right + 1)
        for keys in _steps(start, stop, self.block_k):
            visible = None
            if (left is not None and keys.start < last - left) or (
                right is not None and keys.stop - 1 > first + right
            ):
                distance = self._distance(rows, keys)
                visible = np.ones_like(distance, dtype=bool)
                if left is not None:
                    visible &= distance >= -left
                if right is not None:
                    visible &= distance <= right
            if "mask" in self.views:
                mask = _part(self.views["mask"], rows, keys)
                if not mask.all():
                    visible = mask if visible is None else visible & mask
            if visible is None or visible.any():
                yield keys, visible

    def logits(
        self,
        Q: np.ndarray,
        K: np.ndarray,
        rows: slice,
        keys: slice,
        visible: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return S, -inf where hidden, and its derivative by ``Q @ K.T`` if not 1.

        Q comes scaled: that keeps a zero or negative scale out of the running
        maximum.
        """
        S, slope = Q @ _transposed(K), None
        if self.problem.softcap:
            bounded = np.tanh(S / self.problem.softcap)
            S = bounded * self.problem.softcap
            if self.problem.direction == "backward":
                slope = 1 - bounded * bounded
        by_query_head = S.reshape(-1, rows.stop - rows.start, S.shape[-1])
        if "alibi_slopes" in self.views:
            distance = np.abs(self._distance(rows, keys)).astype(S.dtype)
            by_query_head -= self.views["alibi_slopes"][:, None, None] * distance
        if "bias" in self.views:
            bias = _part(self.views["bias"], rows, keys)
            if bias.dtype.itemsize > S.dtype.itemsize:
                # The lowest float64 is a very low logit, not a hidden key.
                limit = np.finfo(S.dtype).max
                bias = np.where(np.isinf(bias), bias, np.clip(bias, -limit, limit))
            by_query_head += bias.astype(S.dtype)
        if visible is not None:
            np.copyto(by_query_head, -np.inf, where=~visible)
        return S, slope

    def add_to_dbias(self, dS: np.ndarray, rows: slice, keys: slice) -> None:
        """Add dS, summed over the axes in which the bias is broadcast."""
        if "dbias" in self.views:
            dbias = _part(self.views["dbias"], rows, keys)
            axes = tuple(axis for axis, size in enumerate(dbias.shape) if size == 1)
            by_query_head = dS.reshape(-1, rows.stop - rows.start, dS.shape[-1])
            dbias += by_query_head.sum(axes, keepdims=True)

    def load(self, name: str, tokens: slice) -> np.ndarray:
        """Copy a tile as (kv heads, tokens of all its query heads, head_dim)."""
        tile = self.views[name][tokens].swapaxes(0, 1)
        tile = tile.astype(accumulator(self.problem.dtype), order="C")
        return tile.reshape(self._heads(), -1, tile.shape[-1])

    def zeros(self, name: str) -> np.ndarray:
        """Return zeros in the shape of all valid keys of k or v."""
        size = self.views[name].shape[-1]
        shape = (self._heads(), self.k_len, size)
        return np.zeros(shape, accumulator(self.problem.dtype))

    def store(self, name: str, tokens: slice, tile: np.ndarray) -> None:
        """Write a tile back: the reverse of `load`."""
        target = self.views[name][tokens].swapaxes(0, 1)
        target[...] = tile.reshape(target.shape)

    def load_row_values(self, name: str, rows: slice) -> np.ndarray | float:
        """Copy lse or dlse as (kv heads, rows, 1); 0 if the call has none."""
        if name not in self.views:
            return 0.0
        return self.views[name][:, rows].reshape(self._heads(), -1, 1)

    def store_row_values(self, name: str, rows: slice, values: np.ndarray) -> None:
        """Write lse, if it is asked for."""
        if name in self.views:
            target = self.views[name][:, rows]
            target[...] = values.reshape(target.shape)

    def clear(self, name: str, value: float) -> None:
        """Fill an output that is asked for: what no tile writes keeps the value."""
        if name in self.views:
            self.views[name][...] = value

    def _heads(self) -> int:
        return self.views["k"].shape[1]

    def _distance(self, rows: slice, keys: slice) -> np.ndarray:
        """Return ``j - i - offset`` for each query i and key j."""
        i = np.arange(rows.start, rows.stop) + self.offset
        return np.arange(keys.start, keys.stop) - i[:, None]


def _sequences(problem: Problem, arrays: Arrays) -> Iterator[_Sequence]:
    """Yield each batch entry, several kv heads at a time."""
    group = problem.group
    block_q = max(1, min(problem.seqlen_q, _ROWS // group))
    rows = block_q * group
    block_k = max(1, min(problem.seqlen_k, _KEYS, _TILE // rows))
    widest = max(problem.head_dim, problem.head_dim_v)
    largest = max(rows * block_k, rows * widest, block_k * widest)
    heads = max(1, _TILE // largest)
    views = {x.name: _view(arrays[x.name], x) for x in problem.operands}
    for entry in np.ndindex(problem.batch_shape):
        of_entry = {name: view[entry] for name, view in views.items()}
        q_len = int(of_entry.pop("q_lengths", problem.seqlen_q))
        k_len = int(of_entry.pop("k_lengths", problem.seqlen_k))
        for kv_heads in _steps(0, problem.heads_kv, heads):
            q_heads = slice(kv_heads.start * group, kv_heads.stop * group)
            cut = {n: _cut(n, x, q_heads, kv_heads) for n, x in of_entry.items()}
            yield _Sequence(problem, cut, q_len, k_len, block_q, block_k)


def _view(array: np.ndarray, operand: Operand) -> np.ndarray:
    """View an array in the canonical order of axes.

    An axis in which a bias or mask is broadcast has length 1, so that no work is
    spent on repeating it.
    """
    shape = operand.shape
    if operand.name in ("bias", "dbias", "mask"):
        last = zip(shape[-3:], operand.strides[-3:], strict=True)
        shape = shape[:-3] + tuple(min(n, 1) if s == 0 else n for n, s in last)
    # The sums of dbias are wider than the result that the operand describes.
    strides = [s * array.itemsize // operand.dtype.itemsize for s in operand.strides]
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def _cut(name: str, x: np.ndarray, q_heads: slice, kv_heads: slice) -> np.ndarray:
    """Cut an array of one batch entry to some heads."""
    if name in ("k", "v", "dk", "dv"):
        return x[:, kv_heads]
    if name in ("q", "out", "dout", "dq"):
        return x[:, q_heads]
    return x if len(x) == 1 else x[q_heads]


def _part(x: np.ndarray, rows: slice, keys: slice) -> np.ndarray:
    """Cut a bias or mask, (heads, seqlen_q, seqlen_k), to a tile."""
    everything = slice(None)
    return x[
        :,
        everything if x.shape[1] == 1 else rows,
        everything if x.shape[2] == 1 else keys,
    ]


def _steps(start: int, stop: int, step: int) -> Iterator[slice]:
    """Cut a range into slices of at most `step`."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))
