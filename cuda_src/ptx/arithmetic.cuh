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

// The same of each half.
CUPY_FLASH_DEVICE u32 min_or_nan_fp16x2(u32 a, u32 b) {
  u32 smaller;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}

CUPY_FLASH_DEVICE u32 min_or_nan_bf16x2(u32 a, u32 b) {
  u32 smaller;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}

}  // namespace ptx
}  // namespace cupy_flash
