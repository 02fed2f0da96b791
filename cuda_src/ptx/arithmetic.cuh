// Arithmetic for which the language has no word.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// The smaller of two; NaN if one is. Compute capability 8.0 and later.
CUPY_FLASH_DEVICE float min_or_nan(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
}

}  // namespace ptx
}  // namespace cupy_flash
