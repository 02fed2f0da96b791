// Barriers for a part of a block.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

inline void named_barrier(int id, int threads) {
  if (id < 0 || id > 15) sim::fail("named barrier " + std::to_string(id) + " doesn't exist");
  if (threads % kWarpSize != 0) sim::fail("a named barrier of a part of a warp");
  sim::meet(sim::block().named[id], size_t(threads), "named_barrier", [] {});
}

}  // namespace ptx
}  // namespace cupy_flash
