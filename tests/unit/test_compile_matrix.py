"""Every row of the tile tables compiles, for the GPUs it is meant for.

Each row with no option and with all of them, on sm_90 or, if it is chosen only where
shared memory is short, on a GPU that has less of it; without options only where that
can say something new. The marker ``matrix`` selects all for more GPUs, which takes
minutes.

Results are kept in a subfolder of ``CUPY_CACHE_DIR``, if that is set, under a hash of
the source: then the next run takes seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import compile_matrix
from bench.compile_matrix import (
    BY_ACCUMULATOR,
    CAPABILITIES,
    COMPILERS,
    DTYPES,
    FLOAT32,
    FLOAT64,
    HALVES,
    KERNELS,
    MMA_KERNELS,
    NEW,
    RESULT,
    Case,
    Compiler,
    Outcome,
    build,
    cases_for,
    chosen_on,
    compile_case,
    everything,
    kept_in,
    mma_cases_for,
    mma_row_of,
    mma_rows,
    options_of,
    passes,
    plain,
    pool,
    row_of,
    run_child,
    run_compiler,
    simt,
    table_rows,
    wgmma_cases_for,
    wgmma_gradient_cases_for,
    wgmma_tiles,
)
from bench.machine import source_sha256
from cupy_flash import compiler, configs
from cupy_flash.aot import Call
from cupy_flash.device import hypothetical
from cupy_flash.problem import Options
from cupy_flash.variant import Variant

from .test_wgmma_machine_code import SUPPLY_SPILL

MAIN, MIDDLE, SMALL, OLDEST = 90, 80, 86, 75  # from much shared memory to little

# Bytes of registers that a kernel may store to local memory, without and with options,
# by the accumulator's size. A few dozen around the inner loops cost nothing that can be
# measured, and more blocks per multiprocessor are worth them; a whole accumulator of a
# thread (64 x 128 over 128 threads) would be 256 bytes of float32 and come with its
# loads in every round. float64 has half as many registers for twice as wide a tile row,
# and isn't tuned.
MAX_SPILL = {
    ("simt", 4): (128, 640), ("simt", 8): (768, 1280),
    ("mma", 4): (512, 640), ("mma", 8): (3200, 3200), ("wgmma", 4): (0, 384),
}  # fmt: skip


# All options that `wgmma` has.
OF_WGMMA = Variant(left=True, right=True, softcap=True, alibi=True)


# --- The cases ------------------------------------------------------------------------


@functools.cache
def main_cases() -> list[Case]:
    return simt_main_cases() + mma_main_cases() + wgmma_main_cases()


def wgmma_main_cases() -> list[Case]:
    """Each tile without an option and with all, and once each other kernel."""
    cases = wgmma_cases_for(MAIN)
    few = [case for case in cases if case.spec.tile == wgmma_tiles()[0]]
    few += wgmma_gradient_cases_for(MAIN)
    for case in cases:
        variant = case.spec.variant
        if case.spec.dtype != HALVES[0] and variant in (Variant(), OF_WGMMA):
            few.append(case)
    return list(dict.fromkeys(few))


def is_part_of_others(case: Case) -> bool:
    """Whether a kernel of `mma` without options is so like others that one will do.

    It is a part of the same with all options, which has hardly more room. For the main
    GPU alone there are both, and `backward_dkdv` is `backward` without sums of dq.
    """
    spec = case.spec
    return (
        case.capability != MAIN
        or spec.dtype == FLOAT64
        or spec.kernel == "backward_dkdv"
    )


@functools.cache
def mma_main_cases() -> list[Case]:
    """Each row with its deepest tile, and once what is the same in every row.

    That is how elements are loaded, multiplied and stored: the other half, float32 in
    one product, head sizes that fill no chunk. Kernels that are parts of others come
    once for each GPU.
    """
    cases = []
    met = set()
    for capability in (MAIN, MIDDLE, SMALL, OLDEST):
        deepest: dict[Any, list[Case]] = {}
        for case in mma_cases_for(capability):
            spec = case.spec
            row = mma_row_of(spec)
            once = False
            if row is None:  # one of the passes, which look at no more than the depth
                row = spec.kernel, spec.dtype
            elif spec.variant.tf32 or spec.variant.ragged:
                row = spec.kernel, spec.dtype, spec.variant.tf32, spec.variant.ragged
                once = True
            elif spec.dtype == HALVES[0] and capability != OLDEST:
                met.add((*row, spec.dtype))  # so for the oldest, too
                row = spec.kernel, spec.dtype
                once = True
            elif not spec.variant.mask and is_part_of_others(case):
                row = spec.kernel, capability
                once = True
            elif capability == OLDEST:  # which multiplies with other instructions
                row = *row, spec.dtype
            if row in met:
                continue
            tiles = deepest.setdefault(row, [])
            if tiles and tiles[0].spec.tile != spec.tile:
                if once:  # of the tile that came first
                    continue
                tiles.clear()
            tiles.append(case)
        met |= set(deepest)
        cases += [case for tiles in deepest.values() for case in tiles]
    return cases


def simt_main_cases() -> list[Case]:
    chosen = chosen_on(hypothetical(f"sm_{MAIN}"))
    cases = []
    for kernel, row in table_rows():
        is_main = (kernel, row.accumulator, row.tile) in chosen
        dtype = BY_ACCUMULATOR[row.accumulator]
        for variant in (plain(kernel, dtype), everything(dtype)):
            spec = simt(kernel, row.tile, dtype, variant)
            cases.append(Case(spec, MAIN if is_main else OLDEST))
    # What is the same in every row: once for each kernel.
    for kernel, table in KERNELS.items():
        tile = table[0].tile
        specs = [simt(kernel, tile, half, everything(half)) for half in HALVES]
        # A bias of another dtype than the arrays.
        mixed = FLOAT64 if kernel == "backward_dbias" else HALVES[0]
        other = Variant(bias=mixed, scale_first=True)
        specs.append(simt(kernel, tile, FLOAT32, other, batch_axes=3))
        cases += [Case(spec, MAIN) for spec in specs]
    for dtype in DTYPES:
        cases += [Case(spec, MAIN) for spec in passes(dtype)]
    cases += [Case(spec, MAIN) for spec in passes(FLOAT32, batch_axes=4)]
    return list(dict.fromkeys(cases))


def more_cases() -> list[Case]:
    main = set(main_cases())
    cases = [case for capability in NEW for case in cases_for(capability)]
    return [case for case in dict.fromkeys(cases) if case not in main]


# --- Compiling them, on all cores -----------------------------------------------------


@pytest.fixture(scope="session")
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case], Outcome]]:
    """What became of a case; all selected ones are compiled at once."""
    folder = kept_in() or tmp_path_factory.mktemp("matrix")
    if hasattr(request.config, "workerinput"):  # pytest-xdist has processes already
        yield lambda case: build(case, folder)
        return
    cases = {
        item.callspec.params["case"]
        for item in request.session.items
        if hasattr(item, "callspec")
        and isinstance(item.callspec.params.get("case"), Case)
    }
    # Those that take longest first.
    ordered = sorted(cases, key=lambda case: (case.spec.shared_memory, str(case)))
    workers = pool()
    futures = {case: workers.submit(build, case, folder) for case in reversed(ordered)}
    yield lambda case: futures[case].result()
    workers.shutdown(cancel_futures=True)


# --- The tests ------------------------------------------------------------------------


def check(case: Case, outcome: Outcome) -> None:
    assert not outcome.error, outcome.error
    assert outcome.elf
    blocks = 1 if case.spec.family == "passes" else case.spec.tile.blocks
    assert outcome.registers * case.spec.threads * blocks <= 65536
    if case.spec.shared_memory == 0:  # the passes
        assert outcome.spill_stores == 0
        return
    accumulator = 8 if case.spec.dtype == FLOAT64 else 4
    plainly, at_most = MAX_SPILL[case.spec.family, accumulator]
    if case.spec.family == "wgmma" and case.spec.kernel != "forward":
        plainly = SUPPLY_SPILL  # outside the loops, as test_wgmma_machine_code.py sees
    assert not outcome.serialized
    variant = case.spec.variant
    in_use = variant.mask or variant == OF_WGMMA  # all options, or none to speak of
    assert outcome.spill_stores <= (at_most if in_use else plainly)


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
    for kernel, row in table_rows():
        assert (kernel, row.accumulator, row.tile) in compiled
    assert {mma_row_of(case.spec) for case in main_cases()} >= set(mma_rows())
    capabilities = {case.capability for case in main_cases()}
    assert capabilities == {MAIN, MIDDLE, SMALL, OLDEST}
    tiles = {c.spec.tile for c in main_cases() if c.spec.family == "wgmma"}
    assert tiles == {*wgmma_tiles(), *configs.WGMMA_BACKWARD}
    families = {"simt", "mma", "wgmma", "passes"}
    assert {case.spec.family for case in main_cases()} == families


def test_variants_of_mma_are_compiled() -> None:
    """All options and none, each dtype, float32 in one product, each kernel."""
    specs = [case.spec for case in mma_main_cases()]
    for kernel in MMA_KERNELS:
        own = [spec for spec in specs if spec.kernel == kernel]
        assert {spec.dtype for spec in own} == set(DTYPES)
        assert {spec.variant.mask for spec in own} == {False, True}
        assert any(spec.variant.tf32 for spec in own)
        assert {spec.variant.ragged for spec in own} == {False, True}
    assert {spec.kernel for spec in specs} == {
        *MMA_KERNELS, "convert_dq", "reduce_dbias",
    }  # fmt: skip


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


# --- Other versions of NVRTC ----------------------------------------------------------


def check_rows(rows: Sequence[Mapping[str, Any]], capabilities: Sequence[int]) -> None:
    """All are there, and none failed."""
    assert [row["capability"] for row in rows] == list(capabilities)
    for row in rows:
        assert row["failed"] == 0, row["first_error"]
        major, minor = map(int, row["nvrtc"].split("."))
        assert row["kernels"] == len(cases_for(row["capability"], (major, minor)))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "wanted", [c for c in COMPILERS if "." not in c.version], ids=str
)
def test_compiles_with_the_newest_nvrtc(wanted: Compiler) -> None:
    """Of CUDA 13, and of CUDA 12 for older GPUs, in environments made for them."""
    check_rows(run_compiler(wanted), wanted.capabilities)


def test_the_record_is_whole_and_without_failure() -> None:
    """The README's table is made of it."""
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    rows = iter(record["rows"])
    for wanted in COMPILERS:
        part = list(itertools.islice(rows, len(wanted.capabilities)))
        check_rows(part, wanted.capabilities)
        assert all(wanted.is_met_by(row["nvrtc"]) for row in part)
    assert not list(rows)


@pytest.mark.matrix
def test_the_record_is_of_these_sources() -> None:
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    assert record["meta"]["source_sha256"] == source_sha256(), (
        "the sources have changed since; python -m bench.compile_matrix renews it"
    )


def test_every_row_is_chosen_on_some_gpu() -> None:
    """What no GPU of the matrix gets would be compiled nowhere in it."""
    chosen = set()
    for capability in CAPABILITIES:
        chosen |= chosen_on(hypothetical(f"sm_{capability}"))
    assert chosen == {(kernel, r.accumulator, r.tile) for kernel, r in table_rows()}
    rows = {
        mma_row_of(case.spec)
        for capability in CAPABILITIES
        for case in mma_cases_for(capability)
    }
    assert rows - {None} == set(mma_rows())


def test_every_row_of_wgmma_is_chosen() -> None:
    """For heads of its size, of some length and number."""
    gpu = dataclasses.replace(hypothetical(f"sm_{MAIN}"), nvrtc=compile_matrix.NVRTC)
    chosen = {}
    for row, batch, seqlen, causal in itertools.product(
        configs.WGMMA_FORWARD, (1, 2, 9, 33), (512, 4096, 8192), (False, True)
    ):
        head = row.max_depth, row.max_depth_v
        options = Options("forward", causal=causal)
        call = Call(options, HALVES[0], *head, batch, seqlen, seqlen)
        (step,) = call.plan(gpu).steps
        chosen[step.spec.tile] = None
    assert set(chosen) >= set(wgmma_tiles())


def test_cases_of_wgmma_are_what_a_gpu_gets() -> None:
    """Each tile with each kind of option, on Hopper alone."""
    cases = wgmma_cases_for(MAIN)
    assert len(set(cases)) == len(cases)
    for tile in wgmma_tiles():
        specs = [case.spec for case in cases if case.spec.tile == tile]
        assert {spec.dtype for spec in specs} == set(HALVES)
        variants = [spec.variant for spec in specs]
        for name in ("left", "right", "softcap", "alibi", "scale_first"):
            assert {getattr(v, name) for v in variants} == {False, True}, name
        assert Variant() in variants and OF_WGMMA in variants
    for case in cases:
        flags, suffix = options_of(case)
        assert flags[-1] == "-arch=sm_90a" and suffix == ".cubin"
    assert set(cases) < set(cases_for(MAIN))
    others = set(CAPABILITIES) - {MAIN}
    assert not any(wgmma_cases_for(capability) for capability in others)


def test_gradients_of_wgmma_are_what_a_gpu_gets() -> None:
    """Each tile with each kind of band, on Hopper alone."""
    cases = wgmma_gradient_cases_for(MAIN)
    assert len(set(cases)) == len(cases)
    for tile in configs.WGMMA_BACKWARD:
        specs = [case.spec for case in cases if case.spec.tile == tile]
        assert {spec.dtype for spec in specs} == set(HALVES)
        kernel = "backward_by_role" if tile.by_role else "backward"
        assert {spec.kernel for spec in specs} == {kernel, "backward_terms"}
        variants = {spec.variant for spec in specs if spec.kernel == kernel}
        assert variants == {
            Variant(), Variant(right=True), Variant(left=True, right=True)
        }  # fmt: skip
    for case in cases:
        flags, suffix = options_of(case)
        if case.spec.family == "wgmma":
            assert flags[-1] == "-arch=sm_90a" and suffix == ".cubin"
        else:  # what makes dq of its sums
            assert case.spec.kernel == "convert_dq"
    assert set(cases) < set(cases_for(MAIN))
    # An older compiler isn't asked for what it can't do.
    nvrtc = compile_matrix.NVRTC
    older = wgmma_gradient_cases_for(MAIN, nvrtc)
    of_either = [case for case in cases if case.spec.kernel == "convert_dq"]
    by_role = [case for case in cases if getattr(case.spec.tile, "by_role", False)]
    assert set(by_role) < set(older) <= {*by_role, *of_either}
    assert set(older) < set(cases_for(MAIN, nvrtc)) < set(cases_for(MAIN))
    others = set(CAPABILITIES) - {MAIN}
    assert not any(wgmma_gradient_cases_for(capability) for capability in others)


def test_cases_of_mma_are_what_a_gpu_gets() -> None:
    for capability in CAPABILITIES:
        cases = mma_cases_for(capability)
        assert len(set(cases)) == len(cases)
        gpu = hypothetical(f"sm_{capability}")
        dtypes = {case.spec.dtype for case in cases}
        wanted = DTYPES if capability >= 80 else HALVES[:1] if capability == 75 else ()
        assert dtypes == set(wanted)
        for case in cases:
            assert case.spec.shared_memory <= gpu.shared_memory
        assert set(cases) < set(cases_for(capability))


def test_cases_are_what_a_gpu_gets() -> None:
    """Each kernel and tile once plainly and once with all options, halves once."""
    for capability in CAPABILITIES:
        cases = cases_for(capability)
        assert len(set(cases)) == len(cases)
        chosen = chosen_on(hypothetical(f"sm_{capability}"))
        made = Counter(
            (c.spec.kernel, c.spec.dtype.itemsize, c.spec.tile)
            for c in cases
            if c.spec.family == "simt" and c.spec.dtype not in HALVES
        )
        assert set(made) == chosen and set(made.values()) == {2}
        kinds = {(case.spec.kernel, case.spec.dtype) for case in cases}
        assert kinds >= set(itertools.product(KERNELS, HALVES))
        assert kinds >= set(itertools.product(("delta", "reduce_dbias"), DTYPES))


@pytest.mark.parametrize(
    ("wanted", "version", "met"),
    [
        ("13.0", "13.0", True), ("13", "13.0", True), ("13", "13.5", True),
        ("13.0", "13.5", False), ("12", "13.0", False), ("1", "13.0", False),
        ("13.0", "13", False),
    ],
)  # fmt: skip
def test_versions(wanted: str, version: str, met: bool) -> None:
    assert Compiler(wanted, (), ()).is_met_by(version) is met


def test_another_nvrtc_than_is_wanted_is_refused() -> None:
    """A toolkit's NVRTC may come before that of the environment."""
    wanted = Compiler("11", (), ())
    with pytest.MonkeyPatch.context() as patch:
        rows = json.dumps([{"nvrtc": "13.0"}])
        run = subprocess.CompletedProcess([], 0, rows)
        patch.setattr(compile_matrix.subprocess, "run", lambda *_, **__: run)
        with pytest.raises(RuntimeError, match=r"NVRTC 11 is wanted, .* 13\.0"):
            run_child("python", wanted)


def test_the_record_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with failures, but not where it would vouch for other sources."""
    file, failed, hashes = tmp_path / "record.json", 0, iter("aaaaab")
    monkeypatch.setattr(compile_matrix, "RESULT", file)
    monkeypatch.setattr(compile_matrix, "source_sha256", lambda: next(hashes))
    monkeypatch.setattr(
        compile_matrix, "run_compiler", lambda *_, fresh: [{"failed": failed}]
    )
    for failed in (0, 1):
        with pytest.raises(SystemExit) as stopped:
            compile_matrix.main([])
        assert stopped.value.code == failed
        record = json.loads(file.read_text(encoding="utf-8"))
        assert record["rows"] == [{"failed": failed}] * len(COMPILERS)
        assert record["meta"]["source_sha256"] == "a"
        file.unlink()
    with pytest.raises(SystemExit, match="changed meanwhile"):
        compile_matrix.main([])
    assert not file.exists()


def test_a_row_counts_failures() -> None:
    pytest.importorskip("cupy")
    good, bad = Outcome(elf=True, registers=40, spill_stores=8), Outcome("no such type")
    row = row_of(90, [good, bad, bad])
    assert (row["kernels"], row["failed"], row["first_error"]) == (3, 2, "no such type")
    assert (row["max_registers"], row["max_spill_bytes"]) == (40, 8)
    assert row_of(90, [good])["first_error"] is None


def test_ptx_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine code was made, so nothing is known of the GPU."""
    monkeypatch.setattr(compiler, "options", lambda *_: ((), ".ptx"))
    assert "only PTX" in compile_case(Case(passes(FLOAT32)[0], MAIN)).error
