// The threads of the backward pass that load, and that store dK and dV.
#pragma once

#include "wgmma/backward_storage.cuh"
#include "wgmma/producer.cuh"

namespace cupy_flash {
namespace wgmma {

// The thread that copies keys and values.
template <class Traits, bool kByRole>
CUPY_FLASH_DEVICE void load_key_blocks(const Params<Traits::kBatchAxes>& params,
                                       const BackwardMaps& maps,
                                       BackwardStorage<Traits, kByRole>& shared) {
  using Storage = BackwardStorage<Traits, kByRole>;
  using Position = HeadPosition<Traits::kBatchAxes>;
  Slot<Storage::kKeyStages> slot;
  typename Storage::Queue::Place place;
#pragma unroll 1
  while (true) {
    const KeyBlock<Traits>& block = shared.queue.wait(place);
    if (block.row0 < 0) break;
    load_panels(shared.k[slot.stage], maps.k,
                shared.k_pipeline.acquire(slot, Storage::TileK::kBytes),
                Position(params.k_strides, block.batch, block.head), block.row0);
    load_panels(shared.v[slot.stage], maps.v,
                shared.v_pipeline.acquire(slot, Storage::TileV::kBytes),
                Position(params.v_strides, block.batch, block.head), block.row0);
    shared.queue.release(place);
    place.advance();
    slot.advance();
  }
}

// The thread that copies tiles of queries and of dO.
template <class Traits, bool kByRole>
CUPY_FLASH_DEVICE void load_query_tiles(const Params<Traits::kBatchAxes>& params,
                                        const BackwardMaps& maps,
                                        BackwardStorage<Traits, kByRole>& shared) {
  using Storage = BackwardStorage<Traits, kByRole>;
  using Position = HeadPosition<Traits::kBatchAxes>;
  using Terms = typename Storage::Terms;
  const int per_head = query_tiles<Traits>(params);
  Slot<Traits::kStages> slot;
  typename Storage::Queue::Place place;
#pragma unroll 1
  while (true) {
    const KeyBlock<Traits>& block = shared.queue.wait(place);
    if (block.row0 < 0) break;
    const Terms* const terms =
        static_cast<const Terms*>(params.row_terms) + block.heads_before(params) * per_head;
    QueryTile at = QueryTile::before_first(block.tiles);
#pragma unroll 1
    for (int left = block.count; left > 0; --left) {
      at.advance(block.tiles, per_head);
      if (left == 1) ptx::mbarrier_arrive(shared.queue.wanted);
      const int head = block.first_head_q + at.index / per_head;
      const int row0 = at.tile * Traits::kColumns;
      auto& full = shared.q_pipeline.acquire(slot, Storage::TileQ::kBytes + int(sizeof(Terms)));
      load_panels(shared.q[slot.stage], maps.q, full, Position(params.q_strides, block.batch, head),
                  row0);
      ptx::bulk_load(&shared.terms[slot.stage], terms + at.index, sizeof(Terms), full);
      load_panels(shared.dout[slot.stage], maps.dout,
                  shared.dout_pipeline.acquire(slot, Storage::TileO::kBytes),
                  Position(params.dout_strides, block.batch, head), row0);
      slot.advance();
    }
    if (block.count == 0) ptx::mbarrier_arrive(shared.queue.wanted);
    shared.queue.release(place);
    place.advance();
  }
}

// The thread that copies dK and dV to global memory, so that those who compute them needn't wait.
template <class Traits, bool kByRole>
CUPY_FLASH_DEVICE void store_gradients(const Params<Traits::kBatchAxes>& params,
                                       const BackwardMaps& maps,
                                       BackwardStorage<Traits, kByRole>& shared) {
  using Storage = BackwardStorage<Traits, kByRole>;
  using Position = HeadPosition<Traits::kBatchAxes>;
  Slot<Storage::kKeyStages> slot;
  typename Storage::Queue::Place place;
#pragma unroll 1
  while (true) {
    const KeyBlock<Traits>& block = shared.queue.wait(place);
    if (block.row0 < 0) break;
    shared.out_pipeline.wait(slot);
    // A box has 64 rows.
#pragma unroll
    for (int row = 0; row < Traits::kRows; row += kGroupRows) {
      store_panels(maps.dv, shared.v[slot.stage],
                   Position(params.dv_strides, block.batch, block.head), block.row0 + row, row);
      store_panels(maps.dk, shared.k[slot.stage],
                   Position(params.dk_strides, block.batch, block.head), block.row0 + row, row);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    shared.k_pipeline.release(slot);
    shared.v_pipeline.release(slot);
    shared.queue.release(place);
    place.advance();
    slot.advance();
  }
}

// What the warpgroup does that doesn't compute.
template <class Traits, bool kByRole>
CUPY_FLASH_DEVICE void supply(const Params<Traits::kBatchAxes>& params, const BackwardMaps& maps,
                              BackwardStorage<Traits, kByRole>& shared) {
  if (threadIdx.x == 0) load_query_tiles(params, maps, shared);
  if (threadIdx.x == kWarpSize) load_key_blocks(params, maps, shared);
  if (threadIdx.x == 2 * kWarpSize) store_gradients(params, maps, shared);
  if (threadIdx.x == 3 * kWarpSize) plan_work(params, shared.queue);
}

}  // namespace wgmma
}  // namespace cupy_flash
