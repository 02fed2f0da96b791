// dbias = dS, summed over the axes in which the bias was broadcast: a block owns one tile of dbias
// and one of `splits` equal parts of what is summed into it.
#pragma once

#include "common/bias_tile.cuh"
#include "simt/backward.cuh"

namespace cupy_flash {
namespace simt {

template <class Traits>
CUPY_FLASH_DEVICE void backward_dbias(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Acc = Accumulator<Element>;
  constexpr int kThreads = Traits::kThreads;
  static_assert(threads_cover_tile<Traits>(), "the threads cover the tile");
  constexpr int kM = Traits::kRows / LogitGrid<kThreads>::kHeight;
  constexpr int kN = Traits::kColumns / LogitGrid<kThreads>::kWidth;
  constexpr int kChunkD = Traits::kChunkD;
  constexpr int kChunkV = Traits::kChunkV;
  static_assert(!Traits::kResident, "each tile belongs to another head");

  auto& shared = shared_storage<BackwardStorage<Traits>>();
  const LogitGrid<kThreads> at;
  const BiasTiles<Traits> tiles(params);
  const int head_dim = int(params.head_dim);
  const int head_dim_v = int(params.head_dim_v);
  const i64 splits = params.dbias_splits;
  const i64 terms_per_split = (tiles.summed + splits - 1) / splits;

  for (i64 block = blockIdx.x; block < tiles.owned * splits; block += gridDim.x) {
    const i64 tile = block % tiles.owned;
    const i64 first = block / tiles.owned * terms_per_split;
    const i64 last = min_of(tiles.summed, first + terms_per_split);

    Acc sums[kM][kN] = {};
    for (i64 term = first; term < last; ++term) {
      const auto where = tiles.locate(tile, term);
      const int query0 = where.query_tile * Traits::kRows;
      const int key0 = where.key_tile * Traits::kColumns;
      const BatchIndex<Traits::kBatchAxes> batch(params, where.batch);
      const int head = where.head;
      const int kv_head = head / int(params.heads_q / params.heads_kv);
      const Seqlen seqlen(params, batch);
      const Mask<Traits> mask(params, batch, head, seqlen);
      const Range keys = mask.band.keys_of(query0, query0 + Traits::kRows);
      if (key0 >= keys.end || key0 + Traits::kColumns <= keys.begin) continue;

      const Logits<Traits> logits(params, batch, head, seqlen);
      const auto q = head_matrix<const Element>(params.q, params.q_strides, batch, head);
      const auto k = head_matrix<const Element>(params.k, params.k_strides, batch, kv_head);
      const auto v = head_matrix<const Element>(params.v, params.v_strides, batch, kv_head);
      const auto dout = head_matrix<const Element>(params.dout, params.dout_strides, batch, head);
      const RowTermReader<Traits> reader(params, batch, head, seqlen.q);

      Acc s[kM][kN] = {};
      for (int d0 = 0; d0 < head_dim; d0 += kChunkD) {
        __syncthreads();
        load_tile<kChunkD, kThreads>(shared.a_d(), q, query0, seqlen.q, d0, head_dim);
        load_tile<kChunkD, kThreads>(shared.b_d(), k, key0, seqlen.k, d0, head_dim);
        __syncthreads();
        multiply_transposed<kChunkD>(s, shared.a_d(), shared.b_d(), at);
      }
      Acc dp[kM][kN] = {};
      for (int d0 = 0; d0 < head_dim_v; d0 += kChunkV) {
        __syncthreads();
        load_tile<kChunkV, kThreads>(shared.a_v(), dout, query0, seqlen.q, d0, head_dim_v);
        load_tile<kChunkV, kThreads>(shared.b_v(), v, key0, seqlen.k, d0, head_dim_v);
        __syncthreads();
        multiply_transposed<kChunkV>(dp, shared.a_v(), shared.b_v(), at);
      }
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const RowTerms<Acc> terms = reader.read(query0 + at.row(i));
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          const int query = query0 + at.row(i);
          const int key = key0 + at.column(j);
          if (!mask.visible(query, key)) continue;
          Acc chain;
          const Acc p = probability(logits, terms, s[i][j], query, key, chain);
          if (p != Acc(0)) sums[i][j] += p * (dp[i][j] - terms.delta);
        }
      }
    }

    // Sum over the tile itself where the bias has one row or one column.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) shared.weights.row(at.row(i))[at.column(j)] = sums[i][j];
    }
    __syncthreads();
    const int rows = tiles.tile_rows();
    const int columns = tiles.tile_columns();
    const int rows_each = Traits::kRows / rows;
    const int columns_each = Traits::kColumns / columns;
    Acc* partial =
        static_cast<Acc*>(params.dbias_partial) + block * (Traits::kRows * Traits::kColumns);
    for (int e = threadIdx.x; e < rows * columns; e += kThreads) {
      const int row = e / columns;
      const int column = e % columns;
      Acc total = Acc(0);
      for (int r = 0; r < rows_each; ++r) {
        for (int c = 0; c < columns_each; ++c) {
          total += shared.weights.row(row * rows_each + r)[column * columns_each + c];
        }
      }
      if (splits == 1) {
        tiles.store(tile, row, column, total);
      } else {
        partial[e] = total;
      }
    }
    __syncthreads();
  }
}

}  // namespace simt
}  // namespace cupy_flash
