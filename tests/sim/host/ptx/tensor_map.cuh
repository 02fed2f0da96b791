// Copies of whole boxes between global memory and shared memory, by the tensor memory accelerator.
#pragma once

#include "async.h"
#include "common/platform.cuh"
#include "ptx/mbarrier.cuh"
#include "tensor_map.h"

namespace cupy_flash {
namespace ptx {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

inline void prefetch(const TensorMap& map) { sim::prefetch(&map); }

inline void tma_load(void* to, const TensorMap& map, Mbarrier& full, int c0, int c1, int c2,
                     int c3) {
  sim::tma_load(to, &map, &full.state, {c0, c1, c2, c3});
}

inline void tma_load(void* to, const TensorMap& map, Mbarrier& full, int c0, int c1, int c2, int c3,
                     int c4) {
  sim::tma_load(to, &map, &full.state, {c0, c1, c2, c3, c4});
}

inline void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2, int c3) {
  sim::tma_store(&map, from, {c0, c1, c2, c3});
}

inline void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2, int c3,
                      int c4) {
  sim::tma_store(&map, from, {c0, c1, c2, c3, c4});
}

inline void bulk_load(void* to, const void* from, int bytes, Mbarrier& full) {
  sim::copy_bulk(to, from, bytes, &full.state);
}

inline void bulk_reduce_add(float* to, const void* from, int bytes) {
  sim::reduce_bulk(to, from, bytes);
}

inline void bulk_commit() { sim::end_bulk_group(); }

template <int kPending>
inline void bulk_wait_read() {
  sim::wait_for_bulk_groups(kPending);
}

inline void async_proxy_fence() { sim::show_shared_memory(); }

}  // namespace ptx
}  // namespace cupy_flash
