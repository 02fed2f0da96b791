// Registers that the warps of a warpgroup hand over to another one.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// From here on each thread has kCount registers, a multiple of 8 from 24 to 256. All warps of the
// warpgroup do it; an increase waits until a decrease has set enough free. Without
// __launch_bounds__ of two numbers the compiler ignores it. Compute capability 9.0, compiled for
// sm_90a.
template <int kCount>
CUPY_FLASH_DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kCount) : "memory");
}

template <int kCount>
CUPY_FLASH_DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kCount) : "memory");
}

}  // namespace ptx
}  // namespace cupy_flash
