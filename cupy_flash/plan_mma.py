"""Plans of the family `mma`: tensor cores of compute capability 7.5 and later."""

from __future__ import annotations

import math

import numpy as np

from . import configs
from .device import DeviceInfo
from .plan_base import MAX_GRID, Builder, DoesNotFit, blocks
from .problem import Problem
from .tiles import MmaTile, Tile

# Inputs that are loaded in pieces of 16 bytes. What else there is comes by elements.
LOADED_WIDE = ("q", "k", "v", "dout")
_WIDTH = 16
# Bytes of workspace that nobody minds.
_NEGLIGIBLE = 2**20
# Bytes of shared memory that each block takes beside its own.
_RESERVED = 1024
_MMA_ROWS = 16  # queries of one mma.sync, and so of a row of workspace `dq_sums`
_MMA_COLUMNS = 8
# Warps that a multiprocessor can issue from at once.
_SCHEDULERS = 4


def refusal(problem: Problem, device: DeviceInfo) -> str:
    """Return why the family can't serve a problem on a GPU; empty if it may."""
    needed = 75 if problem.dtype == np.float16 else 80
    if device.compute_capability < needed:
        major, minor = divmod(needed, 10)
        return (
            f"mma multiplies {problem.dtype} from compute capability {major}.{minor} on"
        )
    limit = configs.MMA_DEPTHS[-1]
    if max(problem.head_dim, problem.head_dim_v) > limit:
        return f"mma has tiles for head sizes of up to {limit}"
    return ""


def row_multiple(problem: Problem) -> int:
    """Return the elements to whose multiple a copy's rows are padded."""
    return _WIDTH // problem.dtype.itemsize


def needs_copy(problem: Problem, name: str) -> bool:
    """Whether an input can't be loaded in pieces of 16 bytes as it lies."""
    operand = problem.operand(name)
    if operand is None:
        return False
    *steps, (channels, step) = zip(operand.shape, operand.strides, strict=True)
    return (
        operand.misalignment % _WIDTH != 0
        or (channels > 1 and step != operand.dtype.itemsize)
        or any(n > 1 and s % _WIDTH for n, s in steps)
    )


def copied(problem: Problem) -> tuple[str, ...]:
    """Name the inputs that are copied because they can't be loaded as they lie."""
    return tuple(name for name in LOADED_WIDE if needs_copy(problem, name))


def is_ragged(problem: Problem) -> bool:
    """Whether a head's channels aren't whole pieces of 16 bytes."""
    size = problem.dtype.itemsize
    return any(d * size % _WIDTH for d in (problem.head_dim, problem.head_dim_v))


def sums_of_dq(problem: Problem, row_multiple: int, depth: int) -> tuple[int, ...]:
    """Return the shape of the workspace in which blocks add up dq.

    It holds fragments of 16 queries by 8 channels, 4 sums for each lane of a warp.
    """
    rows = blocks(problem.seqlen_q, row_multiple) * row_multiple // _MMA_ROWS
    return (problem.batch, problem.heads_q, rows, depth // _MMA_COLUMNS, 32, 4)


def sums_take_too_much(
    problem: Problem, sums: tuple[int, ...], dtype: np.dtype, times: int = 1
) -> bool:
    """Whether the sums of dq are larger than out, lse, and dq in their dtype.

    Or so many times as large.
    """
    p = problem
    row = p.head_dim_v * p.dtype.itemsize + (p.head_dim + 1) * dtype.itemsize
    limit = times * p.batch * p.heads_q * p.seqlen_q * row
    return math.prod(sums) * dtype.itemsize > limit + _NEGLIGIBLE


class MmaBuilder(Builder):
    """Collects the launches of a call of the family `mma`."""

    family = "mma"

    def forward(self) -> None:
        """Plan the forward pass."""
        tile = self._tile("forward", configs.MMA_FORWARD)
        self.add_step("forward", tile, self._query_blocks(tile.rows))

    def backward(self) -> None:
        """Plan the backward pass."""
        self.add_delta()
        if self.problem.deterministic:
            self._two_kernels(
                "deterministic: dq has a kernel of its own and none adds by atomics, "
                "so every run gives the same bits"
            )
        elif self._sums_take_too_much():
            self._two_kernels(
                "dq has a kernel of its own: its sums, which come in fragments of 16 "
                "queries, would take more memory than out, lse and dq together"
            )
        else:
            self._all_gradients()
        if self.problem.bias_grad:
            self.add_dbias(self._tile("backward_dbias", configs.MMA_BACKWARD_DBIAS))

    def _two_kernels(self, reason: str) -> None:
        """Plan a kernel for dq and one for dk and dv; both make the logits."""
        self.reasons.append(reason)
        tile = self._tile("backward_dq", configs.MMA_BACKWARD_DQ)
        self.add_step("backward_dq", tile, self._query_blocks(tile.rows))
        tile = self._tile("backward_dkdv", configs.MMA_BACKWARD)
        self.add_step("backward_dkdv", tile, self._key_blocks(tile.rows))

    def _sums_take_too_much(self) -> bool:
        """Whether the sums of dq would take too much memory."""
        tile = self._find("backward", configs.MMA_BACKWARD)
        sums = sums_of_dq(self.problem, _MMA_ROWS, tile.depth)
        return sums_take_too_much(self.problem, sums, self.sums)

    def _all_gradients(self) -> None:
        """Plan one kernel for dq, dk and dv, which computes the logits once."""
        self.reasons.append(
            "one kernel for dq, dk and dv: its blocks add to dq by atomics, so the "
            "last bits of dq may differ between runs; deterministic=True avoids that"
        )
        tile = self._tile("backward", configs.MMA_BACKWARD)
        sums = sums_of_dq(self.problem, _MMA_ROWS, tile.depth)
        self.dq_row_tiles = sums[2]
        self.add_step("backward", tile, self._key_blocks(tile.rows))
        self.add_workspace("dq_sums", sums, zero=True)
        self.add_convert_dq(tile, sums)

    def add_step(self, kernel: str, tile: Tile, grid: int) -> None:
        """Add the launch of a kernel, in which each block has one tile."""
        if grid > MAX_GRID:
            raise DoesNotFit(f"{kernel}: {grid} blocks are more than a launch can have")
        super().add_step(kernel, tile, grid)

    def _query_blocks(self, rows: int) -> int:
        p = self.problem
        return p.batch * p.heads_q * blocks(p.seqlen_q, rows)

    def _key_blocks(self, rows: int) -> int:
        p = self.problem
        return p.batch * p.heads_kv * blocks(p.seqlen_k, rows)

    def _blocks_of(self, kernel: str, rows: int) -> int:
        """Return how many blocks a kernel has if each owns so many rows."""
        if kernel in ("forward", "backward_dq"):
            return self._query_blocks(rows)
        return self._key_blocks(rows)

    def _tile(self, kernel: str, table: tuple[configs.MmaRow, ...]) -> MmaTile:
        """Take a tile, and say so."""
        if self._is_forced(kernel):
            return self._find(kernel, table)
        first, tile = self._choose(kernel, table)
        self.reasons.append(f"{kernel}: tile {tile.name}")
        if tile != first:
            self._explain_rows(kernel, first.rows, tile.rows)
        return tile

    def _explain_rows(self, kernel: str, first: int, rows: int) -> None:
        """Say why a block owns fewer rows than with the first tile that fits."""
        of_first, count = (self._blocks_of(kernel, n) for n in (first, rows))
        self.reasons.append(
            f"{kernel}: {first} rows a block would be "
            + (
                "more than the sequence has"
                if count == of_first
                else f"{of_first} blocks for {self.device.multiprocessors} "
                f"multiprocessors, {rows} are {count}"
            )
        )

    def _find(self, kernel: str, table: tuple[configs.MmaRow, ...]) -> MmaTile:
        """Return the tile that a kernel gets of a table, or the one asked for."""
        if self._is_forced(kernel):
            across = kernel == "forward" and self.forced.across != 1
            fault = "only dk and dv have warps across" if across else ""
            self.check_forced(kernel, self.forced, fault)
            return self.forced
        return self._choose(kernel, table)[1]

    def _choose(
        self, kernel: str, table: tuple[configs.MmaRow, ...]
    ) -> tuple[MmaTile, MmaTile]:
        """Return the first tile that fits the GPU, and the one that is taken.

        That is the first with a block for each multiprocessor or, if none has so many,
        the one with most. Where fewer rows make as many blocks, the others would be
        padding.
        """
        p = self.problem
        first = chosen = None
        for row in table:
            if row.itemsize != p.dtype.itemsize:
                continue
            if chosen is not None and not self._is_better(kernel, row, chosen):
                continue
            tile = row.tile(p.head_dim, p.head_dim_v)
            if tile is None or not self._blocks_fit(kernel, tile):
                continue
            if first is None:
                first = chosen = tile
            elif (tile.depth, tile.depth_v) == (first.depth, first.depth_v):
                chosen = tile
        if first is None:
            raise DoesNotFit(
                f"{kernel}: no tile of mma for {p.dtype} with head_dim {p.head_dim} "
                f"and {p.head_dim_v} fits {self.device.shared_memory // 1024} KiB of "
                "shared memory"
            )
        return first, chosen

    def _is_better(self, kernel: str, row: configs.MmaRow, chosen: MmaTile) -> bool:
        """Whether a row's fewer rows a block serve a small problem better."""
        # The bias's gradient fills the GPU with parts of sums instead. Blocks that
        # leave schedulers idle have more to load, and no warp has less to do.
        if (
            kernel == "backward_dbias"
            or row.rows >= chosen.rows
            or row.warps < _SCHEDULERS
        ):
            return False
        count, more = (self._blocks_of(kernel, n) for n in (chosen.rows, row.rows))
        return count == more or count < self.device.multiprocessors

    def _is_forced(self, kernel: str) -> bool:
        """Whether `config` decides about a kernel.

        Not about the bias's gradient, nor with warps side by side about dq alone.
        """
        if self.forced is None or kernel == "backward_dbias":
            return False
        return kernel != "backward_dq" or self.forced.across == 1

    def _blocks_fit(self, kernel: str, tile: MmaTile) -> bool:
        """Whether a multiprocessor has shared memory for the blocks it should hold."""
        # Each block takes a little more, of which one block's is already left out.
        each = self.spec(kernel, tile).shared_memory + _RESERVED
        return tile.blocks * each <= self.device.shared_memory + _RESERVED
