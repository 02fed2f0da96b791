// dQ = scale * dS K: a block owns kRows queries of one head, and kChunkD channels of the result.
#pragma once

#include "simt/backward.cuh"

namespace cupy_flash {
namespace simt {

template <class Traits>
CUPY_FLASH_DEVICE void backward_dq(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Acc = Accumulator<Element>;
  constexpr int kThreads = Traits::kThreads;
  static_assert(threads_cover_tile<Traits>(), "the threads cover the tile");
  constexpr int kM = Traits::kRows / LogitGrid<kThreads>::kHeight;
  constexpr int kN = Traits::kColumns / LogitGrid<kThreads>::kWidth;
  constexpr int kOutputRows = Traits::kRows / OutputGrid<kThreads>::kHeight;
  constexpr int kOutput = Traits::kChunkD / kOutputWidth;
  constexpr int kChunkD = Traits::kChunkD;
  constexpr int kChunkV = Traits::kChunkV;

  auto& shared = shared_storage<BackwardStorage<Traits>>();
  const LogitGrid<kThreads> at;
  const OutputGrid<kThreads> out_at;
  const int head_dim = int(params.head_dim);
  const int head_dim_v = int(params.head_dim_v);
  const i64 row_blocks = ceil_div(int(params.seqlen_q), Traits::kRows);
  const i64 chunks = ceil_div(head_dim, kChunkD);
  const i64 blocks = row_blocks * chunks * params.heads_q * batch_size(params);

  for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
    i64 rest = block;
    const int row0 = int(row_blocks - 1 - rest % row_blocks) * Traits::kRows;
    rest /= row_blocks;
    const int d_out = int(rest % chunks) * kChunkD;
    rest /= chunks;
    const int head = int(rest % params.heads_q);
    const BatchIndex<Traits::kBatchAxes> batch(params, rest / params.heads_q);
    const int kv_head = head / int(params.heads_q / params.heads_kv);

    const Seqlen seqlen(params, batch);
    const Mask<Traits> mask(params, batch, head, seqlen);
    const Logits<Traits> logits(params, batch, head, seqlen);
    const auto q = head_matrix<const Element>(params.q, params.q_strides, batch, head);
    const auto k = head_matrix<const Element>(params.k, params.k_strides, batch, kv_head);
    const auto v = head_matrix<const Element>(params.v, params.v_strides, batch, kv_head);
    const auto dout = head_matrix<const Element>(params.dout, params.dout_strides, batch, head);

    __syncthreads();  // the previous round has read its tiles
    if constexpr (Traits::kResident) {
      load_tile<kChunkD, kThreads>(shared.a_d(), q, row0, seqlen.q, 0, head_dim);
      load_tile<kChunkV, kThreads>(shared.a_v(), dout, row0, seqlen.q, 0, head_dim_v);
    }
    const RowTermReader<Traits> reader(params, batch, head, seqlen.q);
    RowTerms<Acc> terms[kM];
#pragma unroll
    for (int i = 0; i < kM; ++i) terms[i] = reader.read(row0 + at.row(i));

    Acc dq[kOutputRows][kOutput] = {};
    const Range keys = mask.band.keys_of(row0, row0 + Traits::kRows);
    for (int key0 = keys.begin / Traits::kColumns * Traits::kColumns; key0 < keys.end;
         key0 += Traits::kColumns) {
      bool k_finite = true;

      // S = Q Kᵀ
      Acc s[kM][kN] = {};
      for (int d0 = 0; d0 < head_dim; d0 += kChunkD) {
        __syncthreads();
        if constexpr (!Traits::kResident) {
          load_tile<kChunkD, kThreads>(shared.a_d(), q, row0, seqlen.q, d0, head_dim);
        }
        k_finite &= load_tile<kChunkD, kThreads>(shared.b_d(), k, key0, seqlen.k, d0, head_dim);
        if constexpr (Traits::kResident) {
          load_tile<kChunkV, kThreads>(shared.b_v(), v, key0, seqlen.k, 0, head_dim_v);
        }
        __syncthreads();
        multiply_transposed<kChunkD>(s, shared.a_d(), shared.b_d(), at);
      }

      // dP = dO Vᵀ
      Acc dp[kM][kN] = {};
      for (int d0 = 0; d0 < head_dim_v; d0 += kChunkV) {
        if constexpr (!Traits::kResident) {
          __syncthreads();
          load_tile<kChunkV, kThreads>(shared.a_v(), dout, row0, seqlen.q, d0, head_dim_v);
          load_tile<kChunkV, kThreads>(shared.b_v(), v, key0, seqlen.k, d0, head_dim_v);
          __syncthreads();
        }
        multiply_transposed<kChunkV>(dp, shared.a_v(), shared.b_v(), at);
      }
      if constexpr (!Traits::kResident) {
        __syncthreads();
        load_tile<kChunkD, kThreads>(shared.b_d(), k, key0, seqlen.k, d_out, head_dim);
      }
      bool skip_hidden = false;
      if constexpr (Mask<Traits>::kHidesInsideTiles) skip_hidden = !__syncthreads_and(k_finite);

      // dS = P (dP - delta), down to the scaled product
      const bool all_visible =
          mask.all_visible(row0, row0 + Traits::kRows, key0, key0 + Traits::kColumns);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          const int query = row0 + at.row(i);
          const int key = key0 + at.column(j);
          Acc ds = skip_hidden ? hidden_mark(Acc(0)) : Acc(0);
          if (all_visible || mask.visible(query, key)) {
            Acc chain;
            const Acc p = probability(logits, terms[i], s[i][j], query, key, chain);
            if (p != Acc(0)) ds = p * (dp[i][j] - terms[i].delta) * chain;
          }
          shared.weights.row(at.row(i))[at.column(j)] = ds;
        }
      }
      __syncthreads();

      // dQ += dS K
      multiply_rows<kChunkD, kOutput>(dq, shared.weights, shared.b_d(), out_at, skip_hidden);
    }

    const auto out = head_matrix<Element>(params.dq, params.dq_strides, batch, head);
    Acc factor[kOutputRows];
#pragma unroll
    for (int i = 0; i < kOutputRows; ++i) {
      factor[i] = row0 + out_at.row(i) < seqlen.q ? logits.scale : Acc(0);
    }
    store_rows<kChunkD>(out, dq, factor, out_at, row0, int(params.seqlen_q), d_out,
                        min_of(head_dim, d_out + kChunkD));
  }
}

}  // namespace simt
}  // namespace cupy_flash
