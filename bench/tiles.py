"""The tiles that a family could use for a case: contestants of the workload `tiles`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from cupy_flash.configs import (
    SIMT_BACKWARD,
    SIMT_FORWARD,
    SimtRow,
    SimtTile,
)

from .peers.base import Peer
from .peers.ours import CuPyFlash
from .workloads import Case

# Bytes of an element while it is computed with.
ACCUMULATOR = {"float16": 4, "bfloat16": 4, "float32": 4, "float64": 8}
# Each candidate is compiled, which takes seconds.
MOST = 12


def simt_candidates(case: Case) -> list[SimtTile]:
    """Return tiles worth measuring for a case, the one in use first.

    The row that the table gives, and its neighbours: one property changed at a time,
    then two of those that decide occupancy.
    """
    table = SIMT_FORWARD if case.direction == "forward" else SIMT_BACKWARD
    base = table_tile(table, case)
    found = dict.fromkeys([base, *neighbours(base, case)])
    return [tile for tile in found if sensible(tile)][:MOST]


def table_tile(table: Sequence[SimtRow], case: Case) -> SimtTile:
    """Return the first tile whose limits hold, as if shared memory were no limit."""
    for row in table:
        if (
            row.accumulator == ACCUMULATOR[case.dtype]
            and case.head_dim <= (row.max_head_dim or case.head_dim)
            and case.head_dim_v <= (row.max_head_dim_v or case.head_dim_v)
        ):
            return row.tile
    raise AssertionError("the last rows of a table have no limits")


def neighbours(tile: SimtTile, case: Case) -> Iterator[SimtTile]:
    """Yield tiles that differ in occupancy, shape, or what is kept."""
    for blocks in (1, 2, 3, 4):
        yield dataclasses.replace(tile, blocks=blocks)
    for rows, threads in ((128, 256), (64, 256), (32, 128)):
        yield dataclasses.replace(tile, rows=rows, threads=threads)
    for columns in (32, 64):
        yield dataclasses.replace(tile, columns=columns)
    sizes = [size for size in (32, 64, 128) if size <= max(case.head_dim, 32)]
    for size in reversed(sizes):
        yield dataclasses.replace(tile, chunk_d=size, chunk_v=size, resident=False)
    if case.head_dim <= 128 and not tile.resident:
        yield dataclasses.replace(
            tile, chunk_d=case.head_dim, chunk_v=case.head_dim, resident=True
        )
    for columns, blocks in itertools.product((32, 64), (2, 3)):
        yield dataclasses.replace(tile, columns=columns, blocks=blocks)


def sensible(tile: SimtTile) -> bool:
    """Tell whether the kernels take a tile: whole passes of threads, packs of 32."""
    return (
        tile.rows % (tile.threads // 16) == 0
        and tile.columns % 32 == 0
        and tile.chunk_d % 32 == 0
        and tile.chunk_v % 32 == 0
    )


def peers(case: Case) -> list[Peer]:
    """Return the library as it is and, beside it, each candidate."""
    return [
        CuPyFlash(),
        *(CuPyFlash(config=tile) for tile in simt_candidates(case)),
    ]
