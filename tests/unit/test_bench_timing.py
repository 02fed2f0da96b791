"""Timing: turns, rounds, budgets, and calls queued behind a spinning kernel."""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections import Counter
from typing import Any

import pytest

from bench import timing
from bench.timing import CudaTimer, HostTimer, QueueError, Times, alternate

from .bench_fakes import FakeTimer, prepared


def test_contestants_take_turns() -> None:
    timer = FakeTimer()
    pair = {name: prepared(name, timer, 6.0) for name in ("a", "b")}
    times = alternate(pair, timer, seconds=0.1, deadline=math.inf)
    order = [name for name, _, _ in timer.log]
    rounds = [{*order[at : at + 2]} for at in range(0, len(order), 2)]
    assert len(rounds) > 4 and all(both == {"a", "b"} for both in rounds)
    assert times["a"].rounds.keys() == times["b"].rounds.keys()
    # The round before the first one isn't counted.
    assert len(times["a"].rounds) == len(order) // 2 - 1


def test_nobody_always_follows_the_same_one() -> None:
    """A device that was heated by the one before is slower."""
    names = "abcde"
    order = [name for n in range(-1, 200) for name in timing.order_of(names, n)]
    assert order[:5] == timing.order_of(names, -1)  # the same in every run
    after = Counter(zip(order, order[1:], strict=False))
    for before, name in itertools.permutations(names, 2):
        assert 20 < after[before, name] < 60  # 1000 / 25 = 40


def test_times_and_ratios_are_those_of_the_calls() -> None:
    timer = FakeTimer()
    pair = {"ours": prepared("ours", timer, 2.0), "peer": prepared("peer", timer, 3.0)}
    times = alternate(pair, timer, seconds=0.5, deadline=math.inf)
    assert times["ours"].ms == pytest.approx(2.0)
    assert times["peer"].ratio(times["ours"]) == pytest.approx(1.5)
    assert times["ours"].spread == pytest.approx(0.0, abs=1e-9)


def test_the_ratio_is_formed_within_rounds() -> None:
    """A device that slows down slows both; the medians alone would be off."""
    ours = Times({0: 1.0, 1: 2.0, 2: 4.0})
    peer = Times({0: 3.0, 1: 6.0, 2: 12.0, 3: 90.0})
    assert peer.ratio(ours) == 3.0
    assert peer.ratio(Times()) is None


def test_there_are_at_least_five_rounds_and_not_many_more_than_fit() -> None:
    timer = FakeTimer()
    slow = alternate({"a": prepared("a", timer, 95.0)}, timer, seconds=0, deadline=99)
    assert len(slow["a"].rounds) == timing.MIN_ROUNDS
    timer = FakeTimer()
    fast = alternate({"a": prepared("a", timer, 10.0)}, timer, seconds=0.2, deadline=9)
    assert 15 <= len(fast["a"].rounds) <= 21


def test_a_short_turn_for_all_is_not_one_long_one_of_the_slowest() -> None:
    assert timing.rounds_of(300.0, 0.1) == timing.FEWEST_ROUNDS
    assert timing.rounds_of(100.0, 0.1) == timing.MIN_ROUNDS
    assert timing.rounds_of(100.0, 0.3) == 6
    assert timing.rounds_of(100.0, 60.0) == timing.rounds_of(100.0) == 10


def test_what_takes_seconds_has_few_rounds() -> None:
    timer = FakeTimer()
    both = {"a": prepared("a", timer, 900.0), "b": prepared("b", timer, 10.0)}
    times = alternate(both, timer, seconds=3, deadline=99)
    assert len(times["a"].rounds) == timing.FEWEST_ROUNDS
    assert len(times["b"].rounds) > timing.MIN_ROUNDS
    assert times["a"].ratio(times["b"]) == pytest.approx(90)


def test_who_is_far_behind_has_few_rounds() -> None:
    timer = FakeTimer()
    factors = {"a": 1.0, "b": timing.FAR_BEHIND - 1, "c": timing.FAR_BEHIND + 1}
    three = {name: prepared(name, timer, 6.0 * f) for name, f in factors.items()}
    times = alternate(three, timer, seconds=2.0, deadline=99)
    assert len(times["c"].rounds) == timing.ROUNDS_FAR_BEHIND
    assert len(times["a"].rounds) > timing.MIN_ROUNDS < len(times["b"].rounds)
    assert times["c"].ratio(times["a"]) == pytest.approx(factors["c"])


def test_one_slow_round_is_not_far_behind() -> None:
    timer = FakeTimer()
    slow_at_first = prepared("a", timer, lambda number: 60.0 if number < 3 else 6.0)
    pair = {"a": slow_at_first, "b": prepared("b", timer, 6.0)}
    times = alternate(pair, timer, seconds=2.0, deadline=99)
    assert min(len(entry.rounds) for entry in times.values()) > timing.MIN_ROUNDS


def test_rounds_end_before_the_deadline_but_one_is_run() -> None:
    timer = FakeTimer()
    times = alternate({"a": prepared("a", timer, 1e3)}, timer, seconds=9, deadline=3.5)
    assert len(times["a"].rounds) == 2 and timer.seconds <= 3.5
    timer = FakeTimer()
    times = alternate({"a": prepared("a", timer, 1e3)}, timer, seconds=9, deadline=0)
    assert len(times["a"].rounds) == 1


def test_short_calls_are_repeated_and_slow_ones_run_once() -> None:
    assert timing.calls_per_round(12.0, "stream") == 1
    assert timing.calls_per_round(5.0, "stream") == 1
    assert timing.calls_per_round(1.0, "stream") == 10
    assert timing.calls_per_round(1e-4, "stream") == timing.MOST_QUEUED
    assert timing.calls_per_round(0.0, "wall") == timing.MOST_BY_WALL
    assert timing.calls_per_round(10.0, "wall") == 3
    timer = FakeTimer()
    alternate({"a": prepared("a", timer, 1.0)}, timer, seconds=0.1, deadline=9)
    assert [count for _, count, _ in timer.log[:3]] == [1, 10, 10]


def test_a_contestant_that_fails_leaves_the_others_alone() -> None:
    def fail_late(number: int) -> float:
        if number == 3:
            raise RuntimeError("lost")
        return 6.0

    timer = FakeTimer()
    pair = {"a": prepared("a", timer, fail_late), "b": prepared("b", timer, 6.0)}
    times = alternate(pair, timer, seconds=0.2, deadline=9)
    assert str(times["a"].error) == "lost" and len(times["a"].rounds) == 2
    assert times["b"].error is None and len(times["b"].rounds) > 5


def test_a_call_that_waits_is_timed_with_the_host_and_marked() -> None:
    timer = FakeTimer()
    pair = {"a": prepared("a", timer, 6.0, waits=True), "b": prepared("b", timer, 6.0)}
    times = alternate(pair, timer, seconds=0.1, deadline=9)
    assert "includes the host" in times["a"].note and times["b"].note == ""
    assert times["a"].ms == pytest.approx(6.0)


def test_times_by_another_clock_are_marked() -> None:
    timer = FakeTimer()
    pair = {"a": prepared("a", timer, 6.0, clock="wall"), "b": prepared("b", timer, 6)}
    times = alternate(pair, timer, seconds=0, deadline=9, flush=True)
    assert "host's clock" in times["a"].note and "cache" in times["a"].note
    assert times["b"].note == ""


def test_flush_and_host_time_are_passed_on() -> None:
    timer = FakeTimer()
    times = alternate(
        {"a": prepared("a", timer, 6.0)}, timer, seconds=0, deadline=9, flush=True,
        host=True,
    )  # fmt: skip
    assert all(flush for _, _, flush in timer.log)
    assert times["a"].host_us == [7.0] * len(times["a"].rounds)


def test_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)
    assert timing.spread([2.0]) == 0.0


def test_the_host_is_timed_with_its_clock() -> None:
    calls = []
    timer, fake = HostTimer(), FakeTimer()
    timed = prepared("a", fake, lambda n: calls.append(n) or 0.0)
    assert timer.device_ms(timed, 3, flush=True) >= 0.0 and len(calls) == 3
    assert not timer.fits_cache(1)


# --- A CUDA device with a queue -------------------------------------------------------


class Gpu:
    """A queue in which work starts when the host has queued it and the device is free.

    The host's clock moves by `host_ms` with each call that is queued.
    """

    def __init__(self) -> None:
        self.host = self.free = 0.0
        self.kernels: list[str] = []

    def queue(self, name: str, ms: float) -> None:
        self.free = max(self.free, self.host) + ms
        self.kernels.append(name)

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def module(self) -> types.ModuleType:
        """Return as much of CuPy as the timer needs."""
        gpu = self

        class Event:
            time = math.nan

            def record(self) -> None:
                self.time = max(gpu.free, gpu.host)

            @property
            def done(self) -> bool:
                return gpu.host >= self.time

            def synchronize(self) -> None:
                gpu.host = max(gpu.host, self.time)

        class Buffer:
            def fill(self, value: int) -> None:
                gpu.queue("flush", 0.5)

        def spin(grid: Any, block: Any, arguments: tuple[int]) -> None:
            gpu.queue("spin", int(arguments[0]) / 1e6)

        stream = types.SimpleNamespace(synchronize=self.wait)
        runtime = types.SimpleNamespace(
            getDeviceProperties=lambda index: {"l2CacheSize": 1000}
        )
        cupy = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(
            Device=lambda: types.SimpleNamespace(id=0, synchronize=self.wait),
            Event=Event,
            runtime=runtime,
            get_current_stream=lambda: stream,
            get_elapsed_time=lambda start, end: end.time - start.time,
        )
        cupy.RawKernel = lambda source, name: spin
        cupy.uint64 = int
        cupy.empty = lambda size, dtype: Buffer()
        return cupy

    def prepared(self, ms: float, host_ms: float, waits: bool = False) -> Any:
        """Return a call that takes some time on the device and on the host."""

        def call() -> None:
            self.host += host_ms
            self.queue("call", ms)
            if waits:
                self.wait()

        return types.SimpleNamespace(call=call, clock="stream", sync=self.wait)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Put a simulated device in CuPy's place, and its clock in the host's."""
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "cupy", gpu.module())
    clock = types.SimpleNamespace(
        perf_counter=lambda: gpu.host / 1e3, monotonic=lambda: gpu.host / 1e3
    )
    monkeypatch.setattr(timing, "time", clock)
    return gpu


@pytest.mark.parametrize("host_ms", [0.001, 0.05, 1.0, 5.0])
@pytest.mark.parametrize("flush", [False, True])
def test_a_slow_host_does_not_show_in_device_times(
    gpu: Gpu, host_ms: float, flush: bool
) -> None:
    timer = CudaTimer()
    assert timer.device_ms(gpu.prepared(0.25, host_ms), 16, flush) == pytest.approx(
        0.25
    )


def test_the_next_round_spins_long_enough_at_once(gpu: Gpu) -> None:
    timer, slow = CudaTimer(), gpu.prepared(0.25, 1.0)
    timer.device_ms(slow, 8, False)
    gpu.kernels.clear()
    timer.device_ms(slow, 8, False)
    assert gpu.kernels.count("spin") == 1


def test_a_call_that_waits_for_the_device_is_found(gpu: Gpu) -> None:
    timer, waiting = CudaTimer(), gpu.prepared(0.25, 0.01, waits=True)
    with pytest.raises(QueueError, match="waits for the device"):
        timer.device_ms(waiting, 8, False)
    ms = timer.waiting_ms(waiting, 3, False)
    assert 0.25 <= ms <= 0.27


def test_the_cache_is_flushed_before_each_call_outside_its_time(gpu: Gpu) -> None:
    timer = CudaTimer()
    assert timer.fits_cache(1000) and not timer.fits_cache(1001)
    assert timer.device_ms(gpu.prepared(0.25, 0.001), 3, True) == pytest.approx(0.25)
    after_spin = gpu.kernels[gpu.kernels.index("spin") + 1 :]
    assert after_spin == ["flush", "call"] * 3


def test_the_spinning_kernel_compiles_and_reads_the_global_timer() -> None:
    try:
        from cupy.cuda import nvrtc

        program = nvrtc.createProgram(timing._SPIN, "spin.cu", (), ())
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC can't be loaded: {error}")
    nvrtc.compileProgram(program, ("-arch=compute_75",))
    ptx = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert ", %globaltimer;" in ptx and ".entry spin(" in ptx


def test_another_clock_is_the_hosts(gpu: Gpu) -> None:
    other = gpu.prepared(0.25, 0.01)
    other.clock = "wall"
    assert CudaTimer().device_ms(other, 10, True) == pytest.approx(0.251, rel=1e-2)
    assert "spin" not in gpu.kernels
