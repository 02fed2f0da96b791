// Values that the compiler can't see through; here it may.
#pragma once

#include "common/platform.cuh"
#include "warpgroup.h"

namespace cupy_flash {
namespace ptx {

template <class T>
inline T* opaque(T* pointer) {
  return pointer;
}

inline int opaque(int value) { return value; }

template <int kCount>
inline void hold(float (&values)[kCount]) {
  sim::require_not_pending("hold", values, sizeof values);
}

template <int kCount>
inline void hold(u32 (&)[kCount]) {}

}  // namespace ptx
}  // namespace cupy_flash
