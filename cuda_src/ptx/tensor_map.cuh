// Copies of whole boxes between global memory and shared memory, by the tensor memory accelerator.
//
// A tensor map, made on the host, describes an array in global memory and the box that one
// instruction moves. A box lies in shared memory densely, innermost axis first, with 128-byte
// swizzle: bits 7 to 9 of an address are added modulo two to bits 4 to 6. Coordinates may be
// outside the array, and negative for a load: zeros are loaded there, nothing is stored. A row of
// the box begins at a multiple of 16 bytes.
//
// One thread starts a copy. Compute capability 9.0 and later.
#pragma once

#include "common/platform.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory_instructions.cuh"

namespace cupy_flash {
namespace ptx {

// A kernel's parameter, CUPY_FLASH_GRID_CONSTANT, so that it has an address.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

CUPY_FLASH_DEVICE void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// Copies the box that begins at the coordinates, innermost first. `to` is a multiple of 1024; all
// bytes of the box count for the barrier, also those outside the array.
CUPY_FLASH_DEVICE void tma_load(void* to, const TensorMap& map, Mbarrier& full, int c0, int c1,
                                int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "r"(c0), "r"(c1), "r"(c2),
        "r"(c3)
      : "memory");
}

CUPY_FLASH_DEVICE void tma_load(void* to, const TensorMap& map, Mbarrier& full, int c0, int c1,
                                int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "r"(c0), "r"(c1), "r"(c2),
        "r"(c3), "r"(c4)
      : "memory");
}

// The other way; belongs to the group that this thread's next bulk_commit ends. What threads have
// written to shared memory is seen if each has done async_proxy_fence and all have met since.
CUPY_FLASH_DEVICE void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2,
                                 int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      :
      : "l"(&map), "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

CUPY_FLASH_DEVICE void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2,
                                 int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];"
      :
      : "l"(&map), "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Copies bytes that lie side by side; addresses and `bytes` are multiples of 16.
CUPY_FLASH_DEVICE void bulk_load(void* to, const void* from, int bytes, Mbarrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&full))
      : "memory");
}

// Adds floats in shared memory to floats in global memory, each atomically. Addresses and `bytes`
// are multiples of 16; groups and fences as for tma_store.
CUPY_FLASH_DEVICE void bulk_reduce_add(float* to, const void* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(to), "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// Ends a group of stores.
CUPY_FLASH_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups still read shared memory.
template <int kPending>
CUPY_FLASH_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kPending) : "memory");
}

// Shows what this thread has written to shared memory to bulk copies and to wgmma.
CUPY_FLASH_DEVICE void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
}  // namespace cupy_flash
