// Barriers for a part of a block.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// Waits until `threads` threads, whole warps, have come to barrier `id`; 0 is __syncthreads'.
CUPY_FLASH_DEVICE void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// Counts this warp at barrier `id` as named_barrier does, but doesn't wait.
CUPY_FLASH_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

}  // namespace ptx
}  // namespace cupy_flash
