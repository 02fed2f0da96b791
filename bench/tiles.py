"""The tiles that a family could use for a case: contestants of the workload `tiles`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from cupy_flash import compiler
from cupy_flash.aot import Call
from cupy_flash.configs import (
    MMA_BACKWARD,
    MMA_FORWARD,
    WGMMA_FORWARD,
    MmaRow,
    MmaTile,
    SimtTile,
    Tile,
    WgmmaTile,
)
from cupy_flash.device import CuPyDevice, DeviceInfo, current_device
from cupy_flash.dtypes import accumulator, parse_dtype
from cupy_flash.problem import Options
from cupy_flash.spec import KernelSpec
from cupy_flash.variant import Variant

from .peers.base import Inputs, Peer
from .peers.ours import CuPyFlash
from .results import OURS
from .workloads import ITEMSIZE, Case

# Each candidate is compiled, which takes seconds.
MOST = 12
MOST_OF_MMA = 24
MOST_OF_WGMMA = 32
# What a thread can have for sums.
REGISTERS = 256
# Stages of `wgmma` beyond which the loads aren't what is waited for.
STAGES = 4
# Queries that its gradients can take at a time, and what the channels of their tiles by
# role are a multiple of.
BACKWARD_COLUMNS = (64, 128)
ROLE_CHANNELS = 64
# The kernels with most of a tile's products. Where the sums of dq would take too much,
# dq has a kernel of its own.
MAIN_KERNELS = ("forward", "backward", "backward_by_role", "backward_dkdv")
# Its elements have two bytes, whichever of the two dtypes it is.
HALF = np.dtype(np.float16)
# Further tiles worth measuring with their largest head, whatever the table has.
ALSO_FORWARD = (
    MmaRow(2, 64, 64, 64, warps=4, stages=2, blocks=3),
    MmaRow(2, 256, 128, 112, warps=8),
)
ALSO_BACKWARD = (
    MmaRow(2, 128, 64, 32, warps=4, stages=2, across=2, blocks=2),
    MmaRow(2, 128, 128, 32, warps=8, stages=2, across=2),
    MmaRow(2, 256, 32, 64, warps=8, stages=2, across=4),
    MmaRow(2, 256, 64, 64, warps=8, stages=2, across=2),
)
# Shared memory that a block takes beside its own.
RESERVED = 1024


def why_not(kib: Sequence[int], device: str) -> str:
    """Return why tiles can't be measured with so much shared memory, or ""."""
    if not kib:
        return ""
    if device != "cuda":
        return "a CPU has none"
    most = current_device().info.shared_memory // 1024
    return f"this GPU has {most} KiB" if max(kib) > most else ""


def limited(case: Case, gpu: DeviceInfo) -> DeviceInfo:
    """Return a GPU with as much shared memory as the case says."""
    if case.shared_memory is None:
        return gpu
    return dataclasses.replace(gpu, shared_memory=case.shared_memory * 1024)


def planned(case: Case, gpu: DeviceInfo, config: Any, direction: str) -> Call:
    """Return a case's call with a family or a tile."""
    return Call(
        Options(direction, causal=case.causal, config=config), parse_dtype(case.dtype),
        case.head_dim, case.head_dim_v, case.batch, case.seqlen, case.kv_seqlen,
        case.heads, case.kv_heads,
    )  # fmt: skip


def chosen(case: Case, gpu: DeviceInfo, family: str) -> Tile | None:
    """Return the tile that a case gets of a family, None if that can't serve it."""
    try:
        plan = planned(case, gpu, family, case.direction).plan(gpu)
    except ValueError:
        return None
    (tile,) = (s.spec.tile for s in plan.steps if s.spec.kernel in MAIN_KERNELS)
    return tile


def simt_candidates(case: Case, gpu: DeviceInfo) -> list[SimtTile]:
    """Return tiles worth measuring for a case, the one in use first.

    The row that the table gives, and its neighbours: one property changed at a time,
    then two of those that decide occupancy.
    """
    gpu = limited(case, gpu)
    base = chosen(case, gpu, "simt")
    found = dict.fromkeys([base, *neighbours(base, case)])
    return [
        tile
        for tile in found
        if sensible(tile) and shared_memory(tile, case) <= gpu.shared_memory
    ][:MOST]


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


def mma_candidates(case: Case, gpu: DeviceInfo) -> list[MmaTile]:
    """Return tiles of tensor cores worth measuring for a case, the one in use first.

    None if the family has no tile for the case.
    """
    gpu = limited(case, gpu)
    if case.direction == "forward":
        table, also = MMA_FORWARD, ALSO_FORWARD
    else:
        table, also = MMA_BACKWARD, ALSO_BACKWARD
    tiles = mma_tiles(table, case, gpu)
    if not tiles:
        return []
    base = chosen(case, gpu, "mma")
    others = [fitting_depths(other, case) for other in mma_neighbours(base, case)]
    # The table's other tiles are for less shared memory or, which is of interest only
    # where the first one isn't the choice, for few blocks.
    groups = (others, tiles) if base == tiles[0] else (tiles, others)
    rows = [row for row in also if row.max_depth == case.head_dim]
    further = mma_tiles(rows, case, gpu)
    found = dict.fromkeys([base, *further, *itertools.chain(*groups)])
    kept = [tile for tile in found if tile == base or mma_sensible(tile, case, gpu)]
    return kept[:MOST_OF_MMA]


def mma_tiles(table: Sequence[MmaRow], case: Case, gpu: DeviceInfo) -> list[MmaTile]:
    """Return the tiles of a table that a case could have on a GPU."""
    tiles = (
        row.tile(case.head_dim, case.head_dim_v)
        for row in table
        if row.itemsize == ITEMSIZE[case.dtype]
    )
    return [tile for tile in tiles if tile and blocks_fit(tile, case, gpu)]


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
    yield changed(rows=rows // 2)
    yield changed(rows=2 * rows)
    if case.seqlen < rows:
        yield changed(rows=rows // 4, warps=warps // 4)
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


def fitting_depths(tile: MmaTile, case: Case) -> MmaTile:
    """Return a tile with depths that its warps side by side can divide."""
    row = MmaRow(
        ITEMSIZE[case.dtype], max(case.head_dim, case.head_dim_v), tile.rows,
        tile.columns, tile.warps, across=max(tile.across, 1),
    )  # fmt: skip
    depths = row.tile(case.head_dim, case.head_dim_v)
    return dataclasses.replace(tile, depth=depths.depth, depth_v=depths.depth_v)


def mma_sensible(tile: MmaTile, case: Case, gpu: DeviceInfo) -> bool:
    """Tell whether the kernels take a tile and have room for it."""
    dtype = parse_dtype(case.dtype)
    if tile.fault(dtype):
        return False
    # A multiprocessor has 65536 registers and a thread 255.
    registers = min(REGISTERS, 65536 // (tile.threads * tile.blocks))
    return (
        blocks_fit(tile, case, gpu) and sums_of_a_thread(tile, case, dtype) < registers
    )


def blocks_fit(tile: MmaTile, case: Case, gpu: DeviceInfo) -> bool:
    """Tell whether a multiprocessor has shared memory for the blocks it should hold."""
    each = shared_memory(tile, case) + RESERVED
    return tile.blocks * each <= gpu.shared_memory + RESERVED


def shared_memory(tile: Tile, case: Case) -> int:
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


def wgmma_candidates(case: Case, gpu: DeviceInfo) -> list[WgmmaTile]:
    """Return Hopper's tiles worth measuring for a case, the one in use first.

    None if the family can't serve the case, or if it is to be as on a smaller GPU.
    """
    base = None if case.shared_memory else chosen(case, gpu, "wgmma")
    if base is None:
        return []
    if case.direction == "forward":
        others = [*wgmma_of_table(case), *wgmma_neighbours(base, gpu)]
    else:
        others = list(wgmma_backward_neighbours(base, case))
    found = dict.fromkeys([base, *others])
    kept = [tile for tile in found if tile == base or wgmma_sensible(tile, case, gpu)]
    return kept[:MOST_OF_WGMMA]


def wgmma_of_table(case: Case) -> list[WgmmaTile]:
    """Return the tiles of the forward table for a case's head, whatever the mask."""
    rows = [
        row
        for row in WGMMA_FORWARD
        if case.head_dim <= row.max_depth and case.head_dim_v <= row.max_depth_v
    ]
    # Those that follow are for larger heads.
    limits = rows[0].max_depth, rows[0].max_depth_v
    return [
        row.tile(case.head_dim, case.head_dim_v, row.min_keys, bool(row.banded))
        for row in rows
        if (row.max_depth, row.max_depth_v) == limits
    ]


def wgmma_backward_neighbours(tile: WgmmaTile, case: Case) -> Iterator[WgmmaTile]:
    """Yield tiles of the gradients: other numbers of queries, then the one by role.

    That has 64 queries and no more channels than the head needs. There are no others:
    consumers and stages are the same in all tiles of a kind.
    """
    if not tile.by_role:
        for columns in BACKWARD_COLUMNS:
            yield dataclasses.replace(tile, columns=columns)
    depth, depth_v = (
        -(-size // ROLE_CHANNELS) * ROLE_CHANNELS
        for size in (case.head_dim, case.head_dim_v)
    )
    yield WgmmaTile(3, 64, depth, depth_v, by_role=True)


def wgmma_neighbours(tile: WgmmaTile, gpu: DeviceInfo) -> Iterator[WgmmaTile]:
    """Yield forward tiles that differ in shape, pipelining, or in whose turn it is.

    The more likely ones come first.
    """
    turns = (tile.ping_pong, not tile.ping_pong)
    for ping_pong in turns:
        yield from staged(tile, gpu, ping_pong=ping_pong)
    steps = (16, -16, 32, -32)
    shapes = [(tile.consumers, tile.columns + step) for step in steps]
    others = [n for n in (1, 2, 3, 4) if n != tile.consumers]
    others.sort(key=lambda n: abs(n - tile.consumers))
    for consumers in others:
        # As many logits, then as many keys.
        same = tile.consumers * tile.columns // consumers // 16 * 16
        columns = dict.fromkeys((same, tile.columns, same + 16, same - 16))
        shapes += [(consumers, n) for n in columns]
    for ping_pong, (consumers, columns) in itertools.product(turns, shapes):
        changes = {"consumers": consumers, "columns": columns, "ping_pong": ping_pong}
        yield from staged(tile, gpu, **changes)[:1]


def staged(tile: WgmmaTile, gpu: DeviceInfo, **changes: int) -> list[WgmmaTile]:
    """Return a changed tile with as many stages as fit, then with fewer.

    One alone loads nothing meanwhile. None if it can't be, as only several consumers
    can take turns.
    """
    made = dataclasses.replace(tile, **changes)
    if made.ping_pong and made.consumers == 1:
        return []
    each = [dataclasses.replace(made, stages=n) for n in range(STAGES, 1, -1)]
    return [
        one
        for one in each
        if not one.fault(HALF)
        and one.shared_memory("forward", HALF, Variant()) <= gpu.shared_memory
    ]


def wgmma_sensible(tile: WgmmaTile, case: Case, gpu: DeviceInfo) -> bool:
    """Tell whether the kernels take a tile and have room for it."""
    fault = tile.fault(parse_dtype(case.dtype))
    if case.direction != "forward":
        fault = fault or tile.backward_fault
    return not fault and shared_memory(tile, case) <= gpu.shared_memory


# From the fastest family to the one that takes everything.
CANDIDATES: dict[str, Callable[[Case, DeviceInfo], Sequence[Tile]]] = {
    "wgmma": wgmma_candidates,
    "mma": mma_candidates,
    "simt": simt_candidates,
}


def candidates(case: Case, gpu: DeviceInfo, family: str | None = None) -> list[Tile]:
    """Return tiles of a family, or of the one that a case gets by itself."""
    for found in (CANDIDATES[name](case, gpu) for name in CANDIDATES):
        if found and family in (None, found[0].family):
            return [*found]
    return []


# --- Measuring them -------------------------------------------------------------------


class Limited(CuPyFlash):
    """A tile that shares a multiprocessor with no more blocks than on a smaller GPU.

    Its launches ask for more shared memory than they need, as much as leaves room for
    as many blocks as there would be.
    """

    def build(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """Return a call of the public functions."""
        call = super().build(case, inputs)
        device = current_device()
        needed = shared_memory(self.config, case)
        asked = padded(needed, limited(case, device.info), device.info)

        def padding() -> Any:
            with asking(device, needed, asked):
                return call()

        return self._checked(padding)


def padded(needed: int, smaller: DeviceInfo, gpu: DeviceInfo) -> int:
    """Return the shared memory of which a GPU holds as often as another what's needed.

    The other has less of it, and other limits are not known here.
    """
    count = (smaller.shared_memory + RESERVED) // (needed + RESERVED)
    share = (gpu.shared_memory + RESERVED) // max(count, 1) - RESERVED
    return max(needed, share // 16 * 16)


@contextlib.contextmanager
def asking(device: CuPyDevice, needed: int, asked: int) -> Iterator[None]:
    """Launch kernels that need so much shared memory with more of it."""
    from cupy.cuda import driver

    limit = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    launch = device.launch

    def launch_padded(
        kernel: Any, grid: int, block: int, shared: int, *arguments: Any
    ) -> None:
        if shared == needed:
            driver.funcSetAttribute(kernel.ptr, limit, asked)
            shared = asked
        launch(kernel, grid, block, shared, *arguments)

    device.launch = launch_padded
    try:
        yield
    finally:
        del device.launch


def peers(
    case: Case, family: str | None = None, gpu: DeviceInfo | None = None
) -> list[Peer]:
    """Return the tile that a case gets and, beside it, each candidate of a family."""
    gpu = gpu or current_device().info
    make = CuPyFlash if case.shared_memory is None else Limited
    return [
        make(config=candidates(case, gpu)[0], name=OURS),
        *(make(config=tile) for tile in candidates(case, gpu, family)),
    ]


def kernels(
    cases: Iterable[Case], gpu: DeviceInfo, family: str | None = None
) -> list[KernelSpec]:
    """Return the kernels of all candidates of some cases."""
    specs: list[KernelSpec] = []
    for case in cases:
        tiles = [candidates(case, gpu)[0], *candidates(case, gpu, family)]
        calls = [planned(case, gpu, tile, case.direction) for tile in tiles]
        if case.direction != "forward":
            calls.append(planned(case, gpu, None, "forward"))
        for call in calls:
            with contextlib.suppress(ValueError):  # its row will say why
                specs += [step.spec for step in call.plan(gpu).steps]
    return list(dict.fromkeys(specs))


def precompile(
    cases: Iterable[Case], family: str | None = None, gpu: DeviceInfo | None = None
) -> int:
    """Put the kernels of some cases into the cache, in a process for each core.

    Else the time of a run would go to compiling one after the other. Returns how many
    there are.
    """
    gpu = gpu or current_device().info
    specs = kernels(cases, gpu, family)
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(os.cpu_count() or 1, len(specs)))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        capabilities = itertools.repeat(gpu.compute_capability)
        for _ in pool.map(keep, specs, capabilities, chunksize=1):
            pass
    return len(specs)


def keep(spec: KernelSpec, capability: int) -> None:
    """Put a kernel into the cache; one that can't be compiled says so when it's run."""
    with contextlib.suppress(compiler.CompileError):
        compiler.cached_image(spec, capability)
