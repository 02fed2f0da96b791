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


def test_the_table(tmp_path: Path) -> None:
    path = write(tmp_path, "2026-01-01T000000-x-training.json")
    for name in ("forward-bfloat16", "backward-bfloat16"):
        (tmp_path / f"{path.stem}-speed-{name}.svg").touch()
    text = speed.training(speed.newest("training", tmp_path))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines == [
        "| pass | D | mask | cupy_flash | fa2 |",
        "| --- | --- | --- | ---: | ---: |",
        "| forward | 64 | full | 100.0 | 301 |",
        "| backward | 64 | full | 123 | – |",
    ]
    assert "16384 tokens" in text and "NVIDIA X" in text and "GEMM 700" in text
    assert speed.PEERS["fa2"] in text and speed.PEERS["fa4"] not in text
    pictures = [line for line in text.splitlines() if line.startswith("![")]
    assert [p[:9] for p in pictures] == ["![forward", "![backwar"]
    assert all(f"(bench/results/{path.stem}-speed-" in p for p in pictures)
