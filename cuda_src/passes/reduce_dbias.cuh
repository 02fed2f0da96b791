// Adds up the parts of each tile of dbias, in order. One block per tile.
#pragma once

#include "common/bias_tile.cuh"

namespace cupy_flash {
namespace passes {

template <class Traits>
CUPY_FLASH_DEVICE void reduce_dbias(const Params<Traits::kBatchAxes>& params) {
  using Acc = Accumulator<typename Traits::Element>;
  constexpr int kTileSize = Traits::kRows * Traits::kColumns;
  const BiasTiles<Traits> tiles(params);
  const Acc* const partial = static_cast<const Acc*>(params.dbias_partial);
  const int columns = tiles.tile_columns();

  for (i64 tile = blockIdx.x; tile < tiles.owned; tile += gridDim.x) {
    for (int e = threadIdx.x; e < tiles.tile_rows() * columns; e += Traits::kThreads) {
      Acc sum = Acc(0);
      for (i64 split = 0; split < params.dbias_splits; ++split) {
        sum += partial[(split * tiles.owned + tile) * kTileSize + e];
      }
      tiles.store(tile, e / columns, e % columns, sum);
    }
  }
}

}  // namespace passes
}  // namespace cupy_flash
