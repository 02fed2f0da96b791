"""Tiles: what a block of each kernel family works on, and the memory that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .dtypes import accumulator
from .variant import Variant

# Threads of a block of the small kernels around those of a family.
PASS_THREADS = 128
# Barriers of a block beside the one of all its threads.
_BARRIERS = 15
_ROW_PADDING = 16  # bytes between the rows of a shared-memory tile

_WARPGROUP = 128  # threads
_GROUP_ROWS = 64  # of one product of a warpgroup
_HOPPER_SHARED_MEMORY = 227 * 1024  # that a block can have
# Of a thread that computes, by the number of consumers; see wgmma/forward.cuh. Beside
# sums and weights it needs about so many others: with less, products would have to
# wait for each other.
_HOPPER_REGISTERS = {1: 232, 2: 232, 3: 160, 4: 112}
_HOPPER_OTHER_REGISTERS = 26
# Of the 240 that a thread has which computes gradients; see wgmma/backward.cuh.
_GRADIENT_SUMS = 224
_PANEL_COLUMNS = 64  # of 16 bits: 128 bytes, which are swizzled together
_PANEL_ALIGNMENT = 1024


@dataclass(frozen=True, slots=True)
class SimtTile:
    """A tile of the family `simt`.

    Attributes
    ----------
    rows : int
        Rows that a block owns: queries, or keys for dk and dv.
    columns : int
        Rows of the other side that it takes at a time.
    chunk_d, chunk_v : int
        Channels of q and k, and of v, in shared memory at a time. Channels of the
        result are spread over blocks in chunks of this size.
    resident : bool
        The block's own rows stay in shared memory, which needs a head that is no
        larger than a chunk.
    threads : int
        Threads of a block.
    blocks : int
        Blocks per multiprocessor that the compiler has to leave registers for.
    """

    rows: int
    columns: int
    chunk_d: int
    chunk_v: int
    resident: bool
    threads: int = 128
    blocks: int = 2

    @property
    def family(self) -> str:
        """The kernel family that the tile is for."""
        return "simt"

    @property
    def name(self) -> str:
        """The tile in a kernel's name: r is for resident, s for streaming."""
        kind = "r" if self.resident else "s"
        return (
            f"{self.rows}x{self.columns}d{self.chunk_d}v{self.chunk_v}{kind}"
            f"_{self.blocks}x{self.threads}"
        )

    def constants(self, dtype: np.dtype, variant: Variant) -> dict[str, bool | int]:
        """Return what a kernel's traits hold of the tile."""
        return {
            "Resident": self.resident,
            "Rows": self.rows,
            "Columns": self.columns,
            "ChunkD": self.chunk_d,
            "ChunkV": self.chunk_v,
        }

    def shared_memory(self, kernel: str, dtype: np.dtype, variant: Variant) -> int:
        """Return the bytes of shared memory of a kernel; the compiler checks them."""
        size = accumulator(dtype).itemsize
        widest = max(self.chunk_d, self.chunk_v)
        weights = _tile_bytes(self.rows, self.columns, size)
        if kernel == "forward":
            own = _tile_bytes(self.rows, self.chunk_d, size)
            return own + _tile_bytes(self.columns, widest, size) + weights
        copies = 2 if self.resident else 1
        return copies * _tile_bytes(self.rows + self.columns, widest, size) + weights


@dataclass(frozen=True, slots=True)
class MmaTile:
    """A tile of the family `mma`.

    Attributes
    ----------
    rows : int
        Rows that a block owns: queries, or keys for dk and dv.
    columns : int
        Rows of the other side that it takes at a time.
    depth, depth_v : int
        Channels of q and k, and of v, that the tile has room for; those that a head
        doesn't have are zeros.
    warps : int
        Warps of a block.
    stages : int
        Tiles of the other side that are in flight at once.
    across : int
        Warps that share the same rows: 1 but for dk and dv.
    blocks : int
        Blocks per multiprocessor that the compiler has to leave registers for.
    """

    rows: int
    columns: int
    depth: int
    depth_v: int
    warps: int
    stages: int = 1
    across: int = 1
    blocks: int = 1

    @property
    def family(self) -> str:
        """The kernel family that the tile is for."""
        return "mma"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def name(self) -> str:
        """The tile in a kernel's name: w is for warps, s for stages, a for across."""
        across = f"a{self.across}" if self.across != 1 else ""
        return (
            f"{self.rows}x{self.columns}d{self.depth}v{self.depth_v}"
            f"_{self.warps}w{self.stages}s{across}_{self.blocks}b"
        )

    def constants(self, dtype: np.dtype, variant: Variant) -> dict[str, bool | int]:
        """Return what a kernel's traits hold of the tile.

        A product of float32 is made of three of tf32, unless one is precise enough.
        """
        split = dtype == np.float32 and not variant.tf32
        return {
            "Rows": self.rows,
            "Columns": self.columns,
            "Depth": self.depth,
            "DepthV": self.depth_v,
            "Warps": self.warps,
            "Stages": self.stages,
            "Across": self.across,
            "Products": 3 if split else 1,
        }

    def shared_memory(self, kernel: str, dtype: np.dtype, variant: Variant) -> int:
        """Return the bytes of shared memory of a kernel; the compiler checks them."""
        size = dtype.itemsize

        def both(rows: int) -> int:
            return _tile_bytes(rows, self.depth, size) + _tile_bytes(
                rows, self.depth_v, size
            )

        weights = _tile_bytes(self.rows, self.columns, size)
        other = self.stages * both(self.columns)
        # Bits of the keys that some row of the block sees, of this tile and the next.
        looked_through = variant.mask or variant.bias is not None
        seen = _round_up(8 * -(-self.columns // 32), 16) if looked_through else 0
        if kernel == "forward":
            # The output takes the place of q in the end.
            widest = max(self.depth, self.depth_v)
            return _tile_bytes(self.rows, widest, size) + other + seen
        if kernel == "convert_dq":
            return PASS_THREADS // 32 * _tile_bytes(16, self.depth, size)
        if kernel == "backward_dq":
            return both(self.rows) + other + seen
        if kernel == "backward_dbias":
            return both(self.rows) + both(self.columns)
        # dS, for dq also that of the tile before, and P.
        copies = 2 if kernel == "backward" else 0
        if self.across > 1:
            copies = max(copies, 1) + 1
        rows = 2 * self.stages * self.columns * accumulator(dtype).itemsize
        return both(self.rows) + other + copies * weights + rows

    def fault(self, dtype: np.dtype) -> str:
        """Return why no kernel can have the tile; empty if one can."""
        # Rows of the other side that one read from shared memory brings.
        rows_read = 16 if dtype.itemsize == 2 else 8
        if min(self.warps, self.stages, self.across, self.blocks) < 1:
            return "warps, stages, across and blocks must be at least 1"
        if self.stages > 2:
            return "stages must be 1 or 2"
        if self.warps % self.across or self.threads > 1024:
            return "warps must be a multiple of across, and at most 32"
        if self.across > 1 and self.warps // self.across > _BARRIERS:
            return f"warps must be at most {_BARRIERS} * across"
        if self.rows < 1 or self.rows % (16 * self.warps // self.across):
            return "rows must be a multiple of 16 * warps / across"
        columns = math.lcm(16, rows_read * self.across)
        if self.columns < 1 or self.columns % columns:
            return f"columns must be a multiple of {columns}"
        depth = depth_multiple(dtype.itemsize, self.across)
        if min(self.depth, self.depth_v) < 1 or any(
            d % depth for d in (self.depth, self.depth_v)
        ):
            return f"depth and depth_v must be multiples of {depth}"
        return ""


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """A tile of the family `wgmma`.

    Attributes
    ----------
    consumers : int
        Warpgroups that compute, each 64 queries, or keys for the gradients; one more
        loads.
    columns : int
        Keys, or queries for the gradients, that are taken at a time.
    depth, depth_v : int
        Channels of q and k, and of v, that the tile has room for; those that a head
        doesn't have are zeros.
    stages : int
        Tiles of keys and of values, or of queries and of dO, that are in flight at
        once.
    ping_pong : bool
        Consumers start their products in turn.
    by_role : bool
        For the gradients: three consumers share 64 keys and each makes other products.
    """

    consumers: int
    columns: int
    depth: int
    depth_v: int
    stages: int = 2
    ping_pong: bool = False
    by_role: bool = False

    # One block has a multiprocessor.
    blocks = 1

    @property
    def family(self) -> str:
        """The kernel family that the tile is for."""
        return "wgmma"

    @property
    def rows(self) -> int:
        """Queries, or keys for the gradients, that a block owns at a time."""
        return _GROUP_ROWS * (1 if self.by_role else self.consumers)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _WARPGROUP * (self.consumers + 1)

    @property
    def name(self) -> str:
        """The tile in a kernel's name: s for stages, p for ping-pong, r for by role."""
        turns = ("p" if self.ping_pong else "") + ("r" if self.by_role else "")
        return (
            f"{self.rows}x{self.columns}d{self.depth}v{self.depth_v}"
            f"_{self.stages}s{turns}"
        )

    def constants(self, dtype: np.dtype, variant: Variant) -> dict[str, bool | int]:
        """Return what a kernel's traits hold of the tile."""
        return {
            "Consumers": self.consumers,
            "Rows": self.rows,
            "Columns": self.columns,
            "Depth": self.depth,
            "DepthV": self.depth_v,
            "Stages": self.stages,
            "QueryStages": self._layout()[0],
            "OutputApart": self._layout()[1],
            "PingPong": self.ping_pong,
        }

    def shared_memory(self, kernel: str, dtype: np.dtype, variant: Variant) -> int:
        """Return the bytes of shared memory of a kernel; the compiler checks them."""
        if kernel in ("backward", "backward_by_role"):
            return self._backward_bytes()
        return self._bytes(*self._layout())

    def _backward_bytes(self) -> int:
        own, other = (
            sum(_panel_bytes(rows, d) for d in (self.depth, self.depth_v))
            for rows in (self.rows, self.columns)
        )
        ds = 2 * _panel_bytes(self.columns, self.rows)
        terms = self.stages * 2 * self.columns * 4
        weights = self.stages * self.columns * self.rows * 2 if self.by_role else 0
        others = (
            self.stages * other
            + ds
            + _round_up(terms + weights, _PANEL_ALIGNMENT)
            + _PANEL_ALIGNMENT  # barriers, and what is to be done
        )
        # The next keys are loaded beside the work on these if there is room for both.
        both = 2 * own + others
        return both if both <= _HOPPER_SHARED_MEMORY else own + others

    def _layout(self) -> tuple[int, bool]:
        """Return how many tiles' queries there is room for, and if also for output."""
        layouts = ((2, True), (2, False))
        return next(
            (each for each in layouts if self._bytes(*each) <= _HOPPER_SHARED_MEMORY),
            (1, False),
        )

    def _bytes(self, query_stages: int, output_apart: bool) -> int:
        q, out = (_panel_bytes(self.rows, d) for d in (self.depth, self.depth_v))
        keys, values = (
            _panel_bytes(self.columns, d) for d in (self.depth, self.depth_v)
        )
        ends = query_stages * q + out if output_apart else query_stages * max(q, out)
        return (
            ends
            + self.stages * (keys + values)
            + _PANEL_ALIGNMENT  # barriers, and what is to be done next
        )

    @property
    def forward_fault(self) -> str:
        """Why no kernel of the forward pass can have the tile; empty if one can."""
        return "only the gradients are made by role" if self.by_role else ""

    @property
    def backward_fault(self) -> str:
        """Why no kernel of the gradients can have the tile; empty if one can."""
        if self.by_role:
            if (self.consumers, self.columns, self.stages) != (3, _GROUP_ROWS, 2):
                return "by role there are 3 consumers, 64 columns and 2 stages"
            if self.ping_pong:
                return "by role there is no ping-pong"
            if self.depth % _PANEL_COLUMNS or self.depth_v % _PANEL_COLUMNS:
                return "by role, depth and depth_v are multiples of 64"
            return ""
        if self.consumers != 2 or self.stages != 2 or self.ping_pong:
            return "the gradients have 2 consumers and 2 stages, without ping-pong"
        if self.depth % 32:
            return "the gradients have a depth that is a multiple of 32"
        halves = self.depth // 2
        if self.columns == _GROUP_ROWS:
            if halves % _PANEL_COLUMNS:
                return "64 columns need a depth that is a multiple of 128"
        elif self.columns != self.rows:
            return "columns must be 64, or 128 as the rows"
        dq = self.depth if self.columns == self.rows else halves
        sums = (self.depth + self.depth_v + 2 * self.columns + dq) // 2
        if sums > _GRADIENT_SUMS:
            return (
                f"sums take {sums} registers of a thread, and there are "
                f"{_GRADIENT_SUMS} for them"
            )
        return ""

    def fault(self, dtype: np.dtype) -> str:
        """Return why no kernel can have the tile; empty if one can."""
        if self.consumers not in _HOPPER_REGISTERS:
            return "consumers must be 1 to 4"
        if not 1 <= self.stages <= 8:
            return "stages must be 1 to 8"
        if self.columns % 16 or not 16 <= self.columns <= 256:
            return "columns must be a multiple of 16 up to 256"
        if any(d % 16 or not 16 <= d <= 256 for d in (self.depth, self.depth_v)):
            return "depth and depth_v must be multiples of 16 up to 256"
        if self.by_role:
            return ""
        sums = (self.depth_v + self.columns) // 2 + self.columns // 4
        if sums + _HOPPER_OTHER_REGISTERS > _HOPPER_REGISTERS[self.consumers]:
            return (
                f"sums and weights take {sums} registers of a thread beside "
                f"{_HOPPER_OTHER_REGISTERS} others, and it has "
                f"{_HOPPER_REGISTERS[self.consumers]}"
            )
        return ""


Tile = SimtTile | MmaTile | WgmmaTile


def depth_multiple(itemsize: int, across: int) -> int:
    """Return what the channels of an `MmaTile` are a multiple of.

    Each of the warps across has whole reads of them, from shared memory.
    """
    channels_read = 32 if itemsize == 4 else 16
    return math.lcm(32, channels_read * across)


def _panel_bytes(rows: int, columns: int) -> int:
    """Return the size of a tile of 16-bit elements, 64 columns after the other."""
    return rows * 2 * _round_up(columns, _PANEL_COLUMNS)


def _tile_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Return the size of a tile in shared memory."""
    return rows * (columns * itemsize + _ROW_PADDING)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
