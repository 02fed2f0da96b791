// What the backward pass needs of each query beside the arrays, in tiles that are copied at once:
// lse and delta. The sums of dQ are cleared on the way.
#pragma once

#include "mma/gradient.cuh"
#include "passes/delta.cuh"
#include "wgmma/backward_storage.cuh"

namespace cupy_flash {
namespace wgmma {

template <class Traits>
CUPY_FLASH_DEVICE void backward_terms(const Params<Traits::kBatchAxes>& params) {
  using Row = passes::RowDelta<typename Traits::Element>;
  using Terms = RowTermsTile<Traits::kColumns>;
  constexpr int kRows = Traits::kThreads / Row::kLanes;
  constexpr int kPacks = Traits::kDepth / 4 / Row::kLanes;
  static_assert(kPacks * 4 * Row::kLanes == Traits::kDepth, "all sums of a row are cleared");
  const int lane = threadIdx.x % Row::kLanes;
  const int per_head = query_tiles<Traits>(params) * Traits::kColumns;
  const i64 rows = batch_size(params) * params.heads_q * per_head;
  Terms* const terms = static_cast<Terms*>(params.row_terms);
  float* const dq_sums = static_cast<float*>(params.dq_sums);

  // All lanes of a warp make the same number of rounds, for the sums over lanes.
  for (i64 first = i64(blockIdx.x) * kRows; first < rows; first += i64(gridDim.x) * kRows) {
    const i64 row = first + threadIdx.x / Row::kLanes;
    if (row < rows) {
#pragma unroll
      for (int pack = 0; pack < kPacks; ++pack) {
        write_pack<float, 4>(dq_sums + row * Traits::kDepth + 4 * (Row::kLanes * pack + lane), {});
      }
    }
    const i64 rest = row / per_head;
    const BatchIndex<Traits::kBatchAxes> batch(params, rest / params.heads_q);
    const Row found(params, batch, int(rest % params.heads_q), int(row % per_head), row < rows);
    if (lane == 0 && row < rows) {
      Terms& tile = terms[row / Traits::kColumns];
      tile.exponent[row % Traits::kColumns] = mma::RowTerms<float>::of(found.lse, 0.0f).lse;
      tile.minus_delta[row % Traits::kColumns] = -found.delta;
    }
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
