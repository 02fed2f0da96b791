"""Streams, CUDA graphs, the same bits every time, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_flash import explain, flash_attention
from cupy_flash.configs import MMA_DEPTHS

from ..cases import (
    FAMILIES,
    Array,
    Case,
    Inputs,
    assert_same,
    compare,
    expect,
    make,
)
from .running import (
    PeakMemory,
    check,
    check_case,
    cp,
    fetch_all,
    forget_kernels,
    pool_bytes,
    run,
    run_backward,
    to_gpu,
)

families = pytest.mark.parametrize("family", FAMILIES)
SMALL = {"d": 24, "dv": 20}


def over(*grid: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", grid, ids=str)


class Call:
    """A forward and a backward call whose arrays all stay where they are."""

    def __init__(
        self, inputs: Inputs, family: str, *, deterministic: bool = True
    ) -> None:
        self.deterministic = deterministic
        self.arrays = {name: to_gpu(x) for name, x in inputs.arrays.items()}
        self.options = inputs.scalars | {"config": family}
        self.options |= {
            name: self.arrays[name] for name in inputs.options if name in self.arrays
        }
        self.given = {
            name: cp.empty(self.arrays[like].shape, inputs.q.dtype)
            for name, like in (("out", "dout"), ("dq", "q"), ("dk", "k"), ("dv", "v"))
        }
        self.made: dict[str, Any] = {}

    def forward(self) -> None:
        q, k, v = (self.arrays[name] for name in "qkv")
        _, self.made["lse"] = flash_attention(
            q, k, v, **self.options, return_lse=True, out=self.given["out"]
        )

    def backward(self) -> None:
        dout, q, k, v = (self.arrays[name] for name in ("dout", "q", "k", "v"))
        gradients = run_backward(
            dout, q, k, v, self.given["out"], self.made["lse"], **self.options,
            dlse=self.arrays.get("dlse"), bias_grad="bias" in self.options,
            deterministic=self.deterministic,
            dq=self.given["dq"], dk=self.given["dk"], dv=self.given["dv"],
        )  # fmt: skip
        if "bias" in self.options:
            self.made["dbias"] = gradients[3]

    def both(self) -> None:
        self.forward()
        self.backward()

    def change(self, inputs: Inputs) -> None:
        """Write other values into the arrays."""
        for name, x in inputs.arrays.items():
            self.arrays[name].data.copy_from_host(x.ctypes.data, x.nbytes)

    def spoil(self) -> None:
        """Fill all results with NaN."""
        for x in (*self.given.values(), *self.made.values()):
            x.data.memset(0xFF, x.nbytes)

    def results(self) -> dict[str, Array]:
        """Wait for everything, and copy the results to the host."""
        cp.cuda.runtime.deviceSynchronize()
        return fetch_all(self.given | self.made)


def spin(milliseconds: float) -> None:
    """Keep the current stream busy."""
    kernel = cp.RawKernel(
        'extern "C" __global__ void spin(long long ns) {'
        "  unsigned long long start, now;"
        '  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));'
        '  do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); }'
        "  while (now - start < ns); }",
        "spin",
    )
    kernel((1,), (1,), (np.int64(milliseconds * 1e6),))


def warm_stream(call: Call) -> Any:
    """Return a stream that waits for no other, for which memory is in the pool."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        spin(0)
        call.both()
        call.both()
    cp.cuda.runtime.deviceSynchronize()
    return stream


# Causal, grouped heads, and a bias whose gradient takes workspace of its own.
BIAS = Case("bias", **SMALL, batch=(4,), sq=150, sk=200, hq=8, bias="k", dlse=True)
GRID = (
    BIAS,
    Case("causal", "bfloat16", sq=200, sk=200, hq=8, causal=True),
    # More tiles than multiprocessors, so that blocks of `wgmma` claim further ones.
    Case("many", "bfloat16", batch=(50,), sq=70, sk=70, hq=6, causal=True),
)


# --- Streams --------------------------------------------------------------------------


@families
@over(*GRID)
def test_two_streams_at_once(case: Case, family: str) -> None:
    calls, wanted, streams = [], [], []
    for seed in (1, 2):
        inputs = make(replace(case, seed=seed))
        wanted.append(check(inputs, family))
        calls.append(Call(inputs, family))
        streams.append(cp.cuda.Stream(non_blocking=True))
    cp.cuda.runtime.deviceSynchronize()
    for _ in range(20):
        for call in calls:
            call.spoil()
        cp.cuda.runtime.deviceSynchronize()
        for _ in range(5):
            for call, stream in zip(calls, streams, strict=True):
                with stream:
                    call.both()
        for call, right in zip(calls, wanted, strict=True):
            assert_same(call.results(), right)


@families
@over(*GRID)
def test_order_on_a_stream_that_waits_for_no_other(case: Case, family: str) -> None:
    """Work on the null stream would run too early here, and read NaN."""
    inputs = make(case)
    wanted = check(inputs, family)
    call = Call(inputs, family)
    fresh = {name: to_gpu(x) for name, x in inputs.arrays.items()}
    copied = {name: cp.empty_like(x) for name, x in call.given.items()}
    stream = warm_stream(call)
    for x in (*call.arrays.values(), *call.given.values(), *copied.values()):
        x.data.memset(0xFF, x.nbytes)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        spin(50)
        for name, x in call.arrays.items():
            x.data.copy_from_device_async(fresh[name].data, x.nbytes, stream)
        call.both()
        for name, x in copied.items():
            x.data.copy_from_device_async(call.given[name].data, x.nbytes, stream)
        assert not stream.done, "the call waited for the stream"
    stream.synchronize()
    assert_same(fetch_all(copied), {name: wanted[name] for name in copied})


@families
@over(*GRID)
def test_nothing_waits(case: Case, family: str) -> None:
    """A warm call returns while the GPU is still busy with what came before it."""
    call = Call(make(case), family)
    stream = warm_stream(call)
    with stream:
        spin(200)
        call.both()
        assert not stream.done
    stream.synchronize()


# --- Graphs ---------------------------------------------------------------------------


def capture(run: Callable[[], None]) -> Any:
    """Record what `run` enqueues, on a stream of its own."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            run()
        finally:
            graph = stream.end_capture()
    return graph


def garbage() -> list[Any]:
    """Give all free memory back and fill what replaces it."""
    cp.get_default_memory_pool().free_all_blocks()
    blocks = [cp.empty(size, np.uint8) for size in [512] * 64 + [2**20] * 64 + [2**28]]
    for block in blocks:
        block.data.memset(0x5A, block.nbytes)
    return blocks


def assert_garbage(blocks: list[Any]) -> None:
    for block in blocks:
        assert bool((block == 0x5A).all()), "a graph wrote memory that it doesn't own"


@families
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@over(
    *GRID,
    Case("lengths", **SMALL, q_lengths=(100, 37), k_lengths=(64, 130)),
    Case("lengths", "bfloat16", q_lengths=(100, 37), k_lengths=(64, 130)),
)
def test_graph(case: Case, direction: str, family: str) -> None:
    """Warm on one stream, captured on another, replayed with other inputs.

    In between the memory pool is emptied and refilled.
    """
    first, *others = (make(replace(case, seed=seed)) for seed in range(3))
    check_case(replace(case, seed=0), family)
    call = Call(first, family)
    call.both()
    made = dict(call.made)
    graph = capture(getattr(call, direction))
    # What the captured call returned is the user's, and so is what the eager one did.
    assert call.made.keys() == made.keys()
    blocks = garbage()
    for inputs in (*others, first):
        wanted = run(inputs, family)
        call.change(inputs)
        call.spoil()
        cp.cuda.runtime.deviceSynchronize()
        if direction == "backward":
            call.forward()
            # The graph reads the lse that was there when it was recorded.
            made["lse"].data.copy_from_device(call.made["lse"].data, made["lse"].nbytes)
            cp.cuda.runtime.deviceSynchronize()
        graph.launch()
        got = call.results()
        for name in got.keys() & results_of(direction):
            np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)
        assert_garbage(blocks)


@families
@over(*GRID)
def test_graph_whose_blocks_add_up_dq(case: Case, family: str) -> None:
    """The workspace that they add to is cleared in each replay."""
    inputs = make(case)
    check(inputs, family)
    call = Call(inputs, family, deterministic=False)
    call.both()
    graph = capture(call.both)
    blocks = garbage()
    for _ in range(3):
        call.spoil()
        cp.cuda.runtime.deviceSynchronize()
        graph.launch()
        compare(call.results(), expect(inputs))
        assert_garbage(blocks)


def results_of(direction: str) -> set[str]:
    forward, backward = {"out", "lse"}, {"dq", "dk", "dv", "dbias"}
    return {"forward": forward, "backward": backward}.get(direction, forward | backward)


@families
@over(Case("cache", "bfloat16", batch=(3,), sq=1, sk=4096, k_lengths=(100, 1, 17)))
def test_graph_reads_lengths_when_it_runs(case: Case, family: str) -> None:
    """Captured with short sequences, replayed with long ones."""
    inputs = make(case)
    call = Call(inputs, family)
    call.both()
    graph = capture(call.both)
    for lengths in ((4000, 4096, 0), (1, 2, 3)):
        other = inputs.with_options(k_lengths=np.array(lengths, np.int64))
        call.change(other)
        call.spoil()
        cp.cuda.runtime.deviceSynchronize()
        graph.launch()
        wanted = check(other, family)
        assert_same(call.results(), wanted)


@families
@over(*GRID)
def test_several_replays_at_once(case: Case, family: str) -> None:
    """Two graphs on two streams: each has its own workspace."""
    pairs = []
    for seed in (1, 2):
        inputs = make(replace(case, seed=seed))
        call = Call(inputs, family)
        call.both()
        pairs.append((call, capture(call.both), check(inputs, family)))
    streams = [cp.cuda.Stream(non_blocking=True) for _ in pairs]
    cp.cuda.runtime.deviceSynchronize()
    for _ in range(10):
        for call, _, _ in pairs:
            call.spoil()
        cp.cuda.runtime.deviceSynchronize()
        for _ in range(5):
            for (_, graph, _), stream in zip(pairs, streams, strict=True):
                graph.launch(stream)
        for call, _, wanted in pairs:
            assert_same(call.results(), wanted)


@families
@pytest.mark.parametrize("disk", ["warm", "cold"])
def test_a_cold_call_inside_a_capture(
    disk: str, family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """It works, or it raises and the capture goes on."""
    head = {"dtype": "bfloat16"} if family == "wgmma" else SMALL
    case = Case("cold", **head, sq=40, sk=50, causal=True)
    other = Case("warm", **head, sq=40, sk=50)
    forget_kernels(keep=lambda spec: not spec.variant.right)
    warm = Call(make(other), family)
    warm.both()
    call = Call(make(case), family)
    if disk == "cold":
        monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    errors = []

    def record() -> None:
        try:
            call.both()
        except Exception as error:  # of any kind, as long as it comes in time
            errors.append(error)
        warm.both()

    graph = capture(record)
    warm.spoil()
    call.spoil()
    cp.cuda.runtime.deviceSynchronize()
    graph.launch()
    assert_same(warm.results(), check_case(other, family))
    if not errors:
        assert_same(call.results(), check_case(case, family))
    # Either way the process can go on.
    call.both()
    assert_same(call.results(), check_case(case, family))


# --- The same bits --------------------------------------------------------------------


@families
@pytest.mark.parametrize("deterministic", [True, False])
@over(
    Case("causal", "bfloat16", batch=(3,), sq=300, sk=300, hq=8, causal=True),
    Case("causal", "float16", sq=200, sk=200, d=72, causal=True),
    BIAS,
    Case("bias", "float32", batch=(5,), sq=200, sk=200, hq=6, d=24, bias="1"),
    Case("causal", "float64", **SMALL, sq=150, sk=150, causal=True),
)
def test_the_same_bits_every_time(case: Case, deterministic: bool, family: str) -> None:
    """Forward in any case; backward when it is asked for."""
    inputs = make(case)
    first = check_case(case, family, deterministic=deterministic)
    for _ in range(30):
        again = run(inputs, family, deterministic=deterministic)
        if not deterministic:
            again = {name: again[name] for name in ("out", "lse")}
        assert_same(again, {name: first[name] for name in again})


# --- Memory ---------------------------------------------------------------------------


@families
@pytest.mark.parametrize("n", [4096, 16384])
@over(
    Case("causal", "bfloat16", causal=True),
    Case("alibi", "float32", **SMALL, alibi="heads"),
)
def test_memory_is_that_of_the_results(case: Case, n: int, family: str) -> None:
    """Forward: out and lse. Backward: the gradients, and a number or two for each row.

    Where blocks add up dq, also that in float32. A counter where there are more tiles
    than blocks, which then take the next that is left.
    """
    inputs = make(replace(case, batch=(1,), sq=n, sk=n))
    arrays = {name: to_gpu(x) for name, x in inputs.arrays.items()}
    q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
    options = inputs.scalars | arrays | {"config": family}

    def counter_of(direction: str) -> int:
        planned = explain(q, k, v, **options, direction=direction).workspace
        assert direction == "backward" or len(planned) <= (family == "wgmma")
        counters = [w for w in planned if w.name == "claims"]
        return pool_bytes(*(np.empty(w.shape, w.dtype) for w in counters))

    counter = counter_of("forward")
    with PeakMemory() as forward:
        out, lse = flash_attention(q, k, v, **options, return_lse=True)
    assert forward.peak == pool_bytes(out, lse) + counter
    with PeakMemory() as backward:
        gradients = run_backward(dout, q, k, v, out, lse, **options)
    # For delta; lse as it is taken by wgmma.
    numbers = 2 if family == "wgmma" else 1
    workspace = counter_of("backward") + pool_bytes(
        cp.empty((numbers, *lse.shape), lse.dtype)
    )
    if family != "simt":
        # dq in float32, with as many channels as the tile has room for.
        channels = next(d for d in MMA_DEPTHS if d >= case.d)
        workspace += pool_bytes(cp.empty((*q.shape[:-1], channels), np.float32))
    assert backward.peak == pool_bytes(*gradients) + workspace
    assert forward.peak < n * n
    # Into arrays that are there already.
    dq, dk, dv = gradients
    with PeakMemory() as forward:
        flash_attention(q, k, v, **options, out=out)
    assert forward.peak == counter
    with PeakMemory() as backward:
        run_backward(dout, q, k, v, out, lse, **options, dq=dq, dk=dk, dv=dv)
    assert backward.peak == workspace


@families
@over(Case("bias", "float32", **SMALL, batch=(1,), sq=8192, sk=8192, hq=8, bias="k"))
def test_memory_of_a_bias_gradient(case: Case, family: str) -> None:
    """It is summed tile by tile; no S x S array of dS is made on the way."""
    inputs = make(case)
    arrays = {name: to_gpu(x) for name, x in inputs.arrays.items()}
    q, k, v, dout, bias = (arrays[name] for name in ("q", "k", "v", "dout", "bias"))
    out, lse = flash_attention(q, k, v, bias=bias, return_lse=True, config=family)
    with PeakMemory() as hook:
        gradients = run_backward(
            dout, q, k, v, out, lse, bias=bias, bias_grad=True, config=family
        )
    # The parts that several blocks sum are a few tiles for each multiprocessor.
    assert hook.peak - pool_bytes(*gradients, lse) <= 32 * 2**20
