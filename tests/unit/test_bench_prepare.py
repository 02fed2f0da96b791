"""What is compiled before a run, and by whom."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import prepare
from bench.peers import CuPyFlash, Naive
from bench.workloads import WORKLOADS, Case

CASES = WORKLOADS["cpu"]()


class Recording(CuPyFlash):
    """Writes down what it meets."""

    def __init__(self, name: str, met: list[tuple[str, Case]]) -> None:
        super().__init__("cpu", name=name)
        self.met = met

    def prepare(self, case: Case, inputs: object) -> None:
        """Fail after it has been met, as a peer may."""
        self.met.append((self.name, case))
        raise RuntimeError("this peer can't")


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Case]]:
    """Two implementations that compile, one that doesn't; and what they met."""
    met: list[tuple[str, Case]] = []
    peers = [Recording("cupy_flash", met), Recording("other", met), Naive("cpu")]
    monkeypatch.setattr(prepare, "all_peers", lambda device: peers)
    return met


@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_shares_hold_every_case_once(count: int) -> None:
    found = prepare.shares([*CASES, *CASES], count)
    assert len(found) <= count
    assert sorted(map(repr, sum(found, []))) == sorted(map(repr, CASES))


def test_a_share_needs_few_kernels() -> None:
    found = prepare.shares(WORKLOADS["training"](), 9)
    assert [len({(c.head_dim, c.direction) for c in share}) for share in found] == [
        1
    ] * 9


def test_nothing_is_shared_of_nothing() -> None:
    assert prepare.shares([], 4) == []
    assert prepare.prepare([], 4, 1.0) == 0


def test_whatever_compiles_meets_each_case(met: list[tuple[str, Case]]) -> None:
    assert prepare.meet(CASES[:3], (), "cpu", time.time() + 60) == 3
    assert met == [(n, c) for c in CASES[:3] for n in ("cupy_flash", "other")]


def test_ours_is_always_one_of_them(met: list[tuple[str, Case]]) -> None:
    prepare.meet(CASES[:1], ("naive",), "cpu", time.time() + 60)
    assert met == [("cupy_flash", CASES[0])]


def test_no_case_is_begun_too_late(met: list[tuple[str, Case]]) -> None:
    assert prepare.meet(CASES, (), "cpu", time.time() - 1) == 0
    assert met == []


def test_what_is_compiled_is_kept_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = os.environ.copy()
    with prepare.kept():
        assert os.environ["TRITON_CACHE_DIR"] == "mine"
        folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).parent
        assert folder.is_dir()
        for name in ("CUPY_CACHE_DIR", "CUDA_CACHE_DISABLE"):
            assert os.environ.get(name) == before.get(name)
    assert not folder.exists()
    assert os.environ.copy() == before


def test_a_run_is_prepared_by_other_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "cpu --prepare 2 --head-dim 64 --seqlen 256 --mask full --no-plots"
    code = bench.main([*arguments.split(), "--out", str(tmp_path)])
    assert code == 0
    assert "2 of 2 cases compiled" in capsys.readouterr().err
