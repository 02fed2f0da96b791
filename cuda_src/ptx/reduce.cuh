// Additions to global memory whose old value nobody asks for.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// Whether red_add_4 is one instruction.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasVectorRed = true;
#else
constexpr bool kHasVectorRed = false;
#endif

CUPY_FLASH_DEVICE void red_add(float* to, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" : : "l"(to), "f"(value) : "memory");
}

// Compute capability 6.0 and later.
CUPY_FLASH_DEVICE void red_add(double* to, double value) {
  asm volatile("red.global.add.f64 [%0], %1;" : : "l"(to), "d"(value) : "memory");
}

// Four neighbours, at an address that is a multiple of 16; compute capability 9.0 and later.
CUPY_FLASH_DEVICE void red_add_4(float* to, const float (&value)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}

}  // namespace ptx
}  // namespace cupy_flash
