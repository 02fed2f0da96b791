// Steps of the gradients that both of their kernels take.
#pragma once

#include "mma/dq_sums.cuh"
#include "mma/gradient.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/reduce.cuh"
#include "wgmma/backward_storage.cuh"
#include "wgmma/epilogue.cuh"
#include "wgmma/products.cuh"

namespace cupy_flash {
namespace wgmma {

// Barrier of all warpgroups that compute; those of one warpgroup are 1 + its number.
template <class Traits>
CUPY_FLASH_DEVICE void consumers_barrier() {
  ptx::named_barrier(1 + Traits::kConsumers, Traits::kConsumers * kWarpgroup);
}

// A thread's place in its warpgroup, found out anew wherever it is needed: registers are few.
struct Thread {
  int lane;
  int warp;

  CUPY_FLASH_DEVICE Thread() {
    const int index = ptx::opaque(int(threadIdx.x)) % kWarpgroup;
    lane = index % kWarpSize;
    warp = index / kWarpSize;
  }
};

CUPY_FLASH_DEVICE Range uniform(const Range& range) {
  return {uniform(range.begin), uniform(range.end)};
}

CUPY_FLASH_DEVICE bool contains_rows(const Range& range, int row0, int rows) {
  return row0 >= range.begin && row0 + rows <= range.end;
}

// The terms of the two queries that a lane has of the j-th eight.
template <int kColumns>
CUPY_FLASH_DEVICE Pack<float, 2> pair_at(const float (&terms)[kColumns], int j) {
  return read_pack<float, 2>(&terms[8 * j + Thread().lane % 4 * 2]);
}

// Weights of more than 1 become 1: a logit is never above its row's lse, but rounding may put it
// there.
CUPY_FLASH_DEVICE u32 limited_to_one(u32 pair, fp16) {
  return ptx::min_or_nan_fp16x2(pair, 0x3c003c00);
}
CUPY_FLASH_DEVICE u32 limited_to_one(u32 pair, bf16) {
  return ptx::min_or_nan_bf16x2(pair, 0x3f803f80);
}

template <class Element, int kN>
CUPY_FLASH_DEVICE void limit_to_one(Weights<kN>& weights) {
#pragma unroll
  for (int t = 0; t < kN / 2; ++t) {
#pragma unroll
    for (int r = 0; r < 4; ++r) weights[t][r] = limited_to_one(weights[t][r], Element{});
  }
}

// dS = P (dP - delta), of P as floats or as weights.
template <class Element, int kN>
CUPY_FLASH_DEVICE void make_ds(Weights<kN>& ds, Sums<kN>& p, const Sums<kN>& dp) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) p[0][j][c] *= dp[0][j][c];
  }
  make_weights<Element, kN>(ds, p);
}
template <class Element, int kN>
CUPY_FLASH_DEVICE void make_ds(Weights<kN>& ds, const Weights<kN>& p, const Sums<kN>& dp) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float low, high;
      mma::widen_pair(p[j / 2][j % 2 * 2 + half], low, high, Element{});
      ds[j / 2][j % 2 * 2 + half] =
          mma::narrow_pair(low * dp[0][j][2 * half], high * dp[0][j][2 * half + 1], Element{});
    }
  }
}

// Where a lane's sums of a tile of dQ begin, for the product of 64 queries from `row` on and
// channels from `channel` on. Fragments lie one after the other, first by queries, then by
// channels.
template <class Traits>
CUPY_FLASH_DEVICE int dq_offset(int row, int channel) {
  const Thread thread;
  const int fragment = (row / 16 + thread.warp) * (Traits::kDepth / 8) + channel / 8;
  return fragment * mma::kFragmentSize + 4 * thread.lane;
}

template <int kN>
CUPY_FLASH_DEVICE void add_dq(float* to, const Sums<kN>& dq) {
  static_assert(ptx::kHasVectorRed, "a lane's sums lie side by side, as in DqSums");
#pragma unroll
  for (int j = 0; j < kN; ++j) ptx::red_add_4(to + j * mma::kFragmentSize, dq[0][j]);
}

// Writes a warpgroup's 64 rows of dK or of dV to shared memory, from `group_row` on. Those past the
// last key become 0.
template <class Traits, class Tile, int kN>
CUPY_FLASH_DEVICE void write_gradient(const KeyBlock<Traits>& block, Tile& tile, int group_row,
                                      const Sums<kN>& sums, float scale) {
  const mma::Lane lane;
  const int warp_row = group_row + threadIdx.x % kWarpgroup / kWarpSize * 16;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool inside = block.row0 + warp_row + lane.g + 8 * half < block.seqlen.k;
    factor[half] = inside ? scale : -1.0f;
  }
  write_sums<typename Traits::Element>(tile, warp_row, sums, factor);
}

// How far a warpgroup has come: blocks of keys, and tiles of queries of all of them.
struct Progress {
  int block = 0;
  int tile = 0;
};

// Calls part(block, progress) for each block of keys. A warp that returns has read what it needs of
// the block.
template <class Storage, class Part>
CUPY_FLASH_DEVICE void walk_blocks(Storage& shared, const Part& part) {
  Progress progress;
#pragma unroll 1
  while (true) {
    const auto place = slot_of<Storage::Queue::kStages>(progress.block);
    const auto& block = shared.queue.wait(place);
    if (uniform(block.row0) < 0) break;
    const int count = uniform(block.count);
    part(block, progress);
    shared.queue.release(place);
    ++progress.block;
    progress.tile += count;
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
