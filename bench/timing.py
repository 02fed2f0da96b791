"""Times calls: a round of each contestant in turn, and again in another order.

Times on the GPU are those of the device. The calls of a round, each between two events,
are queued while a kernel spins that does nothing else, so that they run back to back
however slow the host was in queueing them.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .peers.base import Prepared

ROUND_MS = 10.0
SLOW_MS = 5.0
# The driver's queue holds about a thousand kernels, and a call may have twenty.
MOST_QUEUED = 32
MOST_BY_WALL = 200
MIN_ROUNDS = 5
# A contestant that takes long has fewer rounds, so that the others have their share:
# what fits into twice the seconds of a case, within these limits.
SLOW_SECONDS = 1.0
FEWEST_SECONDS = 0.5
FEWEST_ROUNDS = 2
# Whose call takes so many times as long as the fastest's is far behind; what is said of
# it doesn't need the exactness of a narrow race.
FAR_BEHIND = 5.0
ROUNDS_FAR_BEHIND = 3
MAX_ROUNDS = 50
HOST_CALLS = 20
# The first guess of how long the host takes to queue a round, and the longest spin.
SPIN_MS = 0.2
LONGEST_SPIN_MS = 400.0

_SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


class Timer(Protocol):
    """Measures on one kind of device. The tests have one without any device.

    `clock` is the one of `Prepared` by which it times.
    """

    clock: str

    def now(self) -> float:
        """Return the time in seconds, for budgets."""

    def device_ms(self, prepared: Prepared, count: int, flush: bool) -> float:
        """Run some calls back to back and return the milliseconds of one."""

    def waiting_ms(self, prepared: Prepared, count: int, flush: bool) -> float:
        """Return the milliseconds of a call that can't be queued, the host's too."""

    def host_us(self, prepared: Prepared, count: int) -> float:
        """Return how many microseconds a call keeps the host busy."""

    def fits_cache(self, size: int) -> bool:
        """Tell whether so many bytes could stay in the device's cache."""

    def release(self) -> None:
        """Give back memory that nobody uses."""


class QueueError(RuntimeError):
    """A call can't be queued ahead: it waits for the device."""


def by_wall(prepared: Prepared, count: int) -> float:
    """Return the milliseconds of a call by the host's clock."""
    prepared.sync()
    start = time.perf_counter()
    for _ in range(count):
        prepared.call()
    prepared.sync()
    return (time.perf_counter() - start) / count * 1e3


def host_us(prepared: Prepared, count: int) -> float:
    """Return the host's microseconds in a call that isn't waited for."""
    prepared.sync()
    start = time.perf_counter()
    for _ in range(count):
        prepared.call()
    elapsed = time.perf_counter() - start
    prepared.sync()
    return elapsed / count * 1e6


class HostTimer:
    """The CPU, by the host's clock."""

    clock = "wall"

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def device_ms(self, prepared: Prepared, count: int, flush: bool) -> float:
        """Run some calls and return the milliseconds of one; caches stay warm."""
        return by_wall(prepared, count)

    def waiting_ms(self, prepared: Prepared, count: int, flush: bool) -> float:
        """Do the same: nothing is queued on the CPU."""
        return by_wall(prepared, count)

    def host_us(self, prepared: Prepared, count: int) -> float:
        """Return the microseconds of a call."""
        return host_us(prepared, count)

    def fits_cache(self, size: int) -> bool:
        """Return False: on the CPU every implementation finds its caches warm."""
        return False

    def release(self) -> None:
        """Do nothing."""


class CudaTimer:
    """A CUDA device, by events on CuPy's current stream."""

    clock = "stream"

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        device = cupy.cuda.Device().id
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        self.cache_bytes = int(properties["l2CacheSize"])
        self._spin = cupy.RawKernel(_SPIN, "spin")
        self._spin_ms = SPIN_MS
        self._flush_buffer: Any = None

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def fits_cache(self, size: int) -> bool:
        """Tell whether so many bytes could stay in L2."""
        return size <= self.cache_bytes

    def release(self) -> None:
        """Give back memory that nobody uses, that of PyTorch too."""
        import gc
        import sys

        self._spin_ms = SPIN_MS
        gc.collect()
        self._cupy.cuda.Device().synchronize()
        self._cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def host_us(self, prepared: Prepared, count: int) -> float:
        """Return the host's microseconds in a call that isn't waited for."""
        return host_us(prepared, count)

    def device_ms(self, prepared: Prepared, count: int, flush: bool) -> float:
        """Run some calls back to back and return the milliseconds of one.

        Raises
        ------
        QueueError
            If the call waits for the device, so that nothing can be queued behind it.
        """
        if prepared.clock == "wall":
            return by_wall(prepared, count)
        spin = self._spin_ms
        for attempt in range(6):
            ms, host_ms, in_time = self._queued(prepared, count, flush, spin)
            if in_time:
                # Until the next case, nobody is likely to take the host much longer.
                spin = max(self._spin_ms, 2 * host_ms)
                self._spin_ms = min(spin, LONGEST_SPIN_MS)
                return ms
            # The host was slow; or else the queue was full, which made it wait.
            spin = min(max(4 * spin, 2 * host_ms), LONGEST_SPIN_MS)
            count = max(1, count // 2) if attempt else count
        raise QueueError("the call waits for the device")

    def waiting_ms(self, prepared: Prepared, count: int, flush: bool) -> float:
        """Return the milliseconds of a call that can't be queued, the host's too.

        By events, but with the device idle before each call.
        """
        total = 0.0
        for _ in range(count):
            if flush:
                self._flush()
            self._cupy.cuda.get_current_stream().synchronize()
            start, end = self._event(), self._event()
            prepared.call()
            end.record()
            total += self._elapsed(start, end)
        return total / count

    def _queued(
        self, prepared: Prepared, count: int, flush: bool, spin_ms: float
    ) -> tuple[float, float, bool]:
        """Time calls behind a spinning kernel.

        Returns
        -------
        ms : float
            Of one call.
        host_ms : float
            What queueing all of them took.
        in_time : bool
            Whether everything was queued before the kernel had stopped spinning.
        """
        cupy = self._cupy
        if flush:
            self._flush()
        events = []
        cupy.cuda.get_current_stream().synchronize()
        host_start = time.perf_counter()
        self._spin((1,), (1,), (cupy.uint64(spin_ms * 1e6),))
        spun = self._event()
        if flush:
            for _ in range(count):
                self._flush()
                start = self._event()
                prepared.call()
                events.append((start, self._event()))
        else:
            # One pair of events, since each would add its own time to a short call.
            start = self._event()
            for _ in range(count):
                prepared.call()
            events.append((start, self._event()))
        in_time = not spun.done
        host_ms = (time.perf_counter() - host_start) * 1e3
        total = sum(self._elapsed(*pair) for pair in events)
        return total / count, host_ms, in_time

    def _flush(self) -> None:
        """Write a buffer twice as large as L2, which drives out what was there."""
        if self._flush_buffer is None:
            self._flush_buffer = self._cupy.empty(2 * self.cache_bytes, "uint8")
        self._flush_buffer.fill(1)

    def _event(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def _elapsed(self, start: Any, end: Any) -> float:
        end.synchronize()
        return self._cupy.cuda.get_elapsed_time(start, end)


@dataclass
class Times:
    """What was measured of one contestant.

    Attributes
    ----------
    rounds : dict of int to float
        Milliseconds of a call in each round; a failed contestant lacks the last ones.
    host_us : list of float
        The host's microseconds of a call in each round, if they were asked for.
    error : Exception, optional
        What ended it early.
    note : str
        What is special about the times.
    waits : bool
        Its calls wait for the device and can't be queued.
    """

    rounds: dict[int, float] = field(default_factory=dict)
    host_us: list[float] = field(default_factory=list)
    error: Exception | None = None
    note: str = ""
    waits: bool = False

    @property
    def ms(self) -> float:
        """The median round."""
        return statistics.median(self.rounds.values())

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        return spread(list(self.rounds.values()))

    def ratio(self, ours: Times) -> float | None:
        """Return the median, over the rounds of both, of this time over ours."""
        common = self.rounds.keys() & ours.rounds.keys()
        if not common:
            return None
        return statistics.median(self.rounds[n] / ours.rounds[n] for n in common)


def spread(values: list[float]) -> float:
    """Return half the distance of the quartiles, relative to the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0


def calls_per_round(ms: float, clock: str) -> int:
    """Return how many calls make a round of about ROUND_MS; slow calls run once."""
    if clock == "wall":
        # Starting and waiting cost the same for any number of calls.
        return max(1, min(MOST_BY_WALL, math.ceil(3 * ROUND_MS / max(ms, 1e-3))))
    if ms >= SLOW_MS:
        return 1
    return max(1, min(MOST_QUEUED, math.ceil(ROUND_MS / max(ms, 1e-3))))


def rounds_of(ms: float, seconds: float = SLOW_SECONDS) -> int:
    """Return how many rounds a contestant has at most whose round takes so long.

    `seconds` is for how long all of them take turns.
    """
    share = min(SLOW_SECONDS, max(FEWEST_SECONDS, 2 * seconds)) * 1e3
    return max(FEWEST_ROUNDS, min(MAX_ROUNDS, int(share / max(ms, 1e-3))))


def alternate(
    contestants: Mapping[str, Prepared],
    timer: Timer,
    *,
    seconds: float,
    deadline: float,
    flush: bool = False,
    host: bool = False,
    tick: Callable[[str], None] = lambda _: None,
) -> dict[str, Times]:
    """Time contestants in turn, for some seconds.

    Parameters
    ----------
    contestants : mapping of name to Prepared
        Calls that have run before.
    timer : Timer
    seconds : float
        How long to go on once there are MIN_ROUNDS rounds.
    deadline : float
        When, by the timer's clock, to stop in any case.
    flush : bool
        Empty the cache before each call.
    host : bool
        Also measure how long a call keeps the host busy.
    tick : callable
        Is told the contestant whose turn it is.
    """
    times = {
        name: Times(note=note_on(prepared, timer, flush))
        for name, prepared in contestants.items()
    }
    counts = dict.fromkeys(contestants, 1)
    most = dict.fromkeys(contestants, MAX_ROUNDS)
    start = timer.now()
    # The round before the first one warms up and tells how many calls a round holds.
    for number in range(-1, MAX_ROUNDS):
        spent = timer.now() - start
        if number >= MIN_ROUNDS and spent >= seconds:
            break
        if number > 0 and timer.now() + spent / (number + 1) > deadline:
            break
        for name in order_of(contestants, number):
            prepared, entry = contestants[name], times[name]
            if entry.error is not None or number >= most[name]:
                continue
            if number >= ROUNDS_FAR_BEHIND and far_behind(name, times):
                continue
            tick(name)
            try:
                ms = _round(timer, prepared, counts[name], flush, entry)
                if number < 0:
                    counts[name] = calls_per_round(ms, prepared.clock)
                    most[name] = rounds_of(counts[name] * ms, seconds)
                    continue
                entry.rounds[number] = ms
                if host:
                    entry.host_us.append(timer.host_us(prepared, HOST_CALLS))
            except Exception as error:  # a peer may raise anything
                entry.error = error
    return times


def far_behind(name: str, times: Mapping[str, Times]) -> bool:
    """Whether even the best round of a contestant is much longer than the fastest's."""
    best = {n: min(e.rounds.values()) for n, e in times.items() if e.rounds}
    return name in best and best[name] > FAR_BEHIND * min(best.values())


def order_of(names: Collection[str], number: int) -> list[str]:
    """Return the order of a round, another one each time but the same in every run.

    What runs before heats the device, so that nobody should always follow the same one.
    """
    return random.Random(number).sample(list(names), len(names))


def note_on(prepared: Prepared, timer: Timer, flush: bool) -> str:
    """Say in what a contestant's times differ from those of the others."""
    if prepared.clock == timer.clock:
        return ""
    warm = ", with what its calls leave in the cache" if flush else ""
    return f"timed by the host's clock over many calls{warm}"


def _round(
    timer: Timer, prepared: Prepared, count: int, flush: bool, entry: Times
) -> float:
    """Return the milliseconds of a call, and note it if it couldn't be queued."""
    if not entry.waits:
        try:
            return timer.device_ms(prepared, count, flush)
        except QueueError as error:
            entry.waits = True
            entry.note = f"{error}: its time includes the host's"
    return timer.waiting_ms(prepared, count, flush)
