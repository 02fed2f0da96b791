// Barriers in shared memory that count arrivals and the bytes of asynchronous copies.
//
// A barrier goes from phase to phase: a phase ends when the expected threads have arrived and all
// announced bytes are there. A wait names the parity of the phase: 0 for the first, 1 for the
// second, and so on in turn. Waiting for parity 1 of a new barrier ends at once.
//
// Compute capability 9.0 and later.
#pragma once

#include "common/platform.cuh"
#include "ptx/shared_memory_instructions.cuh"

namespace cupy_flash {
namespace ptx {

struct alignas(8) Mbarrier {
  u64 state;
};

// One thread does it, before all others; `count` arrivals end a phase.
CUPY_FLASH_DEVICE void mbarrier_init(Mbarrier& barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(&barrier)), "r"(count)
               : "memory");
}

// After the last mbarrier_init, by the same thread, so that copies see the barriers too;
// __syncthreads then shows them to the other threads.
CUPY_FLASH_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

CUPY_FLASH_DEVICE void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(&barrier))
               : "memory");
}

// Arrives, and announces bytes that copies bring in this phase.
CUPY_FLASH_DEVICE void mbarrier_arrive_expect(Mbarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Waits until the phase of that parity has ended.
CUPY_FLASH_DEVICE void mbarrier_wait(Mbarrier& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}"
      :
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
}

}  // namespace ptx
}  // namespace cupy_flash
