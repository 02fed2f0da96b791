// Arithmetic for which the language has no word.
#pragma once

#include "common/platform.cuh"
#include "ptx/convert.cuh"

namespace cupy_flash {
namespace ptx {

inline float min_or_nan(float a, float b) {
  if (kComputeCapability < 80) sim::fail("min_or_nan is for later GPUs");
  if (std::isnan(a) || std::isnan(b)) return __int_as_float(0x7fffffff);
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

inline u32 min_or_nan_halves(u32 a, u32 b, float (*widen)(u16), u16 (*narrow)(float)) {
  const auto half = [&](int shift) {
    return u32(narrow(min_or_nan(widen(u16(a >> shift)), widen(u16(b >> shift))))) << shift;
  };
  return half(0) | half(16);
}

inline u32 min_or_nan_fp16x2(u32 a, u32 b) {
  return min_or_nan_halves(a, b, fp16_to_float, float_to_fp16);
}

inline u32 min_or_nan_bf16x2(u32 a, u32 b) {
  const auto widen = [](u16 bits) { return __uint_as_float(u32(bits) << 16); };
  return min_or_nan_halves(a, b, widen, float_to_bf16);
}

}  // namespace ptx
}  // namespace cupy_flash
