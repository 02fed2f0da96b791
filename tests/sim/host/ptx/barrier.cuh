// Barriers for a part of a block.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

inline sim::NamedBarrier& arrive_at_barrier(int id, int threads) {
  if (id < 0 || id > 15) sim::fail("named barrier " + std::to_string(id) + " doesn't exist");
  if (threads % kWarpSize != 0) sim::fail("a named barrier of a part of a warp");
  auto& barrier = sim::block().named[id];
  if (barrier.arrived > 0 && barrier.size != size_t(threads)) {
    sim::fail("named barrier " + std::to_string(id) + " of " + std::to_string(barrier.size) +
              " and of " + std::to_string(threads) + " threads");
  }
  barrier.size = size_t(threads);
  if (++barrier.arrived < barrier.size) return barrier;
  barrier.arrived = 0;
  std::vector<sim::Thread*> waiting;
  waiting.swap(barrier.waiting);
  for (sim::Thread* thread : waiting) thread->waits = false;
  return barrier;
}

inline void named_barrier(int id, int threads) {
  auto& barrier = arrive_at_barrier(id, threads);
  if (barrier.arrived == 0) return;  // it was the last
  barrier.waiting.push_back(&sim::self());
  sim::wait("named_barrier");
}

inline void barrier_arrive(int id, int threads) { arrive_at_barrier(id, threads); }

}  // namespace ptx
}  // namespace cupy_flash
