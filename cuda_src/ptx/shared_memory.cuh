// Copies from global to shared memory, which go on beside the arithmetic on GPUs that can do that.
#pragma once

#include "common/platform.cuh"
#include "ptx/shared_memory_instructions.cuh"

namespace cupy_flash {
namespace ptx {

// Whether copies are asynchronous; else they have happened when cp_async returns.
constexpr bool kHasAsyncCopies = kComputeCapability >= 80;

// Copies the first `bytes` of kBytes = 4, 8 or 16 and fills up with zeros; both addresses are
// multiples of kBytes. Nothing is read where `bytes` is 0. The copy has happened after it was
// waited for.
template <int kBytes>
CUPY_FLASH_DEVICE void cp_async(void* to, const void* from, int bytes) {
  if constexpr (kHasAsyncCopies) {
    cp_async_shared_global<kBytes>(shared_address(to), from, bytes);
  } else {
    struct alignas(kBytes) Words {
      u32 word[kBytes / 4];
    } words = {};
    if (bytes == kBytes) {
      words = *static_cast<const Words*>(from);
    } else {
      // A word at the end may be half an element too long to be read whole.
      const u16* const halves = static_cast<const u16*>(from);
#pragma unroll
      for (int h = 0; h < kBytes / 2; ++h) {
        if (2 * h < bytes) words.word[h / 2] |= u32(halves[h]) << (16 * (h % 2));
      }
    }
    *static_cast<Words*>(to) = words;
  }
}

// Ends a group of copies.
CUPY_FLASH_DEVICE void cp_async_commit() {
  if constexpr (kHasAsyncCopies) cp_async_commit_group();
}

// Waits until at most kLeft of this thread's latest groups are still being copied.
template <int kLeft>
CUPY_FLASH_DEVICE void cp_async_wait() {
  if constexpr (kHasAsyncCopies) cp_async_wait_group<kLeft>();
}

}  // namespace ptx
}  // namespace cupy_flash
