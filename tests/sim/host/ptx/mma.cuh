// Products of small matrices on tensor cores: d += a b, where a warp holds the 16 x 8 sums d.
#pragma once

#include "common/platform.cuh"
#include "ptx/convert.cuh"

namespace cupy_flash {
namespace ptx {

// Sums in double, then rounded: a GPU's may be off by its own rounding. Element [row][column] of
// each factor, and what a lane holds, are given by functions.
template <int kDepth, class Real, class Fragment, class Left, class Right>
inline void multiply_warp(const char* what, Real (&d)[4], const Fragment& a, const Fragment& b,
                          const Left& left, const Right& right) {
  struct Operand {
    Real* d;
    const Fragment* a;
    const Fragment* b;
  } operand{d, &a, &b};
  sim::with_warp(what, operand, [&](Operand** all, int lanes) {
    if (lanes != 32) sim::fail("mma of a part of a warp");
    double a_of[16][kDepth];
    double b_of[kDepth][8];
    for (int lane = 0; lane < 32; ++lane) {
      left(*all[lane]->a, lane / 4, lane % 4, a_of);
      right(*all[lane]->b, lane / 4, lane % 4, b_of);
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int x = 0; x < 4; ++x) {
        const int row = lane / 4 + 8 * (x / 2);
        const int column = lane % 4 * 2 + x % 2;
        double sum = all[lane]->d[x];
        for (int k = 0; k < kDepth; ++k) sum += a_of[row][k] * b_of[k][column];
        all[lane]->d[x] = Real(sum);
      }
    }
  });
}

struct HalfFragment {
  const u32* bits;
};

template <class Widen>
inline void mma_halves(const char* what, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                       const Widen& widen) {
  multiply_warp<16>(
      what, d, HalfFragment{a}, HalfFragment{b},
      [&](const HalfFragment& f, int g, int t, double (&to)[16][16]) {
        for (int r = 0; r < 4; ++r) {
          for (int e = 0; e < 2; ++e) {
            to[g + 8 * (r % 2)][2 * t + e + 8 * (r / 2)] = widen(u16(f.bits[r] >> (16 * e)));
          }
        }
      },
      [&](const HalfFragment& f, int g, int t, double (&to)[16][8]) {
        for (int r = 0; r < 2; ++r) {
          for (int e = 0; e < 2; ++e) {
            to[2 * t + e + 8 * r][g] = widen(u16(f.bits[r] >> (16 * e)));
          }
        }
      });
}

inline void mma_fp16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_halves("mma_fp16", d, a, b, [](u16 bits) { return fp16_to_float(bits); });
}

inline void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_halves("mma_bf16", d, a, b, [](u16 bits) { return __uint_as_float(u32(bits) << 16); });
}

template <class Real, class Element, class Widen>
inline void mma_wide(const char* what, Real (&d)[4], const Element (&a)[4], const Element (&b)[2],
                     const Widen& widen) {
  multiply_warp<8>(
      what, d, static_cast<const Element*>(a), static_cast<const Element*>(b),
      [&](const Element* f, int g, int t, double (&to)[16][8]) {
        for (int i = 0; i < 4; ++i) to[g + 8 * (i % 2)][t + 4 * (i / 2)] = widen(f[i]);
      },
      [&](const Element* f, int g, int t, double (&to)[8][8]) {
        for (int i = 0; i < 2; ++i) to[t + 4 * i][g] = widen(f[i]);
      });
}

// The bits of a float that tf32 doesn't have count for nothing.
inline void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_wide("mma_tf32", d, a, b, [](u32 bits) { return __uint_as_float(bits & 0xffffe000u); });
}

inline void mma_fp64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  mma_wide("mma_fp64", d, a, b, [](double x) { return x; });
}

}  // namespace ptx
}  // namespace cupy_flash
