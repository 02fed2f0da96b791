"""Runs a small grid of calls under NVIDIA's compute-sanitizer, once with each tool.

    python -m tests.gpu.sanitize
    python -m tests.gpu.sanitize --tool memcheck,racecheck --seconds 120

Every kernel family forward and, if it can, backward, in every dtype that it has, with
sizes that fill no tile.
Kernels are compiled before, without the sanitizer. A tool takes a second or more for
each kernel, so the calls are divided into shares, each in a process of its own, side by
side. What was found goes to bench/results/sanitizer.json if all came to their end. The
exit code is 1 if something was found, or if one didn't.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import operator
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.__main__ import terminable
from bench.machine import ROOT, describe_machine, source_sha256
from cupy_flash import configs, flash_attention, flash_attention_backward
from cupy_flash.compiler import precompile
from cupy_flash.configs import FAMILIES, MmaRow
from cupy_flash.device import CuPyDevice
from cupy_flash.dtypes import parse_dtype
from cupy_flash.spec import KernelSpec

from ..cases import Case, make
from .running import Config, both, cp, has_atomics, is_refusal, specs, to_gpu

RESULT = ROOT / "bench" / "results" / "sanitizer.json"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Lines of a tool's report that are kept where it found something.
KEPT_LINES = 40
SECONDS = 540

_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (?:error|warning)s?")
_VERSION = re.compile(r"\bVersion (\S+)")
_DONE = "calls were made:"

# Neither queries nor keys are multiples of any tile, and heads no whole pieces of 16
# bytes; all options at once, then those that need least, then a band alone.
_EVERYTHING = Case(
    "everything", sq=83, sk=150, d=45, dv=39, causal=True, window=(60, 7), softcap=3.0,
    alibi="heads", bias="h1k", mask="b11k", q_lengths=(83, 41), k_lengths=(150, 77),
    dlse=True,
)  # fmt: skip
_PLAIN = Case("plain", sq=83, sk=150, hq=6, hkv=2)
_CAUSAL = Case("causal", sq=150, sk=83, d=128, causal=True)
GRID = (
    *(
        replace(_EVERYTHING, dtype=dtype)
        for dtype in ("float16", "bfloat16", "float32", "float64")
    ),
    *(replace(_PLAIN, dtype=dtype) for dtype in ("bfloat16", "float32", "float64")),
    *(replace(_CAUSAL, dtype=dtype) for dtype in ("bfloat16", "float32")),
)
# Heads for which the tiles of long sequences are forced; calls of the grid get others.
_LONG = (
    ("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 64),
    ("float32", 128), ("float64", 64),
)  # fmt: skip


# What `wgmma` takes of all options, in each of its tiles; then so many tiles of queries
# that blocks take several.
_FORWARD = Case(
    "forward", "bfloat16", sq=203, sk=333, causal=True, window=(90, 7), softcap=3.0,
    alibi="heads", q_lengths=(203, 71), k_lengths=(77, 333), gradients=False,
)  # fmt: skip
_BACKWARD = Case(
    "backward", "bfloat16", sq=203, sk=333, window=(90, 7), q_lengths=(203, 71),
    k_lengths=(77, 333),
)  # fmt: skip
_MANY = Case(
    "many", "float16", (3,), sq=83, sk=150, hq=48, hkv=16, d=40, causal=True,
    gradients=False,
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a tool found.

    Attributes
    ----------
    errors : int, optional
        Errors and warnings; None if the tool didn't come to its end.
    calls : int
        Those that it came to the end of.
    seconds : float
    report : tuple of str
        What it said, if that isn't that all is well.
    """

    errors: int | None
    calls: int
    seconds: float
    report: tuple[str, ...] = ()

    def __add__(self, other: Found) -> Found:
        """Return what was found in two shares that ran side by side."""
        whole = self.errors is not None and other.errors is not None
        return Found(
            self.errors + other.errors if whole else None,
            self.calls + other.calls,
            max(self.seconds, other.seconds),
            self.report + other.report,
        )


# --- The calls ------------------------------------------------------------------------


def grid() -> Iterator[tuple[Case, Config]]:
    """Yield each case with what is asked for in forward and backward."""
    for case in GRID:
        for family in FAMILIES:
            yield case, family
    for dtype, size in _LONG:
        case = replace(_PLAIN, dtype=dtype, d=size)
        tables = configs.MMA_FORWARD, configs.MMA_BACKWARD
        yield case, tuple(first(table, dtype, size) for table in tables)
    tiles = (
        row.tile(*row.limits, max(row.min_keys, _FORWARD.sk), bool(row.banded))
        for row in configs.WGMMA_FORWARD
    )
    for tile in dict.fromkeys(tiles):
        yield replace(_FORWARD, d=tile.depth - 8, dv=tile.depth_v - 8), tile
    yield _MANY, "wgmma"
    for tile in configs.WGMMA_BACKWARD:
        size = {"d": tile.depth - 8, "dv": tile.depth_v - 8}
        yield replace(_BACKWARD, **size), "wgmma"
        yield replace(_MANY, **size, gradients=True), "wgmma"


def first(table: Sequence[MmaRow], dtype: str, head_dim: int) -> configs.MmaTile:
    """Return the tile of the first row for a head."""
    itemsize = parse_dtype(dtype).itemsize
    tiles = (row.tile(head_dim, head_dim) for row in table if row.itemsize == itemsize)
    return next(tile for tile in tiles if tile is not None)


def kernels(device: str) -> list[KernelSpec]:
    """Return the kernels of all calls, but of those that a GPU refuses."""
    found: dict[KernelSpec, None] = {}
    for case, config in grid():
        for one in (replace(case, gradients=False), case):
            try:
                found |= dict.fromkeys(specs(one, config, device))
            except ValueError as error:
                if not is_refusal(error):
                    raise
    return list(found)


def clear_unused() -> None:
    """Clear what is read before it is written, but not used; initcheck can't know that.

    Counters of claims may begin with anything. Of the padding of copied rows a copy to
    shared memory reads nothing, though its instruction is one of 16 bytes.
    """
    temporary, dense_copy = CuPyDevice.temporary, CuPyDevice.dense_copy

    def cleared(self: CuPyDevice, shape: Sequence[int], dtype: np.dtype) -> Any:
        array = temporary(self, shape, dtype)
        self.clear(array)
        return array

    def counter_cleared(self: CuPyDevice, shape: Sequence[int], dtype: np.dtype) -> Any:
        counts = (tuple(shape), dtype) == ((1,), np.uint64)
        return (cleared if counts else temporary)(self, shape, dtype)

    def padded(self: CuPyDevice, array: Any, multiple: int = 1) -> Any:
        with mock.patch.object(CuPyDevice, "temporary", cleared):
            return dense_copy(self, array, multiple)

    CuPyDevice.temporary = counter_cleared
    CuPyDevice.dense_copy = padded


def run_all(share: int = 0, shares: int = 1) -> int:
    """Make a share of the calls on the present GPU and return how many there were."""
    # Each array lies alone, so that an access beside it is one outside of any.
    cp.cuda.set_allocator(None)
    mine = itertools.islice(grid(), share, None, shares)
    calls = sum(run(case, config) for case, config in mine)
    cp.cuda.Device().synchronize()
    return calls


def run(case: Case, config: Config) -> int:
    """Make the calls of a case, forward and backward, and return how many."""
    inputs = make(case)
    arrays = {name: to_gpu(x) for name, x in inputs.arrays.items()}
    q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
    dlse = arrays.pop("dlse", None)
    options = inputs.scalars | arrays
    of_forward, of_backward = both(config)
    try:
        out, lse = flash_attention(
            q, k, v, **options, return_lse=True, config=of_forward
        )
    except ValueError as error:
        if not is_refusal(error):
            raise
        return 0
    calls = 1
    if of_backward is None or not case.gradients:
        return calls
    for deterministic in (True, False) if has_atomics(config) else (True,):
        try:
            flash_attention_backward(
                dout, q, k, v, out, lse, **options, dlse=dlse,
                bias_grad=case.bias is not None, config=of_backward,
                deterministic=deterministic,
            )  # fmt: skip
        except ValueError as error:
            if not is_refusal(error):
                raise
        else:
            calls += 1
    return calls


# --- The tools ------------------------------------------------------------------------


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, None if there is none."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def version_of(executable: str) -> str | None:
    """Return a sanitizer's version."""
    text = subprocess.run(
        [executable, "--version"], capture_output=True, text=True, check=False
    ).stdout
    match = _VERSION.search(text)
    return match and match[1]


def start(executable: str, tool: str, child: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process under a tool."""
    # What the CUDA libraries ask the driver for is none of our business.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [executable, "--tool", tool, *options, *child]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def read(process: subprocess.Popen[str], began: float, limit: float) -> Found:
    """Wait for a process under a tool and read what it found."""
    try:
        text, _ = process.communicate(timeout=max(0.0, limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        stop(process)
        text, _ = process.communicate()
        text += "\nit was stopped because of its time"
    seconds = round(time.monotonic() - began, 1)
    return understood(text, process.returncode, seconds)


def stop(process: subprocess.Popen[str]) -> None:
    """End a tool and what runs under it, which would keep its output open."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def understood(text: str, code: int, seconds: float) -> Found:
    """Return what a tool's output says."""
    lines = tuple(line for line in text.splitlines() if line.strip())
    calls = re.search(rf"^{_DONE} (\d+)$", text, re.MULTILINE)
    summary = _SUMMARY.findall(text)
    if calls is None or not summary or code < 0:
        return Found(None, 0, seconds, lines[-KEPT_LINES:])
    errors = sum(int(count) for line in summary for count in _COUNT.findall(line))
    return Found(errors, int(calls[1]), seconds, lines[:KEPT_LINES] if errors else ())


def run_tools(
    executable: str,
    tools: Sequence[str],
    child: Sequence[str],
    shares: int,
    seconds: float,
) -> dict[str, Found]:
    """Run all shares under all tools at once, and say what each of them found."""
    began = time.monotonic()
    processes: dict[str, list[subprocess.Popen[str]]] = {tool: [] for tool in tools}
    found = {}
    try:
        for tool, share in itertools.product(tools, range(shares)):
            command = [*child, "--calls", str(share)]
            processes[tool].append(start(executable, tool, command))
        for tool, each in processes.items():
            shares_found = [read(one, began, began + seconds) for one in each]
            found[tool] = functools.reduce(operator.add, shares_found)
            errors, calls = found[tool].errors, found[tool].calls
            outcome = "not done" if errors is None else f"{errors} errors"
            say(f"{tool}: {calls} calls, {outcome}")
    finally:
        for process in itertools.chain(*processes.values()):
            if process.poll() is None:
                stop(process)
                process.communicate()
    return found


def say(text: str) -> None:
    """Say what is done so far."""
    print(text, file=sys.stderr, flush=True)


def record(
    found: dict[str, Found], version: str | None, count: int, command: str
) -> dict[str, Any]:
    """Return the record of a run."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        **describe_machine(),
        "compute_sanitizer": version,
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "kernels": count,
        "source_sha256": source_sha256(),
        "tools": {
            tool: {
                "calls": each.calls, "errors": each.errors, "seconds": each.seconds,
                **({"report": each.report} if each.report else {}),
            }
            for tool, each in found.items()
        },
    }  # fmt: skip


def tools_of(text: str) -> tuple[str, ...]:
    """Split at commas into tools."""
    chosen = tuple(text.split(","))
    if unknown := [tool for tool in chosen if tool not in TOOLS]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)} unknown; accepted: {', '.join(TOOLS)}"
        )
    return chosen


def positive(text: str) -> int:
    """Read a number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tools and write down what they found."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        "python -m tests.gpu.sanitize",
        description="Runs a small grid of calls under compute-sanitizer.",
    )
    parser.add_argument(
        "--tool", type=tools_of, default=TOOLS, metavar="TOOL,...",
        help=f"default: {','.join(TOOLS)}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the record here too")
    parser.add_argument(
        "--shares", type=positive, metavar="N",
        default=max(1, (os.cpu_count() or 1) // len(TOOLS)),
        help="processes for each tool, default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=SECONDS,
        help="after which those that still run are stopped, default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--calls", type=int, metavar="SHARE",
        help="only make the calls of a share, from 0 on, under no tool",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    if chosen.calls is not None:
        if not 0 <= chosen.calls < chosen.shares:
            parser.error(f"share {chosen.calls} of {chosen.shares}: they begin at 0")
        clear_unused()
        print(_DONE, run_all(chosen.calls, chosen.shares))
        return 0
    executable = sanitizer()
    if executable is None:
        parser.error("compute-sanitizer is neither on the path nor with the toolkit")
    capability = int(cp.cuda.Device().compute_capability)
    needed = kernels(f"sm_{capability}")
    began = time.monotonic()
    precompile(needed, capability)
    run_all()  # CuPy's own kernels are compiled as they come
    say(f"{len(needed)} kernels ready after {time.monotonic() - began:.0f} s")
    child = [sys.executable, "-m", "tests.gpu.sanitize", "--shares", str(chosen.shares)]
    with terminable():
        found = run_tools(executable, chosen.tool, child, chosen.shares, chosen.seconds)
    command = shlex.join(["python", "-m", "tests.gpu.sanitize", *arguments])
    made = record(found, version_of(executable), len(needed), command)
    text = json.dumps(made, indent=2)
    print(text)
    complete = all(each.errors is not None for each in found.values())
    paths = [RESULT] if complete and set(found) == set(TOOLS) else []
    for path in (*paths, *([chosen.out] if chosen.out else [])):
        path.write_text(text + "\n", encoding="utf-8")
        print(path)
    return 0 if all(each.errors == 0 for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
