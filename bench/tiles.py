"""The tiles that a family could use for a case: contestants of the workload `tiles`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from cupy_flash.configs import (
    MMA_BACKWARD,
    MMA_FORWARD,
    SIMT_BACKWARD,
    SIMT_FORWARD,
    MmaRow,
    MmaTile,
    SimtRow,
    SimtTile,
    Tile,
)
from cupy_flash.dtypes import accumulator, parse_dtype
from cupy_flash.variant import Variant

from .peers.base import Peer
from .peers.ours import CuPyFlash
from .workloads import ITEMSIZE, Case

# Bytes of an element while it is computed with.
ACCUMULATOR = {"float16": 4, "bfloat16": 4, "float32": 4, "float64": 8}
# Each candidate is compiled, which takes seconds.
MOST = 12
MOST_OF_MMA = 24
# What the largest GPUs give a block, and what a thread can have for sums.
SHARED_MEMORY = 227 * 1024
REGISTERS = 256


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


def mma_candidates(case: Case) -> list[MmaTile]:
    """Return tiles of tensor cores worth measuring for a case, the one in use first.

    None if the family has no tile for the case.
    """
    table = MMA_FORWARD if case.direction == "forward" else MMA_BACKWARD
    rows = mma_rows(table, case)
    if not rows:
        return []
    # Those that follow in the table are made for less shared memory.
    tiles = [row.tile(case.head_dim, case.head_dim_v) for row in rows]
    others = (
        fitting_depths(other, rows[0], case) for other in mma_neighbours(tiles[0], case)
    )
    found = dict.fromkeys([*tiles[:1], *others, *tiles[1:]])
    kept = [tile for tile in found if tile == tiles[0] or mma_sensible(tile, case)]
    return kept[:MOST_OF_MMA]


def mma_rows(table: Sequence[MmaRow], case: Case) -> list[MmaRow]:
    """Return the rows of a table that a case could have on the largest GPU."""
    rows = []
    for row in table:
        tile = row.tile(case.head_dim, case.head_dim_v)
        if row.itemsize == ITEMSIZE[case.dtype] and tile is not None:
            if shared_memory(tile, case) <= SHARED_MEMORY:
                rows.append(row)
    return rows


def mma_neighbours(tile: MmaTile, case: Case) -> Iterator[MmaTile]:
    """Yield tiles that differ in occupancy, shape, pipelining, or how warps divide it.

    The more likely ones come first.
    """

    def changed(**changes: int) -> MmaTile:
        return dataclasses.replace(tile, **changes)

    rows, columns, warps = tile.rows, tile.columns, tile.warps
    for stages in (1, 2):
        yield changed(stages=stages)
    for blocks in (1, 2, 3):
        yield changed(blocks=blocks)
    for wide in (2 * columns, columns // 2):
        yield changed(columns=wide)
    yield changed(warps=2 * warps)
    yield changed(rows=2 * rows, warps=2 * warps)
    yield changed(rows=rows // 2, warps=warps // 2)
    yield changed(warps=warps // 2)
    if case.direction != "forward":
        for across in (1, 2, 4):
            yield changed(across=across, warps=warps * across // tile.across)
            yield changed(across=across)
    for wide, stages, blocks in itertools.product(
        (2 * columns, columns // 2), (1, 2), (1, 2)
    ):
        yield changed(columns=wide, stages=stages, blocks=blocks)
    for shape, stages, blocks in itertools.product(
        ((2 * rows, 2 * warps), (rows // 2, warps // 2)), (1, 2), (1, 2)
    ):
        yield changed(rows=shape[0], warps=shape[1], stages=stages, blocks=blocks)


def fitting_depths(tile: MmaTile, row: MmaRow, case: Case) -> MmaTile:
    """Return a tile with depths that its warps side by side can divide."""
    depths = dataclasses.replace(row, across=max(tile.across, 1)).tile(
        case.head_dim, case.head_dim_v
    )
    return dataclasses.replace(tile, depth=depths.depth, depth_v=depths.depth_v)


def mma_sensible(tile: MmaTile, case: Case) -> bool:
    """Tell whether the kernels take a tile and have room for it."""
    dtype = parse_dtype(case.dtype)
    if tile.fault(dtype):
        return False
    # A multiprocessor has 65536 registers and a thread 255.
    registers = min(REGISTERS, 65536 // (tile.threads * tile.blocks))
    return (
        shared_memory(tile, case) * tile.blocks <= SHARED_MEMORY
        and sums_of_a_thread(tile, case, dtype) < registers
    )


def shared_memory(tile: MmaTile, case: Case) -> int:
    """Return the shared memory of the kernel that a case measures, in bytes."""
    kernel = "forward" if case.direction == "forward" else "backward"
    return tile.shared_memory(kernel, parse_dtype(case.dtype), Variant())


def sums_of_a_thread(tile: MmaTile, case: Case, dtype: np.dtype) -> float:
    """Return the registers that a thread needs for what it adds up."""
    if case.direction == "forward":  # S and O
        channels = tile.columns + tile.depth_v
    else:  # S and dP, dK and dV
        channels = 2 * tile.columns + tile.depth + tile.depth_v
    return tile.rows * channels / tile.threads * accumulator(dtype).itemsize / 4


def candidates(case: Case) -> list[Tile]:
    """Return tiles of the family that a case gets by itself."""
    return [*mma_candidates(case)] or [*simt_candidates(case)]


def peers(case: Case) -> list[Peer]:
    """Return the library as it is and, beside it, each candidate."""
    return [CuPyFlash(), *(CuPyFlash(config=tile) for tile in candidates(case))]
