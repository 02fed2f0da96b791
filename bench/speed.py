"""What README.md says of speed: tables and plots of the newest committed results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import (
    FOLDER,
    OURS,
    ResultFile,
    Row,
    case_of,
    geometric_mean,
    identity,
    unfinished,
)
from .tables import grouped, number
from .workloads import DIRECTIONS, WORK, WORKLOADS

# The sequence length that the table shows; the plots show all.
SEQLEN = 4096
PEERS = {
    "fa2": "FlashAttention-2, through PyTorch",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN, through PyTorch",
    "jax": "cuDNN, through JAX, by the host's clock over many calls",
    "flex": "FlexAttention, compiled",
    "efficient": "memory-efficient attention, through PyTorch",
    "math": "PyTorch's unfused attention",
    "naive": "matmul and softmax in CuPy",
}


# A result file for each direction, with the rows of that direction alone.
Directions = Mapping[str, ResultFile]


# --- Which files ----------------------------------------------------------------------


def files_of(name: str, folder: Path = FOLDER) -> Iterator[ResultFile]:
    """Yield the result files of a workload that were measured on a GPU, newest first.

    Files whose name goes on after the workload's are of a part of it, and don't count.
    """
    # Their names begin with the time.
    for path in sorted(folder.glob(f"*-{name}.json"), reverse=True):
        file = ResultFile.load(path)
        if file.meta.get("workload") == name and file.meta.get("compute_capability"):
            yield file


def newest(name: str, folder: Path = FOLDER) -> ResultFile:
    """Return the newest result file of a workload that was measured on a GPU.

    Raises
    ------
    ValueError
        If there is none.
    """
    for file in files_of(name, folder):
        return file
    raise ValueError(f"{folder} has no result of {name}")


def newest_of_each(name: str, folder: Path = FOLDER) -> dict[str, ResultFile]:
    """Return for each direction the newest file that has most of its cases.

    That is two thirds; a budget may have been spent before the last ones. All are of
    one GPU. What isn't a case of the workload, as one in another dtype, is left out,
    and so is a direction of which no file has enough.

    Raises
    ------
    ValueError
        If that leaves nothing.
    """
    cases: dict[str, set[tuple[Any, ...]]] = {}
    for case in WORKLOADS[name]():
        cases.setdefault(case.direction, set()).add(identity(case))
    found: dict[str, ResultFile] = {}
    for file in files_of(name, folder):
        if found and file.meta["gpu"] != next(iter(found.values())).meta["gpu"]:
            continue
        done = {
            case_of(row)
            for row in file.rows
            if row["impl"] == OURS and not unfinished(row)
        }
        for direction in cases.keys() - found.keys():
            if 3 * len(cases[direction] & done) >= 2 * len(cases[direction]):
                rows = [row for row in file.rows if case_of(row) in cases[direction]]
                found[direction] = dataclasses.replace(file, rows=rows)
    if not found:
        raise ValueError(f"{folder} has no result of {name} with most cases of a pass")
    return {
        direction: found[direction] for direction in DIRECTIONS if direction in found
    }


# --- The training grid ----------------------------------------------------------------


def training(files: Directions) -> str:
    """Return table and plots of the training grid."""
    shown = [row for row in rows_of(files) if row["seqlen"] == SEQLEN]
    impls = timed_impls(shown)
    tokens = {row["batch"] * row["seqlen"] for row in shown}
    plots = (
        pictures(file, f"speed-{direction}-bfloat16")
        for direction, file in files.items()
    )
    return "\n\n".join(
        (
            f"TFLOP/s on an {gpu_of(files)}, bfloat16, {min(tokens)} tokens in "
            f"sequences of {SEQLEN}, 2048 channels\nin heads of D; time on the "
            "device, all in turn in one process, each checked against float64 first.\n"
            "Counted are 4·B·H·S²·D operations forward, half of them if causal, "
            f"{more_work(files)}\n({sources(files, measured_gemm)}):",
            grid(shown, impls, {"D": head_dim, "mask": mask}, tflops),
            "; ".join(f"{name}: {PEERS[name]}" for name in impls if name in PEERS)
            + ".\n–: not supported, failed, or left out for time; the result file "
            "says which.",
            *(picture for each in plots for picture in each),
        )
    )


def more_work(files: Directions) -> str:
    """Say how many times as much of it the other passes are."""
    backward = f"{WORK['backward']:g} times as many backward"
    if "both" not in files:
        return f"and {backward}"
    return f"{backward},\nand {WORK['both']:g} times as many in both, a training step"


def lengths(files: Directions) -> str:
    """Return the table of the training grid at all lengths, beside the best peer."""
    rows = [row for row in rows_of(files) if is_ok(row)]
    seqlens = sorted({row["seqlen"] for row in rows})
    found: dict[tuple[str, ...], dict[int, str]] = {}
    ratios: dict[str, list[float]] = {}
    for group in sorted(grouped(rows, case_of).values(), key=lambda g: order(g[0])):
        first = group[0]
        speeds = {row["impl"]: row["tflops"] for row in group}
        peers = [speed for impl, speed in speeds.items() if impl in PEERS]
        if OURS not in speeds or not peers:
            continue
        ratio = speeds[OURS] / max(peers)
        ratios.setdefault(first["direction"], []).append(ratio)
        line = found.setdefault((first["direction"], head_dim(first), mask(first)), {})
        line[first["seqlen"]] = f"{speeds[OURS]:.0f} ({ratio:.2f})"
    lines = [
        (*line, *(cells.get(n, "–") for n in seqlens)) for line, cells in found.items()
    ]
    means = ", ".join(
        f"{geometric_mean(each):.2f} {name} (shapes: {len(each)})"
        for name, each in ratios.items()
    )
    return "\n\n".join(
        (
            f"The same at all lengths, on an {gpu_of(files)}: {OURS}'s TFLOP/s, and "
            "in brackets how many times\nas fast it is as the fastest of the others; "
            f"in the geometric mean {means}\n({sources(files)}):",
            table(("pass", "D", "mask", *map(str, seqlens)), 3, lines),
        )
    )


def rows_of(files: Directions) -> list[Row]:
    """Return the rows of all directions."""
    return [row for file in files.values() for row in file.rows]


def gpu_of(files: Directions) -> str:
    """Return the GPU that all files are of."""
    (gpu,) = {file.meta["gpu"] for file in files.values()}
    return gpu


def sources(
    files: Directions, more: Callable[[ResultFile], str] = lambda file: ""
) -> str:
    """Return a link to each file after the directions that it's of, and `more` of it.

    If there is only one file, nothing is said of directions.
    """
    directions: dict[str, list[str]] = {}
    for direction, file in files.items():
        described = f"{source(file)}{more(file)}"
        directions.setdefault(described, []).append(direction)
    if len(directions) == 1:
        return "".join(directions)
    return ";\n".join(
        f"{', '.join(names)}: {text}" for text, names in directions.items()
    )


def measured_gemm(file: ResultFile) -> str:
    """Say how fast a matrix product was in the same run."""
    return f", measured GEMM {file.meta['gemm_tflops']:.0f}"


# --- Other workloads ------------------------------------------------------------------


def precise(file: ResultFile) -> str:
    """Return the table of float32 or float64."""
    dtype = file.rows[0]["dtype"]
    gemm = file.meta["gemm_tflops_by_dtype"][dtype]
    columns = {"D": head_dim, "mask": mask, "B × S × H": shape}
    return (
        f"{dtype} on an {file.meta['gpu']}, TFLOP/s, counted and timed in the same "
        f"way\n({source(file)}, measured GEMM {gemm:.1f}):\n\n"
        + grid(file.rows, timed_impls(file.rows), columns, tflops)
    )


def small(file: ResultFile) -> str:
    """Return the table of calls that are so small that the host's part counts."""
    columns = {"D": head_dim, "B × S × H": shape}
    return (
        f"Small causal calls in {file.rows[0]['dtype']} on an {file.meta['gpu']}, "
        "µs on the device / µs that a call keeps the host busy\n"
        f"({source(file)}):\n\n"
        + grid(file.rows, timed_impls(file.rows), columns, device_and_host)
    )


def memory(file: ResultFile) -> str:
    """Return the table of peak memory at the longest sequence, and its plot."""
    rows = [row for row in file.rows if row["dtype"] == "bfloat16"]
    seqlen = longest(rows)
    rows = [row for row in rows if row["seqlen"] == seqlen]
    impls = timed_impls(rows)
    first = rows[0]
    lines = []
    for direction in DIRECTIONS:
        group = [row for row in rows if row["direction"] == direction]
        found = {row["impl"]: row["bytes"] for row in group if is_ok(row)}
        sizes = [*map(found.get, impls), group[0]["needed_bytes"]]
        sizes.append(group[0]["square_bytes"])
        lines.append((direction, *(number(size and size / 2**20) for size in sizes)))
    return "\n\n".join(
        (
            f"Peak memory on an {file.meta['gpu']} in MiB above the inputs, "
            f"{first['dtype']}, batch {first['batch']}, {first['heads']} heads of "
            f"{first['head_dim']}, sequences of {seqlen}:\nwhat the allocators of "
            "CuPy and PyTorch hand out during a pass, and what JAX says of its own. "
            "Needed are\nthe results, the log-sum-exp and one number a row "
            f"({source(file)}):",
            table(("pass", *impls, "needed", "S × S arrays"), 1, lines),
            *pictures(file, "peak-bfloat16"),
        )
    )


def first_call(file: ResultFile) -> str:
    """Return the table of times to the first result, and its plot."""
    done = [row for row in file.rows if is_ok(row)]
    names = dict.fromkeys(row["impl"].partition(" ")[0] for row in done)
    most = max(row["rounds"] for row in done)
    found = {
        (row["impl"], row["direction"]): number(row["ms"])
        + ("" if row["rounds"] == most else f" ({row['rounds']})")
        for row in done
    }
    kinds = [(d, c) for d in ("forward", "backward") for c in ("cold", "warm")]
    lines = [
        (name, *(found.get((f"{name} ({cache})", way), "–") for way, cache in kinds))
        for name in ordered(names)
    ]
    first = done[0]
    fewer = " A number in brackets: of so many only." if any_fewer(done, most) else ""
    return "\n\n".join(
        (
            f"Milliseconds to the first results on an {file.meta['gpu']}, "
            f"{first['dtype']}, D{first['head_dim']} {shape(first)}, causal, in a "
            "fresh\nprocess whose array library has started: from the import to the "
            "end of the first forward, and\nof the first backward after it; cold "
            "with empty kernel caches, warm with those of the cold process,\n"
            f"medians of {most} processes.{fewer} ({source(file)})",
            table(("", *(" ".join(kind) for kind in kinds)), 1, lines),
            *pictures(file, "bars"),
        )
    )


OF_DIRECTIONS: dict[str, Callable[[Directions], str]] = {
    "training": training, "training-lengths": lengths,
}  # fmt: skip
OF_ONE_FILE: dict[str, Callable[[ResultFile], str]] = {
    "fp32": precise, "fp64": precise, "small": small, "memory": memory,
    "first_call": first_call,
}  # fmt: skip
PARTS = (*OF_DIRECTIONS, *OF_ONE_FILE)


def part(name: str, folder: Path = FOLDER) -> str:
    """Return a part of README.md."""
    if name in OF_DIRECTIONS:
        return OF_DIRECTIONS[name](newest_of_each("training", folder))
    return OF_ONE_FILE[name](newest(name, folder))


def sources_of(name: str, folder: Path = FOLDER) -> list[ResultFile]:
    """Return the files of which a part tells."""
    if name in OF_DIRECTIONS:
        return list(newest_of_each("training", folder).values())
    return [newest(name, folder)]


# --- Rows -----------------------------------------------------------------------------


def is_ok(row: Row) -> bool:
    """Whether a row has a result."""
    return row["status"] == "ok"


def any_fewer(rows: Iterable[Row], most: int) -> bool:
    """Whether a row is of fewer processes than others."""
    return any(row["rounds"] < most for row in rows)


def ordered(names: Iterable[str]) -> list[str]:
    """Return this library and the peers that README.md knows in its order."""
    names = set(names)
    return [name for name in (OURS, *PEERS) if name in names or name == OURS]


def timed_impls(rows: Iterable[Row]) -> list[str]:
    """Return the implementations with a result, ours always and first."""
    return ordered(row["impl"] for row in rows if is_ok(row))


def longest(rows: Sequence[Row]) -> int:
    """Return the longest sequence at which this library has a result in each pass."""
    passes: dict[int, set[str]] = {}
    for row in rows:
        if is_ok(row) and row["impl"] == OURS:
            passes.setdefault(row["seqlen"], set()).add(row["direction"])
    return max(seqlen for seqlen, found in passes.items() if found >= {*DIRECTIONS})


def head_dim(row: Row) -> str:
    """Return the head size as text."""
    return str(row["head_dim"])


def mask(row: Row) -> str:
    """Return the mask in words."""
    return "causal" if row["causal"] else "full"


def shape(row: Row) -> str:
    """Return batch, sequence length and heads."""
    return f"{row['batch']} × {row['seqlen']} × {row['heads']}"


def tflops(row: Row) -> str:
    """Return the speed as text."""
    return f"{row['tflops']:.{0 if row['tflops'] >= 100 else 1}f}"


def device_and_host(row: Row) -> str:
    """Return the two times of a call in microseconds."""
    return f"{number(row['ms'] * 1e3)} / {number(row['host_us'])}"


# --- Tables and links -----------------------------------------------------------------


def grid(
    rows: Sequence[Row],
    impls: Sequence[str],
    columns: dict[str, Callable[[Row], str]],
    cell: Callable[[Row], str],
) -> str:
    """Return a line for each case with a result, a column for each implementation."""
    cases = [
        group
        for group in grouped(rows, case_of).values()
        if any(is_ok(row) and row["impl"] in impls for row in group)
    ]
    cases.sort(key=lambda group: order(group[0]))
    lines = []
    for group in cases:
        found = {row["impl"]: cell(row) for row in group if is_ok(row)}
        described = (describe(group[0]) for describe in columns.values())
        lines.append(
            (group[0]["direction"], *described, *(found.get(i, "–") for i in impls))
        )
    return table(("pass", *columns, *impls), 1 + len(columns), lines)


def order(row: Row) -> tuple[Any, ...]:
    """Return what the lines of a table are sorted by."""
    size = row["batch"] * row["seqlen"]
    return DIRECTIONS.index(row["direction"]), row["head_dim"], row["causal"], size


def table(head: Sequence[str], words: int, lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns after the first ones are figures."""
    rule = ("---",) * words + ("---:",) * (len(head) - words)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def source(file: ResultFile) -> str:
    """Return a link to a result file."""
    return f"[{file.path.name}]({link(file.path)})"


def pictures(file: ResultFile, *names: str) -> list[str]:
    """Return those plots of a result file that lie beside it."""
    paths = [file.path.with_name(f"{file.path.stem}-{name}.svg") for name in names]
    workload = file.meta["workload"]
    return [
        f"![{workload}, {name}]({link(path)})"
        for name, path in zip(names, paths, strict=True)
        if path.exists()
    ]


def link(path: Path) -> str:
    """Return a path as README.md names it."""
    return f"bench/results/{path.name}"
