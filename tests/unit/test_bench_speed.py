"""What README.md says of speed comes from the newest results, as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import speed


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


def test_the_table(tmp_path: Path) -> None:
    path = write(tmp_path, "2026-01-01T000000-x-training.json")
    for name in ("forward-bfloat16", "backward-bfloat16", "both-bfloat16"):
        (tmp_path / f"{path.stem}-speed-{name}.svg").touch()
    text = speed.training(speed.newest("training", tmp_path))
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
    text = speed.lengths(speed.newest("training", tmp_path))
    assert table_of(text) == [
        "| pass | D | mask | 512 | 4096 |",
        "| --- | --- | --- | ---: | ---: |",
        "| forward | 64 | full | 600 (2.00) | 150 (0.50) |",
        "| forward | 128 | causal | 10 (1.25) | – |",
        "| backward | 64 | full | – | 1 (0.25) |",
    ]
    assert "1.08 forward (shapes: 3), 0.25 backward (shapes: 1)" in text
    assert path.name in text


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
    text = speed.PARTS["fp32"](file)
    assert table_of(text)[2:] == [
        "| forward | 64 | full | 4 × 4096 × 16 | 12.9 | 11.8 |",
        "| forward | 128 | full | 4 × 4096 × 16 | – | 41.6 |",
    ]
    assert "GEMM 50.0" in text and "float32 on an NVIDIA X" in text
    assert f"[{file.path.name}](bench/results/{file.path.name})" in text


def test_small_calls_show_both_times(tmp_path: Path) -> None:
    rows = [row("cupy_flash", 1.0, heads=4, ms=0.0257, host_us=32.9)]
    text = speed.PARTS["small"](result(tmp_path, "small", rows))
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
    assert "![" not in speed.PARTS["memory"](file)
    picture.touch()
    text = speed.PARTS["memory"](file)
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
    text = speed.PARTS["first_call"](result(tmp_path, "first_call", rows))
    assert table_of(text)[2:] == [
        "| cupy_flash | 1600 | 81.7 | – | – |",
        "| flex | 9000 (1) | – | – | – |",
    ]
    assert "medians of 3 processes" in text and "of so many only" in text
