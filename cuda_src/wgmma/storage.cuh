// What a block keeps in shared memory, and the tensor maps it is filled by.
#pragma once

#include "ptx/tensor_map.cuh"
#include "wgmma/panels.cuh"
#include "wgmma/schedule.cuh"

namespace cupy_flash {
namespace wgmma {

// Mirrored by cupy_flash/plan_wgmma.py. The axes of a map: channels, sequence, heads, batch axes
// from the last to the first.
struct ForwardMaps {
  ptx::TensorMap q;
  ptx::TensorMap k;
  ptx::TensorMap v;
  ptx::TensorMap out;
};

// The output is collected in memory of its own if there is room, else where the queries were.
template <class TileQ, class TileO, int kStages, bool kOutputApart>
class QueriesAndOutput {
 public:
  static constexpr int kOutputStages = 1;
  CUPY_FLASH_DEVICE TileQ& q(int stage) { return q_[stage]; }
  CUPY_FLASH_DEVICE TileO& out(int) { return out_; }

 private:
  TileQ q_[kStages];
  TileO out_;
};
template <class TileQ, class TileO, int kStages>
class QueriesAndOutput<TileQ, TileO, kStages, false> {
 public:
  static constexpr int kOutputStages = kStages;
  CUPY_FLASH_DEVICE TileQ& q(int stage) { return tile_[stage].q; }
  CUPY_FLASH_DEVICE TileO& out(int stage) { return tile_[stage].out; }

 private:
  union {
    TileQ q;
    TileO out;
  } tile_[kStages];
};

template <class Traits>
struct ForwardStorage {
  using Element = typename Traits::Element;
  using TileQ = Panels<Element, Traits::kRows, Traits::kDepth>;
  using TileK = Panels<Element, Traits::kColumns, Traits::kDepth>;
  using TileV = Panels<Element, Traits::kColumns, Traits::kDepthV>;
  using TileO = Panels<Element, Traits::kRows, Traits::kDepthV>;
  using Ends = QueriesAndOutput<TileQ, TileO, Traits::kQueryStages, Traits::kOutputApart>;
  Ends ends;
  TileK k[Traits::kStages];
  TileV v[Traits::kStages];
  Pipeline<Traits::kQueryStages> q_pipeline;
  Pipeline<Traits::kStages> k_pipeline;
  Pipeline<Traits::kStages> v_pipeline;
  Pipeline<Ends::kOutputStages> out_pipeline;
  WorkQueue<Traits> queue;

  // One thread of the block does it.
  CUPY_FLASH_DEVICE void init() {
    constexpr int kWarps = Traits::kConsumers * kWarpgroup / kWarpSize;
    q_pipeline.init(1, Traits::kOutputApart ? kWarps : 1);
    k_pipeline.init(1, kWarps);
    v_pipeline.init(1, kWarps);
    out_pipeline.init(kWarps, 1);
    queue.init(kWarps + 3);  // and the threads of keys, of values and of output
    ptx::mbarrier_init_fence();
  }
};

}  // namespace wgmma
}  // namespace cupy_flash
