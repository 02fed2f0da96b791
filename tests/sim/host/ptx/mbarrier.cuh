// Barriers in shared memory that count arrivals and the bytes of asynchronous copies.
#pragma once

#include "async.h"
#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

struct alignas(8) Mbarrier {
  u64 state;
};

inline void mbarrier_init(Mbarrier& barrier, int count) {
  sim::make_mbarrier(&barrier.state, count);
}

inline void mbarrier_init_fence() { sim::show_mbarriers(); }

inline void mbarrier_arrive(Mbarrier& barrier) {
  sim::arrive_at("mbarrier_arrive", &barrier.state, 0);
}

inline void mbarrier_arrive_expect(Mbarrier& barrier, int bytes) {
  if (bytes < 0 || bytes >= 1 << 20) sim::fail("mbarrier_arrive_expect of that many bytes");
  sim::arrive_at("mbarrier_arrive_expect", &barrier.state, bytes);
}

inline void mbarrier_wait(Mbarrier& barrier, int parity) {
  sim::wait_for_phase(&barrier.state, parity);
}

}  // namespace ptx
}  // namespace cupy_flash
