// Registers that the warps of a warpgroup hand over to another one.
#pragma once

#include "common/platform.cuh"
#include "warpgroup.h"

namespace cupy_flash {
namespace ptx {

template <int kCount>
inline void registers_increase() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "what the instruction takes");
  sim::change_registers("registers_increase", kCount, true);
}

template <int kCount>
inline void registers_decrease() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "what the instruction takes");
  sim::change_registers("registers_decrease", kCount, false);
}

}  // namespace ptx
}  // namespace cupy_flash
