"""From a problem and the facts about a GPU to a plan: which kernels, how launched.

Nothing here touches a GPU. Every decision leaves a reason in the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from . import configs
from .configs import SimtTile
from .device import DeviceInfo
from .dtypes import accumulator
from .params import merge_batch_axes
from .problem import Problem
from .spec import KernelSpec, Variant

_MAX_GRID = 2**31 - 1


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
    """An array that lives for one call."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """How a call is computed; ``print`` shows it.

    Attributes
    ----------
    problem : Problem
    device : DeviceInfo
    family : str
        The kernel family: "simt".
    steps : tuple of Step
        The kernels in the order of their launch; none if the result is empty.
    workspace : tuple of Workspace
    copies : tuple of str
        Arrays that are copied once because no kernel can load them as they are.
    cleared : tuple of str
        Outputs that are filled with zeros.
    dbias_splits : int
        Parts in which each tile of the bias gradient is summed.
    reasons : tuple of str
    """

    problem: Problem
    device: DeviceInfo
    family: str
    steps: tuple[Step, ...]
    workspace: tuple[Workspace, ...]
    copies: tuple[str, ...]
    cleared: tuple[str, ...]
    dbias_splits: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        p, d = self.problem, self.device
        major, minor = divmod(d.compute_capability, 10)
        lines = [
            f"{p.direction} on {d.name} (compute capability {major}.{minor}, "
            f"{d.multiprocessors} multiprocessors, "
            f"{d.shared_memory // 1024} KiB shared memory, "
            f"NVRTC {d.nvrtc[0]}.{d.nvrtc[1]})",
            f"  {p.dtype}: batch {p.batch}, queries {p.seqlen_q} x {p.heads_q} heads, "
            f"keys {p.seqlen_k} x {p.heads_kv} heads, head_dim {p.head_dim}"
            + (f" and {p.head_dim_v}" if p.head_dim_v != p.head_dim else ""),
            f"  family: {self.family}",
        ]
        lines += [
            f"  kernel: {s.spec.symbol}, {s.grid} blocks of {s.block} threads, "
            f"{s.shared_memory / 1024:.1f} KiB shared memory"
            for s in self.steps
        ]
        lines += [
            f"  workspace: {w.name} {w.shape} {w.dtype}, {w.nbytes / 2**20:.2f} MiB"
            for w in self.workspace
        ]
        lines += [f"  why: {reason}" for reason in self.reasons]
        return "\n".join(lines)


def make_plan(problem: Problem, device: DeviceInfo) -> Plan:
    """Choose the kernels for a problem on a device.

    Raises
    ------
    ValueError
        If ``config=`` asks for a tile that doesn't fit, or an output isn't aligned to
        its elements.
    """
    reasons: list[str] = []
    copies = _misaligned(problem, reasons)
    tile = _forced_tile(problem, reasons)
    reasons.append("family simt: the only one that has been built so far")
    variant = _variant(problem, reasons)
    builder = _Builder(problem, device, variant, tile, reasons)
    if problem.direction == "forward":
        builder.forward()
    else:
        builder.backward()
    return Plan(
        problem=problem,
        device=device,
        family="simt",
        steps=tuple(builder.steps),
        workspace=tuple(builder.workspace),
        copies=copies,
        cleared=tuple(builder.cleared),
        dbias_splits=builder.dbias_splits,
        reasons=tuple(reasons),
    )


def _misaligned(problem: Problem, reasons: list[str]) -> tuple[str, ...]:
    """Name the inputs that lie across the boundaries of their elements."""
    names = []
    for operand in problem.operands:
        size = operand.dtype.itemsize
        steps = zip(operand.shape, operand.strides, strict=True)
        if operand.misalignment % size or any(s % size for n, s in steps if n > 1):
            if operand.name in problem.outputs:
                raise ValueError(
                    f"{operand.name} has elements that don't lie on multiples of "
                    f"{size} bytes; an output must be aligned to its elements"
                )
            names.append(operand.name)
            reasons.append(
                f"{operand.name} is copied: its elements of {size} bytes don't lie on "
                f"multiples of {size} bytes"
            )
    return tuple(names)


def _forced_tile(problem: Problem, reasons: list[str]) -> SimtTile | None:
    if not isinstance(problem.config, SimtTile):
        return None
    reasons.append(f"config= asks for tile {problem.config.name}")
    return problem.config


def _variant(problem: Problem, reasons: list[str]) -> Variant:
    bias = problem.operand("bias")
    scale_first = problem.scale < float(np.finfo(accumulator(problem.dtype)).tiny)
    if scale_first:
        reasons.append(
            "logits are scaled before the softmax: a scale that isn't positive, or so "
            "small that it counts as 0, can't be taken out of a maximum"
        )
    if problem.precision == "tf32":
        reasons.append("precision='tf32' is not made use of: simt has no tensor cores")
    return Variant(
        left=problem.left is not None,
        right=problem.right is not None,
        softcap=problem.softcap > 0,
        alibi=problem.has("alibi_slopes"),
        bias=None if bias is None else bias.dtype,
        mask=problem.has("mask"),
        scale_first=scale_first,
    )


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


class _Builder:
    """Collects the launches of one call."""

    def __init__(
        self,
        problem: Problem,
        device: DeviceInfo,
        variant: Variant,
        tile: SimtTile | None,
        reasons: list[str],
    ) -> None:
        self.problem = problem
        self.device = device
        self.variant = variant
        self.tile = tile
        self.reasons = reasons
        self.batch_axes = len(merge_batch_axes(problem).shape)
        self.sums = accumulator(problem.dtype)
        self.steps: list[Step] = []
        self.workspace: list[Workspace] = []
        self.cleared: list[str] = []
        self.dbias_splits = 1

    def forward(self) -> None:
        p = self.problem
        tile = self._tile("forward", configs.SIMT_FORWARD)
        chunks = _blocks(p.head_dim_v, tile.chunk_v)
        if chunks > 1:
            self.reasons.append(
                f"head_dim_v {p.head_dim_v} is spread over {chunks} blocks, each of "
                "which recomputes the logits"
            )
        rows = _blocks(p.seqlen_q, tile.rows)
        self._step("forward", tile, p.batch * p.heads_q * rows * chunks)

    def backward(self) -> None:
        p = self.problem
        self.reasons.append(
            "each gradient has a kernel of its own and none adds by atomics, so every "
            "run gives the same bits"
        )
        self._workspace("delta", (p.batch, p.heads_q, p.seqlen_q))
        self._pass("delta", None, _blocks(p.batch * p.heads_q * p.seqlen_q, 4))
        tile = self._tile("backward_dq", configs.SIMT_BACKWARD)
        rows, chunks = _blocks(p.seqlen_q, tile.rows), _blocks(p.head_dim, tile.chunk_d)
        self._step("backward_dq", tile, p.batch * p.heads_q * rows * chunks)
        tile = self._tile("backward_dkdv", configs.SIMT_BACKWARD)
        rows = _blocks(p.seqlen_k, tile.rows)
        chunks = max(
            _blocks(p.head_dim, tile.chunk_d), _blocks(p.head_dim_v, tile.chunk_v)
        )
        self._step("backward_dkdv", tile, p.batch * p.heads_kv * rows * chunks)
        if p.bias_grad:
            self._dbias()

    def _dbias(self) -> None:
        """Plan the bias's gradient; the counts are those of common/bias_tile.cuh."""
        p = self.problem
        tile = self._tile("backward_dbias", configs.SIMT_BACKWARD_DBIAS)
        dbias = p.operand("dbias")
        counts = (
            *p.batch_shape,
            p.heads_q,
            _blocks(p.seqlen_q, tile.rows),
            _blocks(p.seqlen_k, tile.columns),
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
        splits = _blocks(summed, _blocks(summed, splits))
        self.dbias_splits = splits
        self.reasons.append(
            f"dbias: {owned} tiles, {summed} tiles of logits summed in each"
            + (f", in {splits} parts" if splits > 1 else "")
        )
        self._step("backward_dbias", tile, owned * splits)
        if splits > 1:
            self._workspace("dbias_partial", (owned * splits, tile.rows, tile.columns))
            self._pass("reduce_dbias", tile, owned)

    def _tile(self, kernel: str, table: tuple[configs.SimtRow, ...]) -> SimtTile:
        """Take the first row whose limits hold and which fits the GPU."""

        def fits(tile: SimtTile) -> bool:
            spec = self._spec(kernel, tile)
            resident = tile.resident and kernel != "backward_dbias"
            return spec.shared_memory <= self.device.shared_memory and (
                not resident or self._resident(kernel, tile)
            )

        if self.tile is not None and kernel != "backward_dbias":
            if not fits(self.tile):
                raise ValueError(
                    f"config asks for tile {self.tile.name}, which doesn't fit: "
                    f"{self._spec(kernel, self.tile).shared_memory} of "
                    f"{self.device.shared_memory} bytes of shared memory, head_dim "
                    f"{self.problem.head_dim} and {self.problem.head_dim_v}"
                )
            return self.tile
        for row in table:
            applies = (
                row.accumulator == self.sums.itemsize
                and self.problem.head_dim <= (row.max_head_dim or math.inf)
                and self.problem.head_dim_v <= (row.max_head_dim_v or math.inf)
            )
            if applies and fits(row.tile):
                self.reasons.append(f"{kernel}: tile {row.tile.name}")
                return row.tile
        raise AssertionError("the last rows of a table fit every GPU")

    def _resident(self, kernel: str, tile: SimtTile) -> bool:
        """Whether the block's own rows fit one chunk of channels."""
        p = self.problem
        return p.head_dim <= tile.chunk_d and (
            kernel == "forward" or p.head_dim_v <= tile.chunk_v
        )

    def _spec(self, kernel: str, tile: SimtTile) -> KernelSpec:
        return KernelSpec(
            "simt", kernel, self.problem.dtype, self.variant, tile, tile.threads,
            self.batch_axes,
        )  # fmt: skip

    def _step(self, kernel: str, tile: SimtTile, grid: int) -> None:
        if grid > 0:
            self.steps.append(Step(self._spec(kernel, tile), min(grid, _MAX_GRID)))

    def _pass(self, kernel: str, tile: SimtTile | None, grid: int) -> None:
        if grid == 0:
            return
        # The passes look at the shape of dbias and of its bias, at no other feature.
        variant = Variant(bias=self.variant.bias if tile is not None else None)
        spec = KernelSpec(
            "passes", kernel, self.problem.dtype, variant, tile, configs.PASS_THREADS,
            self.batch_axes,
        )  # fmt: skip
        self.steps.append(Step(spec, min(grid, _MAX_GRID)))

    def _workspace(self, name: str, shape: tuple[int, ...]) -> None:
        self.workspace.append(Workspace(name, shape, self.sums))
