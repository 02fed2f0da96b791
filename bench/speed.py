"""What README.md says of speed: tables and plots of the newest committed results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .results import FOLDER, OURS, ResultFile, Row

# The sequence length that the table shows; the plots show all.
SEQLEN = 4096
PEERS = {
    "fa2": "FlashAttention-2, through PyTorch",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN, through PyTorch",
    "jax": "cuDNN, through JAX, by the host's clock over many calls",
    "flex": "FlexAttention, compiled",
    "efficient": "memory-efficient attention, through PyTorch",
    "math": "PyTorch's unfused attention",
    "naive": "matmul and softmax in CuPy",
}


def newest(workload: str, folder: Path = FOLDER) -> ResultFile:
    """Return the newest result file of a workload that was measured on a GPU.

    Raises
    ------
    ValueError
        If there is none.
    """
    # Their names begin with the time.
    for path in sorted(folder.glob(f"*-{workload}.json"), reverse=True):
        file = ResultFile.load(path)
        if file.meta.get("workload") == workload and file.meta.get(
            "compute_capability"
        ):
            return file
    raise ValueError(f"{folder} has no result of {workload}")


def training(file: ResultFile) -> str:
    """Return table and plots of the training grid."""
    shown = [row for row in file.rows if row["seqlen"] == SEQLEN]
    impls = [
        OURS,
        *(p for p in PEERS if any(is_ok(r) and r["impl"] == p for r in shown)),
    ]
    tokens = {row["batch"] * row["seqlen"] for row in shown}
    lines = [("pass", "D", "mask", *impls), ("---",) * 3 + ("---:",) * len(impls)]
    lines += [(*case, *speeds(shown, case, impls)) for case in cases(shown)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    meta = file.meta
    return "\n\n".join(
        (
            f"TFLOP/s on an {meta['gpu']}, bfloat16, {min(tokens)} tokens in sequences "
            f"of {SEQLEN}, 2048 channels\nin heads of D; time on the device, all in "
            f"turn in one process, each checked against float64 first\n"
            f"([{file.path.name}]({link(file.path)}), measured GEMM "
            f"{meta['gemm_tflops']:.0f}):",
            table,
            "; ".join(f"{name}: {PEERS[name]}" for name in impls if name in PEERS)
            + ".",
            *plots(file),
        )
    )


def is_ok(row: Row) -> bool:
    """Whether a row has a time."""
    return row["status"] == "ok"


def cases(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return pass, head size and mask of what was measured of this library."""
    ours = [row for row in rows if is_ok(row) and row["impl"] == OURS]
    ordered = sorted(
        ours,
        key=lambda r: (r["direction"] != "forward", r["head_dim"], r["causal"]),
    )
    return list(dict.fromkeys(map(case_of, ordered)))


def case_of(row: Row) -> tuple[str, str, str]:
    """Return pass, head size and mask of a row as text."""
    mask = "causal" if row["causal"] else "full"
    return row["direction"], str(row["head_dim"]), mask


def speeds(
    rows: Sequence[Row], case: tuple[str, str, str], impls: Sequence[str]
) -> list[str]:
    """Return the TFLOP/s of some implementations in a case; a dash without a time."""
    found = {
        row["impl"]: f"{row['tflops']:.{0 if row['tflops'] >= 100 else 1}f}"
        for row in rows
        if is_ok(row) and case_of(row) == case
    }
    return [found.get(impl, "–") for impl in impls]


def plots(file: ResultFile) -> list[str]:
    """Return the pictures that lie beside a result file."""
    found = sorted(file.path.parent.glob(f"{file.path.stem}-speed-*.svg"), reverse=True)
    return [f"![{path.stem.partition('-speed-')[2]}]({link(path)})" for path in found]


def link(path: Path) -> str:
    """Return a path as README.md names it."""
    return f"bench/results/{path.name}"
