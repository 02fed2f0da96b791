"""Result files as Markdown: every implementation beside the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .results import (
    OURS,
    ResultFile,
    Row,
    case_of,
    changes,
    geometric_mean,
    is_ours,
    label_of,
)

Meta = Mapping[str, Any]


def report(meta: Meta, rows: Sequence[Row]) -> str:
    """Return what a result file says, as Markdown."""
    notes = Footnotes()
    workloads = dict.fromkeys(row["workload"] for row in rows)
    body = [
        SPECIAL.get(name, speeds)(
            meta, [row for row in rows if row["workload"] == name], notes
        )
        for name in workloads
    ]
    return "\n\n".join([heading(meta, workloads), *body, *notes.lines()]) + "\n"


def heading(meta: Meta, workloads: Iterable[str]) -> str:
    """Say what was measured, where, and how fast that can be at best."""
    name = meta.get("cpu") or meta.get("gpu", "unknown")
    versions = ", ".join(
        f"{package} {meta[package]}"
        for package in ("cupy", "torch", "jax", "numpy")
        if meta.get(package)
    )
    ceilings = [
        f"{dtype} GEMM {number(value)} TFLOP/s"
        for dtype, value in (meta.get("gemm_tflops_by_dtype") or {}).items()
        if value
    ]
    if meta.get("copy_tbps"):
        ceilings.append(f"copy {number(meta['copy_tbps'])} TB/s")
    lines = [
        f"# {', '.join(workloads)} on {name}",
        f"{meta.get('date')}, commit {meta.get('commit') or 'unknown'}, {versions}.",
    ]
    for later in meta.get("resumed", ()):
        commit = later["commit"] or "unknown"
        lines.append(f"Rows added: {later['date']}, commit {commit}.")
    if ceilings:
        lines.append(f"Measured ceilings: {', '.join(ceilings)}.")
    return "\n\n".join(lines)


class Footnotes:
    """Reasons by number, each told once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, row: Row) -> str:
        """Return the number of a row's reason in brackets, "" without a reason."""
        if not row["why"] and row["status"] == "ok":
            return ""
        text = row["why"] or "no reason given"
        if row["status"] != "ok":
            text = f"{row['status']}: {text}"
        return f"[{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    def lines(self) -> list[str]:
        """Return the notes, if there are any, as one paragraph."""
        notes = [f"[{n}] {text}  " for text, n in self._numbers.items()]
        return ["\n".join(notes)] if notes else []


# --- Parts of tables ------------------------------------------------------------------


def number(value: float | None) -> str:
    """Format with three digits that count."""
    if value is None:
        return "–"
    for limit, digits in ((99.95, 0), (9.995, 1), (0.9995, 2)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.3g}"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is aligned to the left, all others right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = (head, rule, *body)
    # A bar would end the cell.
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines
    )


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Collect rows by a key, in order of its first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_shape(row: Row) -> tuple[Any, ...]:
    """Return what tables and plots are ordered by."""
    return (
        row["head_dim"], row["causal"], row["kv_heads"], row["heads"], row["batch"],
        row["kv_seqlen"],
    ) if row["workload"] != "training" else (
        row["head_dim"], row["causal"], row["kv_seqlen"]
    )  # fmt: skip


def shape_name(row: Row) -> str:
    """Return a case without its workload, direction and dtype."""
    before = f"{row['workload']} {row['direction']} {row['dtype']} "
    return label_of(row).removeprefix(before)


def best_rival(rows: Iterable[Row]) -> Row | None:
    """Return the fastest row of a case that isn't of this library."""
    rivals = [
        r for r in rows if r["status"] == "ok" and r["ms"] and not is_ours(r["impl"])
    ]
    return min(rivals, key=lambda row: row["ms"], default=None)


def find(rows: Iterable[Row], impl: str) -> Row | None:
    """Return the row of an implementation."""
    return next((row for row in rows if row["impl"] == impl), None)


@dataclass(frozen=True)
class Share:
    """How near a time is to what the device could do.

    Attributes
    ----------
    percent : float
    limit : str
        What the time is bound by: "GEMM" or "copy".
    """

    percent: float
    limit: str


def share_of_ceiling(meta: Meta, row: Row) -> Share | None:
    """Compare a row with the measured rates; None if these are unknown.

    The bound is the longer of the time that a GEMM would take for as many operations
    and the time that a copy would take for as many bytes.
    """
    gemm = (meta.get("gemm_tflops_by_dtype") or {}).get(row["dtype"])
    copy = meta.get("copy_tbps")
    if not gemm or not copy or not row["tflops"] or not row["tbps"]:
        return None
    by_gemm, by_copy = row["tflops"] / gemm, row["tbps"] / copy
    if by_gemm >= by_copy:
        return Share(100 * by_gemm, "GEMM")
    return Share(100 * by_copy, "copy")


# --- Tables ---------------------------------------------------------------------------


def speeds(meta: Meta, rows: Sequence[Row], notes: Footnotes) -> str:
    """Return a table for each direction and dtype, a column for each implementation."""
    sections = []
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    for (direction, dtype), group in grouped(
        rows, lambda row: (row["direction"], row["dtype"])
    ).items():
        cases = grouped(sorted(group, key=by_shape), case_of)
        key, unit = unit_of(meta, group)
        sections.append(
            f"## {direction}, {dtype}, {unit}\n\n"
            + _speed_table(meta, cases, impls, key, notes)
        )
        if any(row.get("host_us") for row in group):
            sections.append(
                f"## {direction}, {dtype}, host µs per call\n\n"
                + _host_table(cases, impls, notes)
            )
    return "\n\n".join(sections)


def unit_of(meta: Meta, rows: Sequence[Row]) -> tuple[str, str]:
    """Return the figure that says most of these cases, and its unit."""
    if any(row.get("host_us") for row in rows):
        return "us", "device µs"
    shares = [share_of_ceiling(meta, row) for row in rows]
    limits = [share.limit for share in shares if share is not None]
    if limits and limits.count("copy") > len(limits) / 2:
        return "tbps", "TB/s"
    return "tflops", "TFLOP/s"


def _speed_table(
    meta: Meta,
    cases: Mapping[Any, Sequence[Row]],
    impls: Sequence[str],
    key: str,
    notes: Footnotes,
) -> str:
    head = ["case", *impls, "best peer", "ours / best peer", "% of ceiling"]
    body, ratios = [], []
    for group in cases.values():
        ours, rival = find(group, OURS), best_rival(group)
        share = share_of_ceiling(meta, ours) if ours else None
        ratio = rival["ratio"] if rival else None
        if ratio:
            ratios.append(ratio)
        body.append([
            shape_name(group[0]),
            *(_cell(find(group, impl), key, notes) for impl in impls),
            rival["impl"] if rival else "–",
            f"{ratio:.2f}" if ratio else "–",
            f"{share.percent:.0f} ({share.limit})" if share else "–",
        ])  # fmt: skip
    text = markdown(head, body)
    if ratios:
        text += (
            f"\n\nSpeed of {OURS} over that of the best peer, geometric mean of "
            f"{len(ratios)}: {geometric_mean(ratios):.2f}."
        )
    return text


def _host_table(
    cases: Mapping[Any, Sequence[Row]], impls: Sequence[str], notes: Footnotes
) -> str:
    body = [
        [
            shape_name(group[0]),
            *(_cell(find(group, impl), "host_us", notes) for impl in impls),
        ]
        for group in cases.values()
    ]
    return markdown(["case", *impls], body)


def _cell(row: Row | None, key: str, notes: Footnotes) -> str:
    """Return a figure, with a mark where there is something to say of it."""
    if row is None:
        return ""
    mark = notes.mark(row)
    if row["status"] != "ok":
        return f"– {mark}"
    value = row["ms"] * 1e3 if key == "us" else row.get(key)
    return f"{number(value)} {mark}".strip()


def ranking(meta: Meta, rows: Sequence[Row], notes: Footnotes) -> str:
    """Return the tiles of each case, the fastest first."""
    sections = []
    for group in grouped(rows, case_of).values():
        timed = sorted(
            (row for row in group if row["status"] == "ok"), key=lambda row: row["ms"]
        )
        rest = [row for row in group if row["status"] != "ok"]
        body = [
            [
                row["impl"].partition(":")[2] or "the choice",
                _cell(row, "tflops", notes),
                number(row["ms"]) if row["status"] == "ok" else "–",
                f"{1 / row['ratio']:.3f}" if row["ratio"] else "–",
                f"{100 * row['ms_spread']:.1f}" if row["status"] == "ok" else "–",
            ]
            for row in (*timed, *rest)
        ]
        head = ["tile", "TFLOP/s", "ms", "speed / the choice", "spread %"]
        sections.append(f"## {label_of(group[0])}\n\n{markdown(head, body)}")
    return "\n\n".join(sections)


def memory(meta: Meta, rows: Sequence[Row], notes: Footnotes) -> str:
    """Return the peak memory of each implementation over the sequence length."""
    sections = []
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    for (direction, dtype), group in grouped(
        rows, lambda row: (row["direction"], row["dtype"])
    ).items():
        body = []
        for (seqlen, *_), cases in grouped(
            group, lambda row: (row["seqlen"], case_of(row))
        ).items():
            needed, squares = (
                cases[0].get(name) for name in ("needed_bytes", "square_bytes")
            )
            body.append([
                f"S{seqlen}",
                *(_mebibytes(find(cases, impl), notes) for impl in impls),
                number(needed / 2**20) if needed else "–",
                number(squares / 2**20) if squares else "–",
            ])  # fmt: skip
        head = ["case", *impls, "needed", "S × S arrays"]
        sections.append(
            f"## {direction}, {dtype}, peak MiB above the inputs\n\n"
            f"{markdown(head, body)}"
        )
    return "\n\n".join(sections)


def _mebibytes(row: Row | None, notes: Footnotes) -> str:
    if row is None:
        return ""
    mark = notes.mark(row)
    if row.get("bytes") is None:
        return f"– {mark}".strip()
    return f"{number(row['bytes'] / 2**20)} {mark}".strip()


# Columns of some workloads only.
EXTRA = {"tokens_per_s": "tokens / s", "import_ms": "of it import, ms"}


def listing(meta: Meta, rows: Sequence[Row], notes: Footnotes) -> str:
    """Return one line for each row: for times that aren't those of one pass."""
    sections = []
    extra = [key for key in EXTRA if any(row.get(key) for row in rows)]
    head = ["implementation", "ms", "spread %", *(EXTRA[key] for key in extra)]
    for (direction, dtype), group in grouped(
        rows, lambda row: (row["direction"], row["dtype"])
    ).items():
        body = []
        for row in group:
            spread = row.get("ms_spread")
            body.append([
                row["impl"], _cell(row, "ms", notes),
                f"{100 * spread:.1f}" if spread is not None else "–",
                *(number(row.get(key)) for key in extra),
            ])  # fmt: skip
        title = ", ".join((direction, dtype, shape_name(group[0])))
        sections.append(f"## {title}\n\n{markdown(head, body)}")
    return "\n\n".join(sections)


SPECIAL: dict[str, Callable[[Meta, Sequence[Row], Footnotes], str]] = {
    "tiles": ranking, "memory": memory, "first_call": listing, "end_to_end": listing,
}  # fmt: skip


def comparison(before: ResultFile, after: ResultFile) -> str:
    """Return what changed between two files, as Markdown."""
    found = changes(before.rows, after.rows)
    timed = [change for change in found if change.speedup is not None]
    head = ["case", "implementation", "before ms", "after ms", "speed after / before"]
    body = [
        [
            change.label, change.impl, _before_after(change.before),
            _before_after(change.after),
            f"{change.speedup:.3f}" if change.speedup is not None else "–",
        ]
        for change in found
    ]  # fmt: skip
    lines = [f"# {before.path.name} → {after.path.name}", markdown(head, body)]
    means = [
        [impl, str(len(speedups)), f"{geometric_mean(speedups):.3f}"]
        for impl in dict.fromkeys(change.impl for change in timed)
        if (speedups := [c.speedup for c in timed if c.impl == impl and c.speedup])
    ]
    head = ["implementation", "cases", "speed after / before, geometric mean"]
    lines.append(
        markdown(head, means) if means else "No case has a time in both files."
    )
    return "\n\n".join(lines) + "\n"


def _before_after(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
