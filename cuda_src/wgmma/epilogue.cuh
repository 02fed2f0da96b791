// From sums to the output: O / l, and lse = m + log l. A row that sees no key is 0 and -inf.
#pragma once

#include "ptx/barrier.cuh"
#include "wgmma/producer.cuh"
#include "wgmma/softmax.cuh"
#include "wgmma/storage.cuh"

namespace cupy_flash {
namespace wgmma {

// Of the threads of one warpgroup; barrier 0 is the block's.
CUPY_FLASH_DEVICE void group_barrier(int group) { ptx::named_barrier(1 + group, kWarpgroup); }

// Writes 64 rows to shared memory.
template <class Traits, class TileO, int kO>
CUPY_FLASH_DEVICE void write_output(const Params<Traits::kBatchAxes>& params, TileO& out,
                                    const Work<Traits>& work, int group, const Sums<kO>& o,
                                    const Softmax<typename Traits::Element>& softmax) {
  using Element = typename Traits::Element;
  const mma::Lane lane;
  const int row = group * kGroupRows + threadIdx.x % kWarpgroup / kWarpSize * 16 + lane.g;
  const auto lse = head_vector<float>(params.lse, params.lse_strides, work.batch, work.head);
  if constexpr (!Traits::kOutputApart) group_barrier(group);  // the queries have been read
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = work.row0 + row + 8 * half;
    const float sum = mma::row_sum(softmax.sum[half]);
    const bool empty = sum == 0 || query >= work.seqlen.q;
    if (params.lse != nullptr && lane.t == 0 && query < params.seqlen_q) {
      lse.data[query * lse.stride] =
          empty ? -Constants<float>::infinity() : softmax.log_sum(half, sum);
    }
    const float inverse = 1 / sum;
#pragma unroll
    for (int j = 0; j < kO; ++j) {
      const float low = empty ? 0.0f : o[0][j][2 * half] * inverse;
      const float high = empty ? 0.0f : o[0][j][2 * half + 1] * inverse;
      *reinterpret_cast<u32*>(out.pack_at(row + 8 * half, 8 * j) + 2 * lane.t) =
          mma::narrow_pair(low, high, Element{});
    }
  }
  ptx::async_proxy_fence();
}

// The thread that copies output to global memory, so that those who compute it needn't wait.
template <class Traits>
CUPY_FLASH_DEVICE void store_outputs(const Params<Traits::kBatchAxes>& params,
                                     const ForwardMaps& maps, ForwardStorage<Traits>& shared) {
  Slot<ForwardStorage<Traits>::Ends::kOutputStages> slot;
  typename WorkQueue<Traits>::Place place;
#pragma unroll 1
  while (true) {
    const Work<Traits>& work = shared.queue.wait(place);
    if (work.row0 < 0) break;
    const int row0 = work.row0;
    const HeadPosition<Traits::kBatchAxes> at(params.out_strides, work.batch, work.head);
    shared.queue.release(place);
    place.advance();
    shared.out_pipeline.wait(slot);
    store_panels(maps.out, shared.ends.out(slot.stage), at, row0);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    if constexpr (Traits::kOutputApart) {
      shared.out_pipeline.release(slot);
    } else {
      shared.q_pipeline.release(slot);
    }
    slot.advance();
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
