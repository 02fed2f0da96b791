"""Probes of what only Hopper has: its barriers, copies and products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .probe import Array, Map, Probe, to_halves

_HOPPER = 90
# Tiles begin at the first multiple of 1024 after the barrier.
_ONE_BARRIER = """
  auto& full = *reinterpret_cast<ptx::Mbarrier*>(shared);
  auto* const tile = shared + 1024;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();"""


def _words(box: Map) -> int:
    """Return the size of a map's box in units of four bytes."""
    return int(np.prod(box.box)) * np.dtype(box.dtype).itemsize // 4


def _bits(n: int) -> Callable[[np.random.Generator], Sequence[Array]]:
    return lambda random: (random.integers(0, 2**16, n, dtype=np.uint16),)


# --- Copies ---------------------------------------------------------------------------

# An array (2, 19, 3, 144 bytes); with four axes its rows lie apart from its heads.
_BYTES = 2 * 19 * 3 * 144
_STRIDES_4 = (432, 144, 8208)
_STRIDES_5 = (144, 432, 8208, 16416)
_LOADED_4 = Map("q", "float16", (72, 19, 3, 2), _STRIDES_4, (64, 16, 1, 1))
_LOADED_5 = Map("q", "float32", (36, 3, 19, 2, 1), _STRIDES_5, (32, 2, 2, 2, 1))
_PLAIN_5 = Map("q", "float32", (36, 3, 19, 2, 1), _STRIDES_5, (32, 2, 2, 2, 1), 0)
# Of the array a part is left out, which must stay as it was.
_STORED_4 = Map("out", "float16", (56, 17, 3, 2), _STRIDES_4, (64, 16, 1, 1))
_STORED_5 = Map("out", "float32", (32, 3, 17, 2, 1), _STRIDES_5, (32, 2, 2, 2, 1))


def _load(maps: Sequence[Map], boxes: Sequence[tuple[int, ...]]) -> Probe:
    """Copy boxes, one after the other, and show them as they lie in shared memory."""
    words = _words(maps[0])
    loads = "".join(
        f"""
  if (threadIdx.x == 0) {{
    ptx::mbarrier_arrive_expect(full, {4 * words});
    ptx::tma_load(tile, maps.map[{i % len(maps)}], full, {", ".join(map(str, box))});
  }}
  ptx::mbarrier_wait(full, {i % 2});
  for (int i = lane; i < {words}; i += 32) {{
    static_cast<u32*>(params.out)[{i * words} + i] =
        reinterpret_cast<const u32*>(tile)[i];
  }}
  __syncthreads();"""
        for i, box in enumerate(boxes)
    )
    return Probe(
        f"tma_load_{len(boxes[0])}",
        f"{_ONE_BARRIER}\n  ptx::prefetch(maps.map[0]);{loads}",
        _bits(_BYTES // 2), (len(boxes), words), capability=_HOPPER,
        maps=tuple(maps), shared_memory=1024 + 4 * words,
    )  # fmt: skip


def _store(stored: Map, boxes: Sequence[tuple[int, ...]]) -> Probe:
    """Copy one tile to places that don't overlap."""
    words = _words(stored)
    stores = "".join(
        f"\n    ptx::tma_store(maps.map[0], shared, {', '.join(map(str, box))});"
        for box in boxes
    )
    return Probe(
        f"tma_store_{len(boxes[0])}", f"""
  for (int i = lane; i < {words}; i += 32) {{
    reinterpret_cast<u32*>(shared)[i] = static_cast<const u32*>(params.q)[i];
  }}
  ptx::async_proxy_fence();
  __syncthreads();
  if (threadIdx.x == 0) {{{stores}
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }}""",
        _bits(2 * words), (_BYTES // 4,), capability=_HOPPER, maps=(stored,),
        shared_memory=4 * words,
    )  # fmt: skip


# --- Products -------------------------------------------------------------------------

_DEPTH = 64
_ROWS = 64
_ATOM = 1024


def _quarters(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return numbers whose products have sums that need no rounding."""
    return random.integers(-8, 9, shape).astype(np.float32) / 4


def _product(kind: str, n: int, transposed: bool, accumulate: bool = True) -> Probe:
    """Multiply 64 x 64 by 64 x n, half of it with the left factor in registers."""
    panels = -(-n // 64) if transposed else 1
    box = (64, 64, 1, 1) if transposed else (64, n, 1, 1)
    shape = (n, _DEPTH, 1, 1) if transposed else (_DEPTH, n, 1, 1)
    row = 2 * shape[0]
    dtype = {"fp16": "float16", "bf16": "bfloat16"}[kind]
    left = Map("q", dtype, (_DEPTH, _ROWS, 1, 1), (128, 8192, 8192), (64, 64, 1, 1))
    right = Map("k", dtype, shape, (row, row * shape[1], row * shape[1]), box)
    b_bytes = panels * 128 * box[1]
    step, leading = (2 * _ATOM // 16, 64 * 128) if transposed else (2, 16)
    flags = f"{kind}, {n}, {str(transposed).lower()}"
    return Probe(
        f"wgmma_{kind}_{n}_{'mn' if transposed else 'k'}", _ONE_BARRIER + f"""
  auto* const right = tile + 8192;
  if (threadIdx.x == 0) {{
    ptx::mbarrier_arrive_expect(full, {8192 + b_bytes});
    ptx::tma_load(tile, maps.map[0], full, 0, 0, 0, 0);
    for (int panel = 0; panel < {panels}; ++panel) {{
      ptx::tma_load(right + 8192 * panel, maps.map[1], full, 64 * panel, 0, 0, 0);
    }}
  }}
  u32 a[2][4];
  const int row = threadIdx.x / 32 * 16 + lane / 4;
  for (int half = 0; half < 2; ++half) {{
    for (int r = 0; r < 4; ++r) {{
      const int pair = 32 * (row + r % 2 * 8) + 16 + 8 * half + lane % 4 + r / 2 * 4;
      a[half][r] = static_cast<const u32*>(params.q)[pair];
    }}
  }}
  float d[{n // 2}];
  for (int i = 0; i < {n // 2}; ++i) {{
    d[i] = static_cast<const float*>(params.v)[{n // 2} * at + i];
  }}
  // No array has a length here: what is multiplied first starts anew.
  const bool accumulate = {str(accumulate).lower()} || params.seqlen_q != 0;
  ptx::mbarrier_wait(full, 0);
  const u64 da = ptx::wgmma_descriptor(tile, 16, {_ATOM});
  const u64 db = ptx::wgmma_descriptor(right, {leading}, {_ATOM});
  ptx::hold(d);
  ptx::hold(a[0]);
  ptx::hold(a[1]);
  ptx::wgmma_fence();
  ptx::wgmma_ss<{flags}>(d, da, db, accumulate);
  ptx::wgmma_ss<{flags}>(
      d, ptx::wgmma_advance(da, 2), ptx::wgmma_advance(db, {step}), true);
  ptx::wgmma_commit();
  ptx::wgmma_rs<{flags}>(d, a[0], db + {2 * step}, true);
  ptx::wgmma_rs<{flags}>(d, a[1], db + {3 * step}, true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::wgmma_wait<0>();
  ptx::hold(d);
  for (int i = 0; i < {n // 2}; ++i) {{
    static_cast<float*>(params.out)[{n // 2} * at + i] = d[i];
  }}""",
        lambda random: (
            to_halves(_quarters(random, (_ROWS, _DEPTH)), kind),
            to_halves(_quarters(random, shape[1::-1]), kind),
            _quarters(random, (128, n // 2)),
        ),
        (128, n // 2), np.float32, block=128, capability=_HOPPER, maps=(left, right),
        shared_memory=1024 + 8192 + b_bytes,
    )  # fmt: skip


PROBES = (
    Probe(
        "mbarrier", """
  struct Shared { ptx::Mbarrier full[2], empty[2]; int word[2][32]; };
  auto& s = *reinterpret_cast<Shared*>(shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(s.full[stage], 32);
      ptx::mbarrier_init(s.empty[stage], 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  for (int round = 0; round < 7; ++round) {
    const int stage = round % 2;
    const int parity = round / 2 % 2;
    if (threadIdx.x < 32) {
      ptx::mbarrier_wait(s.empty[stage], parity ^ 1);
      s.word[stage][lane] = static_cast<const int*>(params.q)[32 * round + lane];
      ptx::mbarrier_arrive(s.full[stage]);
    } else {
      ptx::mbarrier_wait(s.full[stage], parity);
      static_cast<int*>(params.out)[32 * round + lane] = s.word[stage][31 - lane];
      ptx::mbarrier_arrive(s.empty[stage]);
    }
  }""",
        lambda random: (random.integers(0, 2**30, (7, 32), dtype=np.int32),),
        (7, 32), np.int32, block=64, capability=_HOPPER, shared_memory=512,
    ),
    Probe(
        "barrier_arrive", """
  int* const word = reinterpret_cast<int*>(shared);
  if (threadIdx.x < 32) {
    word[lane] = static_cast<const int*>(params.q)[lane];
    ptx::barrier_arrive(1, 64);
  } else {
    ptx::named_barrier(1, 64);
    static_cast<int*>(params.out)[lane] = word[31 - lane];
  }""",
        lambda random: (random.integers(0, 2**30, 32, dtype=np.int32),),
        (32,), np.int32, block=64, shared_memory=128,
    ),
    Probe(
        "registers", """
  if (threadIdx.x < 128) {
    ptx::registers_decrease<40>();
  } else {
    ptx::registers_increase<208>();
  }
  static_cast<int*>(params.out)[at] = at;""",
        lambda random: (), (256,), np.int32, block=256, capability=_HOPPER,
    ),
    _load(
        (_LOADED_4,),
        ((0, 0, 0, 0), (64, 8, 2, 1), (-8, -3, 1, 0), (0, 0, 3, 0), (16, 4, 0, 1)),
    ),
    _load(
        (_LOADED_5, _PLAIN_5),
        (
            (0, 0, 0, 0, 0), (0, 1, 2, 0, 0), (4, 2, 18, 1, 0), (-4, -1, -1, -1, 0),
            (0, 0, 0, 0, 1), (8, 1, 5, 0, 0),
        ),
    ),
    _store(_STORED_4, ((0, 0, 0, 0), (0, 16, 0, 0), (16, 4, 1, 0), (24, 5, 2, 1))),
    _store(
        _STORED_5, ((0, 0, 0, 0, 0), (4, 2, 16, 1, 0), (8, 1, 9, 1, 0)),
    ),
    Probe(
        "bulk_load", _ONE_BARRIER + """
  const auto* const from = static_cast<const unsigned char*>(params.q);
  u32* const out = static_cast<u32*>(params.out);
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect(full, 1024);
      ptx::bulk_load(tile + 16, from + 1024 * round + 48, 992, full);
      ptx::bulk_load(tile, from + 2032, 16, full);
      ptx::bulk_load(tile + 1008, from + 1024 * round, 16, full);
    }
    ptx::mbarrier_wait(full, round);
    for (int i = lane; i < 256; i += 32) {
      out[256 * round + i] = reinterpret_cast<const u32*>(tile)[i];
    }
    __syncthreads();
  }""",
        lambda random: (random.integers(0, 2**32, 516, dtype=np.uint32),),
        (2, 256), capability=_HOPPER, shared_memory=2048,
    ),
    # Rows of 16 bytes, which the lanes point to in any order.
    Probe(
        "stmatrix_transposed", """
  const u32* const from = static_cast<const u32*>(params.q) + 4 * lane;
  const u32 matrix[4] = {from[0], from[1], from[2], from[3]};
  const u32 row = u32(static_cast<const int*>(params.k)[lane]);
  ptx::stmatrix_transposed(ptx::shared_address(shared) + 16 * row, matrix);
  __syncthreads();
  for (int i = lane; i < 128; i += 32) {
    static_cast<u32*>(params.out)[i] = reinterpret_cast<const u32*>(shared)[i];
  }""",
        lambda random: (
            random.integers(0, 2**32, (32, 4), dtype=np.uint32),
            random.permutation(32).astype(np.int32),
        ),
        (32, 4), capability=_HOPPER, shared_memory=512,
    ),
    Probe(
        "bulk_reduce_add", """
  float* const tile = reinterpret_cast<float*>(shared);
  for (int i = lane; i < 64; i += 32) tile[i] = static_cast<const float*>(params.q)[i];
  ptx::async_proxy_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    float* const to = static_cast<float*>(params.out);
    ptx::bulk_reduce_add(to + 32 * blockIdx.x, tile, 256);
    ptx::bulk_commit();
    ptx::bulk_reduce_add(to + 4, tile + 8, 16);
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();
    ptx::bulk_wait_read<0>();
  }""",
        lambda random: (random.integers(-99, 99, 64).astype(np.float32),),
        (96,), np.float32, grid=2, capability=_HOPPER, shared_memory=256,
    ),
    _product("fp16", 16, False),
    _product("fp16", 80, True, accumulate=False),
    _product("fp16", 128, False),
    _product("bf16", 32, True),
    _product("bf16", 64, False, accumulate=False),
    _product("bf16", 144, True),
    _product("bf16", 256, True),
)  # fmt: skip
