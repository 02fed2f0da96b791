"""What is measured: shapes as data, the same for every implementation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

DIRECTIONS = ("forward", "backward", "both")
MASKS = ("full", "causal")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# Backward has five products where forward has two.
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
TOKENS = 16384


@dataclass(frozen=True)
class Case:
    """One shape in one direction.

    Attributes
    ----------
    workload : str
    dtype : str
        "float16", "bfloat16", "float32" or "float64".
    batch, seqlen, kv_seqlen, heads, kv_heads, head_dim, head_dim_v : int
    causal : bool
        Aligned at the bottom right: the last query sees every key.
    direction : str
        "forward"; "backward" of a forward pass that has been done already; or "both",
        as in a training step.
    q_lengths, k_lengths : tuple of int, optional
        The valid prefix of each sequence of the batch. Rows past it are 0 in the
        output and in the gradients. Both are given or none.
    shared_memory : int, optional
        Blocks have no more than so many KiB, as on a smaller GPU.
    """

    workload: str
    dtype: str
    batch: int
    seqlen: int
    kv_seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    direction: str
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    shared_memory: int | None = None

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence of the batch."""
        if self.q_lengths is None or self.k_lengths is None:
            return ((self.seqlen, self.kv_seqlen),) * self.batch
        return tuple(zip(self.q_lengths, self.k_lengths, strict=True))

    @property
    def pairs(self) -> float:
        """Pairs of query and key that see each other, in all heads.

        A causal square counts as half, as is the custom; it has a little more.
        """
        if self.q_lengths is None and self.causal and self.seqlen == self.kv_seqlen:
            return self.batch * self.heads * self.seqlen**2 / 2
        return self.heads * sum(visible(q, k, self.causal) for q, k in self.lengths)

    @property
    def flops(self) -> float:
        """Floating-point operations, without those that only some algorithms need."""
        forward = 2 * self.pairs * (self.head_dim + self.head_dim_v)
        return WORK[self.direction] * forward

    @property
    def bytes(self) -> int:
        """Memory traffic if each input is read once and each output written once.

        Inputs are read as far as their lengths; outputs are written in full.
        """
        d, dv, size = self.head_dim, self.head_dim_v, ITEMSIZE[self.dtype]
        queries = self.heads * sum(q for q, _ in self.lengths)
        keys = self.kv_heads * sum(k for _, k in self.lengths)
        rows = self.batch * self.heads * self.seqlen
        kv_rows = self.batch * self.kv_heads * self.kv_seqlen
        read = queries * d + keys * (d + dv)
        written = rows * dv
        if self.direction == "forward":
            return size * (read + written)
        gradients = rows * d + kv_rows * (d + dv)
        if self.direction == "both":
            return size * (read + queries * dv + written + gradients)
        # out and its gradient, and the log-sum-exp of each row.
        lse = queries * max(4, size)
        return size * (read + 2 * queries * dv + gradients) + lse

    @property
    def mask(self) -> str:
        """The mask in words."""
        return "causal" if self.causal else "full"

    @property
    def label(self) -> str:
        """The case in one line."""
        heads = f"H{self.heads}"
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        seqlen = f"S{self.kv_seqlen}"
        if self.seqlen != self.kv_seqlen:
            seqlen = f"S{self.seqlen}x{self.kv_seqlen}"
        size = f"D{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            size += f"/{self.head_dim_v}"
        ragged = " ragged" if self.q_lengths else ""
        memory = f" {self.shared_memory} KiB" if self.shared_memory else ""
        return (
            f"{self.workload} {self.direction} {self.dtype} {size} {self.mask} "
            f"B{self.batch} {seqlen} {heads}{ragged}{memory}"
        )


def visible(queries: int, keys: int, causal: bool) -> int:
    """Return how many pairs of query and key see each other in one head."""
    if not causal:
        return queries * keys
    if keys >= queries:
        return queries * (keys - queries) + queries * (queries + 1) // 2
    return keys * (keys + 1) // 2


def square(
    workload: str,
    dtype: str,
    batch: int,
    seqlen: int,
    heads: int,
    head_dim: int,
    causal: bool,
    direction: str,
    kv_heads: int | None = None,
) -> Case:
    """Return a case with as many keys as queries and one head size."""
    return Case(
        workload, dtype, batch, seqlen, seqlen, heads, kv_heads or heads, head_dim,
        head_dim, causal, direction,
    )  # fmt: skip


def training() -> list[Case]:
    """Shapes of a training step: the same number of tokens and channels in each."""
    return [
        square(
            "training", "bfloat16", TOKENS // seqlen, seqlen, 2048 // head_dim,
            head_dim, causal, direction,
        )
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for direction in DIRECTIONS
    ]  # fmt: skip


def gqa() -> list[Case]:
    """Fewer kv heads than query heads."""
    return [
        square(
            "gqa", "bfloat16", TOKENS // seqlen, seqlen, heads, 128, causal,
            direction, kv_heads,
        )
        for heads, kv_heads in ((32, 8), (32, 4), (64, 8), (16, 1))
        for seqlen in (2048, 8192)
        for causal in (False, True)
        for direction in ("forward", "backward")
    ]  # fmt: skip


def long() -> list[Case]:
    """One long sequence."""
    return [
        square("long", "bfloat16", 1, seqlen, heads, 128, causal, direction, kv_heads)
        for seqlen in (32768, 65536, 131072)
        for heads, kv_heads in ((16, 16), (32, 8))
        for causal in (False, True)
        for direction in ("forward", "backward")
    ]


def small() -> list[Case]:
    """Calls so small that the host's part is most of them."""
    shapes = ((1, 128, 4, 128), (1, 128, 4, 64), (1, 512, 8, 64), (8, 128, 8, 64))
    return [
        square("small", "bfloat16", batch, seqlen, heads, head_dim, True, direction)
        for batch, seqlen, heads, head_dim in shapes
        for direction in ("forward", "backward")
    ]


def decode() -> list[Case]:
    """One new query over a cache of keys and values."""
    shapes = (
        (1, 8192, 32, 8), (1, 65536, 32, 8), (1, 131072, 32, 8), (8, 8192, 32, 8),
        (64, 8192, 32, 8), (16, 32768, 64, 8),
    )  # fmt: skip
    return [
        Case(
            "decode", "bfloat16", batch, 1, keys, heads, kv_heads, 128, 128, False,
            "forward",
        )
        for batch, keys, heads, kv_heads in shapes
    ]  # fmt: skip


def varlen() -> list[Case]:
    """Sequences of different lengths in one padded batch."""
    return [
        dataclasses.replace(
            square(
                "varlen", "bfloat16", 8, seqlen, 16, 128, causal, direction, kv_heads
            ),
            q_lengths=ragged(8, seqlen),
            k_lengths=ragged(8, seqlen),
        )
        for seqlen in (2048, 8192)
        for kv_heads in (16, 4)
        for causal in (False, True)
        for direction in ("forward", "backward")
    ]


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    """Return lengths from the longest one down to a fraction 1 / batch of it, mixed."""
    # 5 is coprime to a power of two, so each multiple of the step comes once; minus n,
    # because lengths of real sequences are no multiples of a tile.
    step = longest // batch
    return tuple(step * (batch - 5 * n % batch) - n for n in range(batch))


def fp32() -> list[Case]:
    """float32 where PyTorch's memory-efficient attention is measured too."""
    return [
        square("fp32", "float32", 4, 4096, 2048 // head_dim, head_dim, causal, dir_)
        for head_dim, causal in ((64, False), (128, False), (128, True))
        for dir_ in ("forward", "backward")
    ]


def fp64() -> list[Case]:
    """float64."""
    return [
        square("fp64", "float64", 1, 4096, 16, head_dim, False, direction)
        for head_dim in (64, 128)
        for direction in ("forward", "backward")
    ]


# Batch, queries and keys in 2048 channels.
TILE_SHAPES = {
    "large": (4, 4096, 4096),
    "few blocks": (1, 512, 512),
    "short sequences": (256, 64, 64),
    "few queries": (8, 16, 2048),
}


def tiles() -> list[Case]:
    """Shapes that the tile tables are chosen by; every tile is a contestant."""
    cases = []
    for dtype, size, (name, (batch, queries, keys)), causal, direction in (
        itertools.product(
            ("float32", "bfloat16", "float64"), (64, 128, 256, 32),
            TILE_SHAPES.items(), (False, True), ("forward", "backward"),
        )
    ):  # fmt: skip
        if name != "large" and (causal or size == 32):
            continue
        # Backward has a block for some keys, of which there are many.
        if name == "few queries" and direction == "backward":
            continue
        heads = 2048 // size
        cases.append(
            Case(
                "tiles", dtype, batch, queries, keys, heads, heads, size, size, causal,
                direction,
            )
        )  # fmt: skip
    return cases


def cpu() -> list[Case]:
    """Small shapes for the path that computes with NumPy."""
    return [
        square("cpu", "float32", 1, seqlen, 4, head_dim, causal, direction)
        for seqlen in (256, 512, 1024)
        for head_dim in (64, 128)
        for causal in (False, True)
        for direction in ("forward", "backward")
    ]


WORKLOADS: dict[str, Callable[[], list[Case]]] = {
    "training": training, "gqa": gqa, "long": long, "small": small, "decode": decode,
    "varlen": varlen, "fp32": fp32, "fp64": fp64, "tiles": tiles, "cpu": cpu,
}  # fmt: skip
# Those that bring their own way to measure: modules of this package, by name.
MODULES = ("first_call", "memory", "end_to_end")
NAMES = (*WORKLOADS, *MODULES)


@dataclass(frozen=True)
class Selection:
    """Which cases of a workload to run; an empty tuple selects all.

    `dtypes` isn't a filter: it runs the cases in these dtypes instead of their own.
    `shared_memory` runs those of `tiles` with so many KiB for a block, each.
    """

    head_dims: tuple[int, ...] = ()
    seqlens: tuple[int, ...] = ()
    directions: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shared_memory: tuple[int, ...] = ()

    def cases(self, workload: str) -> list[Case]:
        """Return the selected cases, the most telling first.

        Raises
        ------
        ValueError
            If nothing is left.
        """
        every = WORKLOADS[workload]()
        chosen = [case for case in every if self._accepts(case)]
        if self.dtypes:
            chosen = [
                dataclasses.replace(case, dtype=dtype)
                for dtype in self.dtypes
                for case in chosen
            ]
        if self.shared_memory:
            if workload != "tiles":
                raise ValueError(f"{workload} doesn't depend on shared memory")
            chosen = [
                dataclasses.replace(case, shared_memory=kib)
                for case in chosen
                for kib in self.shared_memory
            ]
        if not chosen:
            raise ValueError(f"no case of {workload} is left: {self.choices(every)}")
        return representative(dict.fromkeys(chosen))

    def _accepts(self, case: Case) -> bool:
        return (
            (not self.head_dims or case.head_dim in self.head_dims)
            and (not self.directions or case.direction in self.directions)
            and (not self.masks or case.mask in self.masks)
            and (
                not self.seqlens
                or case.seqlen in self.seqlens
                or case.kv_seqlen in self.seqlens
            )
        )

    @staticmethod
    def choices(cases: Sequence[Case]) -> str:
        """Say what there is to select from."""
        parts = {
            "head-dim": sorted({case.head_dim for case in cases}),
            "seqlen": sorted({case.kv_seqlen for case in cases}),
            "direction": [d for d in DIRECTIONS if d in {c.direction for c in cases}],
            "mask": sorted({case.mask for case in cases}),
        }
        return "; ".join(
            f"--{name} {','.join(map(str, values))}" for name, values in parts.items()
        )


def representative(cases: Iterable[Case]) -> list[Case]:
    """Order cases so that the first ones stand for all.

    Middle sizes come before extreme ones; within a size first all forward cases, so
    that head sizes and masks take turns.
    """
    cases = list(cases)
    sizes = from_the_middle({case.kv_seqlen for case in cases})
    heads = from_the_middle({case.head_dim for case in cases})
    return sorted(
        cases,
        key=lambda case: (
            sizes.index(case.kv_seqlen),
            DIRECTIONS.index(case.direction),
            heads.index(case.head_dim),
            not case.causal,
        ),
    )


def from_the_middle(values: Iterable[int]) -> list[int]:
    """Sort values by their distance from the middle, the larger one first in a tie."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return sorted(
        ordered, key=lambda value: (abs(ordered.index(value) - middle), -value)
    )
