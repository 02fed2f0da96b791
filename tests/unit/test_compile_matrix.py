"""Every row of the tile tables compiles, for the GPUs it is meant for.

Each row with no option and with all of them, on sm_90 or, if it is chosen only where
shared memory is short, on the oldest GPU that NVRTC 13 compiles for. The marker
``matrix`` selects the same for more GPUs, which takes minutes.

Results are kept in a subfolder of ``CUPY_CACHE_DIR``, if that is set, under a hash of
the source: then the next run takes seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import compiler, configs
from cupy_flash.configs import SimtRow, SimtTile
from cupy_flash.device import DeviceInfo, hypothetical
from cupy_flash.plan import make_plan
from cupy_flash.problem import ArrayInfo, Options
from cupy_flash.spec import KernelSpec, Variant
from cupy_flash.validate import contiguous_strides, make_problem

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
BY_ACCUMULATOR = {4: FLOAT32, 8: FLOAT64}

MAIN, OLDEST = 90, 75
MORE = (75, 80, 86, 89, 100, 120)

# Bytes of registers that a kernel may store to local memory, without and with options,
# by the accumulator's size. A few dozen around the inner loops cost nothing that can be
# measured, and more blocks per multiprocessor are worth them; a whole accumulator of a
# thread (64 x 128 over 128 threads) would be 256 bytes of float32 and come with its
# loads in every round. float64 has half as many registers for twice as wide a tile row,
# and isn't tuned.
MAX_SPILL = {4: (128, 640), 8: (768, 1280)}

KERNELS = {
    "forward": configs.SIMT_FORWARD,
    "backward_dq": configs.SIMT_BACKWARD,
    "backward_dkdv": configs.SIMT_BACKWARD,
    "backward_dbias": configs.SIMT_BACKWARD_DBIAS,
}


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


# --- The cases ------------------------------------------------------------------------


def plain(kernel: str, dtype: np.dtype) -> Variant:
    return Variant(bias=dtype if kernel == "backward_dbias" else None)


def everything(dtype: np.dtype) -> Variant:
    return Variant(
        left=True, right=True, softcap=True, alibi=True, bias=dtype, mask=True
    )


def simt(
    kernel: str, tile: SimtTile, dtype: np.dtype, variant: Variant, batch_axes: int = 1
) -> KernelSpec:
    return KernelSpec("simt", kernel, dtype, variant, tile, tile.threads, batch_axes)


def passes(dtype: np.dtype, batch_axes: int = 1) -> list[KernelSpec]:
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


def chosen_on(gpu: DeviceInfo) -> set[tuple[str, int, SimtTile]]:
    """Return the kernels and tiles that some head size gets on a GPU."""

    def info(*shape: int, dtype: np.dtype) -> ArrayInfo:
        return ArrayInfo(shape, contiguous_strides(shape, dtype), dtype)

    found = set()
    sizes = (16, 32, 64, 96, 128, 256)
    for d, dv, dtype in itertools.product(sizes, sizes, (FLOAT32, FLOAT64)):
        q, v = info(9, 1, d, dtype=dtype), info(9, 1, dv, dtype=dtype)
        arrays = {
            "q": q, "k": q, "v": v, "out": v, "dout": v,
            "lse": info(1, 9, dtype=dtype), "bias": info(9, 9, dtype=dtype),
        }  # fmt: skip
        for direction in ("forward", "backward"):
            options = Options(direction, bias_grad=direction == "backward")
            for step in make_plan(make_problem(arrays, options), gpu).steps:
                if step.spec.family == "simt":
                    found.add((step.spec.kernel, dtype.itemsize, step.spec.tile))
    return found


def rows() -> Iterator[tuple[str, SimtRow]]:
    for kernel, table in KERNELS.items():
        for row in table:
            yield kernel, row


def main_cases() -> list[Case]:
    chosen = chosen_on(hypothetical(f"sm_{MAIN}"))
    cases = []
    for kernel, row in rows():
        is_main = (kernel, row.accumulator, row.tile) in chosen
        dtype = BY_ACCUMULATOR[row.accumulator]
        for variant in (plain(kernel, dtype), everything(dtype)):
            spec = simt(kernel, row.tile, dtype, variant)
            cases.append(Case(spec, MAIN if is_main else OLDEST))
    # What is the same in every row: once for each kernel.
    for kernel, table in KERNELS.items():
        tile = table[0].tile
        first = dataclasses.replace(plain(kernel, FLOAT32), scale_first=True)
        specs = [simt(kernel, tile, FLOAT32, first, batch_axes=3)]
        for half in HALVES:
            specs.append(simt(kernel, tile, half, plain(kernel, half)))
            specs.append(simt(kernel, tile, half, everything(half)))
        # A bias of another dtype than the arrays.
        mixed = Variant(bias=FLOAT64 if kernel == "backward_dbias" else HALVES[0])
        specs.append(simt(kernel, tile, FLOAT32, mixed))
        cases += [Case(spec, MAIN) for spec in specs]
    for dtype in (*HALVES, FLOAT32, FLOAT64):
        cases += [Case(spec, MAIN) for spec in passes(dtype)]
    cases += [Case(spec, MAIN) for spec in passes(FLOAT32, batch_axes=4)]
    return list(dict.fromkeys(cases))


def more_cases() -> list[Case]:
    cases = []
    for capability in MORE:
        chosen = chosen_on(hypothetical(f"sm_{capability}"))
        for kernel, row in rows():
            if (kernel, row.accumulator, row.tile) not in chosen:
                continue
            dtype = BY_ACCUMULATOR[row.accumulator]
            specs = [simt(kernel, row.tile, dtype, plain(kernel, dtype))]
            specs.append(simt(kernel, row.tile, dtype, everything(dtype)))
            cases += [Case(spec, capability) for spec in specs]
        for dtype in (*HALVES, FLOAT32, FLOAT64):
            cases += [Case(spec, capability) for spec in passes(dtype)]
    main = set(main_cases())
    return [case for case in dict.fromkeys(cases) if case not in main]


# --- Compiling them, on all cores -----------------------------------------------------


def build(case: Case, folder: Path) -> Outcome:
    """Compile a case, or look up what came of it the last time."""
    flags, suffix = compiler.options(case.capability)
    flags = (*flags, "--ptxas-options=-v")
    source = compiler.source_text(case.spec)
    key = repr((source, flags, compiler.nvrtc_version(), Outcome()))
    file = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    try:
        return Outcome(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        pass  # not there, or not written to its end
    outcome = compile_case(source, case.spec.symbol, flags, suffix)
    if not outcome.error:
        file.write_text(json.dumps(dataclasses.asdict(outcome)))
    return outcome


def compile_case(
    source: str, symbol: str, flags: tuple[str, ...], suffix: str
) -> Outcome:
    try:
        image = compiler._compile(source, symbol, flags, suffix)
    except compiler.CompileError as error:
        return Outcome(error=str(error))

    def number(pattern: str) -> int:
        match = re.search(pattern, image.log)
        assert match is not None, f"no {pattern!r} in the compiler's log: {image.log}"
        return int(match[1])

    return Outcome(
        elf=suffix == ".cubin" and image.code.startswith(b"\x7fELF"),
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
    )


@pytest.fixture(scope="session")
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case], Outcome]]:
    """What became of a case; all selected ones are compiled at once."""
    root = os.environ.get("CUPY_CACHE_DIR")
    folder = Path(root) / "cupy_flash_matrix" if root else None
    if folder is None:
        folder = tmp_path_factory.mktemp("matrix")
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(request.config, "workerinput"):  # pytest-xdist has processes already
        yield lambda case: build(case, folder)
        return
    cases = {
        item.callspec.params["case"]
        for item in request.session.items
        if hasattr(item, "callspec")
        and isinstance(item.callspec.params.get("case"), Case)
    }
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=context)
    # Those that take longest first.
    ordered = sorted(cases, key=lambda case: (case.spec.shared_memory, str(case)))
    futures = {case: pool.submit(build, case, folder) for case in reversed(ordered)}
    yield lambda case: futures[case].result()
    pool.shutdown(cancel_futures=True)


# --- The tests ------------------------------------------------------------------------


def check(case: Case, outcome: Outcome) -> None:
    assert not outcome.error, outcome.error
    assert outcome.elf
    blocks = case.spec.tile.blocks if case.spec.family == "simt" else 1
    assert outcome.registers * case.spec.threads * blocks <= 65536
    accumulator = 8 if case.spec.dtype == FLOAT64 else 4
    plainly, at_most = MAX_SPILL[accumulator]
    in_use = case.spec.variant.mask  # all options, or none to speak of
    assert outcome.spill_stores <= (at_most if in_use else plainly)
    if case.spec.family == "passes":
        assert outcome.spill_stores == 0


@pytest.mark.parametrize("case", main_cases(), ids=str)
def test_compiles(case: Case, outcome_of: Callable[[Case], Outcome]) -> None:
    check(case, outcome_of(case))


@pytest.mark.matrix
@pytest.mark.parametrize("case", more_cases(), ids=str)
def test_compiles_for_more_gpus(
    case: Case, outcome_of: Callable[[Case], Outcome]
) -> None:
    check(case, outcome_of(case))


def test_all_rows_are_compiled() -> None:
    compiled = {
        (case.spec.kernel, case.spec.dtype.itemsize, case.spec.tile)
        for case in main_cases()
    }
    for kernel, row in rows():
        assert (kernel, row.accumulator, row.tile) in compiled
    capabilities = {case.capability for case in main_cases()}
    assert capabilities == {MAIN, OLDEST}


def test_a_failure_is_an_outcome(tmp_path: Path) -> None:
    """And isn't kept: a compiler that was short of memory may manage it next time."""
    tile = dataclasses.replace(configs.SIMT_FORWARD[0].tile, chunk_v=24)
    spec = simt("forward", tile, FLOAT32, Variant())
    outcome = build(Case(spec, MAIN), tmp_path)
    assert "error" in outcome.error and not outcome.elf
    assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError, match="could not compile"):
        check(Case(spec, MAIN), outcome)


def test_outcomes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(passes(FLOAT32)[0], MAIN)
    outcome = build(case, tmp_path)
    (file,) = tmp_path.iterdir()

    def refuse(*_: object) -> Outcome:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", refuse)
        assert build(case, tmp_path) == outcome
        with pytest.raises(AssertionError, match="compiled again"):
            build(Case(case.spec, OLDEST), tmp_path)
    file.write_text(file.read_text()[:20])
    assert build(case, tmp_path) == outcome
