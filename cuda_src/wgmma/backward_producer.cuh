// The thread that keeps the backward pass's pipelines filled.
#pragma once

#include "wgmma/backward_storage.cuh"
#include "wgmma/producer.cuh"

namespace cupy_flash {
namespace wgmma {

template <class Traits, bool kByRole>
CUPY_FLASH_DEVICE void load_backward(const Params<Traits::kBatchAxes>& params,
                                     const BackwardMaps& maps,
                                     BackwardStorage<Traits, kByRole>& shared) {
  using Storage = BackwardStorage<Traits, kByRole>;
  using Position = HeadPosition<Traits::kBatchAxes>;
  using Terms = typename Storage::Terms;
  const KeyBlock<Traits>& block = shared.block;
  const int count = block.count;
  const int per_head = query_tiles<Traits>(params);
  const Terms* const terms =
      static_cast<const Terms*>(params.row_terms) + block.heads_before(params) * per_head;

  QueryTile at = QueryTile::before_first(block.tiles);
  at.advance(block.tiles, per_head);
  Slot<Traits::kStages> slot;
  const auto load_queries = [&]() {
    auto& full = shared.q_pipeline.acquire(slot, Storage::TileQ::kBytes + int(sizeof(Terms)));
    load_panels(shared.q[slot.stage], maps.q, full,
                Position(params.q_strides, block.batch, block.first_head_q + at.index / per_head),
                at.tile * Traits::kColumns);
    ptx::bulk_load(&shared.terms[slot.stage], terms + at.index, sizeof(Terms), full);
  };
  const auto load_dout = [&]() {
    auto& full = shared.dout_pipeline.acquire(slot, Storage::TileO::kBytes);
    load_panels(
        shared.dout[slot.stage], maps.dout, full,
        Position(params.dout_strides, block.batch, block.first_head_q + at.index / per_head),
        at.tile * Traits::kColumns);
    at.advance(block.tiles, per_head);
    slot.advance();
  };

  load_panels(shared.k, maps.k, shared.k_pipeline.acquire({}, Storage::TileK::kBytes),
              Position(params.k_strides, block.batch, block.head), block.row0);
  if (count > 0) load_queries();
  load_panels(shared.v, maps.v, shared.v_pipeline.acquire({}, Storage::TileV::kBytes),
              Position(params.v_strides, block.batch, block.head), block.row0);
  if (count > 0) load_dout();
#pragma unroll 1
  for (int n = 1; n < count; ++n) {
    load_queries();
    load_dout();
  }
  if (count > 0) {  // consumers look one tile ahead
    shared.q_pipeline.wait_empty(slot);
    shared.q_pipeline.publish(slot);
    if constexpr (kByRole) {
      shared.dout_pipeline.wait_empty(slot);
      shared.dout_pipeline.publish(slot);
    }
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
