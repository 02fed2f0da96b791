"""What a run shows meanwhile: a bar on a terminal, one line per case in a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from .results import OURS, Row, is_ours
from .workloads import Case


def summary(case: Case, rows: Sequence[Row]) -> str:
    """Return a case's outcome in one line: ours, the best peer, and what failed."""
    timed = {row["impl"]: row for row in rows if row["status"] == "ok"}
    parts = []
    if OURS in timed:
        parts.append(f"{OURS} {timed[OURS]['ms']:.3f} ms")
    # Among tiles, every other one is a rival.
    rivals = [
        row for name, row in timed.items()
        if name != OURS and (case.workload == "tiles" or not is_ours(name))
    ]  # fmt: skip
    if rivals:
        best = min(rivals, key=lambda row: row["ms"])
        ratio = f", ratio {best['ratio']:.2f}" if best["ratio"] else ""
        parts.append(f"{best['impl']} {best['ms']:.3f} ms{ratio}")
    for status in ("wrong", "failed", "skipped"):
        names = [row["impl"] for row in rows if row["status"] == status]
        if names:
            parts.append(f"{status}: {', '.join(names)}")
    return f"{case.label}: {'; '.join(parts) or 'nobody can do it'}"


class Lines:
    """One line per case, and at the end what took the time."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._clock = stream, clock
        self._spent: dict[str, float] = {}
        self._what, self._since = "the rest", clock()

    def tick(self, what: str) -> None:
        """Note what goes on within a case from now on."""
        now = self._clock()
        self._spent[self._what] = self._spent.get(self._what, 0) + now - self._since
        self._what, self._since = what, now

    def done(self, line: str) -> None:
        """Print a line."""
        self.tick("the rest")
        print(line, file=self._stream, flush=True)

    def end(self) -> None:
        """Say in one line what took longest."""
        self.tick("")
        longest = sorted(self._spent.items(), key=lambda entry: -entry[1])
        parts = [f"{what} {spent:.0f}" for what, spent in longest if spent >= 0.5]
        if parts:
            print("seconds:", ", ".join(parts), file=self._stream, flush=True)


class Bar:
    """A bar that moves with each case and names what is being measured."""

    def __init__(self, progress: object, task: object) -> None:
        self._progress, self._task = progress, task

    def tick(self, what: str) -> None:
        """Show what is being measured."""
        self._progress.update(self._task, what=what)

    def done(self, line: str) -> None:
        """Print a line above the bar and move on."""
        self._progress.console.print(line, markup=False, highlight=False)
        self._progress.advance(self._task)


@contextlib.contextmanager
def shown(
    title: str, total: int, stream: TextIO | None = None
) -> Iterator[Lines | Bar]:
    """Show a run of so many cases on stderr, or another stream."""
    stream = stream or sys.stderr
    if not stream.isatty():
        lines = Lines(stream)
        try:
            yield lines
        finally:
            lines.end()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    progress = Progress(
        TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"), console=Console(file=stream),
        transient=True,
    )  # fmt: skip
    with progress:
        yield Bar(progress, progress.add_task(title, total=total, what=""))
