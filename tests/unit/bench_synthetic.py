"""Result rows as a GPU would give them, for tests of tables and plots."""

from __future__ import annotations

import math
from typing import Any

from bench.results import Row, new_row
from bench.workloads import Case, Selection, square

# Made up: what each implementation reaches of the ceiling at long sequences.
SHARES = {
    "cupy_flash": 0.80, "naive": 0.06, "fa2": 0.46, "cudnn": 0.76, "efficient": 0.30,
    "math": 0.05, "flex": 0.52, "fa4": 0.72, "jax": 0.74,
}  # fmt: skip
META: dict[str, Any] = {
    "gpu": "NVIDIA H200", "driver": "580.0", "cuda": "13.0", "cupy": "14.2.0",
    "torch": "2.11.0", "commit": "0123abc", "source_sha256": "00",
    "multiprocessors": 132,
    "command": "python -m bench training", "date": "2026-01-01T00:00:00+00:00",
    "gemm_tflops": 780.0, "gemm_dtype": "bfloat16",
    "gemm_tflops_by_dtype": {"bfloat16": 780.0, "float32": 51.0}, "copy_tbps": 4.2,
}  # fmt: skip


def rows(workload: str) -> list[Row]:
    """Return a row for each implementation and case, some of them without a time."""
    return [row for case in Selection().cases(workload) for row in case_rows(case)]


def case_rows(case: Case) -> list[Row]:
    """Return the rows of one case."""
    times = {name: milliseconds(case, name) for name in SHARES}
    found = []
    for name, ms in times.items():
        if (reason := reason_against(case, name)) is not None:
            found.append(new_row(case, name, *reason))
            continue
        found.append(new_row(
            case, name, "ok", ms=ms, ms_spread=0.004, tflops=case.flops / ms / 1e9,
            tbps=case.bytes / ms / 1e9, error=2e-3, rounds=20,
            ratio=ms / times["cupy_flash"],
        ))  # fmt: skip
    return found


def milliseconds(case: Case, name: str) -> float:
    """Return a time that grows with the size as a kernel's does."""
    rate = SHARES[name] * META["gemm_tflops"] * 1e9
    rate *= {64: 0.75, 128: 1.0, 256: 0.9}.get(case.head_dim, 1.0)
    if case.direction != "forward":
        rate *= 0.75
    by_bytes = case.bytes / META["copy_tbps"] / 1e9 / SHARES[name]
    if name in ("naive", "math"):
        return max(case.flops * (2 if case.causal else 1) / rate, by_bytes) + 0.05
    # Some are better at short sequences, others at long ones.
    half = {"cupy_flash": 700, "fa4": 300, "jax": 1500}.get(name, 900)
    by_work = case.flops / rate * (1 + half / case.kv_seqlen)
    return max(by_work, by_bytes) + 0.004


def reason_against(case: Case, name: str) -> tuple[str, str] | None:
    """Return a status and a reason as they happen."""
    if name == "fa4" and case.head_dim == 256:
        return "unsupported", "head size 256 isn't supported on this GPU"
    if name in ("naive", "math") and case.kv_seqlen >= 16384:
        return "failed", "out of memory"
    if name == "flex" and case.direction == "both" and case.causal:
        return "wrong", "dq of sequence 0, kv head 0 is off by 4.0e-01"
    if name == "jax" and case.seqlen == 512:
        return "skipped", "the time budget was spent"
    return None


def memory_rows() -> list[Row]:
    """Return peaks: linear for fused kernels, quadratic for the others."""
    found = []
    for n in range(6):
        for direction in ("forward", "backward", "both"):
            case = square("memory", "bfloat16", 1, 1024 << n, 16, 64, False, direction)
            needed = case.seqlen * 16 * 64 * 2 * (1 if direction == "forward" else 3)
            squares = 16 * case.seqlen**2 * 2 * (1 if direction == "forward" else 2)
            for i, name in enumerate(SHARES):
                quadratic = name in ("naive", "math")
                size = needed * (1 + 0.1 * i) + (2.5 * squares if quadratic else 0)
                status = "failed" if math.log2(size) > 37 else "ok"
                row = new_row(case, name, status, "out of memory" * (status != "ok"))
                found.append(row | {
                    "bytes": int(size) if status == "ok" else None,
                    "needed_bytes": needed, "square_bytes": squares,
                })  # fmt: skip
    return found
