"""The one argument of every kernel: NumPy's side of cuda_src/common/params.cuh."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from .problem import Operand, Problem

POINTERS = (
    "q", "k", "v", "out", "lse", "alibi_slopes", "bias", "mask", "q_lengths",
    "k_lengths", "dout", "dlse", "dq", "dk", "dv", "dbias", "delta", "dbias_partial",
    "dq_sums", "row_terms", "claims",
)  # fmt: skip

# What comes before all that a problem determines: addresses, and a number for a launch.
_HEAD = (*POINTERS, "first_claim")

# Operand and the number of its axes after the batch axes, in the order of the struct.
_STRIDES = (
    ("q", 3), ("k", 3), ("v", 3), ("out", 3), ("dout", 3), ("dq", 3), ("dk", 3),
    ("dv", 3), ("lse", 2), ("dlse", 2), ("bias", 3), ("mask", 3), ("dbias", 3),
    ("alibi_slopes", 1), ("q_lengths", 0), ("k_lengths", 0),
)  # fmt: skip

_SCALARS = (
    "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v", "left",
    "right", "top_left", "q_lengths_bytes", "k_lengths_bytes", "dbias_splits",
    "section", "dq_row_tiles",
)  # fmt: skip

# Arrays that a kernel may load in pieces of 16 bytes.
_LOADED_WIDE = ("q", "k", "v", "dout")

_UNLIMITED = 2**32  # further than any two tokens are apart


def params_dtype(batch_axes: int) -> np.dtype:
    """Return the struct as a NumPy dtype, for that number of batch axes."""
    fields: list[tuple] = [(name, np.uint64) for name in _HEAD]
    fields += [
        (f"{name}_strides", np.int64, (batch_axes + axes,)) for name, axes in _STRIDES
    ]
    fields += [("batch_shape", np.int64, (batch_axes,))]
    fields += [(name, np.int64) for name in _SCALARS]
    fields += [("scale", np.float64), ("softcap", np.float64)]
    return np.dtype(fields)


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch axes after those that all operands step through alike are merged.

    `strides` are those of each operand along the merged axes, in bytes.
    """

    shape: tuple[int, ...]
    strides: Mapping[str, tuple[int, ...]]


def merge_batch_axes(problem: Problem) -> Batch:
    """Merge the batch axes of a problem into as few as its operands allow."""
    shape: list[int] = []
    strides: dict[str, list[int]] = {o.name: [] for o in problem.operands}
    for axis, size in enumerate(problem.batch_shape):
        if size == 1:
            continue
        steps = {o.name: o.strides[axis] for o in problem.operands}
        if shape and all(strides[n][-1] == step * size for n, step in steps.items()):
            shape[-1] *= size
            for name, step in steps.items():
                strides[name][-1] = step
        else:
            shape.append(size)
            for name, step in steps.items():
                strides[name].append(step)
    if not shape:
        shape = [1]
        for steps in strides.values():
            steps.append(0)
    return Batch(tuple(shape), {name: tuple(s) for name, s in strides.items()})


@dataclass(frozen=True, slots=True)
class Template:
    """The struct of a call, but for the addresses and `first_claim` at its begin.

    `blank` is the whole struct with zeros there, `memory` the type of a copy. `select`
    takes what a call fills in out of a mapping by name, in the order in which `head`
    packs it; fields of what the call doesn't have stay 0.
    """

    blank: bytes
    memory: type[ctypes.Array]
    select: Callable[[Mapping[str, int]], tuple[int, ...]]
    head: struct.Struct

    def fill(self, numbers: Mapping[str, int]) -> ctypes.Array:
        """Return a copy with the addresses of a call, and its `first_claim` if any."""
        filled = self.memory.from_buffer_copy(self.blank)
        self.head.pack_into(filled, 0, *self.select(numbers))
        return filled


def selector(
    names: Sequence[str],
) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """Return what takes the values of some names out of a mapping, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)  # which is faster, and returns one value as it is
    return lambda mapping: tuple([mapping[name] for name in names])


def make_template(
    problem: Problem,
    names: Collection[str],
    *,
    dbias_splits: int,
    section: int,
    dq_row_tiles: int,
) -> Template:
    """Fill in everything that a problem determines.

    `names` are those of the arrays whose addresses will be filled in, and maybe
    "first_claim".
    """
    batch = merge_batch_axes(problem)
    dtype = params_dtype(len(batch.shape))
    params = np.zeros(1, dtype)
    for name, axes in _STRIDES:
        operand = problem.operand(name)
        if operand is not None:
            params[f"{name}_strides"] = _element_strides(operand, batch, axes)
    params["batch_shape"] = batch.shape
    params["seqlen_q"] = problem.seqlen_q
    params["seqlen_k"] = problem.seqlen_k
    params["heads_q"] = problem.heads_q
    params["heads_kv"] = problem.heads_kv
    params["head_dim"] = problem.head_dim
    params["head_dim_v"] = problem.head_dim_v
    params["left"] = _limit(problem.left)
    params["right"] = _limit(problem.right)
    params["top_left"] = problem.top_left
    for name in ("q_lengths", "k_lengths"):
        operand = problem.operand(name)
        params[f"{name}_bytes"] = operand.dtype.itemsize if operand else 0
    params["dbias_splits"] = dbias_splits
    params["section"] = section
    params["dq_row_tiles"] = dq_row_tiles
    params["scale"] = problem.scale
    params["softcap"] = problem.softcap
    return Template(
        params.tobytes(),
        ctypes.c_char * dtype.itemsize,
        selector([name for name in _HEAD if name in names]),
        struct.Struct("<" + "".join("Q" if n in names else "8x" for n in _HEAD)),
    )


def _element_strides(operand: Operand, batch: Batch, axes: int) -> list[int]:
    first = len(operand.shape) - axes
    own = list(operand.strides[first:])
    if operand.name in _LOADED_WIDE:
        # The stride of an axis of size 1 leads nowhere and may be anything. 0 keeps
        # addresses aligned that are formed and not read.
        steps = zip(operand.shape[first:], own, strict=True)
        own = [step if size > 1 else 0 for size, step in steps]
    strides = (*batch.strides[operand.name], *own)
    return [stride // operand.dtype.itemsize for stride in strides]


def _limit(bound: int | None) -> int:
    return _UNLIMITED if bound is None else min(bound, _UNLIMITED)
