// Values that the compiler can't see through.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// Returns the value; how it was computed is forgotten. So it isn't carried from one round of a loop
// to the next in registers of its own, and what follows from it is computed anew.
template <class T>
CUPY_FLASH_DEVICE T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

CUPY_FLASH_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Keeps what is computed from the values before this from being moved behind it, and what comes
// after from being moved before: around asynchronous products, which the compiler takes for done.
template <int kCount>
CUPY_FLASH_DEVICE void hold(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
CUPY_FLASH_DEVICE void hold(u32 (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

}  // namespace ptx
}  // namespace cupy_flash
