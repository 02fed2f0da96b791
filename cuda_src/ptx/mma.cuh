// Products of small matrices on tensor cores, one for each type: d += a b, where a warp holds the
// 16 x 8 sums d.
//
// Lane 4g + t of the warp holds d[0], d[1] in row g, columns 2t and 2t + 1, and d[2], d[3] in row
// g + 8. Source of all fragments: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// a: 16 x 16, pairs of columns in a register; b: 16 x 8, pairs of rows in a register.
CUPY_FLASH_DEVICE void mma_fp16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  // Turing multiplies eight columns at a time.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %8, %9, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]), "f"(d[0]), "f"(d[1]), "f"(d[2]),
          "f"(d[3]));
  }
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]),
        "f"(d[2]), "f"(d[3]));
#endif
}

CUPY_FLASH_DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]),
        "f"(d[2]), "f"(d[3]));
}

// a: 16 x 8; a[0], a[1] in column t, a[2], a[3] in column t + 4, the odd ones in row g + 8.
// b: 8 x 8; b[0] in row t, b[1] in row t + 4, column g.
CUPY_FLASH_DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]),
        "f"(d[2]), "f"(d[3]));
}

// The same fragments as mma_tf32.
CUPY_FLASH_DEVICE void mma_fp64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  // Before Hopper there is one shape: eight rows, four columns of a.
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%4, %5};"
          : "=d"(d[2 * row]), "=d"(d[2 * row + 1])
          : "d"(a[2 * half + row]), "d"(b[half]), "d"(d[2 * row]), "d"(d[2 * row + 1]));
    }
  }
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=d"(d[0]), "=d"(d[1]), "=d"(d[2]), "=d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]), "d"(d[0]), "d"(d[1]),
        "d"(d[2]), "d"(d[3]));
#endif
}

}  // namespace ptx
}  // namespace cupy_flash
