"""A clock that stands still and implementations with known times, for the harness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.peers.base import Inputs, Prepared
from bench.timing import QueueError
from bench.workloads import Case
from tests import reference


@dataclass
class FakeTimer:
    """A device whose time passes only in calls.

    Attributes
    ----------
    seconds : float
        The time.
    log : list
        The names of the calls that were timed, with how many at once.
    cache : int
        What fits the cache, in bytes.
    """

    seconds: float = 0.0
    clock: str = "stream"
    log: list[tuple[str, int, bool]] = field(default_factory=list)
    cache: int = 0
    released: int = 0

    def now(self) -> float:
        return self.seconds

    def device_ms(self, prepared: Prepared, count: int, flush: bool) -> float:
        if getattr(prepared.call, "waits", False):
            raise QueueError("the call waits for the device")
        return self._run(prepared, count, flush)

    def waiting_ms(self, prepared: Prepared, count: int, flush: bool) -> float:
        return self._run(prepared, count, flush)

    def host_us(self, prepared: Prepared, count: int) -> float:
        return 7.0

    def fits_cache(self, size: int) -> bool:
        return size <= self.cache

    def release(self) -> None:
        self.released += 1

    def _run(self, prepared: Prepared, count: int, flush: bool) -> float:
        start = self.seconds
        for _ in range(count):
            prepared.call()
        self.log.append((prepared.call.name, count, flush))
        return (self.seconds - start) / count * 1e3


@dataclass
class Call:
    """A call that takes some milliseconds on a fake timer."""

    name: str
    timer: FakeTimer
    ms: Callable[[int], float]
    result: Any = None
    waits: bool = False
    calls: int = 0

    def __call__(self) -> Any:
        self.timer.seconds += self.ms(self.calls) / 1e3
        self.calls += 1
        return self.result


def prepared(
    name: str, timer: FakeTimer, ms: float | Callable[[int], float], **more: Any
) -> Prepared:
    """Return a call of a constant time, or of one that depends on its number."""
    times = ms if callable(ms) else lambda _: ms
    clock = more.pop("clock", "stream")
    call = Call(name, timer, times, **more)
    return Prepared(call, lambda result, index=None: result, clock, lambda: None)


@dataclass
class FakePeer:
    """An implementation that is right, unless `spoil` changes its results."""

    name: str
    timer: FakeTimer
    ms: float | Callable[[int], float] = 1.0
    reason: str | None = None
    error: BaseException | None = None
    spoil: Callable[[dict[str, np.ndarray]], None] = lambda results: None

    def why_not(self, case: Case) -> str | None:
        return self.reason

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        if self.error is not None:
            raise self.error
        results = right_results(case, inputs)
        self.spoil(results)
        call = prepared(self.name, self.timer, self.ms, result=results).call

        def outputs(result: Any, index: Any = None) -> dict[str, np.ndarray]:
            return {name: x[(index or {}).get(name, ...)] for name, x in result.items()}

        return Prepared(call, outputs, "stream", lambda: None)


def right_results(case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """Return what the tests' own reference gives for a case."""
    q, k, v, dout = (inputs.native[name] for name in ("q", "k", "v", "dout"))
    options = {"causal": case.causal}
    if case.q_lengths is not None:
        options |= {"q_lengths": case.q_lengths, "k_lengths": case.k_lengths}
    out, _ = reference.attention(q, k, v, **options)
    if case.direction == "forward":
        return {"out": out}
    dq, dk, dv, _ = reference.attention_backward(dout, q, k, v, **options)
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    return gradients if case.direction == "backward" else {"out": out, **gradients}
