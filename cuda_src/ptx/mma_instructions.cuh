// Products of small matrices on tensor cores, one function for each instruction: d += a b, where a
// warp holds the sums d. Their names give the rows and columns of d and what is summed over.
//
// Lane 4g + t of the warp holds d[0], d[1] in row g, columns 2t and 2t + 1, and d[2], d[3] in row
// g + 8. Source of all fragments: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// a: 16 x 8, columns 2t and 2t + 1 of row g, then of row g + 8; b: 8 x 8, rows 2t and 2t + 1 of
// column g. Compute capability 7.5 and later.
CUPY_FLASH_DEVICE void mma_m16n8k8_fp16(float (&d)[4], const u32 (&a)[2], u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %8, %9, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

// a: 16 x 16, pairs of columns in a register; b: 16 x 8, pairs of rows in a register. Compute
// capability 8.0 and later, as all that follow.
CUPY_FLASH_DEVICE void mma_m16n8k16_fp16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]),
        "f"(d[2]), "f"(d[3]));
}

// The same fragments.
CUPY_FLASH_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]),
        "f"(d[2]), "f"(d[3]));
}

// a: 16 x 8; a[0], a[1] in column t, a[2], a[3] in column t + 4, the odd ones in row g + 8.
// b: 8 x 8; b[0] in row t, b[1] in row t + 4, column g.
CUPY_FLASH_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]),
        "f"(d[2]), "f"(d[3]));
}

// Eight rows: low and high are row g, columns 2t and 2t + 1. a: 8 x 4, row g, column t; b: 4 x 8,
// row t, column g.
CUPY_FLASH_DEVICE void mma_m8n8k4_fp64(double& low, double& high, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%4, %5};"
      : "=d"(low), "=d"(high)
      : "d"(a), "d"(b), "d"(low), "d"(high));
}

// The fragments of mma_m16n8k8_tf32. Compute capability 9.0 and later.
CUPY_FLASH_DEVICE void mma_m16n8k8_fp64(double (&d)[4], const double (&a)[4],
                                        const double (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=d"(d[0]), "=d"(d[1]), "=d"(d[2]), "=d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]), "d"(d[0]), "d"(d[1]),
        "d"(d[2]), "d"(d[3]));
}

}  // namespace ptx
}  // namespace cupy_flash
