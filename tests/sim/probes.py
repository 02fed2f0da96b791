"""Small kernels, one for each function of ``cuda_src/ptx``, for the CPU and for a GPU.

What the twins give on the CPU is recorded in ``probes.npz``, and tests/gpu/test_ptx.py
holds a GPU against it. ``python -m tests.sim.probes`` records it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import probes_hopper
from .probe import Array, Probe, to_halves, widen

RECORD = Path(__file__).with_name("probes.npz")


_SPECIAL = (
    0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 65504.0, 65519.9, 65520.0, -65536.0,
    6e-8, 2.9e-8, 3e-8, -6.1e-5, 6.097e-5, 1e-10, 3e38, 1 + 2.0**-11, 1 + 2.0**-8,
    1 + 3 * 2.0**-11, 1 + 2.0**-12, 255.5, 2049.0, 2051.0,
)  # fmt: skip


def _floats(random: np.random.Generator, n: int) -> Array:
    """Return floats of all sizes, with those at which conversions go wrong."""
    values = random.standard_normal(n) * 2.0 ** random.integers(-20, 20, n)
    values[: len(_SPECIAL)] = _SPECIAL
    return values.astype(np.float32)


def _pairs(random: np.random.Generator) -> tuple[Array, Array]:
    """Return 1024 pairs of floats, among them all of special ones."""
    low, high = random.standard_normal((2, 1024)).astype(np.float32)
    n = len(_SPECIAL)
    low[: n * n], high[: n * n] = np.repeat(_SPECIAL, n), np.tile(_SPECIAL, n)
    return low, high


def _normal(random: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    return to_halves(random.standard_normal(shape).astype(np.float32), kind)


# Where lane 4g + t holds element [row][column] of a fragment.
_LANES = np.arange(32)
_G, _T = _LANES // 4, _LANES % 4


def _sums_limit(a: Array, b: Array, c: Array) -> Array:
    """2^-22 (|c| + sum |a b|) of the four sums that each lane holds."""
    size = np.abs(a) @ np.abs(b)
    rows = np.stack([_G, _G, _G + 8, _G + 8], axis=1)
    columns = np.stack([2 * _T, 2 * _T + 1, 2 * _T, 2 * _T + 1], axis=1)
    return 2.0**-22 * (np.abs(c) + size[rows, columns])


def _half_limit(kind: str) -> Callable[[Sequence[Array]], Array]:
    def limit(inputs: Sequence[Array]) -> Array:
        left, right, c = inputs
        a, b = np.zeros((16, 16)), np.zeros((16, 8))
        wide_a = widen(left.reshape(32, 4, 2), kind)
        wide_b = widen(right.reshape(32, 2, 2), kind)
        for r in range(4):
            for e in range(2):
                a[_G + 8 * (r % 2), 2 * _T + e + 8 * (r // 2)] = wide_a[:, r, e]
        for r in range(2):
            for e in range(2):
                b[2 * _T + e + 8 * r, _G] = wide_b[:, r, e]
        return _sums_limit(a, b, c)

    return limit


def _wide_limit(inputs: Sequence[Array]) -> Array:
    left, right, c = (x.astype(np.float64) for x in inputs)
    a, b = np.zeros((16, 8)), np.zeros((8, 8))
    for i in range(4):
        a[_G + 8 * (i % 2), _T + 4 * (i // 2)] = left[:, i]
    for i in range(2):
        b[_T + 4 * i, _G] = right[:, i]
    limit = _sums_limit(a, b, c)
    return limit * 2.0**-28 if inputs[0].dtype == np.float64 else limit


def _multiply(name: str, fragment: str, real: str) -> str:
    return f"""
  {fragment} a[4], b[2];
  {real} d[4];
  const auto* const q = static_cast<const {fragment}*>(params.q) + 4 * lane;
  const auto* const k = static_cast<const {fragment}*>(params.k) + 2 * lane;
  const auto* const v = static_cast<const {real}*>(params.v) + 4 * lane;
  for (int i = 0; i < 4; ++i) a[i] = q[i];
  for (int i = 0; i < 2; ++i) b[i] = k[i];
  for (int i = 0; i < 4; ++i) d[i] = v[i];
  ptx::{name}(d, a, b);
  for (int i = 0; i < 4; ++i) static_cast<{real}*>(params.out)[4 * lane + i] = d[i];"""


def _multiply_halves(kind: str) -> Probe:
    return Probe(
        f"mma_{kind}", _multiply(f"mma_{kind}", "u32", "float"),
        lambda random: (
            _normal(random, (32, 8), kind), _normal(random, (32, 4), kind),
            random.standard_normal((32, 4)).astype(np.float32),
        ),
        (32, 4), np.float32, _half_limit(kind),
    )  # fmt: skip


def _load_matrices(name: str) -> Probe:
    # Rows of 16 bytes, which the lanes point to in any order.
    return Probe(
        name, f"""
  using Row = Pack<u32, 4>;
  reinterpret_cast<Row*>(shared)[lane] = static_cast<const Row*>(params.q)[lane];
  __syncthreads();
  u32 matrix[4];
  const u32 row = u32(static_cast<const int*>(params.k)[lane]);
  ptx::{name}(matrix, ptx::shared_address(shared) + 16 * row);
  u32* const out = static_cast<u32*>(params.out) + 4 * lane;
  for (int i = 0; i < 4; ++i) out[i] = matrix[i];""",
        lambda random: (
            random.integers(0, 2**32, (32, 4), dtype=np.uint32),
            random.permutation(32).astype(np.int32),
        ),
        (32, 4), shared_memory=512,
    )  # fmt: skip


def _copy(size: int) -> Probe:
    words = size // 4
    return Probe(
        f"cp_async_{size}", f"""
  const auto* const from = static_cast<const unsigned char*>(params.q) + {size} * lane;
  const int bytes = static_cast<const int*>(params.k)[lane];
  ptx::cp_async<{size}>(shared + {size} * lane, from, bytes);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < {words}; ++i) {{
    static_cast<u32*>(params.out)[{words} * lane + i] =
        reinterpret_cast<const u32*>(shared)[{words} * lane + i];
  }}""",
        lambda random: (
            random.integers(0, 2**32, (32, words), dtype=np.uint32),
            (random.integers(0, size // 2 + 1, 32) * 2).astype(np.int32),
        ),
        (32, words), shared_memory=32 * size,
    )  # fmt: skip


def _convert(name: str, body: str, n: int = 4096, **keywords: Any) -> Probe:
    return Probe(
        name, body,
        lambda random: (_floats(random, n), _floats(random, n)[::-1].copy()), (n,),
        grid=n // 128, block=128, **keywords,
    )  # fmt: skip


def _smaller_halves(kind: str) -> Probe:
    # Of all bits, with many numbers that are equal or differ in their sign alone.
    def inputs(random: np.random.Generator) -> tuple[Array, Array]:
        bits = random.integers(0, 2**16, (2, 8192), dtype=np.uint16)
        bits[1, ::4] = bits[0, ::4] ^ (random.integers(0, 2, 2048) << 15)
        bits[0, :512:2], bits[:, 1:512:4] = 0x3C00, 0x8000
        bits[1, 3:512:4] = 0
        low, high = bits.view(np.uint32)
        return low, high

    return Probe(
        f"min_or_nan_{kind}x2", f"""
  const u32 a = static_cast<const u32*>(params.q)[at];
  const u32 b = static_cast<const u32*>(params.k)[at];
  static_cast<u32*>(params.out)[at] = ptx::min_or_nan_{kind}x2(a, b);""",
        inputs, (4096,), grid=32, block=128, capability=90,
    )  # fmt: skip


_PAIR = """
  const float low = static_cast<const float*>(params.q)[at];
  const float high = static_cast<const float*>(params.k)[at];
  static_cast<u32*>(params.out)[at] = ptx::{}(low, high);"""

PROBES = (
    Probe(
        "fp16_to_float", """
  const u16 bits = static_cast<const u16*>(params.q)[at];
  static_cast<float*>(params.out)[at] = ptx::fp16_to_float(bits);""",
        lambda random: (np.arange(65536, dtype=np.uint16),), (65536,), np.float32,
        grid=512, block=128,
    ),
    _convert("float_to_fp16", """
  static_cast<u32*>(params.out)[at] =
      ptx::float_to_fp16(static_cast<const float*>(params.q)[at]);"""),
    _convert("float_to_tf32", """
  static_cast<u32*>(params.out)[at] =
      ptx::float_to_tf32(static_cast<const float*>(params.q)[at]) & 0xffffe000u;"""),
    _convert("floats_to_fp16x2", _PAIR.format("floats_to_fp16x2")),
    _convert("floats_to_bf16x2", _PAIR.format("floats_to_bf16x2")),
    Probe(
        "min_or_nan", """
  const float a = static_cast<const float*>(params.q)[at];
  const float b = static_cast<const float*>(params.k)[at];
  static_cast<float*>(params.out)[at] = ptx::min_or_nan(a, b);""",
        _pairs, (1024,), np.float32, grid=8, block=128, capability=90,
    ),
    *(_smaller_halves(kind) for kind in ("fp16", "bf16")),
    _load_matrices("ldmatrix"),
    _load_matrices("ldmatrix_transposed"),
    _copy(4), _copy(8), _copy(16),
    _multiply_halves("fp16"),
    _multiply_halves("bf16"),
    Probe(
        "mma_tf32", _multiply("mma_tf32", "u32", "float"),
        lambda random: tuple(
            random.standard_normal((32, n)).astype(np.float32) for n in (4, 2, 4)
        ),
        (32, 4), np.float32, _wide_limit,
    ),
    Probe(
        "mma_fp64", _multiply("mma_fp64", "double", "double"),
        lambda random: tuple(random.standard_normal((32, n)) for n in (4, 2, 4)),
        (32, 4), np.float64, _wide_limit,
    ),
    Probe(
        "red_add", """
  float* const to = static_cast<float*>(params.out);
  to[lane] = 1.0f;
  __syncthreads();
  ptx::red_add(to + (lane * 7) % 32, static_cast<const float*>(params.q)[lane]);
  __syncthreads();
  if constexpr (ptx::kHasVectorRed) {
    const float four[4] = {1.0f, 2.0f, 4.0f, 8.0f};
    if (lane < 8) ptx::red_add_4(to + 4 * lane, four);
  } else if (lane < 8) {
    for (int i = 0; i < 4; ++i) ptx::red_add(to + 4 * lane + i, float(1 << i));
  }""",
        lambda random: (random.integers(-99, 99, 32).astype(np.float32),),
        (32,), np.float32,
    ),
    *probes_hopper.PROBES,
)  # fmt: skip


def assert_agrees(probe: Probe, got: Array, recorded: Array) -> None:
    """Hold a result against the recorded one."""
    if probe.limit is not None:
        error = np.abs(got.astype(np.float64) - recorded)
        assert (error <= probe.limit(probe.arrays())).all(), probe.name
    elif got.dtype.kind == "f":
        nan = np.isnan(recorded)
        np.testing.assert_array_equal(np.isnan(got), nan)
        bits = f"u{got.itemsize}"
        np.testing.assert_array_equal(got.view(bits)[~nan], recorded.view(bits)[~nan])
    else:
        np.testing.assert_array_equal(got, recorded)


def simulate() -> dict[str, Array]:
    """Run all probes on the CPU."""
    from .device import SimDevice
    from .running import gpu, mirror

    device = SimDevice(gpu("sm_90"))
    return {
        probe.name: np.array(
            probe.run(device, [mirror(device, x) for x in probe.arrays()])
        )
        for probe in PROBES
    }


if __name__ == "__main__":
    np.savez_compressed(RECORD, **simulate())
