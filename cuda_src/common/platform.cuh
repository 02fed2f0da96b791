// What differs between compilers, GPUs and the host: the rest of cuda_src uses only these names.
#pragma once

#define CUPY_FLASH_DEVICE __device__ __forceinline__

// A kernel parameter that is read in place instead of being copied to local memory when its
// address is taken; compute capability 7.0 and later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
#define CUPY_FLASH_GRID_CONSTANT __grid_constant__
#else
#define CUPY_FLASH_GRID_CONSTANT
#endif

namespace cupy_flash {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Ten times the major version plus the minor one, of the GPU that this is compiled for.
#if defined(__CUDA_ARCH__)
constexpr int kComputeCapability = __CUDA_ARCH__ / 10;
#else
constexpr int kComputeCapability = 0;  // the host's pass of nvcc, which makes no code of it
#endif

constexpr int kWarpSize = 32;
constexpr u32 kAllLanes = 0xffffffffu;

CUPY_FLASH_DEVICE unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(1024) unsigned char cupy_flash_shared[];
  return cupy_flash_shared;
}

// The block's dynamic shared memory, seen as one struct.
template <class Storage>
CUPY_FLASH_DEVICE Storage& shared_storage() {
  return *reinterpret_cast<Storage*>(dynamic_shared_memory());
}

CUPY_FLASH_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace cupy_flash
