// Conversions between 16-bit storage and float.
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

}  // namespace ptx
}  // namespace cupy_flash
