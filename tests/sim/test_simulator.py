"""What the simulator says of kernels that do what they must not do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from .device import SimDevice, SimulationError
from .probes import Array, Probe
from .running import gpu, mirror

_PLAIN = Probe(
    "plain", "", lambda random: (np.arange(64, dtype=np.float32),),
    (64,), np.float32, block=64, shared_memory=256,
)  # fmt: skip


def launch(body: str, **device: object) -> Array:
    """Run a kernel of two warps; q and out are 64 floats, as is its shared memory."""
    probe = dataclasses.replace(_PLAIN, body=body)
    simulated = SimDevice(gpu("sm_90"), **device)
    return np.array(probe.run(simulated, [mirror(simulated, *probe.arrays())]))


_HEAD = """
  const float* const q = static_cast<const float*>(params.q);
  float* const out = static_cast<float*>(params.out);
  float* const tile = reinterpret_cast<float*>(shared);
"""


def test_a_kernel_that_is_right() -> None:
    body = _HEAD + "tile[63 - at] = q[at]; __syncthreads(); out[at] = tile[at];"
    for order in ("ascending", "descending", "random"):
        np.testing.assert_array_equal(launch(body, order=order), np.arange(64)[::-1])


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_a_missing_barrier(order: str) -> None:
    """What hasn't been written is NaN."""
    result = launch(_HEAD + "tile[63 - at] = q[at]; out[at] = tile[at];", order=order)
    assert np.isnan(result).any()


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ("if (at < 32) __syncthreads(); else ptx::named_barrier(1, 64);",
         r"no thread can go on\n  warp 0: 32 x __syncthreads;\n"
         r"  warp 1: 32 x named_barrier;"),
        ("if (lane < 16) __syncwarp(); else __ballot_sync(kAllLanes, 1);",
         "threads that must do the same do different things"),
        ("out[at] = q[at + 1];", "use-after-poison|heap-buffer-overflow"),
        ("out[at + 1] = q[at];", "use-after-poison|heap-buffer-overflow"),
        ("out[at - 1] = q[at];", "heap-buffer-overflow"),
        ("tile[at + 1] = q[at];", "heap-buffer-overflow"),
        ("float x[2] = {q[0], q[1]}; out[at] = x[at];", "out of bounds"),
        ("out[at] = float(0x7fffffff + int(q[1]));", "signed integer overflow"),
        ("out[at] = *reinterpret_cast<const float*>(shared + 2 * at);", "misaligned"),
        ("ptx::cp_async<16>(tile + at, q + at, 16);", "misaligned address"),
    ],
)  # fmt: skip
def test_reports(body: str, report: str) -> None:
    with pytest.raises(SimulationError, match=report):
        launch(_HEAD + body)


_COPY = (
    _HEAD
    + """
  ptx::cp_async<4>(tile + at, q + at, 4);
  ptx::cp_async_commit();
  {}
  __syncthreads();
  out[at] = tile[at];
"""
)


def test_copies_arrive_as_late_as_they_may() -> None:
    """Or at once."""
    waits = _COPY.format("ptx::cp_async_wait<0>();")
    np.testing.assert_array_equal(launch(waits), np.arange(64))
    for careless in (_COPY.format(""), _COPY.format("ptx::cp_async_wait<1>();")):
        assert np.isnan(launch(careless)).all()
        np.testing.assert_array_equal(launch(careless, early=True), np.arange(64))


def test_a_kernel_without_an_end() -> None:
    with pytest.raises(SimulationError, match="no end after 1 s"):
        launch("for (volatile int i = 0; i < 1; i = 0) {}", seconds=1.0)
