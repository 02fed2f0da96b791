// dbias = dS, summed over the axes along which the bias was broadcast: a block owns a tile of
// dbias, or one part of it, and walks over all tiles of dS that are added up in it.
#pragma once

#include "common/bias_tile.cuh"
#include "mma/gradient.cuh"

namespace cupy_flash {
namespace mma {

template <class Traits>
struct BackwardDbiasStorage {
  using Element = typename Traits::Element;
  Tile<Element, Traits::kRows, Traits::kDepth> q;
  Tile<Element, Traits::kRows, Traits::kDepthV> dout;
  Tile<Element, Traits::kColumns, Traits::kDepth> k;
  Tile<Element, Traits::kColumns, Traits::kDepthV> v;
};

template <class Traits>
CUPY_FLASH_DEVICE void backward_dbias(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Atom = mma::Atom<Traits>;
  using Acc = typename Atom::Acc;
  constexpr int kThreads = Traits::kThreads;
  constexpr int kRows = Traits::kRows;
  constexpr int kColumns = Traits::kColumns;
  static_assert(kRows % (16 * Traits::kWarps) == 0, "every warp owns whole fragments");
  constexpr int kM = kRows / (16 * Traits::kWarps);
  constexpr int kN = kColumns / 8;
  using Sums = Tile<Acc, kRows, kColumns>;
  static_assert(sizeof(Sums) <= sizeof(BackwardDbiasStorage<Traits>), "sums take its place");

  auto& shared = shared_storage<BackwardDbiasStorage<Traits>>();
  auto& sums_tile = shared_storage<Sums>();
  const Lane lane;
  const int warp_row = threadIdx.x / kWarpSize * 16 * kM;
  const BiasTiles<Traits> tiles(params);
  const int head_dim = int(params.head_dim);
  const int head_dim_v = int(params.head_dim_v);
  const i64 splits = params.dbias_splits;
  const i64 terms_per_split = (tiles.summed + splits - 1) / splits;

  const i64 block = blockIdx.x;
  const i64 tile = block % tiles.owned;
  const i64 first = block / tiles.owned * terms_per_split;
  const i64 last = min_of(tiles.summed, first + terms_per_split);

  Acc sums[kM][kN][4] = {};
#pragma unroll 1
  for (i64 term = first; term < last; ++term) {
    const auto where = tiles.locate(tile, term);
    const int query0 = where.query_tile * kRows;
    const int key0 = where.key_tile * kColumns;
    const int head = where.head;
    const int kv_head = head / int(params.heads_q / params.heads_kv);
    const BatchIndex<Traits::kBatchAxes> batch(params, where.batch);
    const Seqlen seqlen(params, batch);
    const Mask<Traits> mask(params, batch, head, seqlen);
    const Range keys = mask.band.keys_of(query0, query0 + kRows);
    if (key0 >= keys.end || key0 + kColumns <= keys.begin) continue;
    const Logits<Traits> logits(params, batch, head, seqlen);

    __syncthreads();  // the tiles have been read
    const Range rows = {0, seqlen.q};
    load_tile<kThreads, Traits::kRagged>(
        shared.q, head_matrix<const Element>(params.q, params.q_strides, batch, head), query0, rows,
        head_dim);
    load_tile<kThreads, Traits::kRagged>(
        shared.dout, head_matrix<const Element>(params.dout, params.dout_strides, batch, head),
        query0, rows, head_dim_v);
    load_tile<kThreads, Traits::kRagged>(
        shared.k, head_matrix<const Element>(params.k, params.k_strides, batch, kv_head), key0,
        keys, head_dim);
    load_tile<kThreads, Traits::kRagged>(
        shared.v, head_matrix<const Element>(params.v, params.v_strides, batch, kv_head), key0,
        keys, head_dim_v);
    ptx::cp_async_commit();
    RowTerms<Acc> terms[kM][2];
    read_terms<Traits>(terms, head_vector<const Acc>(params.lse, params.lse_strides, batch, head),
                       head_delta<Traits>(params, batch, head), query0 + warp_row, seqlen.q);
    ptx::cp_async_wait<0>();
    __syncthreads();

    Acc s[kM][kN][4] = {};
    Acc dp[kM][kN][4] = {};
    multiply_transposed<Atom, Traits::kDepth>(s, shared.q, warp_row, shared.k, 0);
    multiply_transposed<Atom, Traits::kDepthV>(dp, shared.dout, warp_row, shared.v, 0);
    // dlogit, without the factor that a softcap puts between logit and product.
    const bool clear = all_visible(mask, query0 + warp_row, 16 * kM, key0, kColumns);
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = query0 + warp_row + 16 * i + 8 * half + lane.g;
#pragma unroll
        for (int j = 0; j < kN; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int x = 2 * half + c;
            const int key = key0 + 8 * j + 2 * lane.t + c;
            const bool visible = clear || mask.visible(query, key);
            Acc unused = Acc(0);
            differentiate(logits, terms[i][half], query, key, visible, s[i][j][x], unused);
            if (s[i][j][x] != Acc(0)) {
              sums[i][j][x] += s[i][j][x] * (dp[i][j][x] - terms[i][half].delta);
            }
          }
        }
      }
    }
  }

  // Sum over the tile itself where the bias has one row or one column.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        write_pack<Acc, 2>(sums_tile.at(warp_row + 16 * i + 8 * half + lane.g, 8 * j + 2 * lane.t),
                           {{sums[i][j][2 * half], sums[i][j][2 * half + 1]}});
      }
    }
  }
  __syncthreads();
  const int rows = tiles.tile_rows();
  const int columns = tiles.tile_columns();
  const int rows_each = kRows / rows;
  const int columns_each = kColumns / columns;
  Acc* const partial = static_cast<Acc*>(params.dbias_partial) + block * (kRows * kColumns);
#pragma unroll 1
  for (int e = threadIdx.x; e < rows * columns; e += kThreads) {
    const int row = e / columns;
    const int column = e % columns;
    Acc total = Acc(0);
    for (int r = 0; r < rows_each; ++r) {
      for (int c = 0; c < columns_each; ++c) {
        total += *sums_tile.at(row * rows_each + r, column * columns_each + c);
      }
    }
    if (splits == 1) {
      tiles.store(tile, row, column, total);
    } else {
      partial[e] = total;
    }
  }
}

}  // namespace mma
}  // namespace cupy_flash
