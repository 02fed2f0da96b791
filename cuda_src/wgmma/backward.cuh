// dV = Pᵀ dO, dK = scale * dSᵀ Q and, in the same pass, the sums of dQ = scale * dS K on Hopper: a
// block takes kRows keys of one kv head after the other and walks over the queries of all heads
// that read them. Threads of its first warpgroup load and store; the other warpgroups compute.
#pragma once

#include "ptx/registers.cuh"
#include "wgmma/backward_consumer.cuh"
#include "wgmma/backward_producer.cuh"
#include "wgmma/backward_storage.cuh"

namespace cupy_flash {
namespace wgmma {

// Registers of a thread.
constexpr int kGradientRegisters = 240;
constexpr int kSupplierRegisters = 24;

template <class Traits>
CUPY_FLASH_DEVICE void backward(const Params<Traits::kBatchAxes>& params,
                                const BackwardMaps& maps) {
  static_assert(Traits::kRows == Traits::kConsumers * kGroupRows, "64 keys a warpgroup");
  static_assert(Traits::kThreads == (Traits::kConsumers + 1) * kWarpgroup, "and one that loads");
  auto& shared = shared_storage<BackwardStorage<Traits>>();
  const int group = uniform(int(threadIdx.x) / kWarpgroup);

  if (threadIdx.x == 0) shared.start(maps);
  __syncthreads();

  if (group == 0) {
    ptx::registers_decrease<kSupplierRegisters>();
    supply(params, maps, shared);
  } else {
    ptx::registers_increase<kGradientRegisters>();
    walk_blocks(shared, [&](const KeyBlock<Traits>& block, const Progress& at) {
      differentiate(params, shared, block, group - 1, at);
    });
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
