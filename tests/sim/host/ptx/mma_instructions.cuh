// Products of small matrices on tensor cores, one function for each instruction: d += a b, where a
// warp holds the sums d.
#pragma once

#include "common/platform.cuh"
#include "ptx/convert.cuh"

namespace cupy_flash {
namespace ptx {

inline void needs_capability(const char* what, int capability) {
  if (kComputeCapability < capability) sim::fail(std::string(what) + " is for later GPUs");
}

// Sums in double, then rounded: a GPU's may be off by its own rounding. Element [row][column] of
// each factor, and what a lane holds, are given by functions.
template <int kRows, int kDepth, class Real, class Fragment, class Left, class Right>
inline void multiply_warp(const char* what, Real (&d)[kRows / 4], const Fragment& a,
                          const Fragment& b, const Left& left, const Right& right) {
  struct Operand {
    Real* d;
    const Fragment* a;
    const Fragment* b;
  } operand{d, &a, &b};
  sim::with_warp(what, operand, [&](Operand** all, int lanes) {
    if (lanes != 32) sim::fail("mma of a part of a warp");
    double a_of[kRows][kDepth];
    double b_of[kDepth][8];
    for (int lane = 0; lane < 32; ++lane) {
      left(*all[lane]->a, lane / 4, lane % 4, a_of);
      right(*all[lane]->b, lane / 4, lane % 4, b_of);
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int x = 0; x < kRows / 4; ++x) {
        const int row = lane / 4 + 8 * (x / 2);
        const int column = lane % 4 * 2 + x % 2;
        double sum = all[lane]->d[x];
        for (int k = 0; k < kDepth; ++k) sum += a_of[row][k] * b_of[k][column];
        all[lane]->d[x] = Real(sum);
      }
    }
  });
}

// --- Two elements in a register --------------------------------------------------------------

// Registers come in pairs for rows g and g + 8 of a, one pair for eight columns.
template <int kDepth, class Widen>
inline void multiply_halves(const char* what, float (&d)[4], const u32* a, const u32* b,
                            const Widen& widen) {
  multiply_warp<16, kDepth>(
      what, d, a, b,
      [&](const u32* bits, int g, int t, double (&to)[16][kDepth]) {
        for (int r = 0; r < kDepth / 4; ++r) {
          for (int e = 0; e < 2; ++e) {
            to[g + 8 * (r % 2)][2 * t + e + 8 * (r / 2)] = widen(u16(bits[r] >> (16 * e)));
          }
        }
      },
      [&](const u32* bits, int g, int t, double (&to)[kDepth][8]) {
        for (int r = 0; r < kDepth / 8; ++r) {
          for (int e = 0; e < 2; ++e) {
            to[2 * t + e + 8 * r][g] = widen(u16(bits[r] >> (16 * e)));
          }
        }
      });
}

inline void mma_m16n8k8_fp16(float (&d)[4], const u32 (&a)[2], u32 b) {
  needs_capability("mma_m16n8k8_fp16", 75);
  multiply_halves<8>("mma_m16n8k8_fp16", d, a, &b, fp16_to_float);
}

inline void mma_m16n8k16_fp16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  needs_capability("mma_m16n8k16_fp16", 80);
  multiply_halves<16>("mma_m16n8k16_fp16", d, a, b, fp16_to_float);
}

inline void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  needs_capability("mma_m16n8k16_bf16", 80);
  multiply_halves<16>("mma_m16n8k16_bf16", d, a, b,
                      [](u16 bits) { return __uint_as_float(u32(bits) << 16); });
}

// --- One element in a register ---------------------------------------------------------------

// Rows g and g + 8 of a, if there are so many, for four columns, then for the next four.
template <int kRows, int kDepth, class Real, class Element, class Widen>
inline void multiply_wide(const char* what, Real (&d)[kRows / 4], const Element* a,
                          const Element* b, const Widen& widen) {
  constexpr int kHigh = kRows / 8;
  multiply_warp<kRows, kDepth>(
      what, d, a, b,
      [&](const Element* f, int g, int t, double (&to)[kRows][kDepth]) {
        for (int i = 0; i < kHigh * kDepth / 4; ++i) {
          to[g + 8 * (i % kHigh)][t + 4 * (i / kHigh)] = widen(f[i]);
        }
      },
      [&](const Element* f, int g, int t, double (&to)[kDepth][8]) {
        for (int i = 0; i < kDepth / 4; ++i) to[t + 4 * i][g] = widen(f[i]);
      });
}

// The bits of a float that tf32 doesn't have count for nothing.
inline void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  needs_capability("mma_m16n8k8_tf32", 80);
  multiply_wide<16, 8>("mma_m16n8k8_tf32", d, static_cast<const u32*>(a), b,
                       [](u32 bits) { return __uint_as_float(bits & 0xffffe000u); });
}

inline void mma_m8n8k4_fp64(double& low, double& high, double a, double b) {
  needs_capability("mma_m8n8k4_fp64", 80);
  double d[2] = {low, high};
  multiply_wide<8, 4>("mma_m8n8k4_fp64", d, &a, &b, [](double x) { return x; });
  low = d[0];
  high = d[1];
}

inline void mma_m16n8k8_fp64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  needs_capability("mma_m16n8k8_fp64", 90);
  multiply_wide<16, 8>("mma_m16n8k8_fp64", d, static_cast<const double*>(a), b,
                       [](double x) { return x; });
}

}  // namespace ptx
}  // namespace cupy_flash
