"""The command line of the benchmarks, from end to end on the CPU."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as cli
from bench import runner
from bench.results import IDENTITY, STATUSES
from bench.workloads import MASKS, NAMES, square

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--device", "cpu", "--no-plots", "--case-seconds", "0.01")
ONE = ("--head-dim", "64", "--seqlen", "256", "--direction", "forward")
META = {
    "gpu", "driver", "cuda", "cupy", "torch", "commit", "source_sha256", "command",
    "date", "gemm_tflops", "copy_tbps", "multiprocessors", "numpy", "jax",
}  # fmt: skip


def result_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def test_a_run_on_the_cpu_writes_result_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["cpu", "--budget", "20", "--out", str(tmp_path), *QUICK, *ONE]
    assert cli.main(arguments) == 0
    result = result_of(tmp_path)
    assert META <= result["meta"].keys()
    assert result["meta"]["command"].startswith("python -m bench cpu --budget 20")
    assert result["meta"]["gemm_tflops"] > 0 and result["meta"]["copy_tbps"] > 0
    impls = {row["impl"] for row in result["rows"]}
    assert impls == {"cupy_flash", "naive", "torch_cpu"}
    assert len(result["rows"]) == 3 * 2
    for row in result["rows"]:
        assert set(IDENTITY) <= row.keys() and row["status"] in STATUSES
        if row["impl"] != "torch_cpu":
            assert row["status"] == "ok" and row["ms"] > 0 and row["rounds"] >= 3
            assert row["error"] < 1e-5
        if row["status"] != "ok":
            assert row["ms"] is None and row["why"]
    out = capsys.readouterr()
    assert "| D64 causal B1 S256 H4 |" in out.out
    # One line per case where nobody watches, and one of where the time went.
    assert len([line for line in out.err.splitlines() if " ms" in line]) == 2
    (table,) = tmp_path.glob("*.md")
    assert table.read_text() in out.out


def test_a_small_budget_still_shows_every_case(tmp_path: Path) -> None:
    assert cli.main(["cpu", "--budget", "0", "--out", str(tmp_path), *QUICK]) == 0
    rows = result_of(tmp_path)["rows"]
    assert len(rows) == 3 * 24
    assert {row["status"] for row in rows} <= {"skipped", "unsupported"}


def test_a_run_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has times keeps them, what was skipped gets them, in the same file."""
    arguments = ["cpu", "--out", str(tmp_path), *QUICK, *ONE]
    assert cli.main([*arguments, "--budget", "20"]) == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    first, *others = (row for row in result["rows"] if row["impl"] == "naive")
    for row in result["rows"]:
        if row["causal"] != first["causal"]:
            row |= {"status": "skipped", "ms": None}
    path.write_text(json.dumps(result))
    for _ in range(2):  # the second time nothing is left to do
        assert cli.main([*arguments, "--budget", "20", "--resume", str(path)]) == 0
        again = result_of(tmp_path)["rows"]
        assert len(again) == len(result["rows"])
        assert first in again
        assert all(row["status"] != "skipped" for row in again)
    assert all(row not in again for row in others)
    capsys.readouterr()
    result["meta"]["source_sha256"] = "another"
    path.write_text(json.dumps(result))
    assert cli.main([*arguments, "--resume", str(path)]) == 1
    assert "source_sha256 is another" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["cpu", "small", "--resume", str(path), *QUICK])


def test_a_workload_with_its_own_way_to_measure_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without a result are made anew where they stand, the others stay."""
    monkeypatch.setitem(cli.module_of("memory").SEQLENS, "cpu", (256,))
    arguments = ["memory", "--out", str(tmp_path), *QUICK]
    assert cli.main([*arguments, "--only", "naive", "--budget", "20"]) == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    before = result["rows"]
    assert {row["impl"] for row in before} == {"cupy_flash", "naive"}
    assert "resumed" not in result["meta"]
    for row in before[1::3]:
        row |= {"status": "skipped", "bytes": None}
    path.write_text(json.dumps(result))
    resume = [*arguments, "--only", "naive", "--budget", "20", "--resume", str(path)]
    for _ in range(2):  # the second time nothing is left to do
        assert cli.main(resume) == 0
        again = result_of(tmp_path)
        assert [(row["impl"], row["direction"]) for row in again["rows"]] == [
            (row["impl"], row["direction"]) for row in before
        ]
        assert all(row["bytes"] for row in again["rows"])
        assert all(row in again["rows"] for row in before if row["status"] == "ok")
        (added,) = again["meta"]["resumed"]
        assert "--resume" in added["command"]


def test_only_knows_what_a_workload_measures(tmp_path: Path) -> None:
    for names in (["first_call"], ["cpu"]):
        with pytest.raises(SystemExit):
            cli.main([*names, "--only", "torch", "--out", str(tmp_path), *QUICK])
    assert "torch" in cli.known_impls(["cpu", "end_to_end"], "cpu")


def test_workloads_share_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their cases: one that takes all it gets leaves the next one its part."""
    shares = []

    def take(*arguments: Any) -> None:
        shares.append(arguments[-1] - cli.time.monotonic())

    monkeypatch.setattr(cli, "run_cases", take)
    monkeypatch.setattr(cli, "run_module", take)
    cases = {"cpu": 12, "small": 4, "fp32": 2}
    one = square("cpu", "float32", 1, 64, 1, 64, False, "forward")
    monkeypatch.setattr(
        cli.Selection, "cases", lambda _, name: [one] * cases.get(name, 0)
    )
    names = [*cases, "memory"]
    arguments = [*names, "--budget", "400", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    # None of them takes any time here, so each may have what those before left over.
    counts = [*cases.values(), cli.CASES_OF_MODULE]
    expected = [400 * n / sum(counts[at:]) for at, n in enumerate(counts)]
    assert shares == pytest.approx(expected, rel=0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    original = runner.Runner.run_case
    cases = []

    def run_case(self: Any, case: Any) -> Any:
        cases.append(case)
        if len(cases) == 3:
            os.kill(os.getpid(), number)
        return original(self, case)

    monkeypatch.setattr(runner.Runner, "run_case", run_case)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["cpu", "--out", str(tmp_path), *QUICK]) == cli.INTERRUPTED == 130
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(result_of(tmp_path)["rows"]) == 2 * 3
    assert len(list(tmp_path.glob("*.md"))) == 1


def test_only_keeps_ours_beside_those_that_are_named(tmp_path: Path) -> None:
    arguments = ["cpu", "--only", "naive", "--out", str(tmp_path), *QUICK, *ONE]
    assert cli.main(arguments) == 0
    rows = result_of(tmp_path)["rows"]
    assert {row["impl"] for row in rows} == {"cupy_flash", "naive"}


@pytest.mark.parametrize("mask", MASKS)
def test_one_mask(tmp_path: Path, mask: str) -> None:
    arguments = ["cpu", "--mask", mask, "--budget", "0", "--out", str(tmp_path)]
    assert cli.main([*arguments, *QUICK, *ONE]) == 0
    rows = result_of(tmp_path)["rows"]
    assert rows and {row["causal"] for row in rows} == {mask == "causal"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainning"], "workload trainning unknown; known: training, gqa"),
        (["cpu", "--only", "fa9"], "fa9 unknown; known: cupy_flash"),
        (["cpu", "--head-dim", "72"], "--head-dim 64,128"),
        (["cpu", "--direction", "up"], "up unknown; accepted: forward"),
        (["cpu", "--dtype", "int8"], "int8 unknown"),
        (["cpu", "--mask", "none"], "none unknown; accepted: full, causal"),
        (["tiles", "--shared-memory", "99"], "--shared-memory: a CPU has none"),
        (["compare", "a.json"], "arguments are required|expected 2"),
        (["compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] != "compare":
        arguments = [*arguments, "--device", "cpu"]
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert any(part in error for part in message.split("|")), error


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for name in (*NAMES, "cupy_flash", "naive", "torch_cpu"):
        assert name in out


def test_saved_results_can_be_compared_tabulated_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cpu", "--out", str(tmp_path), *QUICK, *ONE]) == 0
    (path,) = tmp_path.glob("*.json")
    capsys.readouterr()
    assert cli.main(["compare", str(path), str(path)]) == 0
    assert "| cupy_flash | 2 | 1.000 |" in capsys.readouterr().out
    assert cli.main(["table", str(path)]) == 0
    assert capsys.readouterr().out.rstrip() == (
        path.with_suffix(".md").read_text().rstrip()
    )
    pytest.importorskip("matplotlib")
    assert cli.main(["plot", str(path)]) == 0
    files = [Path(line) for line in capsys.readouterr().out.split()]
    assert len(files) == 4 and all(file.stat().st_size for file in files)


def test_a_run_without_matplotlib_says_that_there_are_no_plots(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "bench.plots", raising=False)
    monkeypatch.delattr("bench.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    arguments = ["cpu", "--out", str(tmp_path), *QUICK, *ONE]
    arguments.remove("--no-plots")
    assert cli.main(arguments) == 0
    assert "no plots: " in capsys.readouterr().err
    assert result_of(tmp_path)["rows"]


def test_a_bar_is_drawn_on_a_terminal() -> None:
    from bench.progress import shown

    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with shown("training", 2, stream) as progress:
        progress.tick("fa2")
        progress.done("case [1] is done")
    assert "case [1] is done" in stream.getvalue()


def test_a_log_ends_with_what_took_the_time() -> None:
    from bench.progress import Lines

    now = 0.0
    stream = io.StringIO()
    lines = Lines(stream, lambda: now)
    for what, seconds in (("fa2", 2.0), ("flex", 5.0), ("fa2", 1.0), ("quick", 0.2)):
        lines.tick(what)
        now += seconds
    lines.done("case 1")
    now += 1.5
    lines.end()
    assert stream.getvalue().splitlines() == [
        "case 1", "seconds: flex 5, fa2 3, the rest 2",
    ]  # fmt: skip


def test_importing_the_harness_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['torch'] = None; "
        "import bench.__main__; print('jax' in sys.modules, 'cupy' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert run.stdout.split() == ["False", "False"]
