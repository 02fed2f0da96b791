// Arithmetic for which the language has no word.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

inline float min_or_nan(float a, float b) {
  if (kComputeCapability < 80) sim::fail("min_or_nan is for later GPUs");
  if (std::isnan(a) || std::isnan(b)) return __int_as_float(0x7fffffff);
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

}  // namespace ptx
}  // namespace cupy_flash
