// The workspace in which blocks add up dQ: fragments of 16 queries by 8 channels, one after the
// other, so that a warp adds its sums to neighbouring addresses.
#pragma once

#include "mma/atom.cuh"
#include "ptx/reduce.cuh"

namespace cupy_flash {
namespace mma {

constexpr int kFragmentSize = 16 * 8;

template <class Traits>
struct DqSums {
  using Acc = Accumulator<typename Traits::Element>;
  static constexpr int kTiles = Traits::kDepth / 8;
  // A lane's four sums side by side where one instruction can add them, else one for each lane.
  static constexpr bool kVector = ptx::kHasVectorRed && sizeof(Acc) == 4;

  Acc* head;

  CUPY_FLASH_DEVICE DqSums(const Params<Traits::kBatchAxes>& params, i64 batch, int head_index)
      : head(static_cast<Acc*>(params.dq_sums) +
             (batch * params.heads_q + head_index) * params.dq_row_tiles * kTiles * kFragmentSize) {
  }

  CUPY_FLASH_DEVICE Acc* fragment(int row_tile, int tile) const {
    return head + (i64(row_tile) * kTiles + tile) * kFragmentSize;
  }

  CUPY_FLASH_DEVICE static int order(int lane, int x) {
    return kVector ? 4 * lane + x : kWarpSize * x + lane;
  }

  CUPY_FLASH_DEVICE void add(int row_tile, int tile, const Acc (&sums)[4]) const {
    const int lane = threadIdx.x % kWarpSize;
    Acc* const to = fragment(row_tile, tile);
    if constexpr (kVector) {
      ptx::red_add_4(to + order(lane, 0), sums);
    } else {
#pragma unroll
      for (int x = 0; x < 4; ++x) ptx::red_add(to + order(lane, x), sums[x]);
    }
  }

  CUPY_FLASH_DEVICE void read(int row_tile, int tile, Acc (&sums)[4]) const {
    const int lane = threadIdx.x % kWarpSize;
    const Acc* const from = fragment(row_tile, tile);
    if constexpr (kVector) {
      const auto pack = read_pack<Acc, 4>(from + order(lane, 0));
#pragma unroll
      for (int x = 0; x < 4; ++x) sums[x] = pack.element[x];
    } else {
#pragma unroll
      for (int x = 0; x < 4; ++x) sums[x] = from[order(lane, x)];
    }
  }
};

}  // namespace mma
}  // namespace cupy_flash
