"""Compares a result with attention in float64: a wrong result has no time.

Some heads are computed in full (of a long forward pass, some blocks of rows), by plain
matrix products and softmax, a few rows of the S x S matrix at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .peers.base import on_host
from .workloads import Case

# Of the error's norm, relative to that of the reference. Half an eps is 5e-4 in float16
# and 4e-3 in bfloat16 at most, a third of it on average, and the chain of roundings is
# about three long: the probabilities or their gradients, the sums, the result. float32
# has no room for TF32, whose products are 3e-4 off. float64 is far from its limit.
TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}
# A block of rows may be off by more than the whole, because a few rows may cancel; a
# tile that is missing or has the wrong keys is off by 0.5 or more.
BLOCK_FACTOR = 12
BLOCK = 128
# Elements of the S x S matrix: of a part that is held, and of what is computed at most
# in a forward pass.
PART = 1 << 24
MOST = 1 << 28


@dataclass(frozen=True)
class Head:
    """One kv head of one sequence with its query heads, cut to the lengths.

    q, dout : (group, Sq, D or Dv); k, v : (Sk, D or Dv), all float64
    """

    sequence: int
    kv_head: int
    group: int
    q: Any
    k: Any
    v: Any
    dout: Any

    @property
    def heads(self) -> slice:
        """Its query heads."""
        return slice(self.kv_head * self.group, (self.kv_head + 1) * self.group)


def chosen_heads(case: Case) -> list[tuple[int, int]]:
    """Return the first and the last pair of sequence and kv head."""
    pairs = [(0, 0), (case.batch - 1, case.kv_heads - 1)]
    # A long backward pass takes a while in float64.
    if case.seqlen * case.kv_seqlen * case.heads // case.kv_heads > MOST:
        pairs = pairs[1:]
    return list(dict.fromkeys(pairs))


def cut(
    case: Case, inputs: Mapping[str, Any], pair: tuple[int, int], xp: ModuleType
) -> Head:
    """Take one kv head out of arrays (B, S, H, D)."""
    sequence, kv_head = pair
    group = case.heads // case.kv_heads
    queries, keys = case.lengths[sequence]
    heads = slice(kv_head * group, (kv_head + 1) * group)

    def take(name: str, length: int, which: Any) -> Any:
        return widened(xp.asarray(inputs[name][sequence, :length, which]))

    return Head(
        sequence, kv_head, group,
        q=take("q", queries, heads).swapaxes(0, 1),
        k=take("k", keys, kv_head),
        v=take("v", keys, kv_head),
        dout=take("dout", queries, heads).swapaxes(0, 1),
    )  # fmt: skip


def row_blocks(case: Case, head: Head) -> list[slice]:
    """Return the blocks of rows to compare in a forward pass."""
    queries, keys = head.q.shape[1], head.k.shape[0]
    blocks = [
        slice(start, min(start + BLOCK, queries)) for start in range(0, queries, BLOCK)
    ]
    most = max(4, MOST // (BLOCK * max(1, keys) * head.group))
    if case.direction != "forward" or len(blocks) <= most:
        return blocks
    picked = np.linspace(0, len(blocks) - 1, most).round().astype(int)
    return [blocks[n] for n in sorted(set(picked.tolist()))]


class Reference:
    """What the results of a case have to be, in float64, for some heads.

    Parameters
    ----------
    case : Case
    inputs : mapping
        "q", "k", "v", "dout" as arrays (B, S, H, D) of the case's dtype or a wider one.
    xp : module
        numpy or cupy: where to compute.
    """

    def __init__(self, case: Case, inputs: Mapping[str, Any], xp: ModuleType) -> None:
        self.case, self.xp = case, xp
        self._expected: list[tuple[Head, list[slice], dict[str, Any]]] = []
        for pair in chosen_heads(case):
            head = cut(case, inputs, pair, xp)
            blocks = row_blocks(case, head)
            self._expected.append((head, blocks, self._compute(head, blocks)))

    def names(self) -> tuple[str, ...]:
        """Return the names of the results that are compared."""
        gradients = ("dq", "dk", "dv")
        return ("out",) if self.case.direction == "forward" else gradients

    def error(self, fetch: Callable[[dict[str, Any]], Mapping[str, Any]]) -> float:
        """Return the largest relative error of the results.

        Parameters
        ----------
        fetch : callable
            Takes an index into each of the results, (B, S, H, D), and returns these
            parts of them by name.

        Raises
        ------
        WrongResult
            If an error is above its tolerance, or a result is missing.
        """
        tolerance = TOLERANCE[self.case.dtype]
        largest = 0.0
        for head, blocks, expected in self._expected:
            outputs = fetch({name: self._index(name, head) for name in expected})
            for name, right in expected.items():
                if name not in outputs:
                    if name in self.names():
                        raise WrongResult(f"no {name}")
                    continue
                got = self._cut(outputs[name], name, right)
                whole, worst = block_errors(got, right, blocks, name)
                # Written so that NaN is an error too.
                if not whole <= tolerance or not worst <= BLOCK_FACTOR * tolerance:
                    raise WrongResult(
                        f"{name} of sequence {head.sequence}, kv head {head.kv_head} "
                        f"is off by {whole:.1e}, its worst rows by {worst:.1e}; "
                        f"allowed {tolerance:.0e} and {BLOCK_FACTOR * tolerance:.0e}"
                    )
                largest = max(largest, whole)
        return largest

    def _index(self, name: str, head: Head) -> Any:
        """Return where a head's part of a result is."""
        if name in ("dk", "dv"):
            return np.s_[head.sequence, :, head.kv_head : head.kv_head + 1]
        return np.s_[head.sequence, :, head.heads]

    def _cut(self, part: Any, name: str, right: Any) -> Any:
        """Bring a part (S, heads, size) to the form of the reference.

        Rows past the lengths are left out: not every implementation says what is there.
        """
        case = self.case
        rows = case.kv_seqlen if name in ("dk", "dv") else case.seqlen
        expected = (rows, right.shape[0], right.shape[2])
        if tuple(part.shape) != expected:
            shape = tuple(part.shape)
            raise WrongResult(f"{name} of a kv head is {shape}, expected {expected}")
        return widened(self.xp.asarray(part[: right.shape[1]])).swapaxes(0, 1)

    def _compute(self, head: Head, blocks: list[slice]) -> dict[str, Any]:
        """Return the results of a head: out in the blocks of rows, 0 elsewhere."""
        xp, case = self.xp, self.case
        backward = case.direction != "forward"
        scale = 1 / math.sqrt(case.head_dim)
        out = xp.zeros((*head.q.shape[:2], case.head_dim_v))
        dq = xp.zeros(head.q.shape)
        dk, dv = xp.zeros(head.k.shape), xp.zeros(head.v.shape)
        for g in range(head.group):
            for rows, p, seen in self._probabilities(head, g, blocks, scale):
                k, v = head.k[:seen], head.v[:seen]
                out[g, rows] = p @ v
                if not backward:
                    continue
                dout = head.dout[g, rows]
                dp = dout @ v.T
                ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
                dq[g, rows] = ds @ k
                dk[:seen] += ds.T @ head.q[g, rows]
                dv[:seen] += p.T @ dout
        results = {"out": out}
        if backward:
            results |= {"dq": dq, "dk": dk[None], "dv": dv[None]}
        return results

    def _probabilities(
        self, head: Head, g: int, blocks: list[slice], scale: float
    ) -> Iterator[tuple[slice, Any, int]]:
        """Yield rows, their probabilities and how many keys these are for."""
        xp = self.xp
        keys = head.k.shape[0]
        offset = keys - head.q.shape[1]
        for rows in parts(blocks, max(BLOCK, PART // max(1, keys))):
            seen = keys
            if self.case.causal:
                seen = min(max(rows.stop + offset, 0), keys)
            if seen == 0:
                continue
            s = head.q[g, rows] @ head.k[:seen].T * scale
            if self.case.causal:
                i = xp.arange(rows.start, rows.stop)[:, None] + offset
                s = xp.where(xp.arange(seen) <= i, s, -np.inf)
            largest = s.max(-1, keepdims=True)
            p = xp.exp(s - xp.where(largest == -np.inf, 0.0, largest))
            total = p.sum(-1, keepdims=True)
            yield rows, p / xp.where(total == 0, 1.0, total), seen


def widened(x: Any) -> Any:
    """Return an array in float64, through float32 because CuPy knows few casts."""
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    return x.astype(np.float64)


class WrongResult(Exception):
    """A result differs from the reference; the message says by how much."""


def parts(blocks: list[slice], most: int) -> Iterator[slice]:
    """Join neighbouring blocks into parts of up to so many rows."""
    current: slice | None = None
    for block in blocks:
        if current is None:
            current = block
        elif current.stop == block.start and block.stop - current.start <= most:
            current = slice(current.start, block.stop)
        else:
            yield current
            current = block
    if current is not None:
        yield current


def block_errors(
    got: Any, right: Any, blocks: list[slice], name: str
) -> tuple[float, float]:
    """Return the relative error of the whole and of the worst block of rows.

    got, right : (group or 1, rows, size), float64
    """
    if name in ("dk", "dv"):
        rows = right.shape[1]
        blocks = [
            slice(start, min(start + BLOCK, rows)) for start in range(0, rows, BLOCK)
        ]
    # One sum for each row, so that the device is waited for twice and not per block.
    errors, norms = (on_host((x**2).sum((0, 2))) for x in (got - right, right))
    squares = [(float(errors[b].sum()), float(norms[b].sum())) for b in blocks]
    wrong, norm = (sum(column) for column in zip(*squares, strict=True))
    if not norm:
        return (0.0, 0.0) if wrong == 0 else (math.inf, math.inf)
    # Rows that are 0, such as dq of a row with one key, have only their rounding.
    floor = 1e-6 * norm / len(blocks)
    worst = max(
        # max() would lose a NaN.
        (math.inf if math.isnan(e) else e / max(n, floor)) for e, n in squares
    )  # fmt: skip
    return math.sqrt(wrong / norm), math.sqrt(worst)
