"""What is compiled before a run, and by whom."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import __main__ as bench
from bench import prepare
from bench.peers import CuPyFlash, Naive, make_inputs
from bench.prepare import Compiled
from bench.workloads import WORKLOADS, Case, Selection

CASES = WORKLOADS["cpu"]()


class Recording(CuPyFlash):
    """Writes down what it meets; "broken" then fails, as a peer may."""

    def __init__(self, name: str, met: list[tuple[str, Case]]) -> None:
        super().__init__("cpu", name=name)
        self.met = met

    def prepare(self, case: Case, inputs: object) -> None:
        """Note the case."""
        self.met.append((self.name, case))
        if self.name == "broken":
            raise RuntimeError("this peer can't")


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Case]]:
    """Two implementations that compile, one that doesn't; and what they met."""
    met: list[tuple[str, Case]] = []
    peers = [Recording("cupy_flash", met), Recording("broken", met), Naive("cpu")]
    monkeypatch.setattr(prepare, "all_peers", lambda device: peers)
    return met


@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_shares_hold_every_case_once_and_are_alike_in_size(count: int) -> None:
    found = prepare.shares([*CASES, *CASES], count)
    assert len(found) == min(count, len(CASES))
    assert sorted(map(repr, sum(found, []))) == sorted(map(repr, CASES))
    sizes = {len(share) for share in found}
    assert max(sizes) - min(sizes) <= 1


def test_a_share_needs_few_kernels_and_begins_with_the_most_telling() -> None:
    cases = Selection().cases("training")
    found = prepare.shares(cases, 9)
    assert [len({(c.head_dim, c.direction) for c in share}) for share in found] == [
        1
    ] * 9
    for share in found:
        assert share == [case for case in cases if case in share]


def test_nothing_is_shared_of_nothing() -> None:
    assert prepare.shares([], 4) == []
    assert prepare.prepare([], 4, 1.0) == Compiled()


def test_whatever_compiles_meets_each_case(met: list[tuple[str, Case]]) -> None:
    made = prepare.compile_share(CASES[:3], (), "cpu", time.time() + 60)
    assert met == [(n, c) for c in CASES[:3] for n in ("cupy_flash", "broken")]
    assert made == Compiled(calls=3, cases=3)


def test_ours_is_always_one_of_them(met: list[tuple[str, Case]]) -> None:
    prepare.compile_share(CASES[:1], ("naive",), "cpu", time.time() + 60)
    assert met == [("cupy_flash", CASES[0])]


def test_no_case_is_begun_too_late(met: list[tuple[str, Case]]) -> None:
    assert prepare.compile_share(CASES, (), "cpu", time.time() - 1) == Compiled()
    assert met == []


def test_inputs_that_do_not_fit_leave_a_case_out(
    met: list[tuple[str, Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(case: Case, device: str) -> Any:
        if case == CASES[0]:
            raise MemoryError
        return make_inputs(case, device)

    monkeypatch.setattr(prepare, "make_inputs", make)
    made = prepare.compile_share(CASES[:2], (), "cpu", time.time() + 60)
    assert made == Compiled(calls=1, cases=2)


class Harmful:
    """Stands for a case; the process that receives it makes a call instead."""

    def __init__(self, case: Case, call: Callable[[int], object], value: int) -> None:
        self.case, self.call, self.value = case, call, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.case, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (self.value,)


def test_a_process_that_dies_takes_only_its_share_with_it() -> None:
    pair: list[Any] = [CASES[0], Harmful(CASES[1], os._exit, 3)]
    made = prepare.prepare(pair, 2, 60, device="cpu")
    assert made == Compiled(calls=1, cases=1)


def test_a_process_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "GRACE_SECONDS", 0.5)
    start = time.monotonic()
    hanging: list[Any] = [Harmful(CASES[0], time.sleep, 60)]
    assert prepare.prepare(hanging, 1, 0.5, device="cpu") == Compiled()
    assert time.monotonic() - start < 30


def test_what_is_compiled_is_kept_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = os.environ.copy()
    with prepare.shared_caches():
        assert os.environ["TRITON_CACHE_DIR"] == "mine"
        folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).parent
        assert folder.is_dir()
        # What only workers need would change what `first_call` measures.
        for name in ("CUPY_CACHE_DIR", "CUDA_CACHE_DISABLE", *prepare._IN_WORKERS):
            assert os.environ.get(name) == before.get(name)
    assert not folder.exists()
    assert os.environ.copy() == before


def test_a_run_is_prepared_by_other_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "cpu --prepare 2 --head-dim 64 --seqlen 256 --mask full --no-plots"
    code = bench.main([*arguments.split(), "--out", str(tmp_path)])
    assert code == 0
    assert "prepared 2 of 2 cases, 2 calls" in capsys.readouterr().err


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that the last run wanted to have prepared; none is."""
    found: list[Case] = []

    def note(cases: list[Case], *_: Any) -> Compiled:
        found[:] = cases
        return Compiled()

    monkeypatch.setattr(bench, "prepare", note)
    return found


def test_only_what_is_left_of_a_run_is_prepared(
    tmp_path: Path, wanted: list[Case]
) -> None:
    one = "cpu --prepare 2 --head-dim 64 --seqlen 256 --no-plots --case-seconds 0.01"
    forward = [*one.split(), "--direction", "forward"]
    assert bench.main([*forward, "--out", str(tmp_path)]) == 0
    assert {case.direction for case in wanted} == {"forward"}
    (path,) = tmp_path.glob("*.json")
    assert bench.main([*one.split(), "--resume", str(path)]) == 0
    assert {case.direction for case in wanted} == {"backward"}


def test_memory_in_float32_is_ours_alone_on_a_gpu(wanted: list[Case]) -> None:
    options = SimpleNamespace(device="cuda", prepare=2, budget=9.0, only=())
    tiles = Selection().cases("tiles")
    bench.compile_ahead(options, {"memory": (), "first_call": (), "tiles": tiles})
    assert {(c.workload, c.dtype) for c in wanted} == {("memory", "bfloat16")}


def test_a_negative_number_of_processes_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        bench.main(["cpu", "--prepare", "-1"])
    assert "-1 is negative" in capsys.readouterr().err
