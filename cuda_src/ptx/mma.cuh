// Products of small matrices on tensor cores, one for each type: d += a b, where a warp holds the
// 16 x 8 sums d. On each GPU they are made of the instructions that it has.
#pragma once

#include "common/platform.cuh"
#include "ptx/mma_instructions.cuh"

namespace cupy_flash {
namespace ptx {

// a: 16 x 16, b: 16 x 8; the fragments of mma_m16n8k16_fp16.
CUPY_FLASH_DEVICE void mma_fp16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (kComputeCapability < 80) {
    // Turing multiplies eight columns at a time.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mma_m16n8k8_fp16(d, {a[2 * half], a[2 * half + 1]}, b[half]);
    }
  } else {
    mma_m16n8k16_fp16(d, a, b);
  }
}

// The same fragments.
CUPY_FLASH_DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16_bf16(d, a, b);
}

// a: 16 x 8, b: 8 x 8; the fragments of mma_m16n8k8_tf32.
CUPY_FLASH_DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k8_tf32(d, a, b);
}

// The same fragments.
CUPY_FLASH_DEVICE void mma_fp64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  if constexpr (kComputeCapability < 90) {
    // Before Hopper there is one shape: eight rows, four columns of a.
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma_m8n8k4_fp64(d[2 * row], d[2 * row + 1], a[2 * half + row], b[half]);
      }
    }
  } else {
    mma_m16n8k8_fp64(d, a, b);
  }
}

}  // namespace ptx
}  // namespace cupy_flash
