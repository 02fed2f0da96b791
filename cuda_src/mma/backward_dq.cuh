// dQ = scale * dS K by itself, for results that are the same in every run: a block owns kRows
// queries of one head and walks over the keys they see.
#pragma once

#include "mma/block.cuh"
#include "mma/gradient.cuh"

namespace cupy_flash {
namespace mma {

template <class Traits>
struct BackwardDqStorage : SeenKeys<Traits::kColumns, kDropsUnseen<Traits>> {
  using Element = typename Traits::Element;
  Tile<Element, Traits::kRows, Traits::kDepth> q;  // dQ in the end
  Tile<Element, Traits::kRows, Traits::kDepthV> dout;
  Tile<Element, Traits::kColumns, Traits::kDepth> k[Traits::kStages];
  Tile<Element, Traits::kColumns, Traits::kDepthV> v[Traits::kStages];
};

template <class Traits>
CUPY_FLASH_DEVICE void backward_dq(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Atom = mma::Atom<Traits>;
  using Acc = typename Atom::Acc;
  constexpr int kThreads = Traits::kThreads;
  constexpr int kRows = Traits::kRows;
  constexpr int kColumns = Traits::kColumns;
  constexpr int kStages = Traits::kStages;
  static_assert(kRows % (16 * Traits::kWarps) == 0, "every warp owns whole fragments");
  constexpr int kM = kRows / (16 * Traits::kWarps);
  constexpr int kN = kColumns / 8;
  constexpr int kD = Traits::kDepth / 8;

  auto& shared = shared_storage<BackwardDqStorage<Traits>>();
  const int warp_row = threadIdx.x / kWarpSize * 16 * kM;
  const int head_dim = int(params.head_dim);
  const int head_dim_v = int(params.head_dim_v);
  const auto block = Block<Traits>::of_queries(params);
  const int row0 = block.row0;
  const int head = block.head;
  const auto& batch = block.batch;
  const int kv_head = head / int(params.heads_q / params.heads_kv);

  const Seqlen seqlen(params, batch);
  const Mask<Traits> mask(params, batch, head, seqlen);
  const Logits<Traits> logits(params, batch, head, seqlen);
  const auto k = head_matrix<const Element>(params.k, params.k_strides, batch, kv_head);
  const auto v = head_matrix<const Element>(params.v, params.v_strides, batch, kv_head);
  const Range keys = mask.band.keys_of(row0, row0 + kRows);
  const int first = keys.begin / kColumns * kColumns;
  const auto load_keys = [&](int stage, int key0) {
    load_tile<kThreads, Traits::kRagged>(shared.k[stage], k, key0, keys, head_dim);
    load_tile<kThreads, Traits::kRagged>(shared.v[stage], v, key0, keys, head_dim_v);
  };

  if constexpr (kDropsUnseen<Traits>) {
    if (threadIdx.x < 2 * shared.kWords) {
      shared.seen[threadIdx.x / shared.kWords][threadIdx.x % shared.kWords] = 0;
    }
  }
  load_tile<kThreads, Traits::kRagged>(
      shared.q, head_matrix<const Element>(params.q, params.q_strides, batch, head), row0,
      {0, seqlen.q}, head_dim);
  load_tile<kThreads, Traits::kRagged>(
      shared.dout, head_matrix<const Element>(params.dout, params.dout_strides, batch, head), row0,
      {0, seqlen.q}, head_dim_v);
  if (first < keys.end) load_keys(0, first);
  ptx::cp_async_commit();

  RowTerms<Acc> terms[kM][2];
  read_terms<Traits>(terms, head_vector<const Acc>(params.lse, params.lse_strides, batch, head),
                     head_delta<Traits>(params, batch, head), row0 + warp_row, seqlen.q);
  Acc dq[kM][kD][4] = {};

  int stage = 0;
  [[maybe_unused]] int parity = 0;
#pragma unroll 1
  for (int key0 = first; key0 < keys.end; key0 += kColumns) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && key0 + kColumns < keys.end) load_keys(stage ^ 1, key0 + kColumns);
    ptx::cp_async_commit();

    // S = Q Kᵀ, dP = dO Vᵀ
    Acc s[kM][kN][4] = {};
    Acc dp[kM][kN][4] = {};
    multiply_transposed<Atom, Traits::kDepth>(s, shared.q, warp_row, shared.k[stage], 0);
    multiply_transposed<Atom, Traits::kDepthV>(dp, shared.dout, warp_row, shared.v[stage], 0);

    // P = exp(S - lse), dS = P (dP - delta)
    const int query0 = row0 + warp_row;
    if (all_visible(mask, query0, 16 * kM, key0, kColumns)) {
      differentiate_rows<false>(s, dp, terms, mask, logits, query0, key0);
    } else {
      differentiate_rows<true>(s, dp, terms, mask, logits, query0, key0);
    }
    if constexpr (kDropsUnseen<Traits>) {
      note_seen<Traits>(shared.seen[parity], s, [](Acc p) { return !(p == Acc(0)); });
      __syncthreads();
      drop_unseen<kThreads>(shared.k[stage], shared.seen[parity]);
      parity ^= 1;
      if (threadIdx.x < shared.kWords) shared.seen[parity][threadIdx.x] = 0;
      __syncthreads();
    }

    // dQ += dS K
    multiply_rows<Atom, kColumns>(dq, HeldWeights<Atom, kM, kN>{dp}, shared.k[stage], 0);

    if constexpr (kStages > 1) {
      stage ^= 1;
    } else if (key0 + kColumns < keys.end) {
      __syncthreads();
      load_keys(0, key0 + kColumns);
      ptx::cp_async_commit();
    }
  }

  Acc scale[kM][2];
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Queries past the end: nothing was read for them, but K may hold NaN.
      const bool inside = row0 + warp_row + 16 * i + 8 * half + Lane().g < seqlen.q;
      scale[i][half] = inside ? Acc(params.scale) : Acc(0);
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // every warp has read its rows of q
  write_results<Atom>(shared.q, dq, scale, warp_row, 0);
  __syncthreads();
  store_tile<kThreads>(head_matrix<Element>(params.dq, params.dq_strides, batch, head), shared.q,
                       row0, int(params.seqlen_q), head_dim);
}

}  // namespace mma
}  // namespace cupy_flash
