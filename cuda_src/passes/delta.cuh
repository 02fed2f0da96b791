// delta_i = sum over channels of dO_i * O_i, minus dlse_i: what the softmax's derivative subtracts
// from dP in row i. One warp per row.
#pragma once

#include "common/seqlen.cuh"

namespace cupy_flash {
namespace passes {

template <class Traits>
CUPY_FLASH_DEVICE void delta(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Acc = Accumulator<Element>;
  constexpr int kWarps = Traits::kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const i64 rows = batch_size(params) * params.heads_q * params.seqlen_q;
  Acc* const delta = static_cast<Acc*>(params.delta);

  for (i64 row = i64(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; row < rows;
       row += i64(gridDim.x) * kWarps) {
    const int i = int(row % params.seqlen_q);
    const i64 rest = row / params.seqlen_q;
    const int head = int(rest % params.heads_q);
    const BatchIndex<Traits::kBatchAxes> batch(params, rest / params.heads_q);
    Acc sum = Acc(0);
    if (i < Seqlen(params, batch).q) {
      const auto out = head_matrix<const Element>(params.out, params.out_strides, batch, head);
      const auto dout = head_matrix<const Element>(params.dout, params.dout_strides, batch, head);
      for (int d = lane; d < params.head_dim_v; d += kWarpSize) {
        sum = fma_of(Acc(widen(*dout.at(i, d))), Acc(widen(*out.at(i, d))), sum);
      }
#pragma unroll
      for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, lanes);
      }
      if (params.dlse != nullptr) {
        const auto dlse = head_vector<const Acc>(params.dlse, params.dlse_strides, batch, head);
        sum -= dlse.data[i * dlse.stride];
      }
    }
    if (lane == 0) delta[row] = sum;
  }
}

}  // namespace passes
}  // namespace cupy_flash
