"""The runner: what becomes of right, wrong, failing and late implementations."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from bench.peers import Unsupported, make_inputs
from bench.results import FIGURES, IDENTITY, STATUSES, Row
from bench.runner import Runner, describe
from bench.tiles import sensible, simt_candidates
from bench.workloads import WORKLOADS, Case, square
from cupy_flash.device import hypothetical

from .bench_fakes import FakePeer, FakeTimer

CASE = square("x", "float32", 1, 40, 2, 8, True, "forward")
FIELDS = {*IDENTITY, *FIGURES, "impl", "status", "why"}


def run(
    timer: FakeTimer, peers: list[FakePeer], *cases: Case, **more: Any
) -> list[list[Row]]:
    runner = Runner(
        peers=lambda case: peers,
        make_inputs=functools.partial(make_inputs, device="cpu"),
        timer=timer, xp=np, **more,
    )  # fmt: skip
    return [rows for _, rows in runner.run(cases or (CASE,))]


def spoil(results: dict[str, np.ndarray]) -> None:
    for array in results.values():
        array *= 1.1


def test_right_results_are_timed_beside_each_other() -> None:
    timer = FakeTimer()
    peers = [FakePeer("cupy_flash", timer, 2.0), FakePeer("fa2", timer, 5.0)]
    ours, peer = run(timer, peers)[0]
    assert FIELDS == ours.keys() == peer.keys()
    assert (ours["status"], ours["impl"], ours["ratio"]) == ("ok", "cupy_flash", 1.0)
    assert ours["ms"] == pytest.approx(2.0) and peer["ms"] == pytest.approx(5.0)
    assert peer["ratio"] == pytest.approx(2.5)
    assert ours["tflops"] == pytest.approx(CASE.flops / 2e-3 / 1e12)
    assert ours["tbps"] == pytest.approx(CASE.bytes / 2e-3 / 1e12)
    assert 0 <= ours["error"] < 1e-12 and ours["rounds"] >= 5


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_a_wrong_result_has_no_time(direction: str) -> None:
    timer = FakeTimer()
    peers = [FakePeer("cupy_flash", timer), FakePeer("fa2", timer, spoil=spoil)]
    case = square("x", "float32", 1, 40, 2, 8, True, direction)
    right, wrong = run(timer, peers, case)[0]
    assert right["status"] == "ok"
    assert wrong["status"] == "wrong" and "off by 1.0e-01" in wrong["why"]
    assert all(wrong[name] is None for name in FIGURES)
    assert {name for name, _, _ in timer.log} == {"cupy_flash"}


def test_every_implementation_has_a_row_with_its_reason() -> None:
    timer = FakeTimer()
    peers = [
        FakePeer("a", timer, reason="no module named a"),
        FakePeer("b", timer, error=Unsupported("head size 72")),
        FakePeer("c", timer, error=MemoryError("out of memory: 9 GB")),
        FakePeer("cupy_flash", timer),
        FakePeer("d", timer, lambda n: 1.0 if n < 4 else 1 / 0),
    ]
    rows = run(timer, peers)[0]
    found = [(row["impl"], row["status"], row["why"]) for row in rows]
    assert found == [
        ("a", "unsupported", "no module named a"),
        ("b", "unsupported", "head size 72"),
        ("c", "failed", "out of memory (out of memory: 9 GB)"),
        ("cupy_flash", "ok", ""),
        ("d", "failed", "ZeroDivisionError: division by zero"),
    ]
    assert all(row["status"] in STATUSES for row in rows)
    assert all(row["ms"] is None for row in rows if row["status"] != "ok")


def test_without_ours_there_are_times_but_no_ratios() -> None:
    timer = FakeTimer()
    peers = [FakePeer("cupy_flash", timer, spoil=spoil), FakePeer("fa2", timer)]
    _, peer = run(timer, peers)[0]
    assert peer["status"] == "ok" and peer["ratio"] is None


def test_cases_past_the_budget_are_skipped_and_shown() -> None:
    timer = FakeTimer()
    peers = [FakePeer("cupy_flash", timer, 100.0), FakePeer("a", timer, reason="no a")]
    outcomes = run(timer, peers, *[CASE] * 4, seconds=0.5, deadline=1.7)
    statuses = [[row["status"] for row in rows] for rows in outcomes]
    assert statuses[0] == ["ok", "unsupported"]
    assert statuses[-1] == ["skipped", "unsupported"]
    assert "budget" in outcomes[-1][0]["why"] and outcomes[-1][1]["why"] == "no a"
    assert timer.seconds <= 1.7


def test_a_case_that_would_take_too_long_leaves_room_for_smaller_ones() -> None:
    timer = FakeTimer()
    peers = [FakePeer("cupy_flash", timer, 50.0)]
    large = square("x", "float32", 1, 640, 2, 8, True, "forward")
    outcomes = run(timer, peers, CASE, large, CASE, seconds=0.3, deadline=1.2)
    assert [rows[0]["status"] for rows in outcomes] == ["ok", "skipped", "ok"]


def test_what_is_done_once_does_not_make_later_cases_seem_long() -> None:
    """The first call of all takes 7 s, as an import does; a case takes 0.1 s."""
    timer = FakeTimer()
    peers = [FakePeer("cupy_flash", timer, lambda n: 7000.0 if first(timer) else 10.0)]
    outcomes = run(timer, peers, *[CASE] * 8, seconds=0.1, deadline=15.0)
    assert [rows[0]["status"] for rows in outcomes] == ["ok"] * 8
    assert 7.0 < timer.seconds < 10.0


def first(timer: FakeTimer) -> bool:
    return timer.seconds == 0.0


def test_cases_unlike_a_short_one_are_not_guessed_from_it() -> None:
    """Three of its kind count, however short the first of another kind was."""
    timer = FakeTimer()
    large = square("x", "float32", 1, 640, 2, 8, True, "forward")
    runner = Runner(lambda case: [], lambda case: None, timer, np, deadline=100.0)
    runner._spent += [(CASE.flops, 0.1), *[(large.flops, 5.0)] * 3]
    assert runner._expected_seconds(large) == 5.0
    assert runner._expected_seconds(CASE) == 0.1


def test_peers_that_are_late_within_a_case_are_skipped() -> None:
    timer = FakeTimer()
    peers = [FakePeer("cupy_flash", timer, 900.0), FakePeer("fa2", timer, 900.0)]
    ours, peer = run(timer, peers, deadline=0.5)[0]
    assert ours["status"] == "ok" and ours["rounds"] == 1
    assert peer["status"] == "skipped" and peer["ms"] is None


def test_inputs_that_fit_the_cache_are_timed_with_an_empty_one() -> None:
    for cache, flush in ((CASE.bytes, True), (CASE.bytes - 1, False)):
        timer = FakeTimer(cache=cache)
        run(timer, [FakePeer("cupy_flash", timer)])
        assert {entry[2] for entry in timer.log} == {flush}


def test_host_time_is_measured_in_small_alone() -> None:
    for workload, host_us in (("small", 7.0), ("x", None)):
        timer = FakeTimer()
        case = square(workload, "float32", 1, 40, 2, 8, True, "forward")
        assert run(timer, [FakePeer("cupy_flash", timer)], case)[0][0]["host_us"] == (
            host_us
        )


def test_an_interrupt_is_not_a_failure_of_a_peer() -> None:
    timer = FakeTimer()
    with pytest.raises(KeyboardInterrupt):
        run(timer, [FakePeer("cupy_flash", timer, error=KeyboardInterrupt())])


def test_inputs_that_do_not_fit_fail_the_case_alone() -> None:
    def no_memory(case: Case) -> Any:
        raise MemoryError("out of memory")

    timer = FakeTimer()
    peers = [FakePeer("cupy_flash", timer), FakePeer("fa2", timer, reason="absent")]
    runner = Runner(lambda case: peers, no_memory, timer, np)
    rows = [rows for _, rows in runner.run([CASE])][0]
    assert [row["status"] for row in rows] == ["failed", "unsupported"]
    assert timer.released and "no reference" in rows[0]["why"]


def test_ragged_lengths_stand_in_the_row() -> None:
    timer = FakeTimer()
    case = Case(
        "x", "float32", 2, 9, 9, 2, 2, 8, 8, True, "forward", (9, 4), (8, 7)
    )  # fmt: skip
    row = run(timer, [FakePeer("cupy_flash", timer)], case)[0][0]
    assert row["status"] == "ok" and row["q_lengths"] == (9, 4)


def test_errors_are_described_in_one_line() -> None:
    assert describe(ValueError("two\n  lines")) == "ValueError: two lines"
    assert describe(KeyError()) == "KeyError"
    assert describe(RuntimeError("CUDA out of memory. x")).startswith("out of memory")


@pytest.mark.parametrize("case", WORKLOADS["tiles"](), ids=lambda case: case.label)
def test_tile_candidates_are_few_and_begin_with_the_tables(case: Case) -> None:
    tiles = simt_candidates(case, hypothetical("sm_90"))
    assert 4 <= len(tiles) == len(set(tiles)) <= 12
    assert all(sensible(tile) for tile in tiles)
    names = {tile.name for tile in tiles}
    assert len(names) == len(tiles)
