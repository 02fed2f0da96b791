"""What the planners of all kernel families share: steps, workspace, the passes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from . import configs
from .device import DeviceInfo
from .dtypes import accumulator
from .params import merge_batch_axes
from .problem import Problem
from .spec import KernelSpec
from .tiles import MmaTile, Tile, WgmmaTile
from .variant import Variant

MAX_GRID = 2**31 - 1
DELTA_LANES = 8  # for each row


class DoesNotFit(ValueError):
    """No tile of a family fits the GPU, or the one that was asked for doesn't."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch."""

    spec: KernelSpec
    grid: int

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.spec.threads

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self.spec.shared_memory


@dataclass(frozen=True, slots=True)
class Workspace:
    """An array that lives for one call; `zero`: it is filled with zeros at first."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    zero: bool = False

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MapSpec:
    """A tensor map to be made: an array of which boxes are copied.

    `shape` and `box` are in elements, the innermost axis first; `strides` are in
    bytes, without that of the innermost axis.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def scales_first(problem: Problem) -> bool:
    """Whether logits are scaled before the softmax's maximum is taken."""
    return problem.scale < float(np.finfo(accumulator(problem.dtype)).tiny)


def blocks(count: int, size: int) -> int:
    """Return how many blocks of a size hold that many rows."""
    return -(-count // size)


class Builder(ABC):
    """Collects the launches of one call; each family has its own."""

    family: str

    def __init__(
        self,
        problem: Problem,
        device: DeviceInfo,
        variant: Variant,
        tile: Tile | None,
    ) -> None:
        self.problem = problem
        self.device = device
        self.variant = variant
        self.forced = tile
        self.batch_axes = len(merge_batch_axes(problem).shape)
        self.sums = accumulator(problem.dtype)
        self.reasons: list[str] = []
        self.steps: list[Step] = []
        self.workspace: list[Workspace] = []
        self.cleared: list[str] = []
        self.maps: tuple[MapSpec, ...] = ()
        self.dbias_splits = 1
        self.section = 1
        self.dq_row_tiles = 0

    def build(self) -> None:
        """Plan the call.

        Raises
        ------
        DoesNotFit
        """
        if self.problem.direction == "forward":
            self.forward()
        else:
            self.backward()

    @abstractmethod
    def forward(self) -> None:
        """Plan the forward pass."""

    @abstractmethod
    def backward(self) -> None:
        """Plan the backward pass."""

    def add_delta(self) -> None:
        """Plan what the kernels of all gradients start from."""
        p = self.problem
        self.add_workspace("delta", (p.batch, p.heads_q, p.seqlen_q))
        rows = configs.PASS_THREADS // DELTA_LANES
        self.add_pass("delta", None, blocks(p.batch * p.heads_q * p.seqlen_q, rows))

    def add_convert_dq(self, tile: MmaTile, sums: tuple[int, ...]) -> None:
        """Plan the pass that makes dq of its sums, one warp for 16 queries."""
        grid = blocks(math.prod(sums[:3]), configs.PASS_THREADS // 32)
        self.add_pass("convert_dq", tile, grid, "mma")

    def add_dbias(self, tile: Tile) -> None:
        """Plan the bias's gradient; the counts are those of common/bias_tile.cuh."""
        p = self.problem
        dbias = p.operand("dbias")
        counts = (
            *p.batch_shape,
            p.heads_q,
            blocks(p.seqlen_q, tile.rows),
            blocks(p.seqlen_k, tile.columns),
        )
        owned = summed = 1
        for count, stride in zip(counts, dbias.strides, strict=True):
            if stride == 0:
                summed *= count
            else:
                owned *= count
        if owned == 0 or summed == 0:
            self.cleared.append("dbias")
            return
        # Enough blocks to fill the GPU, as far as there is something to share out.
        wanted = 4 * self.device.multiprocessors
        splits = max(1, min(summed, wanted // owned))
        # No empty part at the end: each takes the same number of tiles, rounded up.
        splits = blocks(summed, blocks(summed, splits))
        self.dbias_splits = splits
        self.reasons.append(
            f"dbias: {owned} tiles, {summed} tiles of logits summed in each"
            + (f", in {splits} parts" if splits > 1 else "")
        )
        self.add_step("backward_dbias", tile, owned * splits)
        if splits > 1:
            shape = (owned * splits, tile.rows, tile.columns)
            self.add_workspace("dbias_partial", shape)
            self.add_pass("reduce_dbias", tile, owned)

    def check_forced(
        self, kernel: str, tile: MmaTile | WgmmaTile, fault: str = ""
    ) -> None:
        """Raise DoesNotFit if no kernel, or not this call, can have a tile.

        `fault` is what the kernel has against it beside what the tile says itself.
        """
        p = self.problem
        fault = tile.fault(p.dtype) or fault
        if fault:
            raise DoesNotFit(f"config asks for tile {tile.name}: {fault}")
        needed = self.spec(kernel, tile).shared_memory
        if (
            needed > self.device.shared_memory
            or tile.depth < p.head_dim
            or tile.depth_v < p.head_dim_v
        ):
            raise DoesNotFit(
                f"config asks for tile {tile.name}, which doesn't fit: {needed} of "
                f"{self.device.shared_memory} bytes of shared memory, head_dim "
                f"{p.head_dim} and {p.head_dim_v}"
            )

    def spec(self, kernel: str, tile: Tile) -> KernelSpec:
        """Return a kernel of the family."""
        return KernelSpec(
            self.family, kernel, self.problem.dtype, self.variant, tile, tile.threads,
            self.batch_axes,
        )  # fmt: skip

    def add_step(self, kernel: str, tile: Tile, grid: int) -> None:
        """Add the launch of a kernel, if it has anything to do."""
        if grid > 0:
            self.steps.append(Step(self.spec(kernel, tile), min(grid, MAX_GRID)))

    def add_pass(
        self, kernel: str, tile: Tile | None, grid: int, family: str = "passes"
    ) -> None:
        """Add the launch of a pass around the kernels of a family."""
        if grid == 0:
            return
        # The passes look at the shape of dbias and of its bias, at no other feature.
        variant = Variant(bias=self.variant.bias if kernel == "reduce_dbias" else None)
        spec = KernelSpec(
            family, kernel, self.problem.dtype, variant, tile, configs.PASS_THREADS,
            self.batch_axes,
        )  # fmt: skip
        self.steps.append(Step(spec, min(grid, MAX_GRID)))

    def add_workspace(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: np.dtype | None = None,
        zero: bool = False,
    ) -> None:
        """Add an array, of the accumulator's dtype unless another one is given."""
        self.workspace.append(Workspace(name, shape, dtype or self.sums, zero))
