"""What the simulator says of kernels that do what they must not do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cupy_flash.compiler import source_root

from .build import _digest_of_includes
from .device import SimDevice, SimulationError
from .probe import Array, Map, Probe, to_halves, widen
from .running import changed_sources, gpu, mirror

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


# --- Hopper ---------------------------------------------------------------------------

# Sums of A B_t^T over three tiles B_t that one warpgroup loads for another.
_PIPELINE = """
  struct alignas(1024) Shared {
    u16 a[64][64];
    u16 b[2][32][64];
    float out[64][32];
    ptx::Mbarrier loaded, full[2], empty[2];
  };
  auto& s = *reinterpret_cast<Shared*>(shared);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(s.loaded, 1);
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(s.full[stage], 1);
      ptx::mbarrier_init(s.empty[stage], 4);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const int thread = threadIdx.x % 128;
  const int warp = thread / 32;
  if (threadIdx.x < 128) {
    ptx::registers_decrease<56>();
    if (thread == 0) {
      ptx::mbarrier_arrive_expect(s.loaded, 8192);
      ptx::tma_load(s.a, maps.map[0], s.loaded, 0, 0, 0, 0);
      for (int t = 0; t < 3; ++t) {
        const int stage = t % 2;
        ptx::mbarrier_wait(s.empty[stage], t / 2 % 2 ^ 1);
        ptx::mbarrier_arrive_expect(s.full[stage], 4096);
        ptx::tma_load(s.b[stage], maps.map[1], s.full[stage], 0, 32 * t, 0, 0);
      }
    }
  } else {
    ptx::registers_increase<240>();
    const int row = 16 * warp + lane / 4;
    u32 a[4];
    for (int r = 0; r < 4; ++r) {
      const int pair = 32 * (row + r % 2 * 8) + 24 + lane % 4 + r / 2 * 4;
      a[r] = static_cast<const u32*>(params.q)[pair];
    }
    float d[16] = {};
    ptx::mbarrier_wait(s.loaded, 0);
    const u64 left = ptx::wgmma_descriptor(s.a, 16, 1024);
    for (int t = 0; t < 3; ++t) {
      const int stage = t % 2;
      ptx::mbarrier_wait(s.full[stage], t / 2 % 2);
      const u64 right = ptx::wgmma_descriptor(s.b[stage], 16, 1024);
      ptx::hold(d);
      ptx::wgmma_fence();
      for (int k = 0; k < 3; ++k) {
        ptx::wgmma_ss<fp16, 32, false>(d, left + 2 * k, right + 2 * k, true);
      }
      ptx::wgmma_rs<fp16, 32, false>(d, a, right + 6, true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(d);
      if (lane == 0) ptx::mbarrier_arrive(s.empty[stage]);
    }
    for (int i = 0; i < 16; ++i) {
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int at_row = row + i / 2 % 2 * 8;
      s.out[at_row][column ^ at_row % 8 * 4] = d[i];
    }
    ptx::async_proxy_fence();
    ptx::named_barrier(1, 128);
    if (thread == 0) {
      ptx::tma_store(maps.map[2], s.out, 0, 0, 0, 0);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
  }
"""
_MAPS = (
    Map("q", "float16", (64, 64, 1, 1), (128, 8192, 8192), (64, 64, 1, 1)),
    Map("k", "float16", (64, 96, 1, 1), (128, 12288, 12288), (64, 32, 1, 1)),
    Map("out", "float32", (32, 64, 1, 1), (128, 8192, 8192), (32, 64, 1, 1)),
)
_ON_HOPPER = Probe(
    "pipeline", "",
    lambda random: tuple(
        to_halves(random.integers(-4, 5, (n, 64)).astype(np.float32), "fp16")
        for n in (64, 96)
    ),
    (64, 32), np.float32, block=256, shared_memory=25600, capability=90, maps=_MAPS,
)  # fmt: skip


def run_pipeline(replacements: dict[str, str], **device: object) -> None:
    """Run the kernel with parts of its text replaced; its result must be right."""
    body = _PIPELINE
    for part, replacement in replacements.items():
        assert body.count(part) == 1, part
        body = body.replace(part, replacement)
    probe = dataclasses.replace(_ON_HOPPER, body=body)
    simulated = SimDevice(gpu("sm_90"), **device)
    inputs = probe.arrays()
    got = probe.run(simulated, [mirror(simulated, x) for x in inputs])
    a, b = (widen(x, "fp16") for x in inputs)
    np.testing.assert_array_equal(got, sum(a @ tile.T for tile in np.split(b, 3)))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_a_pipeline_that_is_right(order: str, early: bool) -> None:
    run_pipeline({}, order=order, early=early)


_WAIT_FULL = "ptx::mbarrier_wait(s.full[stage], t / 2 % 2);"
_WAIT_EMPTY = "ptx::mbarrier_wait(s.empty[stage], t / 2 % 2 ^ 1);"
_WAIT_PRODUCTS = "ptx::wgmma_wait<0>();"
_RELEASE = "if (lane == 0) ptx::mbarrier_arrive(s.empty[stage]);"
_PRODUCT = "ptx::wgmma_rs<fp16, 32, false>(d, a, right + 6, true);"
_EXPECT = "ptx::mbarrier_arrive_expect(s.full[stage], 4096);"
_STORE = "ptx::bulk_commit();\n      ptx::bulk_wait_read<0>();"


@pytest.mark.parametrize(
    ("replacements", "report"),
    [
        # Waits that are missing.
        ({_WAIT_FULL: ""}, "wgmma_ss reads byte .* a tma_load that nobody has waited"),
        ({_WAIT_EMPTY: ""}, "wgmma_ss reads byte .* a tma_load that nobody has waited"),
        ({_WAIT_PRODUCTS: ""}, "hold of sums that are still being computed"),
        ({_WAIT_PRODUCTS: "d[lane % 16] += 1;"}, "use-after-poison"),
        ({"ptx::wgmma_commit();": ""}, "hold of sums that are still being computed"),
        ({_WAIT_PRODUCTS: "ptx::wgmma_wait<1>();"}, "hold of sums that are still"),
        ({"ptx::bulk_wait_read<0>();": ""}, "ended without bulk_wait_read"),
        ({"ptx::bulk_commit();": ""}, "ended without bulk_wait_read"),
        # What is read is written too early.
        ({_PRODUCT: _PRODUCT + "a[0] ^= 1;"}, "registers of the factor were written"),
        ({_PRODUCT: _PRODUCT + "d[0] = 0;"}, "use-after-poison"),
        ({_PRODUCT: _PRODUCT + "s.b[stage][0][0] = 7;"}, "written while wgmma_ss"),
        ({_STORE: "ptx::bulk_commit(); s.out[0][1] = 7; ptx::bulk_wait_read<0>();"},
         "written while a bulk store"),
        ({_WAIT_PRODUCTS: f"{_RELEASE} ptx::named_barrier(2, 128); {_WAIT_PRODUCTS}",
          f"{_RELEASE}\n": ""}, "written while wgmma_ss"),
        # Fences.
        ({"ptx::async_proxy_fence();": ""}, "tma_store reads .* without an async_p"),
        ({"ptx::mbarrier_init_fence();": ""}, "no mbarrier_init_fence after"),
        ({"ptx::wgmma_fence();": ""}, "wgmma_ss without a wgmma_fence"),
        # What never comes.
        ({_WAIT_EMPTY: _WAIT_EMPTY.replace(" ^ 1", "")},
         "parity 0 of the mbarrier at byte 24600, in phase 0: of 4 arrivals 4 are"),
        ({_EXPECT: _EXPECT.replace("4096", "4160")},
         "parity 0 of the mbarrier at byte 24584.* 64 bytes are missing"),
        ({_EXPECT: _EXPECT.replace("4096", "4032")}, "64 bytes are too many"),
        ({"ptx::mbarrier_init(s.empty[stage], 4);":
          "ptx::mbarrier_init(s.empty[stage], 5);"}, "of 5 arrivals 1 are missing"),
        ({"ptx::mbarrier_init(s.empty[stage], 4);":
          "ptx::mbarrier_init(s.empty[stage], 3);"}, "parity|wgmma_ss reads"),
        ({"ptx::named_barrier(1, 128);": "ptx::named_barrier(1, 160);"},
         "32 x named_barrier"),
        # Warps of a warpgroup that don't do the same.
        ({_PRODUCT: f"if (warp != 2) {_PRODUCT}"},
         r"different things: wgmma_rs \(32\) and wgmma_commit"),
        ({"right + 6, true": "right + (warp == 2 ? 4 : 6), true"}, "other descriptors"),
        ({"right + 6, true": "right + (lane == 2 ? 4 : 6), true"}, "lanes of a warp"),
        ({"ptx::registers_increase<240>();":
          "if (warp < 3) ptx::registers_increase<240>();"}, "different things"),
        # Addresses.
        ({"right + 6, true": "right + 8, true"}, "amid eight swizzled rows"),
        ({"wgmma_descriptor(s.b[stage], 16, 1024)":
          "wgmma_descriptor(s.b[stage] + 4, 16, 1024)"}, "amid eight swizzled rows"),
        ({"(s.b[stage], maps": "(s.b[stage] + 4, maps"}, "isn't a multiple of 1024"),
        ({"s.full[stage], 0, 32 * t, 0, 0)": "s.full[stage], 0, 32 * t, 0, 0, 0)"},
         "5 coordinates and a map of 4 axes"),
        ({_EXPECT: "s.full[0].state = 0;" + _EXPECT}, "the mbarrier is overwritten"),
        ({"ptx::mbarrier_init(s.loaded, 1);": ""}, "no mbarrier_init of byte 24576"),
    ],
)  # fmt: skip
def test_reports_of_a_pipeline(replacements: dict[str, str], report: str) -> None:
    with pytest.raises(SimulationError, match=report):
        run_pipeline(replacements)


@pytest.mark.parametrize(
    "replacements",
    [
        {_WAIT_FULL: ""},
        {_WAIT_EMPTY: ""},
        {_WAIT_FULL: _WAIT_FULL.replace("% 2)", "% 2 ^ 1)")},
        {"ptx::named_barrier(1, 128);": ""},
    ],
)
@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("early", [False, True])
def test_faults_show_in_whatever_order(
    replacements: dict[str, str], order: str, early: bool
) -> None:
    """In a report, or in the result."""
    with pytest.raises((SimulationError, AssertionError)):
        run_pipeline(replacements, order=order, early=early)


@pytest.mark.parametrize(
    ("loader", "report"),
    [(24, ""), (40, "ask for 66560 registers, of 64512"), (176, "from at most 168")],
)
def test_registers_that_there_are(loader: int, report: str) -> None:
    """Of three warpgroups, two of which take 240 for each thread."""
    body = f"""
  if (threadIdx.x < 128) ptx::registers_decrease<{loader}>();
  else ptx::registers_increase<240>();
  static_cast<int*>(params.out)[at] = at;
"""
    probe = Probe(
        "registers", body, lambda random: (), (384,), np.int32, block=384, capability=90
    )
    if not report:
        got = probe.run(SimDevice(gpu("sm_90")), [])
        np.testing.assert_array_equal(got, np.arange(384))
        return
    with pytest.raises(SimulationError, match=report):
        probe.run(SimDevice(gpu("sm_90")), [])


# --- What is compiled anew ------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "renewed"),
    [
        ("wgmma/panels.cuh", {"wgmma/forward.cuh"}),
        ("common/seqlen.cuh", {"wgmma/forward.cuh", "passes/delta.cuh"}),
        ("ptx/mbarrier.cuh", set()),  # which the simulator has in place of it
    ],
)
def test_a_change_renews_what_includes_it(
    tmp_path: Path, file: str, renewed: set[str]
) -> None:
    sources = changed_sources(tmp_path, file, ("#pragma once", "#pragma once  //"))
    for header in ("wgmma/forward.cuh", "passes/delta.cuh"):
        before, after = (
            _digest_of_includes(header, folder) for folder in (source_root(), sources)
        )
        assert (before != after) == (header in renewed)
