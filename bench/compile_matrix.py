"""Compiles every tile for every kind of GPU, by every version of NVRTC that matters.

    python -m bench.compile_matrix

NVRTC 13.0, the newest 13 and the newest 12 each run in an environment of their own, if
the present one doesn't have that version. What came of it goes to
bench/results/compile-matrix.json, from which the README's table is made.

Outcomes are kept in a subfolder of ``CUPY_CACHE_DIR``, if that is set, under a hash of
the source: a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash import compiler, configs, plan_wgmma
from cupy_flash.configs import MmaRow, SimtRow, SimtTile, WgmmaTile
from cupy_flash.device import DeviceInfo, hypothetical
from cupy_flash.plan import make_plan
from cupy_flash.problem import ArrayInfo, Options
from cupy_flash.spec import KernelSpec
from cupy_flash.validate import contiguous_strides, make_problem
from cupy_flash.variant import Variant

from .machine import ROOT, source_sha256

RESULT = ROOT / "bench" / "results" / "compile-matrix.json"
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
DTYPES = (*HALVES, FLOAT32, FLOAT64)
BY_ACCUMULATOR = {4: FLOAT32, 8: FLOAT64}
KERNELS = {
    "forward": configs.SIMT_FORWARD,
    "backward_dq": configs.SIMT_BACKWARD,
    "backward_dkdv": configs.SIMT_BACKWARD,
    "backward_dbias": configs.SIMT_BACKWARD_DBIAS,
}
MMA_KERNELS = {
    "forward": configs.MMA_FORWARD,
    "backward": configs.MMA_BACKWARD,
    "backward_dkdv": configs.MMA_BACKWARD,
    "backward_dq": configs.MMA_BACKWARD_DQ,
    "backward_dbias": configs.MMA_BACKWARD_DBIAS,
}
# Options of calls that need other kernels of `wgmma`; what a length is needs none.
WGMMA_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (3, 3)},
    {"window": (3, 3), "softcap": 5.0, "alibi_slopes": True},
    {"scale": -1.0},
)
WGMMA_BACKWARD_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (3, 3)},
)
# The oldest NVRTC that some kernels are planned for, and that all are.
NVRTC, NVRTC_FOR_ALL = (12, 9), (13, 0)


@dataclass(frozen=True)
class Compiler:
    """A version of NVRTC and the GPUs it is asked for.

    Attributes
    ----------
    version : str
        The version, or as much of it as matters.
    requirements : tuple of str
        What pip installs, which takes the newest there is.
    capabilities : tuple of int
    """

    version: str
    requirements: tuple[str, ...]
    capabilities: tuple[int, ...]

    def __str__(self) -> str:
        return f"NVRTC {self.version}"

    def is_met_by(self, version: str) -> bool:
        """Whether a whole version is this one."""
        return f"{version}.".startswith(f"{self.version}.")


# CUDA 13 begins at compute capability 7.5; what is older gets an NVRTC of CUDA 12, and
# so does Hopper, whose kernels ask most of a compiler.
OLD, NEW = (50, 52, 60, 61, 70, 72), (75, 80, 86, 89, 90, 100, 120)
CAPABILITIES = (*OLD, *NEW)
NEEDED = ("ml_dtypes", "numpy", "rich")
COMPILERS = (
    Compiler("13.0", ("cupy-cuda13x", "nvidia-cuda-nvrtc==13.0.*", *NEEDED), NEW),
    Compiler("13", ("cupy-cuda13x", "nvidia-cuda-nvrtc==13.*", *NEEDED), NEW),
    Compiler("12", ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12==12.*", *NEEDED),
             (*OLD, 90)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel and the compute capability it is compiled for."""

    spec: KernelSpec
    capability: int

    def __str__(self) -> str:
        return f"sm_{self.capability}-{self.spec.symbol}"


@dataclass(frozen=True)
class Outcome:
    """What the compiler made of a case; `error` is empty if it could."""

    error: str = ""
    elf: bool = False
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    serialized: bool = False  # each product of a warpgroup waits for the one before


# --- The cases ------------------------------------------------------------------------


def plain(kernel: str, dtype: np.dtype) -> Variant:
    """Return the variant without options."""
    return Variant(bias=dtype if kernel == "backward_dbias" else None)


def everything(dtype: np.dtype) -> Variant:
    """Return the variant with all options."""
    return Variant(
        left=True, right=True, softcap=True, alibi=True, bias=dtype, mask=True
    )


def simt(
    kernel: str, tile: SimtTile, dtype: np.dtype, variant: Variant, batch_axes: int = 1
) -> KernelSpec:
    """Return a kernel of the family `simt`."""
    return KernelSpec("simt", kernel, dtype, variant, tile, tile.threads, batch_axes)


def passes(dtype: np.dtype, batch_axes: int = 1) -> list[KernelSpec]:
    """Return the passes around backward."""
    accumulator = 8 if dtype == FLOAT64 else 4
    (row,) = (r for r in configs.SIMT_BACKWARD_DBIAS if r.accumulator == accumulator)
    threads = configs.PASS_THREADS
    return [
        KernelSpec("passes", "delta", dtype, Variant(), None, threads, batch_axes),
        KernelSpec(
            "passes", "reduce_dbias", dtype, Variant(bias=dtype), row.tile, threads,
            batch_axes,
        ),
    ]  # fmt: skip


def table_rows() -> Iterator[tuple[str, SimtRow]]:
    """Yield each kernel with each row of its table."""
    for kernel, table in KERNELS.items():
        for row in table:
            yield kernel, row


def info(*shape: int, dtype: np.dtype) -> ArrayInfo:
    """Describe a contiguous array."""
    return ArrayInfo(shape, contiguous_strides(shape, dtype), dtype)


def chosen_on(gpu: DeviceInfo) -> set[tuple[str, int, SimtTile]]:
    """Return the kernels of `simt` and the tiles that some head size gets on a GPU."""
    found = set()
    sizes = configs.head_dim_buckets()
    for d, dv, dtype in itertools.product(sizes, sizes, (FLOAT32, FLOAT64)):
        q, v = info(9, 1, d, dtype=dtype), info(9, 1, dv, dtype=dtype)
        arrays = {
            "q": q, "k": q, "v": v, "out": v, "dout": v,
            "lse": info(1, 9, dtype=dtype), "bias": info(9, 9, dtype=dtype),
        }  # fmt: skip
        for direction in ("forward", "backward"):
            options = Options(
                direction, bias_grad=direction == "backward", config="simt"
            )
            for step in make_plan(make_problem(arrays, options), gpu).steps:
                if step.spec.family == "simt":
                    found.add((step.spec.kernel, dtype.itemsize, step.spec.tile))
    return found


def mma_specs(
    gpu: DeviceInfo, dtype: np.dtype, head_dim: int, **options: Any
) -> Iterator[KernelSpec]:
    """Yield the kernels of `mma` of a head size on a GPU: no option, then all of them.

    For sequences from long to short, as tiles have fewer rows where blocks are few.
    None if the family can't serve it there.
    """
    tables = MMA_KERNELS.values()
    for rows in sorted({row.rows for table in tables for row in table}, reverse=True):
        # A block of so many rows for each multiprocessor.
        seqlen = rows * gpu.multiprocessors
        yield from mma_specs_of(seqlen, gpu, dtype, head_dim, **options)


def mma_specs_of(
    seqlen: int, gpu: DeviceInfo, dtype: np.dtype, head_dim: int, **options: Any
) -> Iterator[KernelSpec]:
    """Yield the kernels of one head with so many queries and keys."""
    q, bias = info(seqlen, 1, head_dim, dtype=dtype), info(1, 1, dtype=dtype)
    lse = info(1, seqlen, dtype=FLOAT64 if dtype == FLOAT64 else FLOAT32)
    arrays = {"q": q, "k": q, "v": q, "out": q, "dout": q, "lse": lse}
    whole = {
        "bias": bias, "mask": info(seqlen, seqlen, dtype=np.dtype(bool)),
        "alibi_slopes": info(1, dtype=FLOAT32),
    }  # fmt: skip
    limits = {"window": (3, 3), "softcap": 5.0}
    for direction, deterministic in (
        ("forward", False), ("backward", False), ("backward", True),
    ):  # fmt: skip
        gradient = direction == "backward"
        for extra, features in (
            ({}, {}),
            ({"bias": bias}, {"bias_grad": gradient}),
            (whole, {**limits, "bias_grad": gradient}),
        ):
            wanted = Options(
                direction, deterministic=deterministic, config="mma", **features,
                **options,
            )  # fmt: skip
            try:
                plan = make_plan(make_problem(arrays | extra, wanted), gpu)
            except ValueError as error:
                if "can't be had" not in str(error):
                    raise
                continue
            for spec in (step.spec for step in plan.steps):
                # With a bias and nothing else its gradient alone is of interest.
                alone = spec.kernel in ("backward_dbias", "reduce_dbias")
                if spec.tile is not None and (alone or extra != {"bias": bias}):
                    yield spec


def mma_cases_for(capability: int) -> list[Case]:
    """Return the kernels of `mma` for each depth of its tiles on a GPU."""
    gpu = hypothetical(f"sm_{capability}")
    # Halves differ by an instruction alone.
    half, other = HALVES if capability < 80 else HALVES[::-1]
    specs: list[KernelSpec] = []
    for dtype in (half, FLOAT32, FLOAT64):
        for depth in configs.MMA_DEPTHS:
            specs += mma_specs(gpu, dtype, depth)
        specs += mma_specs(gpu, dtype, configs.ragged_head_dims()[1])
    specs += mma_specs(gpu, other, 64)
    specs += mma_specs(gpu, FLOAT32, 64, precision="tf32")
    return [Case(spec, capability) for spec in dict.fromkeys(specs)]


def mma_rows() -> Iterator[tuple[str, MmaRow]]:
    """Yield each kernel of `mma` with each row of its table."""
    for kernel, table in MMA_KERNELS.items():
        for row in table:
            yield kernel, row


def mma_row_of(spec: KernelSpec) -> tuple[str, MmaRow] | None:
    """Return the row that a kernel's tile is of, None if it isn't of a table."""
    if spec.family != "mma":
        return None
    size = spec.dtype.itemsize
    for row in MMA_KERNELS.get(spec.kernel, ()):
        # Any head of the tile's depth would do.
        if row.itemsize == size and spec.tile == row.tile(
            spec.tile.depth, spec.tile.depth_v
        ):
            return spec.kernel, row
    return None


def wgmma_tiles() -> list[WgmmaTile]:
    """Return the tiles of `wgmma`, each with the deepest head that its row is for."""
    found = {}
    for row in configs.WGMMA_FORWARD:
        depths = row.max_depth, row.max_depth_v
        found[row.tile(*depths, row.min_keys, bool(row.banded))] = None
    return list(found)


def wgmma_specs(
    gpu: DeviceInfo, tile: WgmmaTile, dtype: np.dtype, **options: Any
) -> Iterator[KernelSpec]:
    """Yield the kernel of a tile with some options, none if the GPU can't have it."""
    q, v = (info(9, 1, d, dtype=dtype) for d in (tile.depth, tile.depth_v))
    arrays = {"q": q, "k": q, "v": v}
    if options.pop("alibi_slopes", False):
        arrays["alibi_slopes"] = info(1, dtype=FLOAT32)
    wanted = Options("forward", config="wgmma", **options)
    problem = make_problem(arrays, wanted)
    if plan_wgmma.refusal(problem, gpu):
        return
    problem = dataclasses.replace(problem, config=tile)
    yield from (step.spec for step in make_plan(problem, gpu).steps)


def wgmma_backward_specs(
    gpu: DeviceInfo, tile: WgmmaTile, dtype: np.dtype, **options: Any
) -> Iterator[KernelSpec]:
    """Yield the kernels of the gradients with a tile, none if the GPU can't have it."""
    q, v = (info(129, 1, d, dtype=dtype) for d in (tile.depth, tile.depth_v))
    arrays = {"q": q, "k": q, "v": v, "out": v, "dout": v}
    arrays["lse"] = info(1, 129, dtype=FLOAT32)
    problem = make_problem(arrays, Options("backward", config="wgmma", **options))
    if plan_wgmma.refusal(problem, gpu) or plan_wgmma.gradients_refusal(tile, gpu):
        return
    problem = dataclasses.replace(problem, config=tile)
    yield from (step.spec for step in make_plan(problem, gpu).steps)


def wgmma_cases_for(capability: int) -> list[Case]:
    """Return the kernels of `wgmma`: each tile with each of the options."""
    gpu = dataclasses.replace(hypothetical(f"sm_{capability}"), nvrtc=NVRTC)
    half, other = HALVES[::-1]
    specs: list[KernelSpec] = []
    for tile in wgmma_tiles():
        for options in WGMMA_OPTIONS:
            specs += wgmma_specs(gpu, tile, half, **options)
        specs += wgmma_specs(gpu, tile, other)
    return [Case(spec, capability) for spec in dict.fromkeys(specs)]


def wgmma_gradient_cases_for(
    capability: int, nvrtc: tuple[int, int] = NVRTC_FOR_ALL
) -> list[Case]:
    """Return the kernels of the gradients of `wgmma`, and the passes around them."""
    gpu = dataclasses.replace(hypothetical(f"sm_{capability}"), nvrtc=nvrtc)
    half, other = HALVES[::-1]
    specs: list[KernelSpec] = []
    for tile in configs.WGMMA_BACKWARD:
        for options in WGMMA_BACKWARD_OPTIONS:
            specs += wgmma_backward_specs(gpu, tile, half, **options)
        specs += wgmma_backward_specs(gpu, tile, other)
    return [Case(spec, capability) for spec in dict.fromkeys(specs)]


def cases_for(capability: int, nvrtc: tuple[int, int] = NVRTC_FOR_ALL) -> list[Case]:
    """Return each tile that a GPU gets with no option and with all, and the passes."""
    return [
        *simt_cases_for(capability), *mma_cases_for(capability),
        *wgmma_cases_for(capability), *wgmma_gradient_cases_for(capability, nvrtc),
    ]  # fmt: skip


def simt_cases_for(capability: int) -> list[Case]:
    """Return each tile of `simt` that a GPU gets, and the passes."""
    chosen = chosen_on(hypothetical(f"sm_{capability}"))
    specs = []
    for kernel, row in table_rows():
        if (kernel, row.accumulator, row.tile) in chosen:
            dtype = BY_ACCUMULATOR[row.accumulator]
            for variant in (plain(kernel, dtype), everything(dtype)):
                specs.append(simt(kernel, row.tile, dtype, variant))
    for kernel in KERNELS:  # halves differ by their loads and stores alone
        tile = next(r.tile for r in KERNELS[kernel] if (kernel, 4, r.tile) in chosen)
        specs += [simt(kernel, tile, half, everything(half)) for half in HALVES]
    for dtype in DTYPES:
        specs += passes(dtype)
    return [Case(spec, capability) for spec in dict.fromkeys(specs)]


# --- Compiling ------------------------------------------------------------------------


def options_of(case: Case) -> tuple[tuple[str, ...], str]:
    """Return the compiler's options for a case, and the suffix of the result."""
    return compiler.options(case.capability, case.spec.architecture_specific)


def compile_case(case: Case) -> Outcome:
    """Compile a case and read what the compiler says of it."""
    try:
        flags, suffix = options_of(case)
        if suffix != ".cubin":
            return Outcome(error=f"no machine code for {case}, only PTX")
        image = compiler._compile(
            compiler.source_text(case.spec), case.spec.symbol,
            (*flags, "--ptxas-options=-v"), suffix,
        )  # fmt: skip
    except compiler.CompileError as error:
        return Outcome(error=str(error))

    def number(pattern: str) -> int:
        match = re.search(pattern, image.log)
        assert match is not None, f"no {pattern!r} in the compiler's log: {image.log}"
        return int(match[1])

    return Outcome(
        elf=image.code.startswith(b"\x7fELF"),
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        serialized="serialized" in image.log,
    )


def kept_in() -> Path | None:
    """Return the folder where outcomes are kept, None if they aren't."""
    root = os.environ.get("CUPY_CACHE_DIR")
    return Path(root) / "cupy_flash_matrix" if root else None


def build(case: Case, folder: Path | None) -> Outcome:
    """Compile a case, or look up what came of it the last time."""
    if folder is None:
        return compile_case(case)
    flags, _ = options_of(case)
    source = compiler.source_text(case.spec)
    key = repr((source, flags, compiler.nvrtc_version(), Outcome()))
    file = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    try:
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass  # not there, or not written to its end
    outcome = compile_case(case)
    if not outcome.error:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")
    return outcome


def pool() -> ProcessPoolExecutor:
    """Return a process for each core."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(os.cpu_count(), mp_context=context)


def compile_all(capabilities: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Compile for some GPUs with the present NVRTC, and yield a row for each."""
    with pool() as workers:
        for capability in capabilities:
            cases = cases_for(capability, compiler.nvrtc_version())
            folders = itertools.repeat(kept_in())
            yield row_of(capability, list(workers.map(build, cases, folders)))


def row_of(capability: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what the result file says of a GPU."""
    import cupy

    errors = [outcome.error for outcome in outcomes if outcome.error]
    return {
        "nvrtc": "{}.{}".format(*compiler.nvrtc_version()),
        "cupy": cupy.__version__,
        "capability": capability,
        "kernels": len(outcomes),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "max_registers": max(outcome.registers for outcome in outcomes),
        "max_spill_bytes": max(outcome.spill_stores for outcome in outcomes),
        "shared_memory_limit": hypothetical(f"sm_{capability}").shared_memory,
    }


# --- In an environment of its own -----------------------------------------------------


def run_compiler(wanted: Compiler, *, fresh: bool = True) -> list[dict[str, Any]]:
    """Return the rows of a version of NVRTC.

    Parameters
    ----------
    wanted : Compiler
    fresh : bool, default True
        Make an environment, whatever the present one has.
    """
    if not fresh:
        return run_child(sys.executable, wanted)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        binaries = "Scripts" if os.name == "nt" else "bin"
        python = str(Path(folder, binaries, "python"))
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *wanted.requirements], check=True
        )
        return run_child(python, wanted)


def run_child(python: str, wanted: Compiler) -> list[dict[str, Any]]:
    """Compile in another process, which may have another NVRTC.

    Raises
    ------
    RuntimeError
        If it has another one than is wanted, such as that of an installed toolkit.
    """
    arguments = map(str, wanted.capabilities)
    run = subprocess.run(
        [python, "-m", "bench.compile_matrix", "--here", *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    rows = json.loads(run.stdout)
    for row in rows:
        if not wanted.is_met_by(row["nvrtc"]):
            raise RuntimeError(f"{wanted} is wanted, and found is {row['nvrtc']}")
    return rows


def is_present(wanted: Compiler) -> bool:
    """Whether the present environment has exactly that version.

    Which one is the newest of a major version isn't known here.
    """
    return "{}.{}".format(*compiler.nvrtc_version()) == wanted.version


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all compilers and write the result, or compile with the present one."""
    parser = argparse.ArgumentParser(
        "python -m bench.compile_matrix", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--here", type=int, nargs="+", metavar="NN",
        help="compile for these compute capabilities with the present NVRTC and print "
        "the rows",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    if chosen.here:
        rows = []
        for row in compile_all(chosen.here):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        print(json.dumps(rows))
        return
    meta = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "command": "python -m bench.compile_matrix",
        "source_sha256": source_sha256(),
    }
    rows = [
        row
        for entry in COMPILERS
        for row in run_compiler(entry, fresh=not is_present(entry))
    ]
    if source_sha256() != meta["source_sha256"]:
        sys.exit("the sources changed meanwhile; nothing is written")
    text = json.dumps({"meta": meta, "rows": rows}, indent=1)
    RESULT.write_text(f"{text}\n", encoding="utf-8")
    failed = sum(row["failed"] for row in rows)
    print(f"{RESULT.name}: {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
