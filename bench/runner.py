"""Runs cases: check every implementation, then time those that are right, in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .check import Reference, WrongResult
from .peers.base import Inputs, Peer, Prepared, Unsupported
from .results import OURS, Row, new_row
from .timing import Timer, Times, alternate
from .workloads import Case

# Cases whose figures include how long a call keeps the host busy.
HOST_WORKLOADS = ("small",)
# As many of the nearest cases say how long one will take.
NEIGHBOURS = 3
OUT_OF_TIME = "the time budget was spent"


@dataclass
class Runner:
    """What is the same for all cases of a run.

    Attributes
    ----------
    peers : callable
        Returns the implementations of a case.
    make_inputs : callable
        Returns the inputs of a case.
    timer : Timer
    xp : module
        numpy or cupy, for the reference.
    seconds : float
        Time to spend on the rounds of one case.
    deadline : float
        By the timer's clock; what would end later is skipped.
    tick : callable
        Is told what is being done.
    """

    peers: Callable[[Case], Sequence[Peer]]
    make_inputs: Callable[[Case], Inputs]
    timer: Timer
    xp: ModuleType
    seconds: float = 1.0
    deadline: float = math.inf
    tick: Callable[[str], None] = lambda _: None
    _spent: list[tuple[float, float]] = field(default_factory=list)

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[Case, list[Row]]]:
        """Yield the rows of each case."""
        for case in cases:
            start = self.timer.now()
            if start + self._expected_seconds(case) > self.deadline:
                yield case, self._skipped(case)
                continue
            rows = self.run_case(case)
            self._spent.append((case.flops, self.timer.now() - start))
            yield case, rows

    def run_case(self, case: Case) -> list[Row]:
        """Check and time every implementation of a case.

        Returns
        -------
        list of Row
            One for each, in the order of the peers.
        """
        rows: dict[str, Row] = {}
        able: list[Peer] = []
        peers = self.peers(case)
        for peer in peers:
            if (reason := peer.why_not(case)) is None:
                able.append(peer)
            else:
                rows[peer.name] = new_row(case, peer.name, "unsupported", reason)
        if able:
            try:
                rows |= self._measure(case, able)
            except Exception as error:  # inputs or the reference don't fit the memory
                for peer in able:
                    rows[peer.name] = new_row(
                        case, peer.name, "failed", f"no reference: {describe(error)}"
                    )
            self._give_back()
        return [rows[peer.name] for peer in peers]

    def _measure(self, case: Case, peers: Sequence[Peer]) -> dict[str, Row]:
        self.tick("reference")
        inputs = self.make_inputs(case)
        reference = Reference(case, inputs.native, self.xp)
        ready: dict[str, Prepared] = {}
        errors: dict[str, float] = {}
        rows: dict[str, Row] = {}
        for peer in peers:
            name = peer.name
            if self.timer.now() > self.deadline:
                rows[name] = new_row(case, name, "skipped", OUT_OF_TIME)
                continue
            self.tick(f"{name}, to be ready")
            try:
                prepared = peer.prepare(case, inputs)
                errors[name] = checked(reference, prepared)
                ready[name] = prepared
            except Unsupported as error:
                rows[name] = new_row(case, name, "unsupported", str(error))
            except WrongResult as error:
                rows[name] = new_row(case, name, "wrong", str(error))
            except Exception as error:  # a peer may raise anything
                rows[name] = new_row(case, name, "failed", describe(error))
                self._give_back()
        del reference
        self._give_back()
        times = alternate(
            ready,
            self.timer,
            seconds=self.seconds,
            deadline=self.deadline,
            flush=self.timer.fits_cache(case.bytes),
            host=case.workload in HOST_WORKLOADS,
            tick=self.tick,
        )
        for name, entry in times.items():
            rows[name] = timed_row(case, name, entry, times.get(OURS), errors[name])
        return rows

    def _give_back(self) -> None:
        self.tick("giving memory back")
        self.timer.release()

    def _expected_seconds(self, case: Case) -> float:
        """Guess from the nearest cases so far how long this one will take.

        Much of a case's time doesn't grow with its size: preparing, and the rounds.
        What is done only once, as importing, makes a case seem longer than others like
        it will be, and nothing makes it seem shorter: so the least counts.
        """
        work = math.log(case.flops)
        near = sorted(self._spent, key=lambda entry: abs(math.log(entry[0]) - work))
        guesses = (
            seconds * math.sqrt(max(1.0, case.flops / flops))
            for flops, seconds in near[:NEIGHBOURS]
        )
        return min(guesses, default=0.0)

    def _skipped(self, case: Case) -> list[Row]:
        rows = []
        for peer in self.peers(case):
            reason = peer.why_not(case)
            status = "skipped" if reason is None else "unsupported"
            rows.append(new_row(case, peer.name, status, reason or OUT_OF_TIME))
        return rows


def checked(reference: Reference, prepared: Prepared) -> float:
    """Run a call once and return the error of its results."""
    result = prepared.call()
    prepared.sync()
    return reference.error(lambda index: prepared.outputs(result, index))


def timed_row(
    case: Case, name: str, times: Times, ours: Times | None, error: float
) -> Row:
    """Return the row of an implementation whose result is right."""
    if times.error is not None:
        return new_row(case, name, "failed", describe(times.error), error=error)
    if not times.rounds:
        return new_row(case, name, "skipped", OUT_OF_TIME, error=error)
    figures: dict[str, Any] = {
        "ms": times.ms,
        "ms_spread": times.spread,
        "tflops": case.flops / times.ms / 1e9,
        "tbps": case.bytes / times.ms / 1e9,
        "error": error,
        "rounds": len(times.rounds),
        "ratio": times.ratio(ours) if ours is not None else None,
    }
    if times.host_us:
        figures["host_us"] = sorted(times.host_us)[len(times.host_us) // 2]
    return new_row(case, name, "ok", times.note, **figures)


def describe(error: Exception) -> str:
    """Return an error in one line, with its kind."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if "OutOfMemory" in kind or "out of memory" in text.lower():
        return f"out of memory ({text[:120]})"
    return f"{kind}: {text}" if text else kind
