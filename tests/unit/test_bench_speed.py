"""What README.md says of speed comes from the newest results, as they are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import speed
from bench.results import ResultFile, new_row
from bench.workloads import WORKLOADS, Case


def row(impl: str, tflops: float | None, **changes: Any) -> dict[str, Any]:
    case = {
        "workload": "training", "direction": "forward", "dtype": "bfloat16",
        "head_dim": 64, "causal": False, "seqlen": 4096, "batch": 4,
    }  # fmt: skip
    status = "failed" if tflops is None else "ok"
    return case | {"impl": impl, "tflops": tflops, "status": status} | changes


ROWS = [
    row("cupy_flash", 123.4, direction="backward"),
    row("cupy_flash", 99.96),
    row("fa2", 301.2),
    row("fa4", None),
    row("unheard of", 1.0),
    row("cupy_flash", 7.0, seqlen=512, batch=32),
]


def write(folder: Path, name: str, **meta: Any) -> Path:
    meta = {
        "gpu": "NVIDIA X", "workload": "training", "compute_capability": "9.0",
        "gemm_tflops": 700.4,
    } | meta  # fmt: skip
    path = folder / name
    path.write_text(json.dumps({"meta": meta, "rows": ROWS}), encoding="utf-8")
    return path


def test_the_newest_result_of_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result of training"):
        speed.newest("training", tmp_path)
    write(tmp_path, "2026-01-01T000000-x-training.json")
    newest = write(tmp_path, "2026-02-01T000000-x-training.json")
    write(tmp_path, "2026-03-01T000000-cpu-training.json", compute_capability=None)
    write(tmp_path, "2026-04-01T000000-x-small.json", workload="small")
    assert speed.newest("training", tmp_path).path == newest


def table_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def split(file: ResultFile) -> dict[str, ResultFile]:
    return {
        name: dataclasses.replace(
            file, rows=[row for row in file.rows if row["direction"] == name]
        )
        for name in ("forward", "backward")
    }


def test_the_table(tmp_path: Path) -> None:
    path = write(tmp_path, "2026-01-01T000000-x-training.json")
    for name in ("forward-bfloat16", "backward-bfloat16", "both-bfloat16"):
        (tmp_path / f"{path.stem}-speed-{name}.svg").touch()
    text = speed.training(split(speed.newest("training", tmp_path)))
    assert table_of(text) == [
        "| pass | D | mask | cupy_flash | fa2 |",
        "| --- | --- | --- | ---: | ---: |",
        "| forward | 64 | full | 100.0 | 301 |",
        "| backward | 64 | full | 123 | – |",
    ]
    assert "16384 tokens" in text and "NVIDIA X" in text and "GEMM 700" in text
    assert speed.PEERS["fa2"] in text and speed.PEERS["fa4"] not in text
    pictures = [line for line in text.splitlines() if line.startswith("![")]
    assert pictures == [
        f"![training, speed-{name}](bench/results/{path.stem}-speed-{name}.svg)"
        for name in ("forward-bfloat16", "backward-bfloat16")
    ]


def test_the_grid_at_all_lengths(tmp_path: Path) -> None:
    """Beside the best peer of each shape; what has no peer is left out."""
    rows = [
        row("cupy_flash", 1.0, direction="backward"),
        row("cudnn", 4.0, direction="backward"),
        row("cupy_flash", 150.0), row("fa2", 301.2), row("fa4", 100.0),
        row("cupy_flash:simt", 999.0),
        row("cupy_flash", 600.0, seqlen=512, batch=32),
        row("cudnn", 300.0, seqlen=512, batch=32),
        row("cupy_flash", 99.0, head_dim=128, causal=True),
        row("cudnn", None, head_dim=128, causal=True),
        row("cupy_flash", 10.0, head_dim=128, causal=True, seqlen=512, batch=32),
        row("cudnn", 8.0, head_dim=128, causal=True, seqlen=512, batch=32),
    ]  # fmt: skip
    path = write(tmp_path, "2026-01-01T000000-x-training.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": rows}))
    text = speed.lengths(split(speed.newest("training", tmp_path)))
    assert table_of(text) == [
        "| pass | D | mask | 512 | 4096 |",
        "| --- | --- | --- | ---: | ---: |",
        "| forward | 64 | full | 600 (2.00) | 150 (0.50) |",
        "| forward | 128 | causal | 10 (1.25) | – |",
        "| backward | 64 | full | – | 1 (0.25) |",
    ]
    assert "1.08 forward (shapes: 3), 0.25 backward (shapes: 1)" in text
    assert path.name in text


# --- Directions of different files ----------------------------------------------------

FIRST, SECOND = "2026-01-01T000000-x-training", "2026-02-01T000000-x-training"
CASES = WORKLOADS["training"]()


def grid_file(
    folder: Path,
    stem: str,
    directions: Sequence[str],
    tflops: float,
    without: Callable[[Case], bool] = lambda case: False,
    status: str = "skipped",
    **meta: Any,
) -> Path:
    """Write the whole grid of some directions, this library half as fast as fa2.

    Cases that are `without` have rows which say why, or none if there's no `status`.
    """
    rows = []
    for case in CASES:
        if case.direction not in directions:
            continue
        for impl, factor in (("cupy_flash", 1.0), ("fa2", 2.0)):
            if not without(case):
                figures = {"ms": 1.0, "tflops": factor * tflops}
                rows.append(new_row(case, impl, "ok", **figures))
            elif status:
                rows.append(new_row(case, impl, status, "the time budget was spent"))
    path = write(folder, f"{stem}.json", **meta)
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"rows": rows}), encoding="utf-8")
    for direction in directions:
        path.with_name(f"{stem}-speed-{direction}-bfloat16.svg").touch()
    return path


def files_by_direction(folder: Path) -> dict[str, str]:
    found = speed.newest_of_each("training", folder)
    return {direction: file.path.stem for direction, file in found.items()}


def test_each_direction_is_of_its_newest_file(tmp_path: Path) -> None:
    """The older file tells of forward alone, though it has backward too."""
    grid_file(tmp_path, FIRST, ["forward", "backward"], 100.0, gemm_tflops=600.0)
    grid_file(tmp_path, SECOND, ["backward", "both"], 200.0, gemm_tflops=700.0)
    assert files_by_direction(tmp_path) == {
        "forward": FIRST, "backward": SECOND, "both": SECOND,
    }  # fmt: skip
    assert [f.path.stem for f in speed.sources_of("training", tmp_path)] == [
        FIRST, SECOND, SECOND,
    ]  # fmt: skip

    text = speed.part("training", tmp_path)
    head, _, *lines = table_of(text)
    assert head == "| pass | D | mask | cupy_flash | fa2 |"
    assert lines == [
        f"| {direction} | {size} | {mask} | {figures} |"
        for direction, figures in (
            ("forward", "100 | 200"), ("backward", "200 | 400"), ("both", "200 | 400"),
        )
        for size in (64, 128, 256)
        for mask in ("full", "causal")
    ]  # fmt: skip
    link = "[{0}.json](bench/results/{0}.json)"
    assert (
        f"(forward: {link.format(FIRST)}, measured GEMM 600;\n"
        f"backward, both: {link.format(SECOND)}, measured GEMM 700):"
    ) in text
    assert "2.5 times as many backward,\nand 3.5 times as many in both" in text
    pictures = [line for line in text.splitlines() if line.startswith("![")]
    assert pictures == [
        f"![training, {name}](bench/results/{stem}-{name}.svg)"
        for stem, name in (
            (FIRST, "speed-forward-bfloat16"), (SECOND, "speed-backward-bfloat16"),
            (SECOND, "speed-both-bfloat16"),
        )
    ]  # fmt: skip

    text = speed.part("training-lengths", tmp_path)
    head, _, *lines = table_of(text)
    assert head == "| pass | D | mask | 512 | 1024 | 2048 | 4096 | 8192 | 16384 |"
    assert len(lines) == 18
    for line in lines:
        cell = "100 (0.50)" if line.startswith("| forward ") else "200 (0.50)"
        assert line.endswith(f" | {' | '.join([cell] * 6)} |")
    assert (
        f"(forward: {link.format(FIRST)};\nbackward, both: {link.format(SECOND)}):"
    ) in text
    for name in ("forward", "backward", "both"):
        assert f"0.50 {name} (shapes: 36)" in text


def test_one_file_is_named_once(tmp_path: Path) -> None:
    grid_file(tmp_path, FIRST, ["forward", "backward"], 100.0, gemm_tflops=600.0)
    for name in ("training", "training-lengths"):
        text = speed.part(name, tmp_path)
        assert f"\n([{FIRST}.json]" in text and text.count(FIRST + ".json") == 2
        assert "| both |" not in text and " in both" not in text


missing = pytest.mark.parametrize("status", ["skipped", ""])


@missing
@pytest.mark.parametrize(
    "without",
    [
        lambda case: case.seqlen >= 2048,
        lambda case: case.causal,
        lambda case: case.head_dim != 64,
    ],
    ids=["lengths", "a mask", "heads"],
)
def test_a_direction_needs_most_of_its_cases(
    without: Callable[[Case], bool], status: str, tmp_path: Path
) -> None:
    grid_file(tmp_path, FIRST, ["forward", "backward"], 100.0)
    grid_file(
        tmp_path, SECOND, ["backward", "both"], 200.0,
        lambda case: case.direction == "backward" and without(case), status,
    )  # fmt: skip
    assert files_by_direction(tmp_path) == {
        "forward": FIRST, "backward": FIRST, "both": SECOND,
    }  # fmt: skip
    # Nor does anything stand for a direction that no file has.
    (tmp_path / f"{FIRST}.json").unlink()
    assert files_by_direction(tmp_path) == {"both": SECOND}
    lines = table_of(speed.part("training", tmp_path))[2:]
    assert {line.split(" | ")[0] for line in lines} == {"| both"}


@missing
@pytest.mark.parametrize(
    "without",
    [
        lambda case: case.seqlen <= 1024,
        lambda case: (case.seqlen, case.head_dim, case.causal) == (2048, 64, True),
    ],
    ids=["lengths", "one case"],
)
def test_cases_left_out_for_time_are_dashes(
    without: Callable[[Case], bool], status: str, tmp_path: Path
) -> None:
    """Not figures of an older file."""
    grid_file(tmp_path, FIRST, ["backward"], 100.0)
    grid_file(tmp_path, SECOND, ["backward"], 200.0, without, status)
    assert files_by_direction(tmp_path) == {"backward": SECOND}
    lines = table_of(speed.part("training-lengths", tmp_path))[2:]
    left_out = sum(without(case) for case in CASES if case.direction == "backward")
    shown = " ".join(lines)
    assert "100 (" not in shown
    lengths = {case.seqlen for case in CASES if not without(case)}
    columns = sum(len(line.split(" | ")) - 3 for line in lines)
    assert columns == 6 * len(lengths)
    assert shown.count("200 (0.50)") == 36 - left_out
    assert shown.count("–") == columns - (36 - left_out)


def test_a_case_that_failed_is_had(tmp_path: Path) -> None:
    """An older figure in its place would hide that."""
    grid_file(tmp_path, FIRST, ["backward"], 100.0)
    grid_file(
        tmp_path, SECOND, ["backward"], 200.0,
        lambda case: case.head_dim == 64, "failed",
    )  # fmt: skip
    assert files_by_direction(tmp_path) == {"backward": SECOND}


def test_what_is_no_result_of_the_grid(tmp_path: Path) -> None:
    """Another GPU's, a part's, a CPU's, and rows in another dtype."""
    with pytest.raises(ValueError, match="no result of training"):
        speed.newest_of_each("training", tmp_path)
    grid_file(tmp_path, f"{SECOND}-part", ["both"], 9.0)
    grid_file(tmp_path, "2026-03-01T000000-training", ["both"], 9.0, workload="other")
    grid_file(
        tmp_path, "2026-04-01T000000-training", ["both"], 9.0, compute_capability=None
    )
    with pytest.raises(ValueError, match="no result of training"):
        speed.newest_of_each("training", tmp_path)
    grid_file(tmp_path, "2025-01-01T000000-y-training", ["both"], 9.0, gpu="NVIDIA Y")
    path = grid_file(tmp_path, FIRST, ["forward"], 100.0)
    content = json.loads(path.read_text(encoding="utf-8"))
    others = [row | {"dtype": "float16", "tflops": 1.0} for row in content["rows"]]
    content["rows"] = others + content["rows"]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert files_by_direction(tmp_path) == {"forward": FIRST}
    text = speed.part("training", tmp_path)
    assert "NVIDIA X" in text and len(table_of(text)) == 2 + 6
    assert all(line.endswith(" 100 | 200 |") for line in table_of(text)[2:])


# --- Other workloads ------------------------------------------------------------------


def result(tmp_path: Path, workload: str, rows: list[dict[str, Any]]) -> Any:
    path = write(
        tmp_path, f"2026-01-01T000000-x-{workload}.json", workload=workload,
        gemm_tflops_by_dtype={"float32": 50.04},
    )  # fmt: skip
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [row | {"workload": workload} for row in rows]
    path.write_text(json.dumps(content | {"rows": rows}), encoding="utf-8")
    return speed.newest(workload, tmp_path)


def test_a_case_that_only_a_peer_can_do_is_shown(tmp_path: Path) -> None:
    rows = [
        row("math", 41.6, head_dim=128), row("cupy_flash", None, head_dim=128),
        row("cupy_flash", 12.9), row("math", 11.8), row("fa2", None),
        row("cupy_flash", None, causal=True), row("math", None, causal=True),
    ]  # fmt: skip
    rows = [row | {"heads": 16, "dtype": "float32"} for row in rows]
    file = result(tmp_path, "fp32", rows)
    text = speed.OF_ONE_FILE["fp32"](file)
    assert table_of(text)[2:] == [
        "| forward | 64 | full | 4 × 4096 × 16 | 12.9 | 11.8 |",
        "| forward | 128 | full | 4 × 4096 × 16 | – | 41.6 |",
    ]
    assert "GEMM 50.0" in text and "float32 on an NVIDIA X" in text
    assert f"[{file.path.name}](bench/results/{file.path.name})" in text


def test_small_calls_show_both_times(tmp_path: Path) -> None:
    rows = [row("cupy_flash", 1.0, heads=4, ms=0.0257, host_us=32.9)]
    text = speed.OF_ONE_FILE["small"](result(tmp_path, "small", rows))
    assert table_of(text)[2:] == ["| forward | 64 | 4 × 4096 × 4 | 25.7 / 32.9 |"]


def test_memory_is_shown_at_the_longest_sequence_with_every_pass(
    tmp_path: Path,
) -> None:
    rows = [
        row(
            impl, 1.0 if done else None, heads=16, seqlen=seqlen, direction=direction,
            bytes=size << 20 if done else None, needed_bytes=4 << 20,
            square_bytes=1 << 29,
        )
        for seqlen in (4096, 8192)
        for direction in ("forward", "backward", "both")
        for impl, size in (("cupy_flash", 5), ("fa2", 6))
        for done in [(seqlen, direction, impl) not in (
            (8192, "both", "cupy_flash"), (4096, "backward", "fa2"),
        )]
    ]  # fmt: skip
    file = result(tmp_path, "memory", rows)
    picture = file.path.with_name(f"{file.path.stem}-peak-bfloat16.svg")
    assert "![" not in speed.OF_ONE_FILE["memory"](file)
    picture.touch()
    text = speed.OF_ONE_FILE["memory"](file)
    assert table_of(text)[2:] == [
        "| forward | 5.00 | 6.00 | 4.00 | 512 |",
        "| backward | 5.00 | – | 4.00 | 512 |",
        "| both | 5.00 | 6.00 | 4.00 | 512 |",
    ]
    assert "sequences of 4096" in text and f"(bench/results/{picture.name})" in text


def test_first_results_cold_and_warm(tmp_path: Path) -> None:
    rows = [
        row(f"{impl} ({cache})", 1.0, heads=4, ms=ms, rounds=rounds)
        for impl, cache, ms, rounds in (
            ("flex", "cold", 9000.0, 1), ("cupy_flash", "cold", 1600.0, 3),
            ("cupy_flash", "warm", 81.7, 3),
        )
    ]  # fmt: skip
    rows.append(row("fa4 (cold)", None, heads=4, ms=None, rounds=None))
    text = speed.OF_ONE_FILE["first_call"](result(tmp_path, "first_call", rows))
    assert table_of(text)[2:] == [
        "| cupy_flash | 1600 | 81.7 | – | – |",
        "| flex | 9000 (1) | – | – | – |",
    ]
    assert "medians of 3 processes" in text and "of so many only" in text
