"""Result files: their rows, writing them safely, and what changed between two."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .machine import ROOT
from .workloads import Case

FOLDER = ROOT / "bench" / "results"
STATUSES = ("ok", "unsupported", "failed", "wrong", "skipped")
# What says which case a row belongs to.
IDENTITY = (
    "workload", "direction", "dtype", "head_dim", "head_dim_v", "causal", "seqlen",
    "kv_seqlen", "batch", "heads", "kv_heads",
)  # fmt: skip
# The same of some cases only.
MORE_IDENTITY = ("shared_memory",)
FIGURES = ("ms", "ms_spread", "tflops", "tbps", "error", "ratio", "host_us", "rounds")
OURS = "cupy_flash"

# Workloads in which each implementation is measured by itself, not in turn.
ALONE = ("first_call", "memory")
# How the reason begins where a process was stopped.
NO_RESULT = "no result after"
TIME_IS_UP = "the time is used up"

Row = dict[str, Any]


def new_row(case: Case, impl: str, status: str, why: str = "", **figures: Any) -> Row:
    """Return the row of one implementation in one case.

    Parameters
    ----------
    status : str
        One of `STATUSES`; only "ok" has times.
    why : str
        The reason in one line; for "ok" what is special about the times, or "".
    **figures
        Some of `FIGURES`. `ms_spread` is relative; `ratio` is this time over that of
        `cupy_flash`, from the rounds that both have; `host_us` is the host's part.
    """
    assert status in STATUSES and set(figures) <= set(FIGURES)
    row: Row = {name: getattr(case, name) for name in IDENTITY}
    row["impl"] = impl
    for name in FIGURES:
        value = figures.get(name)
        finite = not isinstance(value, float) or math.isfinite(value)
        row[name] = value if finite else None
    if case.q_lengths is not None:
        row |= {"q_lengths": case.q_lengths, "k_lengths": case.k_lengths}
    for name in MORE_IDENTITY:
        if getattr(case, name) is not None:
            row[name] = getattr(case, name)
    return row | {"status": status, "why": one_line(why)}


def one_line(text: str) -> str:
    """Return the first line that says something, cut to a length for tables."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    return line if len(line) <= 200 else line[:199] + "…"


def case_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what is equal in the rows of one case."""
    return tuple(row.get(name) for name in (*IDENTITY, *MORE_IDENTITY))


def identity(case: Case) -> tuple[Any, ...]:
    """Return `case_of` of a case's rows."""
    return tuple(getattr(case, name) for name in (*IDENTITY, *MORE_IDENTITY))


def is_ours(impl: str) -> bool:
    """Tell whether a name is of this library, chosen or forced."""
    return impl.partition(":")[0].partition(" ")[0] == OURS


def unfinished(row: Row) -> bool:
    """Whether a row only says that the time didn't suffice."""
    stopped = row["status"] == "failed" and row["why"].startswith(NO_RESULT)
    return row["status"] == "skipped" or (row["workload"] == "first_call" and stopped)


def absent(row: Row) -> bool:
    """Whether a row says that the implementation wasn't there."""
    missing = re.search("can't be imported|No module named", row["why"])
    return row["status"] in ("unsupported", "failed") and missing is not None


def is_done(row: Row, only: Sequence[str] = ()) -> bool:
    """Whether nothing is left to measure for a row.

    Who wasn't there is tried again where `only` names it.
    """
    named = row["impl"].partition(" ")[0] in only
    return not (unfinished(row) or (named and absent(row)))


@dataclass(frozen=True)
class Wanted:
    """What is to be measured: all that isn't done, of these implementations.

    Attributes
    ----------
    only : tuple of str
        If not empty, only these implementations and this library.
    done : set
        Cases and implementations that have a row already.
    """

    only: tuple[str, ...] = ()
    done: frozenset[tuple[Any, str]] = frozenset()

    def named(self, impl: str) -> bool:
        """Whether an implementation is to be measured at all."""
        return not self.only or impl.partition(" ")[0] in (OURS, *self.only)

    def __call__(self, case: Case, impl: str) -> bool:
        """Whether the row of an implementation in a case is wanted."""
        return self.named(impl) and (identity(case), impl) not in self.done


EVERYTHING = Wanted()


def label_of(row: Mapping[str, Any]) -> str:
    """Describe a row's case in one line."""
    if row.get("head_dim") is None:
        parts = (row.get("workload"), row.get("direction"), row.get("dtype"))
        return " ".join(str(part) for part in parts if part)
    more = {name: row[name] for name in MORE_IDENTITY if name in row}
    return Case(**{name: row[name] for name in IDENTITY}, **more).label


def slug(name: str) -> str:
    """Return a GPU's name as a part of a file's name: "NVIDIA H200" is "h200"."""
    words = re.sub(r"\b(NVIDIA|GeForce|Corporation)\b", " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "unknown"


def now() -> datetime.datetime:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


@dataclass
class ResultFile:
    """A result file that is complete on disk after every `add`.

    Attributes
    ----------
    path : Path
    meta : dict
    rows : list of Row
    addition : dict, optional
        What `meta` will say of this run, once it adds to an earlier one's rows.
    """

    path: Path
    meta: dict[str, Any]
    rows: list[Row]
    addition: dict[str, Any] | None = None

    @classmethod
    def new(cls, folder: Path, workload: str, meta: Mapping[str, Any]) -> ResultFile:
        """Name a file after the time, the GPU and the workload; nothing is written."""
        date = now()
        name = f"{date:%Y-%m-%dT%H%M%S}-{slug(str(meta['gpu']))}-{workload}.json"
        stamped = {**meta, "workload": workload, "date": date.isoformat()}
        return cls(folder / name, stamped, [])

    @classmethod
    def load(cls, path: Path) -> ResultFile:
        """Read a file.

        Raises
        ------
        ValueError
            If it isn't a result file.
        """
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {"meta", "rows"} <= content.keys():
            raise ValueError(f"{path} is not a result file: no meta and rows")
        return cls(path, content["meta"], content["rows"])

    @classmethod
    def resume(cls, path: Path, workload: str, meta: Mapping[str, Any]) -> ResultFile:
        """Read a file whose run was cut short.

        Raises
        ------
        ValueError
            If it isn't of this workload and GPU, or not of these sources; where each
            implementation is measured by itself, sources matter only if this library
            has something left to measure.
        """
        file = cls.load(path)
        same = {"workload": workload, "gpu": meta["gpu"]}
        left = {row["impl"] for row in file.rows if unfinished(row)}
        if workload not in ALONE or any(map(is_ours, left)):
            same["source_sha256"] = meta["source_sha256"]
        for name, present in same.items():
            if file.meta.get(name) != present:
                raise ValueError(
                    f"{path} can't be resumed: its {name} is {file.meta.get(name)}, "
                    f"not {present}"
                )
        file.addition = {
            "command": meta.get("command"), "commit": meta.get("commit"),
            "source_sha256": meta["source_sha256"], "date": now().isoformat(),
        }  # fmt: skip
        return file

    def without_done(
        self, cases: Iterable[Case], only: Sequence[str] = ()
    ) -> list[Case]:
        """Return the cases that have no row yet, or one that isn't done."""
        done = {case_of(row) for row in self.rows}
        done -= {case_of(row) for row in self.rows if not is_done(row, only)}
        return [case for case in cases if identity(case) not in done]

    def wanted(self, only: Sequence[str] = ()) -> Wanted:
        """Return what is left to measure of all or some implementations."""
        done = {(case_of(r), r["impl"]) for r in self.rows if is_done(r, only)}
        return Wanted(tuple(only), frozenset(done))

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, in the place of those that they renew, and write the file.

        The rows of a case that were timed in turn go together: what an earlier run
        measured there is dropped, even if this one has nothing for it.
        """
        new = {(case_of(row), row["impl"]): row for row in rows}
        together = self.meta.get("workload") not in ALONE
        cases = {case for case, _ in new} if together else set()
        kept = []
        for row in self.rows:
            key = (case_of(row), row["impl"])
            if key in new:
                kept.append(new.pop(key))
            elif key[0] not in cases or unfinished(row):
                kept.append(row)
        self.rows = [*kept, *new.values()]
        if self.addition is not None:
            self.meta.setdefault("resumed", []).append(self.addition)
            self.addition = None
        self.save()

    def save(self) -> None:
        """Write the file so that a reader never finds half of one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        # One row a line keeps files small and their differences readable.
        rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in self.rows)
        meta = json.dumps(self.meta, indent=1, allow_nan=False)
        meta = meta.replace("\n", "\n ")
        partial.write_text(
            f'{{\n "meta": {meta},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8"
        )
        os.replace(partial, self.path)


# --- What changed ---------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One implementation in one case of two files.

    Attributes
    ----------
    label, impl : str
    before, after : float or str
        Milliseconds, or the status where there is no time.
    """

    label: str
    impl: str
    before: float | str
    after: float | str

    @property
    def speedup(self) -> float | None:
        """How many times as fast it is now; None if a time is missing."""
        if isinstance(self.before, str) or isinstance(self.after, str):
            return None
        return self.before / self.after


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[Change]:
    """Pair the rows of two files, the slowdowns first.

    Rows without a time come last, and only if their status changed.
    """
    old = {(case_of(row), row["impl"]): row for row in before}
    new = {(case_of(row), row["impl"]): row for row in after}
    found = [
        Change(
            label_of(new.get(key) or old[key]),
            key[1],
            _outcome(old.get(key)),
            _outcome(new.get(key)),
        )
        for key in dict.fromkeys((*old, *new))
    ]
    timed = [change for change in found if change.speedup is not None]
    rest = [c for c in found if c.speedup is None and c.before != c.after]
    return sorted(timed, key=lambda change: change.speedup or 0.0) + rest


def _outcome(row: Row | None) -> float | str:
    if row is None:
        return "absent"
    return row["ms"] if row["status"] == "ok" and row.get("ms") else row["status"]


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
