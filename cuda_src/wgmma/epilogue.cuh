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

// Writes lse of the two rows that a lane has a part of, and finds out what their sums are to be
// multiplied with; less than 0: the row is empty.
template <class Traits>
CUPY_FLASH_DEVICE void close_rows(const Params<Traits::kBatchAxes>& params,
                                  const Work<Traits>& work, int warp_row, float to_exponent,
                                  const Softmax<typename Traits::Element>& softmax,
                                  float (&factor)[2]) {
  const mma::Lane lane;
  const auto lse = head_vector<float>(params.lse, params.lse_strides, work.batch, work.head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = work.row0 + warp_row + lane.g + 8 * half;
    const float sum = mma::row_sum(softmax.sum[half]);
    const bool empty = sum == 0 || query >= work.seqlen.q;
    if (params.lse != nullptr && lane.t == 0 && query < params.seqlen_q) {
      lse.data[query * lse.stride] =
          empty ? -Constants<float>::infinity() : softmax.log_sum(half, sum, to_exponent);
    }
    factor[half] = empty ? -1.0f : 1 / sum;
  }
}

// Writes sums as elements, the two rows that a lane has a part of each multiplied by its factor;
// less than 0: the row becomes 0. A warp's 16 rows begin at `warp_row`.
template <class Element, class TileO, int kO>
CUPY_FLASH_DEVICE void write_sums(TileO& out, int warp_row, const Sums<kO>& o,
                                  const float (&factor)[2]) {
  mma::Lane lane;
  // Or addresses would be kept in registers all the time.
  lane.g = ptx::opaque(lane.g);
  lane.t = ptx::opaque(lane.t);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool empty = factor[half] < 0;
#pragma unroll
    for (int j = 0; j < kO; ++j) {
      const float low = empty ? 0.0f : o[0][j][2 * half] * factor[half];
      const float high = empty ? 0.0f : o[0][j][2 * half + 1] * factor[half];
      *reinterpret_cast<u32*>(out.pack_at(warp_row + lane.g + 8 * half, 8 * j) + 2 * lane.t) =
          mma::narrow_pair(low, high, Element{});
    }
  }
  ptx::async_proxy_fence();
}

// Writes 64 rows of output to shared memory.
template <class Traits, class TileO, int kO>
CUPY_FLASH_DEVICE void write_output(TileO& out, int group, int warp_row, const Sums<kO>& o,
                                    const float (&factor)[2]) {
  if constexpr (!Traits::kOutputApart) group_barrier(group);  // the queries have been read
  write_sums<typename Traits::Element>(out, warp_row, o, factor);
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
