"""Plans of the family `wgmma`: Hopper's warpgroup products and tensor memory copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from . import configs, plan_mma
from .device import DeviceInfo
from .params import Batch, merge_batch_axes
from .plan_base import (
    DELTA_LANES,
    MAX_GRID,
    Builder,
    DoesNotFit,
    MapSpec,
    Step,
    blocks,
    scales_first,
)
from .problem import Operand, Problem
from .tiles import MmaTile, WgmmaTile
from .variant import Variant

_LOADED_WIDE = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "dout")}
_STORED = {"forward": ("out",), "backward": ("dk", "dv")}

_CAPABILITY = 90
_NVRTC = (12, 9)  # the oldest that the kernels are compiled with in tests
# 12.9 comes to a segmentation fault on gradients that aren't made by role.
_NVRTC_GRADIENTS = (13, 0)
_WIDTH = 16
_MMA_ROWS = 16
_GROUP_ROWS = 64
_PANEL_COLUMNS = 64
_MAX_STRIDE = 2**40
_MAX_BATCH_AXES = 2  # a tensor map has five axes
# Bytes that blocks of a section of heads share, so that the L2 cache, of 50 or 60 MB,
# holds them beside what passes through (bench/LOG.md): forward keys and values,
# backward queries, dO and the sums of dq.
_SECTION = 32 * 2**20
_LEAST_SECTION = 8  # heads
# What the sums of dq may take beside out, lse, and dq in their dtype.
_MOST_SUMS = 2
# What a tile costs beside its rows, in rows: fewer rows share each copy of a key.
_TILE_COST = 96


def refusal(problem: Problem, device: DeviceInfo) -> str:
    """Return why the family can't serve a problem on a GPU; empty if it may."""
    if device.compute_capability != _CAPABILITY:
        return "wgmma is for compute capability 9.0"
    if device.nvrtc < _NVRTC:
        return f"wgmma needs {_newer(device, _NVRTC)}"
    if problem.dtype.itemsize != 2:
        return f"wgmma has no products of {problem.dtype}"
    for name in ("bias", "mask"):
        if problem.has(name):
            return f"wgmma reads no {name} array yet"
    limit = configs.WGMMA_DEPTHS[-1]
    if problem.direction == "backward":
        refused = _backward_refusal(problem)
        if refused:
            return refused
        limit = configs.WGMMA_BACKWARD[-1].depth
    if max(problem.head_dim, problem.head_dim_v) > limit:
        return f"wgmma has tiles for head sizes of up to {limit}"
    if problem.seqlen_k == 0:
        return "there are no keys to copy"
    if len(merge_batch_axes(problem).shape) > _MAX_BATCH_AXES:
        return (
            f"the batch has more than {_MAX_BATCH_AXES} axes that can't be merged, "
            "more than a tensor map has room for"
        )
    # Stores of a row that ends inside 16 bytes would overwrite what follows.
    for name in _STORED[problem.direction]:
        operand = problem.operand(name)
        row = operand.shape[-1] * problem.dtype.itemsize
        if needs_copy(operand) or row % _WIDTH:
            return (
                f"{name} can't be written by tensor maps: its channels must lie side "
                "by side and its rows start and end at multiples of 16 bytes"
            )
    return ""


def _backward_refusal(problem: Problem) -> str:
    """Return why the family has no gradients for a problem; empty if it may."""
    if problem.deterministic:
        return "wgmma adds to dq by atomics, which isn't deterministic"
    if problem.softcap > 0:
        return "wgmma's gradients have no softcap yet"
    if problem.has("alibi_slopes"):
        return "wgmma's gradients have no alibi_slopes yet"
    if scales_first(problem):
        return "wgmma's gradients need a positive scale that doesn't count as 0"
    if problem.batch * problem.seqlen_q == 0:
        return "there are no queries to copy"
    return ""


def gradients_refusal(tile: WgmmaTile, device: DeviceInfo) -> str:
    """Return why the kernel of the gradients can't be compiled; empty if it can."""
    if tile.by_role or device.nvrtc >= _NVRTC_GRADIENTS:
        return ""
    return f"tile {tile.name} needs {_newer(device, _NVRTC_GRADIENTS)}"


def _newer(device: DeviceInfo, needed: tuple[int, int]) -> str:
    """Say which NVRTC is needed instead of the present one."""
    version, present = (".".join(map(str, v)) for v in (needed, device.nvrtc))
    return f"NVRTC {version} or later, and this is {present}"


def needs_copy(operand: Operand) -> bool:
    """Whether an array can't be described by a tensor map as it lies."""
    *steps, (channels, step) = zip(operand.shape, operand.strides, strict=True)
    sequence, stride = steps[-2]
    return (
        operand.misalignment % _WIDTH != 0
        or (channels > 1 and step != operand.dtype.itemsize)
        or any(n > 1 and (s % _WIDTH or not 0 <= s < _MAX_STRIDE) for n, s in steps)
        or (sequence > 1 and stride == 0)
    )


def tensor_map(operand: Operand, batch: Batch, rows: int) -> MapSpec:
    """Describe the map of an array, for boxes of `rows` rows of 64 channels.

    An axis along which the array repeats has one entry.
    """
    sequence, heads, channels = operand.shape[-3:]
    steps = operand.strides[-3:-1]
    axes = [
        (sequence, steps[0]),
        (heads, steps[1]),
        *reversed(list(zip(batch.shape, batch.strides[operand.name], strict=True))),
    ]
    # The stride of an axis of one entry isn't used, but must be legal.
    kept = [(n, s) if n > 1 and s != 0 else (1, _WIDTH) for n, s in axes]
    shape, strides = zip(*kept, strict=True)
    box = (_PANEL_COLUMNS, rows, *(1 for _ in shape[1:]))
    return MapSpec(operand.name, operand.dtype, (channels, *shape), strides, box)


class WgmmaBuilder(Builder):
    """Collects the launches of a call of the family `wgmma`."""

    family = "wgmma"

    def forward(self) -> None:
        """Plan the forward pass."""
        p = self.problem
        tile = self._tile()
        heads = p.batch * p.heads_q
        tiles = self._count(tile)
        if tiles > MAX_GRID:
            raise DoesNotFit(f"forward: {tiles} tiles are more than a launch can have")
        if tiles == 0:
            return
        self.section = self._section(heads)
        self._add_claiming("forward", tile, tiles)
        # The order of wgmma/storage.cuh.
        self._add_maps(
            {"q": tile.rows, "k": tile.columns, "v": tile.columns, "out": tile.rows}
        )

    def backward(self) -> None:
        """Plan the backward pass."""
        p = self.problem
        tile = self._backward_tile()
        refused = gradients_refusal(tile, self.device)
        if refused:
            raise DoesNotFit(f"backward: {refused}")
        sums = plan_mma.sums_of_dq(p, tile.columns, tile.depth)
        if plan_mma.sums_take_too_much(p, sums, self.sums, _MOST_SUMS):
            raise DoesNotFit(
                "backward: the sums of dq, padded to whole tiles, would take more than "
                f"{_MOST_SUMS} times the memory of out, lse and dq"
            )
        heads = p.batch * p.heads_kv
        tiles = heads * blocks(p.seqlen_k, tile.rows)
        if tiles > MAX_GRID:
            raise DoesNotFit(f"backward: {tiles} tiles are more than a launch can have")
        self.reasons.append(
            "one kernel for dq, dk and dv: its blocks add to dq by atomics, so the "
            "last bits of dq may differ between runs; deterministic=True avoids that"
        )
        self.reasons.append(f"backward: tile {tile.name}")
        self.section = self._backward_section(heads, tile)
        self.dq_row_tiles = sums[2]
        self.add_workspace("dq_sums", sums)
        padded = math.prod(sums[:3]) * _MMA_ROWS
        shape = (*sums[:2], sums[2] * _MMA_ROWS // tile.columns, 2, tile.columns)
        self.add_workspace("row_terms", shape)
        self._add_terms(tile, blocks(padded, configs.PASS_THREADS // DELTA_LANES))
        kernel = "backward_by_role" if tile.by_role else "backward"
        self._add_claiming(kernel, tile, tiles)
        self.add_convert_dq(
            MmaTile(_MMA_ROWS, _MMA_ROWS, tile.depth, tile.depth, warps=1), sums
        )
        # The order of wgmma/backward_storage.cuh. What is stored at a time has 64 keys.
        self._add_maps(
            {
                "q": tile.columns, "k": tile.rows, "v": tile.rows,
                "dout": tile.columns, "dk": _GROUP_ROWS, "dv": _GROUP_ROWS,
            }
        )  # fmt: skip

    def _add_claiming(self, kernel: str, tile: WgmmaTile, tiles: int) -> None:
        """Add a launch whose blocks stay and claim a tile after the other."""
        self.add_step(kernel, tile, min(tiles, self.device.multiprocessors))
        if tiles > self.device.multiprocessors:
            self.add_workspace("claims", (1,), dtype=np.dtype(np.uint64))

    def _add_terms(self, tile: WgmmaTile, grid: int) -> None:
        spec = replace(
            self.spec("backward_terms", tile),
            variant=Variant(),
            threads=configs.PASS_THREADS,
        )
        if grid > 0:
            self.steps.append(Step(spec, min(grid, MAX_GRID)))

    def _add_maps(self, rows: Mapping[str, int]) -> None:
        """Add a tensor map for each array, with boxes of so many rows."""
        batch = merge_batch_axes(self.problem)
        self.maps = tuple(
            tensor_map(self.problem.operand(name), batch, n) for name, n in rows.items()
        )

    def _backward_tile(self) -> WgmmaTile:
        """Return the tile that the table gives, or the one asked for."""
        p = self.problem
        if isinstance(self.forced, WgmmaTile):
            self.check_forced("backward", self.forced, self.forced.backward_fault)
            return self.forced
        return next(
            tile
            for tile in configs.WGMMA_BACKWARD
            if tile.depth >= p.head_dim and tile.depth_v >= p.head_dim_v
        )

    def _backward_section(self, heads: int, tile: WgmmaTile) -> int:
        """Return how many kv heads share the L2 cache, if the order matters."""
        p = self.problem
        if p.right is None:
            return 1
        row = (p.head_dim + p.head_dim_v) * p.dtype.itemsize + tile.depth * 4
        head = p.group * p.seqlen_q * row
        return max(1, min(heads, max(_LEAST_SECTION // p.group, _SECTION // head)))

    def _section(self, heads: int) -> int:
        """Return how many heads share the L2 cache, if the order of tiles matters."""
        p = self.problem
        if p.right is None:
            return 1
        head = p.seqlen_k * (p.head_dim + p.head_dim_v) * p.dtype.itemsize
        fitting = max(_LEAST_SECTION, p.group * (_SECTION // head))
        return max(1, min(heads, fitting))

    def _tile(self) -> WgmmaTile:
        """Return the tile that the table gives, or the one asked for."""
        if isinstance(self.forced, WgmmaTile):
            self.check_forced("forward", self.forced, self.forced.forward_fault)
            return self.forced
        p = self.problem
        banded = p.left is not None or p.right is not None
        rows = [
            (row, tile)
            for row in configs.WGMMA_FORWARD
            if (tile := row.tile(p.head_dim, p.head_dim_v, self._keys(), banded))
        ]
        # Those that follow are for larger heads.
        row, first = rows[0]
        tiles = [tile for other, tile in rows if other.limits == row.limits]
        found = min(tiles, key=self._cost)
        self.reasons.append(f"forward: tile {found.name}")
        if found != first:
            of_first, count = self._count(first), self._count(found)
            self.reasons.append(
                f"forward: {first.rows} rows a tile would be "
                + (
                    f"as many tiles as {found.rows}, with more padding"
                    if count == of_first
                    else f"{of_first} tiles for {self.device.multiprocessors} "
                    f"multiprocessors, {found.rows} are {count}"
                )
            )
        return found

    def _keys(self) -> int:
        """Return how many keys a query sees at most."""
        p = self.problem
        if p.left is None or p.right is None:
            return p.seqlen_k
        return min(p.seqlen_k, max(0, p.left + p.right + 1))

    def _cost(self, tile: WgmmaTile) -> int:
        """Return about how long the multiprocessor with most tiles takes."""
        tiles = blocks(self._count(tile), self.device.multiprocessors)
        return tiles * (tile.rows + _TILE_COST)

    def _count(self, tile: WgmmaTile) -> int:
        p = self.problem
        return p.batch * p.heads_q * blocks(p.seqlen_q, tile.rows)


def copied(problem: Problem) -> tuple[str, ...]:
    """Name the inputs that are copied because no tensor map describes them."""
    names = _LOADED_WIDE[problem.direction]
    return tuple(n for n in names if needs_copy(problem.operand(n)))


def row_multiple(problem: Problem) -> int:
    """Return the elements to whose multiple a copy's rows are padded."""
    return plan_mma.row_multiple(problem)
