"""Tile tables: which tile a family uses for which head size, and why.

A row is taken if its limits hold and its tile fits the GPU's shared memory; the
first such row of a table wins, so tables go from the special to the general. In `mma`
it has to make enough blocks for the GPU, too: else one with fewer rows is taken. Of
`wgmma`'s rows for a head size that is taken whose tiles keep the GPU busy for the least
time.
"""

from __future__ import annotations

from dataclasses import dataclass

from .tiles import (
    PASS_THREADS,
    MmaTile,
    SimtTile,
    Tile,
    WgmmaTile,
    depth_multiple,
)

__all__ = [
    "FAMILIES", "MMA_BACKWARD", "MMA_BACKWARD_DBIAS", "MMA_BACKWARD_DQ", "MMA_DEPTHS",
    "MMA_FORWARD", "PASS_THREADS", "SIMT_BACKWARD", "SIMT_BACKWARD_DBIAS",
    "SIMT_FORWARD", "WGMMA_BACKWARD", "WGMMA_DEPTHS", "WGMMA_FORWARD", "MmaRow",
    "MmaTile", "SimtRow",
    "SimtTile", "Tile", "WgmmaRow", "WgmmaTile",
    "head_dim_buckets", "ragged_head_dims", "wgmma_tiles",
]  # fmt: skip

FAMILIES = ("simt", "mma", "wgmma")


@dataclass(frozen=True, slots=True)
class SimtRow:
    """For accumulators of `accumulator` bytes and head sizes up to the limits."""

    accumulator: int
    max_head_dim: int | None
    max_head_dim_v: int | None
    tile: SimtTile


# Measured on the H200 at S=4096: float32 with head sizes 64 and 128, float64 with 64
# (bench/LOG.md). The other rows follow the same pattern and aren't tuned.
SIMT_FORWARD = (
    SimtRow(4, 32, 32, SimtTile(64, 64, 32, 32, resident=True, blocks=3)),
    SimtRow(4, 64, 64, SimtTile(64, 64, 64, 64, resident=True, blocks=3)),
    SimtRow(4, 96, 96, SimtTile(64, 64, 96, 96, resident=True)),
    SimtRow(4, 64, None, SimtTile(64, 64, 64, 128, resident=True)),
    SimtRow(4, 128, None, SimtTile(64, 64, 128, 128, resident=True)),
    SimtRow(4, None, None, SimtTile(64, 64, 64, 128, resident=False)),
    SimtRow(8, 32, 32, SimtTile(64, 32, 32, 32, resident=True)),
    SimtRow(8, 64, 64, SimtTile(64, 32, 64, 64, resident=True)),
    SimtRow(8, None, None, SimtTile(64, 32, 64, 128, resident=False)),
    # 48 KiB of shared memory: compute capability 5.0 to 6.2.
    SimtRow(4, 64, None, SimtTile(64, 32, 64, 64, resident=True)),
    SimtRow(4, None, None, SimtTile(64, 32, 64, 64, resident=False)),
    SimtRow(8, None, None, SimtTile(64, 32, 32, 32, resident=False)),
)

# dq, and dk with dv: the same products with the sides exchanged.
SIMT_BACKWARD = (
    SimtRow(4, 32, 32, SimtTile(64, 32, 32, 32, resident=True, blocks=3)),
    SimtRow(4, 64, 64, SimtTile(64, 32, 64, 64, resident=True, blocks=3)),
    SimtRow(4, 96, 96, SimtTile(64, 32, 96, 96, resident=True)),
    SimtRow(4, 128, 128, SimtTile(64, 32, 128, 128, resident=True)),
    SimtRow(4, None, None, SimtTile(64, 32, 128, 128, resident=False)),
    SimtRow(8, 32, 32, SimtTile(64, 32, 32, 32, resident=True)),
    SimtRow(8, None, None, SimtTile(64, 32, 64, 64, resident=False)),
    # 48 KiB of shared memory: compute capability 5.0 to 6.2.
    SimtRow(4, None, None, SimtTile(64, 32, 64, 64, resident=False)),
    SimtRow(8, None, None, SimtTile(64, 32, 32, 32, resident=False)),
)

SIMT_BACKWARD_DBIAS = (
    SimtRow(4, None, None, SimtTile(64, 32, 64, 64, resident=False)),
    SimtRow(8, None, None, SimtTile(64, 32, 32, 32, resident=False)),
)

# Channels that a tile of `mma` has room for: the least that holds the head and that
# warps side by side can divide.
MMA_DEPTHS = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class MmaRow:
    """For elements of `itemsize` bytes and head sizes of up to `max_depth`.

    The other numbers are those of `MmaTile`.
    """

    itemsize: int
    max_depth: int
    rows: int
    columns: int
    warps: int
    stages: int = 1
    across: int = 1
    blocks: int = 1

    def tile(self, head_dim: int, head_dim_v: int) -> MmaTile | None:
        """Return the tile for a head, None if the row isn't for its size."""
        if max(head_dim, head_dim_v) > self.max_depth:
            return None
        multiple = depth_multiple(self.itemsize, self.across)
        possible = [depth for depth in MMA_DEPTHS if depth % multiple == 0]
        depth, depth_v = (
            next(depth for depth in possible if depth >= size)
            for size in (head_dim, head_dim_v)
        )
        return MmaTile(
            self.rows, self.columns, depth, depth_v, self.warps, self.stages,
            self.across, self.blocks,
        )  # fmt: skip


# A row fits where its blocks fit a multiprocessor together. Those that come first for a
# head size were the fastest of their neighbours on the H200 at S=4096 (bench/LOG.md);
# the others are for GPUs with less shared memory or, with fewer rows, for problems that
# are too small to give each multiprocessor a block, and aren't tuned.
MMA_FORWARD = (
    MmaRow(2, 64, 128, 128, warps=4, blocks=2),
    MmaRow(2, 64, 128, 64, warps=4, blocks=2),
    MmaRow(2, 64, 128, 128, warps=8),
    MmaRow(2, 64, 64, 64, warps=4, blocks=2),
    MmaRow(2, 128, 128, 64, warps=4, stages=2, blocks=2),
    MmaRow(2, 128, 128, 64, warps=4, blocks=2),
    MmaRow(2, 128, 128, 64, warps=4),
    MmaRow(2, 128, 64, 64, warps=4, stages=2),
    MmaRow(2, 128, 64, 64, warps=4),
    MmaRow(2, 256, 128, 128, warps=8),
    MmaRow(2, 256, 128, 64, warps=8),
    MmaRow(2, 256, 64, 64, warps=4),
    MmaRow(2, 256, 64, 32, warps=4),
    MmaRow(2, 256, 32, 32, warps=2),
    MmaRow(4, 64, 128, 32, warps=4, stages=2, blocks=2),
    MmaRow(4, 64, 64, 32, warps=4, blocks=2),
    MmaRow(4, 128, 128, 16, warps=4, blocks=2),
    MmaRow(4, 128, 64, 32, warps=4),
    MmaRow(4, 256, 64, 16, warps=4),
    MmaRow(8, 64, 128, 32, warps=8),
    MmaRow(8, 128, 128, 32, warps=8),
    MmaRow(8, 128, 64, 16, warps=4),
)

# dk and dv, with dq beside them or without: the rows are keys.
MMA_BACKWARD = (
    MmaRow(2, 64, 128, 32, warps=4, stages=2, blocks=2),
    MmaRow(2, 64, 64, 32, warps=2, stages=2, blocks=2),
    MmaRow(2, 64, 64, 64, warps=4),
    MmaRow(2, 128, 128, 64, warps=8, stages=2, across=2),
    MmaRow(2, 128, 128, 64, warps=8, across=2),
    MmaRow(2, 128, 64, 32, warps=4, stages=2),
    MmaRow(2, 128, 64, 32, warps=4),
    MmaRow(2, 256, 64, 64, warps=8, stages=2, across=4),
    MmaRow(2, 256, 64, 64, warps=8, across=4),
    MmaRow(2, 256, 32, 32, warps=4, stages=2, across=2),
    MmaRow(2, 256, 32, 32, warps=4, across=2),
    MmaRow(2, 256, 16, 32, warps=2, across=2),
    MmaRow(4, 64, 64, 32, warps=4, stages=2),
    MmaRow(4, 128, 32, 32, warps=4, stages=2, across=2, blocks=2),
    MmaRow(4, 128, 32, 32, warps=4, across=2),
    MmaRow(4, 256, 32, 32, warps=8, across=4),
    MmaRow(4, 256, 16, 16, warps=2, across=2),
    MmaRow(8, 64, 32, 32, warps=4, across=2, blocks=2),
    MmaRow(8, 64, 32, 32, warps=4, across=2),
    MmaRow(8, 128, 32, 32, warps=8, across=4),
    MmaRow(8, 128, 16, 16, warps=2, across=2),
)

MMA_BACKWARD_DQ = (
    MmaRow(2, 128, 64, 64, warps=4, stages=2, blocks=2),
    MmaRow(2, 128, 64, 64, warps=4),
    MmaRow(2, 128, 64, 32, warps=4),
    MmaRow(2, 256, 64, 32, warps=4),
    MmaRow(2, 256, 32, 32, warps=2),
    MmaRow(2, 256, 16, 32, warps=1),
    MmaRow(4, 128, 64, 32, warps=4),
    MmaRow(4, 256, 32, 16, warps=2),
    MmaRow(8, 64, 64, 32, warps=4),
    MmaRow(8, 128, 32, 16, warps=2),
)

MMA_BACKWARD_DBIAS = (
    MmaRow(2, 256, 64, 64, warps=4),
    MmaRow(2, 256, 64, 32, warps=4),
    MmaRow(2, 256, 32, 32, warps=2),
    MmaRow(2, 256, 16, 32, warps=1),
    MmaRow(4, 256, 64, 32, warps=4),
    MmaRow(4, 256, 32, 32, warps=2),
    MmaRow(4, 256, 16, 32, warps=1),
    MmaRow(8, 128, 64, 32, warps=4),
    MmaRow(8, 128, 32, 32, warps=2),
    MmaRow(8, 128, 16, 32, warps=1),
)


# Channels that a tile of `wgmma` has room for.
WGMMA_DEPTHS = (64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class WgmmaRow:
    """For head sizes of up to `max_depth`, and v's of up to `max_depth_v`.

    `banded` rows are for calls whose queries don't all see the same keys, others for
    those that do, None for both; `min_keys` is the least number of keys that a query
    may see. The other numbers are those of `WgmmaTile`.
    """

    max_depth: int
    max_depth_v: int
    consumers: int
    columns: int
    stages: int
    ping_pong: bool = False
    banded: bool | None = None
    min_keys: int = 0

    @property
    def limits(self) -> tuple[int, int]:
        """The largest head sizes."""
        return self.max_depth, self.max_depth_v

    def tile(
        self, head_dim: int, head_dim_v: int, keys: int, banded: bool
    ) -> WgmmaTile | None:
        """Return the tile for a head, None if the row isn't for the call."""
        if head_dim > self.max_depth or head_dim_v > self.max_depth_v:
            return None
        if keys < self.min_keys or self.banded not in (None, banded):
            return None
        depth, depth_v = (
            next(depth for depth in WGMMA_DEPTHS if depth >= size)
            for size in (head_dim, head_dim_v)
        )
        return WgmmaTile(
            self.consumers, self.columns, depth, depth_v, self.stages, self.ping_pong
        )


# The first rows for a head size were the fastest of their neighbours on the H200
# (bench/LOG.md); those that follow, with fewer rows a tile, are for problems with few
# tiles for each multiprocessor.
WGMMA_FORWARD = (
    WgmmaRow(64, 64, 4, 64, 4, ping_pong=True, banded=False),
    WgmmaRow(64, 64, 4, 64, 4, ping_pong=True, banded=True, min_keys=8192),
    WgmmaRow(64, 64, consumers=4, columns=64, stages=6, banded=True),
    WgmmaRow(64, 64, consumers=2, columns=128, stages=4),
    WgmmaRow(64, 64, consumers=1, columns=64, stages=4),
    WgmmaRow(96, 96, 4, 48, 3, ping_pong=True, banded=False),
    WgmmaRow(96, 96, consumers=3, columns=64, stages=4, banded=True),
    WgmmaRow(96, 96, consumers=2, columns=128, stages=3),
    WgmmaRow(96, 96, consumers=1, columns=64, stages=4),
    WgmmaRow(128, 128, consumers=3, columns=64, stages=3),
    WgmmaRow(128, 128, consumers=2, columns=128, stages=2),
    WgmmaRow(128, 128, consumers=1, columns=64, stages=4),
    WgmmaRow(192, 128, consumers=2, columns=96, stages=2),
    WgmmaRow(192, 128, consumers=1, columns=64, stages=3),
    WgmmaRow(192, 192, 2, 80, 2, ping_pong=True, banded=False),
    WgmmaRow(192, 192, 2, 80, 2, banded=True, min_keys=2048),
    WgmmaRow(192, 192, consumers=2, columns=64, stages=2),
    WgmmaRow(192, 192, consumers=1, columns=64, stages=2),
    WgmmaRow(256, 256, 2, 64, 2, ping_pong=True, banded=False, min_keys=1024),
    WgmmaRow(256, 256, 2, 64, 2, banded=True, min_keys=1024),
    WgmmaRow(256, 256, consumers=2, columns=32, stages=3, banded=True),
    WgmmaRow(256, 256, consumers=2, columns=48, stages=2),
    WgmmaRow(256, 256, consumers=1, columns=64, stages=2),
)


# dq, dk and dv: rows are keys, columns queries. Measured on the H200 at S=4096 and
# 16384 with head sizes 64 and 128 (bench/LOG.md); no other shape has registers for its
# sums.
WGMMA_BACKWARD = (
    WgmmaTile(consumers=2, columns=128, depth=64, depth_v=64),
    WgmmaTile(consumers=2, columns=64, depth=128, depth_v=128),
    WgmmaTile(consumers=3, columns=64, depth=192, depth_v=128, by_role=True),
    WgmmaTile(consumers=3, columns=64, depth=192, depth_v=192, by_role=True),
    WgmmaTile(consumers=3, columns=64, depth=256, depth_v=256, by_role=True),
)


def wgmma_tiles(head_dim: int, head_dim_v: int) -> list[WgmmaTile]:
    """Return the tiles of `wgmma` that calls with a head may get."""
    many_keys = max(row.min_keys for row in WGMMA_FORWARD)
    tiles = (
        row.tile(head_dim, head_dim_v, many_keys, banded)
        for row in WGMMA_FORWARD
        for banded in (False, True)
    )
    return [tile for tile in dict.fromkeys(tiles) if tile is not None]


def ragged_head_dims() -> tuple[int, ...]:
    """Return a head size for each depth of `mma` that isn't a multiple of 16 bytes."""
    return tuple(depth - 1 for depth in MMA_DEPTHS)


def head_dim_buckets() -> tuple[int, ...]:
    """Return a head size for each tile of the tables, where both sizes are equal.

    The last one stands for all that are larger than the largest limit.
    """
    rows = (*SIMT_FORWARD, *SIMT_BACKWARD, *SIMT_BACKWARD_DBIAS)
    limits = {row.max_head_dim for row in rows if row.max_head_dim is not None}
    sizes = sorted(limits | {*MMA_DEPTHS})
    return (*sizes, 2 * sizes[-1])
