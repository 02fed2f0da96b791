// The threads that keep the pipelines filled.
#pragma once

#include "ptx/tensor_map.cuh"
#include "wgmma/storage.cuh"

namespace cupy_flash {
namespace wgmma {

// Where a head begins in a tensor map. An axis along which an array repeats has one entry there.
template <int kBatchAxes>
struct HeadPosition {
  int head;
  int batch[kBatchAxes];

  CUPY_FLASH_DEVICE HeadPosition(const SequenceStrides<kBatchAxes>& strides,
                                 const BatchIndex<kBatchAxes>& index, int head_)
      : head(strides.axis[1] == 0 ? 0 : head_) {
#pragma unroll
    for (int a = 0; a < kBatchAxes; ++a) {
      batch[a] = strides.batch[a] == 0 ? 0 : int(index.coordinate[a]);
    }
  }
};

// Begins to copy a tile of rows from `row0` on.
template <class Tile, int kBatchAxes>
CUPY_FLASH_DEVICE void load_panels(Tile& tile, const ptx::TensorMap& map, ptx::Mbarrier& full,
                                   const HeadPosition<kBatchAxes>& at, int row0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kCount; ++panel) {
    const int channel = panel * kPanelColumns;
    if constexpr (kBatchAxes == 1) {
      ptx::tma_load(tile.data[panel], map, full, channel, row0, at.head, at.batch[0]);
    } else {
      ptx::tma_load(tile.data[panel], map, full, channel, row0, at.head, at.batch[1], at.batch[0]);
    }
  }
}

// Begins to store a tile, or its rows from `row` on, as rows from `row0` on.
template <class Tile, int kBatchAxes>
CUPY_FLASH_DEVICE void store_panels(const ptx::TensorMap& map, Tile& tile,
                                    const HeadPosition<kBatchAxes>& at, int row0, int row = 0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kCount; ++panel) {
    const int channel = panel * kPanelColumns;
    if constexpr (kBatchAxes == 1) {
      ptx::tma_store(map, tile.data[panel][row], channel, row0, at.head, at.batch[0]);
    } else {
      ptx::tma_store(map, tile.data[panel][row], channel, row0, at.head, at.batch[1], at.batch[0]);
    }
  }
}

// The thread that copies queries and keys.
template <class Traits>
CUPY_FLASH_DEVICE void load_keys(const Params<Traits::kBatchAxes>& params, const ForwardMaps& maps,
                                 ForwardStorage<Traits>& shared) {
  using Storage = ForwardStorage<Traits>;
  Slot<Traits::kStages> slot;
  Slot<Traits::kQueryStages> q_slot;
  typename WorkQueue<Traits>::Place place;
  const int heads_per_kv = int(params.heads_q / params.heads_kv);
#pragma unroll 1
  while (true) {
    const Work<Traits>& work = shared.queue.wait(place);
    if (work.row0 < 0) break;
    const int row0 = work.row0;
    const Range tiles = work.tiles;
    const HeadPosition<Traits::kBatchAxes> q_at(params.q_strides, work.batch, work.head);
    const HeadPosition<Traits::kBatchAxes> k_at(params.k_strides, work.batch,
                                                work.head / heads_per_kv);
    shared.queue.release(place);
    place.advance();
    const auto load_tile = [&](int tile) {
      auto& full = shared.k_pipeline.acquire(slot, Storage::TileK::kBytes);
      load_panels(shared.k[slot.stage], maps.k, full, k_at, tile * Traits::kColumns);
      slot.advance();
    };
    int tile = tiles.end - 1;
    if (tile > tiles.begin) load_tile(tile);
    auto& full = shared.q_pipeline.acquire(q_slot, Storage::TileQ::kBytes);
    load_panels(shared.ends.q(q_slot.stage), maps.q, full, q_at, row0);
    q_slot.advance();
#pragma unroll 1
    for (--tile; tile > tiles.begin; --tile) load_tile(tile);
    ptx::mbarrier_arrive(shared.queue.wanted);
    if (tiles.begin < tiles.end) load_tile(tiles.begin);
  }
}

// The thread that copies values. It has its own, so that keys needn't wait for it.
template <class Traits>
CUPY_FLASH_DEVICE void load_values(const Params<Traits::kBatchAxes>& params,
                                   const ForwardMaps& maps, ForwardStorage<Traits>& shared) {
  Slot<Traits::kStages> slot;
  typename WorkQueue<Traits>::Place place;
  const int heads_per_kv = int(params.heads_q / params.heads_kv);
#pragma unroll 1
  while (true) {
    const Work<Traits>& work = shared.queue.wait(place);
    if (work.row0 < 0) break;
    const HeadPosition<Traits::kBatchAxes> at(params.v_strides, work.batch,
                                              work.head / heads_per_kv);
    const Range tiles = work.tiles;
    shared.queue.release(place);
    place.advance();
#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      auto& full = shared.v_pipeline.acquire(slot, ForwardStorage<Traits>::TileV::kBytes);
      load_panels(shared.v[slot.stage], maps.v, full, at, tile * Traits::kColumns);
      slot.advance();
    }
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
