"""Measures this library and every other one that can be imported, side by side.

    python -m bench                      what suits the device there is
    python -m bench training decode      these workloads
    python -m bench --list               what there is to measure
    python -m bench compare A B          what changed between two result files
    python -m bench plot FILE...         the plots of result files
    python -m bench table FILE...        their tables

All implementations of a case are measured in turn in one process, after their results
were compared with float64. Each workload gives a result file, a table and plots.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from . import memory, tables, tiles
from .machine import run_meta
from .peers import all_peers, make_inputs
from .peers.base import Peer, no_cuda, spare_imported
from .prepare import prepare, shared_caches
from .progress import Lines, shown, summary
from .results import FOLDER, ResultFile, Wanted, one_line
from .runner import Runner
from .timing import CudaTimer, HostTimer, Timer
from .workloads import DIRECTIONS, ITEMSIZE, MASKS, MODULES, NAMES, Case, Selection

INTERRUPTED = 130
# A workload that measures by itself has as much of the budget as so many cases.
CASES_OF_MODULE = 20
# Where no workload is named.
DEFAULT = {"cuda": "training", "cpu": "cpu"}
# Seconds for the rounds of one case.
CASE_SECONDS = {"cuda": 1.0, "cpu": 0.2}


def words(text: str) -> tuple[str, ...]:
    """Split at commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str) -> tuple[int, ...]:
    """Split at commas into integers."""
    return tuple(int(word) for word in words(text))


def count(text: str) -> int:
    """Read a number that isn't negative."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return int(text)


def one_of(choices: Sequence[str], text: str) -> tuple[str, ...]:
    """Split at commas into words of a list."""
    chosen = words(text)
    unknown = [word for word in chosen if word not in choices]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)} unknown; accepted: {', '.join(choices)}"
        )
    return chosen


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of a run."""
    parser = argparse.ArgumentParser(
        "python -m bench", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("workload", nargs="*", metavar="workload", help=", ".join(NAMES))
    add(
        "--only",
        type=words,
        default=(),
        metavar="IMPL,...",
        help="measure these implementations; cupy_flash is always measured",
    )
    add("--head-dim", type=numbers, default=(), metavar="D,...")
    add("--seqlen", type=numbers, default=(), metavar="S,...")
    add(
        "--direction",
        type=functools.partial(one_of, DIRECTIONS),
        default=(),
        metavar="DIRECTION,...",
        help=", ".join(DIRECTIONS),
    )
    add(
        "--mask",
        type=functools.partial(one_of, MASKS),
        default=(),
        metavar="MASK,...",
        help=", ".join(MASKS),
    )
    add(
        "--dtype",
        type=functools.partial(one_of, tuple(ITEMSIZE)),
        default=(),
        metavar="DTYPE,...",
        help="instead of those of the workload",
    )
    add(
        "--shared-memory",
        type=numbers,
        default=(),
        metavar="KIB,...",
        help="tiles as for GPUs on which a block has so much: 64 (7.5), 99 (8.6, 8.9, "
        "12.0), 163 (8.0, 8.7), 227 (9.0, 10.0)",
    )
    add(
        "--family",
        choices=tuple(tiles.CANDIDATES),
        help="whose tiles are measured (default: what each case gets by itself)",
    )
    add(
        "--budget",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="of the whole run; what doesn't fit is skipped (default: %(default)g)",
    )
    add(
        "--prepare",
        type=count,
        default=0,
        metavar="N",
        help="first let N processes compile what the cases need, for about a third of "
        "the budget at most (default: each case compiles when it is measured)",
    )
    add(
        "--case-seconds",
        type=float,
        metavar="SECONDS",
        help="for the rounds of one case (default: 1, on the CPU 0.2)",
    )
    add(
        "--out",
        type=Path,
        default=FOLDER,
        metavar="DIR",
        help="for results, tables and plots (default: bench/results)",
    )
    add(
        "--resume",
        type=Path,
        metavar="FILE",
        help="measure what this result file of a workload has no time for yet, and "
        "what --only names and couldn't be imported then, and add it there",
    )
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add("--no-plots", action="store_true", help="for machines without matplotlib")
    add("--list", action="store_true", help="show workloads and implementations")
    return parser  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "compare": compare, "plot": plot, "table": table,
    }  # fmt: skip
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    parser = run_parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.workload if name not in NAMES]
    if unknown:
        parser.error(
            f"workload {', '.join(unknown)} unknown; known: {', '.join(NAMES)}"
        )
    options.device = options.device or ("cpu" if no_cuda() else "cuda")
    if options.device == "cuda" and (reason := no_cuda()):
        parser.error(f"--device cuda: {reason}")
    if options.shared_memory and (
        reason := tiles.why_not(options.shared_memory, options.device)
    ):
        parser.error(f"--shared-memory: {reason}")
    names = options.workload or [DEFAULT[options.device]]
    known = known_impls(names, options.device)
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only {','.join(unknown)} unknown; known: {', '.join(known)}")
    if options.list:
        show_list(options.device)
        return 0
    selection = Selection(
        options.head_dim, options.seqlen, options.direction, options.mask,
        options.dtype, options.shared_memory,
    )  # fmt: skip
    if options.resume and len(names) > 1:
        parser.error("--resume takes one workload")
    try:
        cases = {
            name: () if name in MODULES else selection.cases(name) for name in names
        }
    except ValueError as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", "bench", *arguments])
    return run(options, cases, command)


def run(
    options: argparse.Namespace, cases: dict[str, Sequence[Case]], command: str
) -> int:
    """Run workloads one after the other; an interrupt keeps what was measured."""
    end = time.monotonic() + options.budget
    file: ResultFile | None = None
    caches = shared_caches() if options.prepare else contextlib.nullcontext()
    try:
        with terminable(), caches:
            dtypes = {case.dtype: None for group in cases.values() for case in group}
            meta = run_meta(options.device, command, dtypes)
            timer = CudaTimer() if options.device == "cuda" else HostTimer()
            timer.release()  # what measuring the ceilings took
            files = {name: result_file(options, name, meta) for name in cases}
            if options.resume:
                cases = {
                    name: files[name].without_done(group, options.only)
                    for name, group in cases.items()
                }
            if options.prepare:
                compile_ahead(options, cases)
            parts = {
                name: CASES_OF_MODULE if name in MODULES else len(group)
                for name, group in cases.items()
            }
            for name, group in cases.items():
                # What one workload leaves over is shared by those after it.
                share = parts[name] / max(1, sum(parts.values()))
                left = (end - time.monotonic()) * share
                deadline = time.monotonic() + left
                del parts[name]
                file = files[name]
                if name in MODULES:
                    run_module(name, options, file, deadline)
                elif group:
                    run_cases(options, group, timer, file, deadline)
                finish(file, plots=not options.no_plots)
    except ValueError as error:
        if not options.resume or file is not None:
            raise
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if file is not None:
            finish(file, plots=False)
        print("interrupted; what was measured is kept", file=sys.stderr)
        return INTERRUPTED
    return 0


def result_file(
    options: argparse.Namespace, name: str, meta: dict[str, Any]
) -> ResultFile:
    """Return the file that the rows of a workload go to."""
    if options.resume:
        return ResultFile.resume(options.resume, name, meta)
    return ResultFile.new(options.out, name, meta)


def compile_ahead(
    options: argparse.Namespace, cases: dict[str, Sequence[Case]]
) -> None:
    """Let several processes compile what the workloads need.

    `first_call` measures that, `end_to_end` needs little, and `tiles` has a way of its
    own.
    """
    start = time.monotonic()
    needed = [
        case for name, group in cases.items() if name != "tiles" for case in group
    ]
    if "memory" in cases:
        # In float32 only this library is measured, on a GPU.
        every = memory.cases(options.device)
        needed += [c for c in every if c.dtype != "float32" or options.device == "cpu"]
    made = prepare(
        needed, options.prepare, options.budget / 3, options.only, options.device
    )
    print(
        f"prepared {made.cases} of {len(needed)} cases, {made.calls} calls, in "
        f"{time.monotonic() - start:.0f} s",
        file=sys.stderr,
    )


def run_cases(
    options: argparse.Namespace,
    cases: Sequence[Case],
    timer: Timer,
    file: ResultFile,
    deadline: float,
) -> None:
    """Measure the cases of a workload, writing the file after each of them."""
    if options.device == "cuda":
        import cupy as xp
    else:
        xp = np
    runner = Runner(
        peers=functools.partial(
            contestants, options.device, options.only, options.family
        ),
        make_inputs=functools.partial(make_inputs, device=options.device),
        timer=timer,
        xp=xp,
        seconds=options.case_seconds or CASE_SECONDS[options.device],
        deadline=deadline,
    )
    if cases[0].workload == "tiles" and options.device == "cuda":
        start = time.monotonic()
        count = tiles.precompile(cases, options.family)
        elapsed = time.monotonic() - start
        print(f"{count} kernels ready after {elapsed:.0f} s", file=sys.stderr)
    with shown(cases[0].workload, len(cases)) as progress:
        runner.tick = progress.tick
        for case, rows in runner.run(cases):
            file.add(rows)
            progress.done(summary(case, rows))
            spare_imported(options.device)


def contestants(
    device: str, only: Sequence[str], family: str | None, case: Case
) -> list[Peer]:
    """Return the implementations of a case, ours first."""
    if case.workload == "tiles" and device == "cuda":
        return tiles.peers(case, family)
    wanted = Wanted(tuple(only))
    return [peer for peer in all_peers(device) if wanted.named(peer.name)]


def run_module(
    name: str, options: argparse.Namespace, file: ResultFile, deadline: float
) -> None:
    """Run a workload that measures by itself; its rows come all at once."""
    log = Lines(sys.stderr).done
    left = max(0.0, deadline - time.monotonic())
    wanted = file.wanted(options.only)
    if rows := module_of(name).rows(left, log, options.device, wanted):
        file.add(rows)


def module_of(name: str) -> ModuleType:
    """Return the module of a workload that measures by itself."""
    return importlib.import_module(f".{name}", __package__)


def known_impls(workloads: Sequence[str], device: str) -> list[str]:
    """Return the names of what some workloads measure."""
    modules = [module_of(name) for name in workloads if name in MODULES]
    found = [peer.name for peer in all_peers(device)]
    found += [impl for module in modules for impl in module.implementations(device)]
    return list(dict.fromkeys(found))


def finish(file: ResultFile, plots: bool) -> None:
    """Print and write the table of a file, and its plots."""
    if not file.rows:
        return
    text = tables.report(file.meta, file.rows)
    file.path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    written = [file.path, file.path.with_suffix(".md")]
    if plots:
        written += draw(file)
    for path in written:
        print(path)


def draw(file: ResultFile) -> list[Path]:
    """Draw the plots of a file beside it; say so if there is no matplotlib."""
    try:
        from . import plots
    except ImportError as error:
        print(f"no plots: {one_line(str(error))}", file=sys.stderr)
        return []
    return plots.draw(file.meta, file.rows, file.path.with_suffix(""))


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that both end a run alike."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_list(device: str) -> None:
    """Print the workloads, and the implementations with what keeps them away."""
    print("Workloads")
    for name in NAMES:
        size = "" if name in MODULES else f"{len(Selection().cases(name))} cases"
        print(f"  {name:12} {size}")
    print(f"Implementations on {device}")
    example = Selection().cases(DEFAULT[device])[0]
    for peer in all_peers(device):
        print(f"  {peer.name:12} {peer.why_not(example) or ''}")


# --- Result files ---------------------------------------------------------------------


def files_of(command: str, arguments: Sequence[str], count: str | int) -> list[Any]:
    """Parse and load result files, or leave with a message."""
    parser = argparse.ArgumentParser(f"python -m bench {command}")
    parser.add_argument("file", nargs=count, type=Path, metavar="FILE")
    paths = parser.parse_args(arguments).file
    try:
        return [ResultFile.load(path) for path in paths]
    except (OSError, ValueError) as error:
        parser.error(str(error))


def compare(arguments: Sequence[str]) -> int:
    """Print what changed between two result files."""
    before, after = files_of("compare", arguments, 2)
    print(tables.comparison(before, after))
    return 0


def plot(arguments: Sequence[str]) -> int:
    """Draw the plots of result files again."""
    written = [path for file in files_of("plot", arguments, "+") for path in draw(file)]
    for path in written:
        print(path)
    return 0 if written else 1


def table(arguments: Sequence[str]) -> int:
    """Print the tables of result files."""
    for file in files_of("table", arguments, "+"):
        print(tables.report(file.meta, file.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
