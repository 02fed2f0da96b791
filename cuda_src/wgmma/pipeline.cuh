// Tiles on their way from one warp, which starts the copies, to the warpgroups that compute.
#pragma once

#include "ptx/mbarrier.cuh"

namespace cupy_flash {
namespace wgmma {

// Tells the compiler that all lanes have the same value, where it can't see that: wgmma with
// addresses that might differ would be made one after another.
CUPY_FLASH_DEVICE int uniform(int value) { return __shfl_sync(kAllLanes, value, 0); }

// A place in a ring of stages; each side of a pipeline walks on by itself.
template <int kStages>
struct Slot {
  int stage = 0;
  int parity = 0;  // of the barriers' phase in this round

  CUPY_FLASH_DEVICE void advance() {
    stage = stage == kStages - 1 ? 0 : stage + 1;
    parity ^= stage == 0;
  }

  CUPY_FLASH_DEVICE void make_uniform() {
    stage = uniform(stage);
    parity = uniform(parity);
  }
};

// The place of the n-th that goes through a ring of so many stages.
template <int kStages>
CUPY_FLASH_DEVICE Slot<kStages> slot_of(u32 n) {
  static_assert((kStages & (kStages - 1)) == 0, "a power of two");
  return {int(n % kStages), int(n / kStages % 2)};
}

template <int kStages>
struct Pipeline {
  ptx::Mbarrier full[kStages];
  ptx::Mbarrier empty[kStages];

  // One thread of the block does it. So many calls of `publish` (or one of `acquire`) fill a stage,
  // and so many of `release` free it.
  CUPY_FLASH_DEVICE void init(int publishes, int releases) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full[stage], publishes);
      ptx::mbarrier_init(empty[stage], releases);
    }
  }

  // The producer's thread: waits for a free stage and announces the bytes that copies will bring.
  CUPY_FLASH_DEVICE ptx::Mbarrier& acquire(const Slot<kStages>& slot, int bytes) {
    wait_empty(slot);
    ptx::mbarrier_arrive_expect(full[slot.stage], bytes);
    return full[slot.stage];
  }

  CUPY_FLASH_DEVICE void wait_empty(const Slot<kStages>& slot) {
    ptx::mbarrier_wait(empty[slot.stage], slot.parity ^ 1);
  }

  // The first lane of a warp, or a thread that produces by itself, once it has written to the
  // stage.
  CUPY_FLASH_DEVICE void publish(const Slot<kStages>& slot) {
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(full[slot.stage]);
  }

  CUPY_FLASH_DEVICE void wait(const Slot<kStages>& slot) {
    ptx::mbarrier_wait(full[slot.stage], slot.parity);
  }

  // A warp, once it has read the stage.
  CUPY_FLASH_DEVICE void release(const Slot<kStages>& slot) {
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(empty[slot.stage]);
  }
};

}  // namespace wgmma
}  // namespace cupy_flash
