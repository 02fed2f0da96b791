// The tiles of a bias gradient, and what has to be summed into each.
//
// Where the bias was broadcast along an axis, dbias has stride 0 there and the axis is summed
// over. The axes of the S x S square, the heads and the batch axes are treated alike: each is
// either owned (one coordinate per tile) or summed (walked over by the tile's block).
#pragma once

#include "common/batch.cuh"
#include "common/dtypes.cuh"

namespace cupy_flash {

template <class Traits>
struct BiasTiles {
  static constexpr int kBatchAxes = Traits::kBatchAxes;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kColumns = Traits::kColumns;

  const Params<kBatchAxes>& params;
  bool sum_heads;
  bool sum_queries;
  bool sum_keys;
  i64 query_tiles;
  i64 key_tiles;
  i64 owned;   // tiles of dbias
  i64 summed;  // tiles of logits that are added up in each

  CUPY_FLASH_DEVICE explicit BiasTiles(const Params<kBatchAxes>& p)
      : params(p),
        sum_heads(p.dbias_strides.axis[0] == 0),
        sum_queries(p.dbias_strides.axis[1] == 0),
        sum_keys(p.dbias_strides.axis[2] == 0),
        query_tiles(ceil_div(int(p.seqlen_q), kRows)),
        key_tiles(ceil_div(int(p.seqlen_k), kColumns)),
        owned(1),
        summed(1) {
    (sum_queries ? summed : owned) *= query_tiles;
    (sum_keys ? summed : owned) *= key_tiles;
    (sum_heads ? summed : owned) *= p.heads_q;
#pragma unroll
    for (int a = 0; a < kBatchAxes; ++a) {
      (p.dbias_strides.batch[a] == 0 ? summed : owned) *= p.batch_shape[a];
    }
  }

  struct Coordinates {
    int query_tile;
    int key_tile;
    int head;
    i64 batch;  // flat
  };

  // The tile of logits number `term` among those that are added up in tile `tile` of dbias.
  CUPY_FLASH_DEVICE Coordinates locate(i64 tile, i64 term) const {
    Coordinates at;
    at.query_tile = int(take(sum_queries, query_tiles, tile, term));
    at.key_tile = int(take(sum_keys, key_tiles, tile, term));
    at.head = int(take(sum_heads, params.heads_q, tile, term));
    at.batch = 0;
    i64 step = 1;
#pragma unroll
    for (int a = kBatchAxes - 1; a >= 0; --a) {
      const bool sum = params.dbias_strides.batch[a] == 0;
      at.batch += step * take(sum, params.batch_shape[a], tile, term);
      step *= params.batch_shape[a];
    }
    return at;
  }

  // Rows and columns of a tile of dbias; 1 where the axis is summed over.
  CUPY_FLASH_DEVICE int tile_rows() const { return sum_queries ? 1 : kRows; }
  CUPY_FLASH_DEVICE int tile_columns() const { return sum_keys ? 1 : kColumns; }

  template <class Acc>
  CUPY_FLASH_DEVICE void store(i64 tile, int row, int column, Acc value) const {
    using BiasElement = typename Traits::BiasElement;
    const Coordinates at = locate(tile, 0);
    const i64 i = (sum_queries ? 0 : i64(at.query_tile) * kRows) + row;
    const i64 j = (sum_keys ? 0 : i64(at.key_tile) * kColumns) + column;
    if (i >= params.seqlen_q || j >= params.seqlen_k) return;
    const BatchIndex<kBatchAxes> batch(params, at.batch);
    const auto& strides = params.dbias_strides;
    BiasElement* to = static_cast<BiasElement*>(params.dbias) + batch.offset(strides.batch) +
                      at.head * strides.axis[0] + i * strides.axis[1] + j * strides.axis[2];
    narrow(value, *to);
  }

 private:
  CUPY_FLASH_DEVICE static i64 take(bool sum, i64 size, i64& tile, i64& term) {
    i64& from = sum ? term : tile;
    const i64 coordinate = from % size;
    from /= size;
    return coordinate;
  }
};

}  // namespace cupy_flash
