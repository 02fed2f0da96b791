// Products of a warpgroup, four warps, on Hopper's tensor cores: d += a b, asynchronously.
#pragma once

#include "common/platform.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared_memory_instructions.cuh"
#include "warpgroup.h"

namespace cupy_flash {

struct fp16;

namespace ptx {

inline u64 wgmma_descriptor(const void* tile, int leading_bytes, int stride_bytes) {
  const u32 address = shared_address(tile);
  for (int field : {int(address), leading_bytes, stride_bytes}) {
    if (field < 0 || field % 16 != 0 || field >= 1 << 18) {
      sim::fail("wgmma_descriptor of " + std::to_string(field) + " bytes");
    }
  }
  return u64(address >> 4) | u64(leading_bytes >> 4) << 16 | u64(stride_bytes >> 4) << 32 |
         u64(1) << 62;
}

inline u64 wgmma_advance(u64 descriptor, int units) {
  const int address = int(descriptor & 0x3fff) + units;
  if (address < 0 || address > 0x3fff) sim::fail("wgmma_advance beyond all addresses");
  return (descriptor & ~u64(0x3fff)) | u64(address);
}

inline void wgmma_fence() { sim::fence_products(); }

inline void wgmma_commit() { sim::end_product_group(); }

template <int kPending>
inline void wgmma_wait() {
  sim::wait_for_products(kPending);
}

template <class Element>
float widen_bits(u16 bits) {
  return kIsFp16<Element> ? fp16_to_float(bits) : __uint_as_float(u32(bits) << 16);
}

template <class Element, int kN, bool kTransposeB>
inline void wgmma_ss(float (&d)[kN / 2], u64 a, u64 b, bool accumulate) {
  static_assert(kN % 16 == 0 && kN >= 16 && kN <= 256, "a shape that there is");
  sim::begin_product("wgmma_ss", {d, nullptr, a, b, accumulate}, kN, kTransposeB,
                     widen_bits<Element>);
}

template <class Element, int kN, bool kTransposeB>
inline void wgmma_rs(float (&d)[kN / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  static_assert(kN % 16 == 0 && kN >= 16 && kN <= 256, "a shape that there is");
  sim::begin_product("wgmma_rs", {d, a, 0, b, accumulate}, kN, kTransposeB, widen_bits<Element>);
}

}  // namespace ptx
}  // namespace cupy_flash
