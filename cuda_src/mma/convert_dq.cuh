// dQ from its sums: scaled, in the element type, in the caller's layout. One warp for 16 queries.
#pragma once

#include "common/seqlen.cuh"
#include "mma/dq_sums.cuh"
#include "mma/products.cuh"

namespace cupy_flash {
namespace mma {

template <class Traits>
struct ConvertDqStorage {
  Tile<typename Traits::Element, 16, Traits::kDepth> dq[Traits::kThreads / kWarpSize];
};

template <class Traits>
CUPY_FLASH_DEVICE void convert_dq(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Atom = mma::Atom<Traits>;
  using Acc = typename Atom::Acc;
  constexpr int kWarps = Traits::kThreads / kWarpSize;
  constexpr int kGroup = Atom::kGroup;
  auto& tile = shared_storage<ConvertDqStorage<Traits>>().dq[threadIdx.x / kWarpSize];
  const i64 row_tiles = ceil_div(int(params.seqlen_q), 16);
  const i64 tiles = batch_size(params) * params.heads_q * row_tiles;

  for (i64 index = i64(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; index < tiles;
       index += i64(gridDim.x) * kWarps) {
    const int row_tile = int(index % row_tiles);
    const i64 sequence = index / row_tiles;
    const int head = int(sequence % params.heads_q);
    const BatchIndex<Traits::kBatchAxes> batch(params, sequence / params.heads_q);
    const DqSums<Traits> sums(params, batch.flat, head);
    // Queries past the end: K may have been NaN.
    const int left = Seqlen(params, batch).q - 16 * row_tile - Lane().g;
    const Acc scale[1][2] = {
        {left > 0 ? Acc(params.scale) : Acc(0), left > 8 ? Acc(params.scale) : Acc(0)}};
    // Through shared memory: sums are read in the order of fragments, dq is written row by row.
#pragma unroll 4
    for (int j = 0; j < Traits::kDepth / 8; j += kGroup) {
      Acc group[1][kGroup][4];
#pragma unroll
      for (int e = 0; e < kGroup; ++e) sums.read(row_tile, j + e, group[0][e]);
      write_results<Atom>(tile, group, scale, 0, 8 * j);
    }
    __syncwarp();
    store_tile<kWarpSize>(head_matrix<Element>(params.dq, params.dq_strides, batch, head), tile,
                          16 * row_tile, int(params.seqlen_q), int(params.head_dim));
    __syncwarp();
  }
}

}  // namespace mma
}  // namespace cupy_flash
