"""Makes the parts of README.md that come from data.

    python -m bench.readme            writes them
    python -m bench.readme --check    fails if they aren't as it would write them

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cupy_flash import configs
from cupy_flash.aot import Call
from cupy_flash.device import DeviceInfo, hypothetical
from cupy_flash.dtypes import ELEMENT_TYPES
from cupy_flash.plan import Plan
from cupy_flash.problem import Options

from . import speed
from .compile_matrix import RESULT
from .machine import ROOT

README = ROOT / "README.md"
_PART = re.compile(r"<!-- (begin|end) ([\w-]+) -->")

DIRECTIONS = ("forward", "backward")
FASTEST_FIRST = configs.FAMILIES[::-1]
# Head sizes that are tried to find the largest; the last stands for any.
SIZES = (32, 64, 96, 128, 160, 192, 256, 320, 1024)
# Options of which the table tells in which passes a family has them: the name there,
# and an argument of a call.
FEATURES = (
    ("softcap", "softcap", 30.0), ("alibi_slopes", "alibi", True),
    ("bias", "bias", True), ("mask", "mask", True),
)  # fmt: skip
# The first compute capability of each. Source: NVIDIA, "CUDA GPU Compute Capability".
GENERATIONS = (
    (50, "Maxwell"), (60, "Pascal"), (70, "Volta"), (75, "Turing"), (80, "Ampere"),
    (89, "Ada"), (90, "Hopper"), (100, "Blackwell"),
)  # fmt: skip

T = TypeVar("T")


# --- Words and tables -----------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def dotted(capability: int) -> str:
    """Return a compute capability as people write it."""
    return f"{capability // 10}.{capability % 10}"


def generation(capability: int) -> str:
    """Return NVIDIA's name for GPUs of a compute capability."""
    return [name for first, name in GENERATIONS if first <= capability][-1]


def grouped(values: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return the values with equal keys together, in the order of the first ones."""
    groups: dict[Hashable, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def span(chosen: Sequence[T], among: Sequence[T], name: Callable[[T], str]) -> str:
    """Return some values of a list as ranges: "5.0, 7.0–9.0"."""
    ranges: list[list[T]] = []
    for before, value in zip((None, *among), among, strict=False):
        if value in chosen:
            if not ranges or ranges[-1][-1] != before:
                ranges.append([])
            ranges[-1].append(value)
    return ", ".join("–".join(map(name, dict.fromkeys((r[0], r[-1])))) for r in ranges)


def head_sizes(chosen: Sequence[int], among: Sequence[int]) -> str:
    """Return some neighbouring sizes of a list, each standing for those up to it.

    The last of the list stands for all that are larger than the one before.
    """
    lower = [size for size in among if size < chosen[0]][-1:]
    upper = chosen[-1:] if chosen[-1] != among[-1] else []
    match lower, upper:
        case [low], [high]:
            return f"{low + 1}–{high}"
        case [low], []:
            return f"over {low}"
        case [], [high]:
            return f"up to {high}"
    return "any"


# --- What was compiled ----------------------------------------------------------------


def compile_matrix(report: Mapping[str, Any]) -> str:
    """Return which GPUs every kernel was compiled for, by which NVRTC."""
    rows = sorted(report["rows"], key=lambda row: row["capability"])
    lines = []
    for group in grouped(rows, lambda row: row["capability"]):
        capability = group[0]["capability"]
        versions = dict.fromkeys(row["nvrtc"] for row in group)
        counts = dict.fromkeys(row["kernels"] for row in group)
        name = generation(capability)
        kernels = " or ".join(map(str, counts))
        lines.append((dotted(capability), name, ", ".join(versions), kernels))
    head = ("compute capability", "GPUs", "NVRTC", "kernels")
    return f"{table(head, lines)}\n\n{failures(rows)}"


def failures(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in a sentence how many kernels could not be compiled."""
    total = sum(row["kernels"] for row in rows)
    failed = sum(row["failed"] for row in rows)
    if not failed:
        return f"None of these {total} compilations failed."
    where = ", ".join(
        f"{dotted(row['capability'])} with NVRTC {row['nvrtc']}"
        for row in rows
        if row["failed"]
    )
    return f"{failed} of these {total} compilations failed: for {where}."


# --- Which GPU gets which kernel ------------------------------------------------------


def gpus_of(report: Mapping[str, Any]) -> list[DeviceInfo]:
    """Return the GPUs that were compiled for, with the newest NVRTC that did it."""
    newest: dict[int, tuple[int, ...]] = {}
    for row in report["rows"]:
        version = tuple(map(int, row["nvrtc"].split(".")))
        capability = row["capability"]
        newest[capability] = max(version, newest.get(capability, version))
    return [
        dataclasses.replace(hypothetical(f"sm_{capability}"), nvrtc=version)
        for capability, version in sorted(newest.items())
    ]


def kernels(gpus: Sequence[DeviceInfo]) -> str:
    """Return which family and which tiles a GPU gets, and what a family can do."""
    return "\n\n".join(
        (
            table(("compute capability", "GPUs", "dtype", "family"), families(gpus)),
            "The first family that can serve a call is taken:",
            table(("", *(f"`{name}`" for name in FASTEST_FIRST)), features(gpus)),
            "What decides about a tile is how much shared memory a block can have. "
            "Where there would\nbe fewer blocks than multiprocessors, or more rows in "
            "one than in the sequence, `mma` takes\na tile with fewer rows, and so "
            "does `wgmma` forward, where it may take others with a causal\nmask, a "
            "window or few keys. Backward it has a tile for each of two head sizes; "
            "where their\npadding would take too much memory, the call is for `mma`.",
            "<details>\n<summary>The tiles of large problems without a mask</summary>",
            "In rows × columns of the matrix of logits, forward queries × keys and "
            "backward keys × queries,\nwhere K and V have heads of the same size:",
            table(
                (
                    "dtype", "compute capability", "shared memory", "head size",
                    *DIRECTIONS,
                ),
                tiles(gpus),
            ),
            "</details>",
        )
    )  # fmt: skip


def families(gpus: Sequence[DeviceInfo]) -> list[tuple[str, ...]]:
    """Return the rows of the table of families."""
    rows = []
    for dtypes, group, found in alike(gpus, family_of):
        names = dict.fromkeys(generation(gpu.compute_capability) for gpu in group)
        ends = dict.fromkeys((next(iter(names)), next(reversed(names))))
        rows.append((capabilities(group, gpus), " to ".join(ends), dtypes, found))
    return rows


def features(gpus: Sequence[DeviceInfo]) -> list[tuple[str, ...]]:
    """Return the rows of the table of what the families can do."""
    of_all = [Features(name, gpus) for name in FASTEST_FIRST]
    return [
        ("compute capability", *(each.capabilities() for each in of_all)),
        ("dtype", *(each.dtypes() for each in of_all)),
        ("head size", *(each.head_sizes() for each in of_all)),
        ("backward pass", *(each.says("backward") for each in of_all)),
        *(
            (f"`{name}`", *(each.passes(**{argument: value}) for each in of_all))
            for name, argument, value in FEATURES
        ),
        (
            "`deterministic=True`",
            *(each.says("backward", deterministic=True) for each in of_all),
        ),
    ]


class Features:
    """What a family can do, found out by planning calls on some GPUs."""

    def __init__(self, family: str, gpus: Sequence[DeviceInfo]) -> None:
        self.family = family
        self.gpus = gpus
        self.serving = [g for g in gpus if any(self.can(g, t) for t in ELEMENT_TYPES)]

    def can(
        self,
        gpu: DeviceInfo,
        dtype: np.dtype,
        size: int = 64,
        direction: str = "forward",
        **arguments: Any,
    ) -> bool:
        """Tell whether a call can be planned, with fields of `Options` or `Call`."""
        named = {n: arguments.pop(n) for n in Options._fields if n in arguments}
        options = Options(direction, config=self.family, **named)
        try:
            Call(options, dtype, size, size, **arguments).plan(gpu)
        except ValueError:
            return False
        return True

    def capabilities(self) -> str:
        """Return the GPUs for which the family is."""
        if len(self.serving) == len(self.gpus):
            return "any"
        if not self.serving:
            return "none"
        return capabilities(self.serving, self.gpus)

    def dtypes(self) -> str:
        """Return the dtypes that it has, and where only some GPUs have one."""
        words = []
        for dtype, element in ELEMENT_TYPES.items():
            having = [gpu for gpu in self.serving if self.can(gpu, dtype)]
            where = f" from {dotted(having[0].compute_capability)}" if having else ""
            if having:
                words.append(element.name + where * (having != self.serving))
        if words == [element.name for element in ELEMENT_TYPES.values()]:
            return "any"
        return ", ".join(words) or "none"

    def head_sizes(self) -> str:
        """Return the largest head, and for what it is another one."""
        forward, backward = map(self._largest_heads, DIRECTIONS)
        if backward in (forward, "none"):
            return forward
        return f"{forward}, backward {backward}"

    def _largest_heads(self, direction: str) -> str:
        words = []
        for dtype, element in ELEMENT_TYPES.items():
            found = [
                size
                for size in SIZES
                if any(self.can(gpu, dtype, size, direction) for gpu in self.gpus)
            ]
            if found:
                largest = "any" if found[-1] == SIZES[-1] else f"up to {found[-1]}"
                words.append((largest, element.name))
        usual = words[0][0] if words else "none"
        others = [f"{size} in {name}" for size, name in words if size != usual]
        return ", ".join((usual, *others))

    def says(self, direction: str = "forward", **arguments: Any) -> str:
        """Return whether a kind of call can be served on every GPU of the family."""
        can = {
            self.can(gpu, dtype, direction=direction, **arguments)
            for gpu in self.serving
            for dtype in ELEMENT_TYPES
            if self.can(gpu, dtype)
        }
        return "yes" if can == {True} else "no" if can == {False} else "in part"

    def passes(self, **arguments: Any) -> str:
        """Return the same, and in which pass if it can't be in both."""
        forward, backward = (self.says(name, **arguments) for name in DIRECTIONS)
        if (forward, backward) == ("yes", "no"):
            return "forward"
        return forward if forward == backward else "in part"


def tiles(gpus: Sequence[DeviceInfo]) -> list[tuple[str, ...]]:
    """Return the rows of the table of tiles."""
    sizes = configs.head_dim_buckets()
    rows = []
    for dtypes, group, found in alike(gpus, tiles_of):
        kib = sorted({gpu.shared_memory // 1024 for gpu in group})
        memory = "–".join(map(str, dict.fromkeys((kib[0], kib[-1]))))
        where = (dtypes, capabilities(group, gpus), f"{memory} KiB")
        by_size = zip(sizes, found, strict=True)
        for shapes, run in itertools.groupby(by_size, key=lambda entry: entry[1]):
            size = head_sizes([size for size, _ in run], sizes)
            rows.append((*where, size, *shapes))
    return rows


def alike(
    gpus: Sequence[DeviceInfo], what: Callable[[DeviceInfo, np.dtype], T]
) -> list[tuple[str, list[DeviceInfo], T]]:
    """Return dtypes and GPUs for which the same is found, and what it is."""
    found = []
    for dtype, element in ELEMENT_TYPES.items():
        of_gpu = {gpu: what(gpu, dtype) for gpu in gpus}
        for group in grouped(gpus, of_gpu.__getitem__):
            found.append((element.name, group, of_gpu[group[0]]))
    return [
        (", ".join(name for name, _, _ in same), *same[0][1:])
        for same in grouped(found, lambda entry: (tuple(entry[1]), entry[2]))
    ]


def capabilities(chosen: Sequence[DeviceInfo], among: Sequence[DeviceInfo]) -> str:
    """Return the compute capabilities of some GPUs as ranges."""
    return span(chosen, among, lambda gpu: dotted(gpu.compute_capability))


def family_of(gpu: DeviceInfo, dtype: np.dtype) -> str:
    """Return the families that calls get on a GPU."""
    sizes = configs.head_dim_buckets()
    plans = [plan(gpu, dtype, s, direction) for s in sizes for direction in DIRECTIONS]
    found = {each.family for each in plans}
    return ", ".join(f"`{name}`" for name in FASTEST_FIRST if name in found)


def tiles_of(gpu: DeviceInfo, dtype: np.dtype) -> tuple[tuple[str, ...], ...]:
    """Return the shapes of the tiles for each head size and direction."""
    return tuple(
        tuple(shapes(plan(gpu, dtype, size, direction)) for direction in DIRECTIONS)
        for size in configs.head_dim_buckets()
    )


def plan(gpu: DeviceInfo, dtype: np.dtype, head_dim: int, direction: str) -> Plan:
    """Plan a call of a usual size without options."""
    return Call(Options(direction), dtype, head_dim, head_dim).plan(gpu)


def shapes(plan: Plan) -> str:
    """Return rows × columns of a plan's tiles, equal ones once.

    That of the pass which makes dq of its sums says nothing.
    """
    specs = [step.spec for step in plan.steps if step.spec.kernel != "convert_dq"]
    used = [spec.tile for spec in specs if spec.tile is not None]
    return ", ".join(dict.fromkeys(f"{tile.rows} × {tile.columns}" for tile in used))


def parts() -> dict[str, Callable[[], str]]:
    """Return what makes each part."""
    return {
        "compile-matrix": lambda: compile_matrix(load(RESULT)),
        "kernels": lambda: kernels(gpus_of(load(RESULT))),
        **{name: functools.partial(speed.part, name) for name in speed.PARTS},
    }


def load(path: Path) -> Any:
    """Read a result file."""
    return json.loads(path.read_text(encoding="utf-8"))


# --- The page -------------------------------------------------------------------------


def renewed(text: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its parts made anew.

    Raises
    ------
    ValueError
        If a marker is unknown, missing, or without its other one.
    """
    pieces, position, opened, seen = [], 0, None, []
    for marker in _PART.finditer(text):
        kind, name = marker.groups()
        if kind == "begin":
            if opened is not None or name in seen:
                raise ValueError(f"begin {name} stands in {opened or 'two places'}")
            if name not in makers:
                raise ValueError(f"{name} is unknown; known: {', '.join(makers)}")
            opened = name
            pieces.append(text[position : marker.end()])
            pieces.append(f"\n{makers[name]()}\n")
        else:
            if name != opened:
                raise ValueError(f"end {name} has no begin before it")
            seen.append(name)
            opened = None
            pieces.append(marker.group())
        position = marker.end()
    if opened is not None:
        raise ValueError(f"begin {opened} has no end")
    if missing := sorted(set(makers) - set(seen)):
        raise ValueError(f"no place for {', '.join(missing)}")
    return "".join((*pieces, text[position:]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the parts of README.md."""
    parser = argparse.ArgumentParser(
        "python -m bench.readme", description="Makes the parts of README.md from data."
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    chosen = parser.parse_args(arguments)
    text = README.read_text(encoding="utf-8")
    try:
        new = renewed(text, parts())
    except ValueError as error:
        print(f"README.md: {error}", file=sys.stderr)
        return 1
    if new == text:
        return 0
    if chosen.check:
        print("README.md is stale: python -m bench.readme renews it", file=sys.stderr)
        return 1
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
