"""What is to be computed, as plain data: the result of validation.

A `Problem` holds no arrays and no pointers, only their shapes, strides and
dtypes. It can be hashed, so that everything derived from it can be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Options(NamedTuple):
    """The arguments of a public function that aren't arrays, as they came."""

    direction: str
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    layout: str = "bshd"
    precision: str | None = None
    return_lse: bool = False
    bias_grad: bool = False
    deterministic: bool = False
    config: object = None


class ArrayInfo(NamedTuple):
    """What validation needs to know of an array.

    `strides` are in bytes; `misalignment` is the address modulo 16.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    misalignment: int = 0


class Operand(NamedTuple):
    """An array in the canonical order of axes, the batch axes first.

    After the batch axes come (seqlen, heads, head_dim) for q, k, v and their
    like, (heads, seqlen) for lse, (heads, seqlen_q, seqlen_k) for bias and mask,
    (heads,) for ALiBi slopes and nothing for lengths. An axis that is broadcast
    has stride 0. Strides are in bytes.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    misalignment: int = 0


@dataclass(frozen=True)
class Problem:
    """One attention problem.

    Query i sees key j if ``i < q_len``, ``j < k_len`` and
    ``-left <= j - i - off <= right``, where a bound that is None doesn't apply and
    ``off`` is 0 if `top_left`, else ``k_len - q_len``. Causal masking is
    ``right = 0``.
    """

    direction: str
    dtype: np.dtype
    batch_shape: tuple[int, ...]
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    layout: str
    single_head: bool
    scale: float
    softcap: float
    left: int | None
    right: int | None
    top_left: bool
    precision: str | None
    return_lse: bool
    bias_grad: bool
    deterministic: bool
    config: object
    bias_shape: tuple[int, ...] | None
    operands: tuple[Operand, ...]

    def operand(self, name: str) -> Operand | None:
        """Return the operand of that name, or None if the call has none."""
        for operand in self.operands:
            if operand.name == name:
                return operand
        return None

    def has(self, name: str) -> bool:
        """Whether the call has an operand of that name."""
        return self.operand(name) is not None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the results, in the order in which they are returned."""
        if self.direction == "forward":
            return ("out", "lse") if self.return_lse else ("out",)
        return ("dq", "dk", "dv", "dbias") if self.bias_grad else ("dq", "dk", "dv")

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return int(np.prod(self.batch_shape, dtype=np.int64))

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.heads_q // self.heads_kv
