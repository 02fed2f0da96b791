// Forward pass on Hopper. A block owns kRows queries of one head at a time, and visits their keys
// tile by tile from the last to the first. Four threads of its first warpgroup each keep something
// going: what to do next, queries and keys, values, and output. The other warpgroups compute.
#pragma once

#include "ptx/registers.cuh"
#include "wgmma/consumer.cuh"
#include "wgmma/epilogue.cuh"
#include "wgmma/producer.cuh"
#include "wgmma/schedule.cuh"
#include "wgmma/storage.cuh"

namespace cupy_flash {
namespace wgmma {

// Registers of a thread, by the number of consumers; together at most those of the launch, where
// all threads have as many, a multiple of 8.
template <int kConsumers>
constexpr int kConsumerRegisters = kConsumers == 4   ? 112
                                   : kConsumers == 3 ? 160
                                                     : 232;
template <int kConsumers>
constexpr int kProducerRegisters = kConsumers >= 3 ? 32 : 40;

template <class Traits>
CUPY_FLASH_DEVICE void forward(const Params<Traits::kBatchAxes>& params, const ForwardMaps& maps) {
  constexpr int kConsumers = Traits::kConsumers;
  static_assert(Traits::kRows == kConsumers * kGroupRows, "64 rows a warpgroup");
  static_assert(Traits::kThreads == (kConsumers + 1) * kWarpgroup, "and one that loads");
  auto& shared = shared_storage<ForwardStorage<Traits>>();
  const int group = uniform(int(threadIdx.x) / kWarpgroup);

  if (threadIdx.x == 0) {
    shared.init();
    ptx::prefetch(maps.q);
    ptx::prefetch(maps.k);
    ptx::prefetch(maps.v);
    ptx::prefetch(maps.out);
  }
  __syncthreads();

  if (group == 0) {
    ptx::registers_decrease<kProducerRegisters<kConsumers>>();
    if (threadIdx.x == 0) load_keys<Traits>(params, maps, shared);
    if (threadIdx.x == kWarpSize) load_values<Traits>(params, maps, shared);
    if (threadIdx.x == 2 * kWarpSize) store_outputs<Traits>(params, maps, shared);
    if (threadIdx.x == 3 * kWarpSize) plan_work(params, shared.queue);
  } else {
    ptx::registers_increase<kConsumerRegisters<kConsumers>>();
    consume<Traits>(params, shared, group - 1);
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
