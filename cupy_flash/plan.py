"""From a problem and the facts about a GPU to a plan: which kernels, how launched.

Nothing here touches a GPU. Every decision leaves a reason in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import plan_mma, plan_wgmma
from .device import DeviceInfo
from .plan_base import Builder, DoesNotFit, MapSpec, Step, Workspace, scales_first
from .plan_mma import MmaBuilder
from .plan_simt import SimtBuilder
from .plan_wgmma import WgmmaBuilder
from .problem import Problem
from .tiles import MmaTile, SimtTile, WgmmaTile
from .variant import Variant


@dataclass(frozen=True)
class Plan:
    """How a call is computed; ``print`` shows it.

    Attributes
    ----------
    problem : Problem
    device : DeviceInfo
    family : str
        The kernel family: "simt", "mma" or "wgmma".
    steps : tuple of Step
        The kernels in the order of their launch; none if the result is empty.
    workspace : tuple of Workspace
    copies : tuple of str
        Arrays that are copied once because no kernel can load them as they are.
    cleared : tuple of str
        Outputs that are filled with zeros.
    maps : tuple of MapSpec
        The tensor maps that the kernels of `wgmma` copy by.
    dbias_splits : int
        Parts in which each tile of the bias gradient is summed.
    section : int
        Heads that `wgmma` computes side by side, so that they share the L2 cache.
    dq_row_tiles : int
        Tiles of 16 queries that a head has in workspace `dq_sums`.
    reasons : tuple of str
    """

    problem: Problem
    device: DeviceInfo
    family: str
    steps: tuple[Step, ...]
    workspace: tuple[Workspace, ...]
    copies: tuple[str, ...]
    cleared: tuple[str, ...]
    maps: tuple[MapSpec, ...]
    dbias_splits: int
    section: int
    dq_row_tiles: int
    reasons: tuple[str, ...]

    def row_multiple(self, name: str) -> int:
        """Return the elements to whose multiple the rows of a copy are padded."""
        if self.family != "simt" and name in plan_mma.LOADED_WIDE:
            return plan_mma.row_multiple(self.problem)
        return 1

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
        If ``config=`` asks for a family or a tile that the call can't have, or an
        output isn't aligned to its elements.
    """
    reasons: list[str] = []
    copies = _misaligned(problem, reasons)
    builder = _build(problem, device, reasons)
    if builder.family != "simt":
        copies += _not_wide(problem, builder.family, copies, reasons)
    return Plan(
        problem=problem,
        device=device,
        family=builder.family,
        steps=tuple(builder.steps),
        workspace=tuple(builder.workspace),
        copies=copies,
        cleared=tuple(builder.cleared),
        maps=builder.maps,
        dbias_splits=builder.dbias_splits,
        section=builder.section,
        dq_row_tiles=builder.dq_row_tiles,
        reasons=(*reasons, *builder.reasons),
    )


# From the fastest to the one that takes everything: its planner, what it can't serve,
# and why it is taken.
_FAMILIES = (
    (WgmmaBuilder, plan_wgmma.refusal, "Hopper's tensor cores take this call"),
    (MmaBuilder, plan_mma.refusal, "tensor cores multiply this dtype and head size"),
    (SimtBuilder, lambda problem, device: "", "it takes everything"),
)


def _build(problem: Problem, device: DeviceInfo, reasons: list[str]) -> Builder:
    """Plan with the fastest family that can serve the call, or the one asked for."""
    config = problem.config
    tile = config if isinstance(config, (SimtTile, MmaTile, WgmmaTile)) else None
    asked = config if tile is None else tile.family
    if tile is not None:
        reasons.append(f"config= asks for tile {tile.name}")
    refusals = []
    for planner, refuses, reason in _FAMILIES:
        family = planner.family
        if asked not in (None, family):
            continue
        refusal = refuses(problem, device)
        if not refusal:
            variant = _variant(problem, family)
            builder = planner(problem, device, variant, tile)
            try:
                builder.build()
            except DoesNotFit as error:
                refusal = str(error)
        if not refusal:
            reasons += refusals
            reasons.append(
                f"family {family}: {'config= asks for it' if asked else reason}"
            )
            reasons += _about_variant(problem, variant)
            return builder
        if asked:
            prefix = "" if tile is not None else f"config={family!r} can't be had: "
            raise ValueError(f"{prefix}{refusal}")
        refusals.append(f"not family {family}: {refusal}")
    raise AssertionError("the last family takes everything")


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


def _not_wide(
    problem: Problem, family: str, copies: tuple[str, ...], reasons: list[str]
) -> tuple[str, ...]:
    """Name the further inputs that tensor cores' families can't load as they lie."""
    if family == "wgmma":
        found = plan_wgmma.copied(problem)
        needs = "strides of sequence, heads and batch be positive multiples of 16 bytes"
    else:
        found = plan_mma.copied(problem)
        needs = "its rows start at multiples of 16 bytes"
    names = tuple(name for name in found if name not in copies)
    for name in names:
        reasons.append(
            f"{name} is copied: {family} loads 16 bytes at a time, so its channels "
            f"must lie side by side and {needs}"
        )
    return names


def _variant(problem: Problem, family: str) -> Variant:
    bias = problem.operand("bias")
    return Variant(
        left=problem.left is not None,
        right=problem.right is not None,
        softcap=problem.softcap > 0,
        alibi=problem.has("alibi_slopes"),
        bias=None if bias is None else bias.dtype,
        mask=problem.has("mask"),
        scale_first=scales_first(problem),
        tf32=problem.precision == "tf32" and family == "mma",
        ragged=family == "mma" and plan_mma.is_ragged(problem),
    )


def _about_variant(problem: Problem, variant: Variant) -> list[str]:
    reasons = []
    if variant.scale_first:
        reasons.append(
            "logits are scaled before the softmax: a scale that isn't positive, or so "
            "small that it counts as 0, can't be taken out of a maximum"
        )
    if variant.tf32:
        reasons.append("precision='tf32': products of 10-bit mantissas")
    elif problem.precision == "tf32":
        reasons.append("precision='tf32' is not made use of: simt has no tensor cores")
    return reasons
