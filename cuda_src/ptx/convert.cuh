// Conversions between float and what tensor cores multiply.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

CUPY_FLASH_DEVICE float fp16_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

CUPY_FLASH_DEVICE u16 float_to_fp16(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two floats in one register, `low` in the lower half.
CUPY_FLASH_DEVICE u32 floats_to_fp16x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return u32(float_to_fp16(low)) | u32(float_to_fp16(high)) << 16;
#else
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#endif
}

// Compute capability 8.0 and later.
CUPY_FLASH_DEVICE u32 floats_to_bf16x2(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// The nearest tf32 number, ties away from zero. Compute capability 8.0 and later.
CUPY_FLASH_DEVICE u32 float_to_tf32(float value) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

}  // namespace ptx
}  // namespace cupy_flash
