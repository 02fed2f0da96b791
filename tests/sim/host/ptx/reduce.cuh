// Additions to global memory whose old value nobody asks for.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// As on the GPU that is simulated.
constexpr bool kHasVectorRed = SIM_CAPABILITY >= 90;

inline void red_add(float* to, float value) { *to += value; }
inline void red_add(double* to, double value) { *to += value; }

inline void red_add_4(float* to, const float (&value)[4]) {
  if (reinterpret_cast<size_t>(to) % 16 != 0) sim::fail("red_add_4 of a misaligned address");
  for (int x = 0; x < 4; ++x) to[x] += value[x];
}

}  // namespace ptx
}  // namespace cupy_flash
