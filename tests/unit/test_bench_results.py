"""Result files, their comparison, and tables."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
from pathlib import Path

import pytest

from bench import results, tables
from bench.results import Change, ResultFile, changes, new_row, one_line, slug
from bench.workloads import square

from . import bench_synthetic
from .bench_synthetic import META

CASE = square("training", "bfloat16", 4, 4096, 16, 128, True, "forward")
OTHER = square("training", "bfloat16", 4, 4096, 16, 128, False, "forward")


def timed(impl: str, ms: float, case: object = CASE, **more: object) -> results.Row:
    figures = {
        "ms": ms, "ms_spread": 0.01, "tflops": case.flops / ms / 1e9,
        "tbps": case.bytes / ms / 1e9, "rounds": 9, "ratio": 1.0,
    }  # fmt: skip
    return new_row(case, impl, "ok", **(figures | more))


def test_a_file_is_complete_after_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ResultFile.new(tmp_path / "new", "training", META)
    file.add([timed("cupy_flash", 1.0)])
    first = json.loads(file.path.read_text())
    assert first["rows"][0]["ms"] == 1.0 and first["meta"]["gpu"] == "NVIDIA H200"

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    # What is on disk is whole even if the next write is cut short.
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        file.add([timed("fa2", 2.0)])
    assert json.loads(file.path.read_text()) == first


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = ResultFile.new(tmp_path, "training", META)
    file.add(bench_synthetic.rows("varlen"))
    again = ResultFile.load(file.path)
    assert again.meta == file.meta
    assert again.rows == json.loads(json.dumps(file.rows))
    assert len(file.path.read_text().splitlines()) > len(file.rows)


def test_a_file_is_named_after_time_gpu_and_workload(tmp_path: Path) -> None:
    file = ResultFile.new(tmp_path, "training", META)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d{6}-h200-training\.json", file.path.name)
    date = datetime.datetime.fromisoformat(file.meta["date"])
    assert date.tzinfo is not None and date.microsecond == 0
    assert slug("NVIDIA GeForce RTX 3060 Ti") == "rtx-3060-ti"
    assert slug("cpu") == "cpu"


def test_other_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not a result file"):
        ResultFile.load(path)


def test_figures_that_json_cannot_hold_become_null() -> None:
    row = new_row(CASE, "a", "wrong", "error", error=math.inf, ms=math.nan)
    assert row["error"] is None and row["ms"] is None
    with pytest.raises(AssertionError):
        new_row(CASE, "a", "fine")


def test_reasons_are_one_line() -> None:
    assert one_line("\n  first\nsecond") == "first"
    assert one_line("") == ""
    assert len(one_line("x" * 999)) == 200


def test_changes_are_sorted_with_slowdowns_first() -> None:
    before = [timed("a", 1.0), timed("b", 4.0), timed("a", 2.0, OTHER)]
    after = [timed("a", 2.0), timed("b", 2.0), timed("a", 2.0, OTHER)]
    found = changes(before, after)
    assert [(c.impl, c.speedup) for c in found] == [("a", 0.5), ("a", 1.0), ("b", 2.0)]


def test_changes_tell_what_has_no_time_any_more() -> None:
    failed = new_row(CASE, "a", "failed", "out of memory")
    same = new_row(CASE, "b", "unsupported", "no b")
    found = changes([timed("a", 1.0), same], [failed, same, timed("c", 3.0)])
    assert found == [
        Change(results.label_of(failed), "a", 1.0, "failed"),
        Change(results.label_of(failed), "c", "absent", 3.0),
    ]


def test_the_comparison_ends_with_geometric_means(tmp_path: Path) -> None:
    before = ResultFile(tmp_path / "a.json", {}, [])
    after = ResultFile(tmp_path / "b.json", {}, [])
    before.rows = [timed("a", 1.0), timed("a", 8.0, OTHER), timed("b", 1.0)]
    after.rows = [timed("a", 1.0), timed("a", 2.0, OTHER), timed("b", 1.0)]
    text = tables.comparison(before, after)
    assert "| a | 2 | 2.000 |" in text and "| b | 1 | 1.000 |" in text
    assert "a.json → b.json" in text
    assert results.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(results.geometric_mean([]))


# --- Resuming -------------------------------------------------------------------------


def cut_short(folder: Path, workload: str, *rows: results.Row) -> Path:
    file = ResultFile.new(folder, workload, META)
    file.add(row | {"workload": workload} for row in rows)
    return file.path


SKIPPED = {"status": "skipped", "why": "the time is used up", "ms": None}


def test_a_resumed_file_keeps_its_order_and_says_who_added(tmp_path: Path) -> None:
    rows = [timed("cupy_flash", 1.0), timed("fa2", 2.0) | SKIPPED, timed("fa4", 3.0)]
    path = cut_short(tmp_path, "memory", *rows)
    later = {**META, "command": "python -m bench memory", "commit": "fedcba9"}
    file = ResultFile.resume(path, "memory", later)
    file.add([timed("fa2", 5.0) | {"workload": "memory"}])
    file.add([timed("jax", 7.0) | {"workload": "memory"}])
    again = ResultFile.load(path)
    assert [(row["impl"], row["ms"]) for row in again.rows] == [
        ("cupy_flash", 1.0), ("fa2", 5.0), ("fa4", 3.0), ("jax", 7.0),
    ]  # fmt: skip
    (added,) = again.meta["resumed"]
    assert datetime.datetime.fromisoformat(added["date"]).tzinfo is not None
    assert added == {
        "command": "python -m bench memory", "commit": "fedcba9",
        "source_sha256": "00", "date": added["date"],
    }  # fmt: skip
    assert again.meta["commit"] == META["commit"]
    assert "Rows added: " in tables.report(again.meta, again.rows)
    ResultFile.resume(path, "memory", META).add([])
    assert len(ResultFile.load(path).meta["resumed"]) == 2


def test_times_of_two_runs_do_not_meet_in_a_case(tmp_path: Path) -> None:
    """Those that were timed in turn before go with what is measured anew."""
    other = timed("fa2", 4.0, OTHER)
    rows = [timed("cupy_flash", 1.0) | SKIPPED, timed("fa2", 2.0), other]
    rows.append(timed("fa4", 3.0) | SKIPPED)
    path = cut_short(tmp_path, "training", *rows)
    file = ResultFile.resume(path, "training", META)
    assert file.without_done([CASE, OTHER]) == [CASE]
    file.add([timed("cupy_flash", 1.5)])
    assert [(row["impl"], row["ms"]) for row in file.rows] == [
        ("cupy_flash", 1.5), ("fa2", 4.0), ("fa4", None),
    ]  # fmt: skip


def test_what_is_left_to_measure(tmp_path: Path) -> None:
    stopped = {"status": "failed", "why": "no result after 20 s", "ms": None}
    broken = {"status": "failed", "why": "no module", "ms": None}
    rows = [
        timed("cupy_flash (cold)", 1.0), timed("flex (cold)", 1.0) | stopped,
        timed("fa4 (cold)", 1.0) | SKIPPED, timed("jax (cold)", 1.0) | broken,
    ]  # fmt: skip
    case = dataclasses.replace(CASE, workload="first_call")
    path = cut_short(tmp_path, "first_call", *rows)
    wanted = ResultFile.resume(path, "first_call", META).wanted()
    left = [row["impl"] for row in rows if wanted(case, row["impl"])]
    assert left == ["flex (cold)", "fa4 (cold)"]
    wanted = ResultFile.resume(path, "first_call", META).wanted(["fa4"])
    left = [row["impl"] for row in rows if wanted(case, row["impl"])]
    assert left == ["fa4 (cold)"]
    # Elsewhere a failure is a result.
    assert not results.unfinished(timed("flex", 1.0) | stopped)


@pytest.mark.parametrize(
    ("status", "why", "left"),
    [
        ("failed", "ModuleNotFoundError: No module named 'fa4'", True),
        ("unsupported", "fa4 can't be imported: it is broken", True),
        ("unsupported", "float32 isn't supported", False),
        ("failed", "out of memory", False),
        ("ok", "", False),
    ],
)
def test_who_was_not_there_is_tried_again_if_named(
    tmp_path: Path, status: str, why: str, left: bool
) -> None:
    found = timed("fa4", 1.0) | {"status": status, "why": why}
    file = cut_short(tmp_path, "memory", timed("cupy_flash", 1.0), found)
    resumed = ResultFile.resume(file, "memory", META)
    case = dataclasses.replace(CASE, workload="memory")
    assert not resumed.wanted()(case, "fa4") and not resumed.without_done([case])
    assert not resumed.wanted(["jax"])(case, "fa4")
    assert resumed.wanted(["fa4"])(case, "fa4") == left
    assert resumed.without_done([case], ["fa4"]) == [case] * left


@pytest.mark.parametrize(
    ("workload", "impl", "allowed"),
    [
        ("first_call", "fa4 (cold)", True), ("first_call", "cupy_flash (warm)", False),
        ("memory", "fa2", True), ("memory", "cupy_flash:simt", False),
        ("training", "fa2", False), ("end_to_end", "torch", False),
    ],
)  # fmt: skip
def test_other_sources_matter_where_ours_is_measured(
    tmp_path: Path, workload: str, impl: str, allowed: bool
) -> None:
    path = cut_short(tmp_path, workload, timed(impl, 1.0) | SKIPPED)
    changed = {**META, "source_sha256": "01"}
    if allowed:
        file = ResultFile.resume(path, workload, changed)
        file.add([timed(impl, 1.0) | {"workload": workload}])
        assert file.meta["resumed"][0]["source_sha256"] == "01"
    else:
        with pytest.raises(ValueError, match="its source_sha256 is 00, not 01"):
            ResultFile.resume(path, workload, changed)
    with pytest.raises(ValueError, match="its gpu is NVIDIA H200, not B200"):
        ResultFile.resume(path, workload, {**META, "gpu": "B200"})


# --- Tables ---------------------------------------------------------------------------


def cells(text: str, start: str) -> list[str]:
    """Return the cells of the line of a table that starts so."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_has_ours_the_best_peer_and_the_ceiling() -> None:
    rows = [
        timed("cupy_flash", 2.0), timed("fa2", 3.0, ratio=1.5),
        timed("cudnn", 1.6, ratio=0.8), timed("cupy_flash:simt", 1.0, ratio=0.5),
        new_row(CASE, "fa4", "unsupported", "no module named fa4"),
        new_row(CASE, "flex", "wrong", "dq is off"),
    ]  # fmt: skip
    text = tables.report(META, rows)
    line = cells(text, "D128 causal B4 S4096 H16")
    share = 100 * CASE.flops / 2.0 / 1e9 / 780
    assert line[1] == tables.number(CASE.flops / 2.0 / 1e9)
    # Another kernel of ours is no rival.
    assert line[-3:] == ["cudnn", "0.80", f"{share:.0f} (GEMM)"]
    assert "[1] unsupported: no module named fa4" in text and "– [1]" in line
    assert "[2] wrong: dq is off" in text and "– [2]" in line
    assert "commit 0123abc" in text and "NVIDIA H200" in text


def test_the_same_reason_is_told_once() -> None:
    text = tables.report(META, bench_synthetic.rows("training"))
    assert text.count("failed: out of memory") == 1
    assert text.count("– [") > 36


def test_every_implementation_of_every_case_is_in_the_table() -> None:
    rows = bench_synthetic.rows("gqa")
    text = tables.report(META, rows)
    lines = [line for line in text.splitlines() if line.startswith("| D128")]
    assert len(lines) == len({results.case_of(row) for row in rows})
    for line in lines:
        assert "" not in [cell.strip() for cell in line.strip("|").split("|")]


def test_what_is_bound_by_memory_is_shown_in_bytes() -> None:
    text = tables.report(META, bench_synthetic.rows("decode"))
    assert "forward, bfloat16, TB/s" in text and "(copy)" in text


def test_small_calls_show_host_and_device_apart() -> None:
    case = square("small", "bfloat16", 1, 128, 4, 64, True, "forward")
    rows = [timed("cupy_flash", 0.005, case, host_us=21.0)]
    text = tables.report(META, rows)
    assert cells(text, "D64")[1] == "5.00"
    assert "host µs per call" in text and "| 21.0 |" in text


def test_tiles_are_ranked() -> None:
    case = square("tiles", "float32", 4, 4096, 16, 128, True, "forward")
    rows = [
        timed("cupy_flash", 3.0, case), timed("cupy_flash:a", 4.0, case, ratio=4 / 3),
        timed("cupy_flash:b", 2.0, case, ratio=2 / 3),
        new_row(case, "cupy_flash:c", "unsupported", "it doesn't fit"),
    ]  # fmt: skip
    text = tables.report(META, rows)
    order = re.findall(r"^\| (b|a|c|the choice) \|", text, re.MULTILINE)
    assert order == ["b", "the choice", "a", "c"]
    assert cells(text, "b |")[3] == "1.500"


def test_memory_is_shown_beside_what_is_needed() -> None:
    text = tables.report(META, bench_synthetic.memory_rows())
    assert "forward, bfloat16, peak MiB" in text
    line = cells(text, "S1024")
    assert line[-2:] == ["2.00", "32.0"]


def test_other_workloads_are_listed() -> None:
    case = square("end_to_end", "bfloat16", 4, 1024, 8, 64, True, "training step")
    row = new_row(case, "torch", "ok", ms=12.0, ms_spread=0.01)
    row["tokens_per_s"] = 341333.0
    text = tables.report(META, [row])
    assert "## training step, bfloat16, D64 causal B4 S1024 H8" in text
    assert "| torch | 12.0 | 1.0 | 341333 |" in text


def test_numbers_have_three_digits() -> None:
    values = [1234.5, 123.4, 99.96, 12.34, 9.996, 1.234, 0.9996, 0.1234, 0.001234, None]
    assert [tables.number(value) for value in values] == [
        "1234", "123", "100", "12.3", "10.0", "1.23", "1.00", "0.123", "0.00123", "–",
    ]  # fmt: skip
