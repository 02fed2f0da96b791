// Values that the compiler can't see through; here it may.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

template <class T>
inline T* opaque(T* pointer) {
  return pointer;
}

inline int opaque(int value) { return value; }

}  // namespace ptx
}  // namespace cupy_flash
