// dV = Pᵀ dO and dK = scale * dSᵀ Q: a block owns kRows keys of one kv head, one chunk of channels
// of both results, and walks over the queries of all heads that read them. Its tiles of P and dS
// are transposed: keys are rows.
#pragma once

#include "simt/backward.cuh"

namespace cupy_flash {
namespace simt {

// dK and dV together leave few registers: their products are made four columns at a time.
template <int kCount>
CUPY_FLASH_DEVICE constexpr int group_of() {
  return kCount % 4 == 0 ? 4 : kCount;
}

template <class Traits>
CUPY_FLASH_DEVICE void backward_dkdv(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Acc = Accumulator<Element>;
  constexpr int kThreads = Traits::kThreads;
  static_assert(threads_cover_tile<Traits>(), "the threads cover the tile");
  constexpr int kM = Traits::kRows / LogitGrid<kThreads>::kHeight;
  constexpr int kN = Traits::kColumns / LogitGrid<kThreads>::kWidth;
  constexpr int kOutputRows = Traits::kRows / OutputGrid<kThreads>::kHeight;
  constexpr int kChunkD = Traits::kChunkD;
  constexpr int kChunkV = Traits::kChunkV;
  constexpr int kOutputD = kChunkD / kOutputWidth;
  constexpr int kOutputV = kChunkV / kOutputWidth;

  auto& shared = shared_storage<BackwardStorage<Traits>>();
  const LogitGrid<kThreads> at;
  const OutputGrid<kThreads> out_at;
  const int head_dim = int(params.head_dim);
  const int head_dim_v = int(params.head_dim_v);
  const int group = int(params.heads_q / params.heads_kv);
  const i64 row_blocks = ceil_div(int(params.seqlen_k), Traits::kRows);
  const int chunks_d = ceil_div(head_dim, kChunkD);
  const int chunks_v = ceil_div(head_dim_v, kChunkV);
  const i64 chunks = max_of(chunks_d, chunks_v);
  const i64 blocks = row_blocks * chunks * params.heads_kv * batch_size(params);

  for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
    i64 rest = block;
    // First keys first: under a causal mask they are seen by most queries.
    const int row0 = int(rest % row_blocks) * Traits::kRows;
    rest /= row_blocks;
    const int chunk = int(rest % chunks);
    rest /= chunks;
    const int kv_head = int(rest % params.heads_kv);
    const BatchIndex<Traits::kBatchAxes> batch(params, rest / params.heads_kv);
    const bool has_dk = chunk < chunks_d;
    const bool has_dv = chunk < chunks_v;

    const Seqlen seqlen(params, batch);
    const auto k = head_matrix<const Element>(params.k, params.k_strides, batch, kv_head);
    const auto v = head_matrix<const Element>(params.v, params.v_strides, batch, kv_head);

    __syncthreads();  // the previous round has read its tiles
    if constexpr (Traits::kResident) {
      load_tile<kChunkD, kThreads>(shared.a_d(), k, row0, seqlen.k, 0, head_dim);
      load_tile<kChunkV, kThreads>(shared.a_v(), v, row0, seqlen.k, 0, head_dim_v);
    }

    Acc dk[kOutputRows][kOutputD] = {};
    Acc dv[kOutputRows][kOutputV] = {};
    for (int member = 0; member < group; ++member) {
      const int head = kv_head * group + member;
      const Mask<Traits> mask(params, batch, head, seqlen);
      const Logits<Traits> logits(params, batch, head, seqlen);
      const auto q = head_matrix<const Element>(params.q, params.q_strides, batch, head);
      const auto dout = head_matrix<const Element>(params.dout, params.dout_strides, batch, head);
      const RowTermReader<Traits> reader(params, batch, head, seqlen.q);

      const Range queries = mask.band.queries_of(row0, row0 + Traits::kRows);
      for (int query0 = queries.begin / Traits::kColumns * Traits::kColumns; query0 < queries.end;
           query0 += Traits::kColumns) {
        RowTerms<Acc> terms[kN];
#pragma unroll
        for (int j = 0; j < kN; ++j) terms[j] = reader.read(query0 + at.column(j));

        // Sᵀ = K Qᵀ
        bool finite = true;
        Acc s[kM][kN] = {};
        for (int d0 = 0; d0 < head_dim; d0 += kChunkD) {
          __syncthreads();
          if constexpr (Traits::kResident) {
            finite &=
                load_tile<kChunkV, kThreads>(shared.b_v(), dout, query0, seqlen.q, 0, head_dim_v);
          } else {
            load_tile<kChunkD, kThreads>(shared.a_d(), k, row0, seqlen.k, d0, head_dim);
          }
          finite &= load_tile<kChunkD, kThreads>(shared.b_d(), q, query0, seqlen.q, d0, head_dim);
          __syncthreads();
          multiply_transposed<kChunkD>(s, shared.a_d(), shared.b_d(), at);
        }

        // dPᵀ = V dOᵀ
        Acc dp[kM][kN] = {};
        for (int d0 = 0; d0 < head_dim_v; d0 += kChunkV) {
          if constexpr (!Traits::kResident) {
            __syncthreads();
            load_tile<kChunkV, kThreads>(shared.a_v(), v, row0, seqlen.k, d0, head_dim_v);
            finite &=
                load_tile<kChunkV, kThreads>(shared.b_v(), dout, query0, seqlen.q, d0, head_dim_v);
            __syncthreads();
          }
          multiply_transposed<kChunkV>(dp, shared.a_v(), shared.b_v(), at);
        }
        bool skip_hidden = false;
        if constexpr (Mask<Traits>::kHidesInsideTiles) skip_hidden = !__syncthreads_and(finite);
        const Acc hidden = skip_hidden ? hidden_mark(Acc(0)) : Acc(0);

        // P = exp(S - lse) into the shared tile, dS = P (dP - delta) kept for later
        const bool all_visible =
            mask.all_visible(query0, query0 + Traits::kColumns, row0, row0 + Traits::kRows);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
#pragma unroll
          for (int j = 0; j < kN; ++j) {
            const int query = query0 + at.column(j);
            const int key = row0 + at.row(i);
            Acc p = hidden;
            Acc ds = hidden;
            if (all_visible || mask.visible(query, key)) {
              Acc chain;
              const Acc seen = probability(logits, terms[j], s[i][j], query, key, chain);
              if (seen != Acc(0)) {
                p = seen;
                ds = seen * (dp[i][j] - terms[j].delta) * chain;
              }
            }
            shared.weights.row(at.row(i))[at.column(j)] = p;
            s[i][j] = ds;
          }
        }
        if constexpr (!Traits::kResident) {
          __syncthreads();
          load_tile<kChunkV, kThreads>(shared.b_v(), dout, query0, seqlen.q, chunk * kChunkV,
                                       head_dim_v);
        }
        __syncthreads();

        // dV += Pᵀ dO
        if (has_dv)
          multiply_rows<kChunkV, group_of<kOutputV>()>(dv, shared.weights, shared.b_v(), out_at,
                                                       skip_hidden);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kM; ++i) {
#pragma unroll
          for (int j = 0; j < kN; ++j) shared.weights.row(at.row(i))[at.column(j)] = s[i][j];
        }
        if constexpr (!Traits::kResident) {
          load_tile<kChunkD, kThreads>(shared.b_d(), q, query0, seqlen.q, chunk * kChunkD,
                                       head_dim);
        }
        __syncthreads();

        // dK += dSᵀ Q
        if (has_dk)
          multiply_rows<kChunkD, group_of<kOutputD>()>(dk, shared.weights, shared.b_d(), out_at,
                                                       skip_hidden);
      }
    }

    Acc one[kOutputRows];
    Acc scale[kOutputRows];
#pragma unroll
    for (int i = 0; i < kOutputRows; ++i) {
      const bool inside = row0 + out_at.row(i) < seqlen.k;
      one[i] = inside ? Acc(1) : Acc(0);
      scale[i] = inside ? Acc(params.scale) : Acc(0);
    }
    const auto dk_out = head_matrix<Element>(params.dk, params.dk_strides, batch, kv_head);
    const auto dv_out = head_matrix<Element>(params.dv, params.dv_strides, batch, kv_head);
    store_rows<kChunkD>(dk_out, dk, scale, out_at, row0, int(params.seqlen_k), chunk * kChunkD,
                        min_of(head_dim, (chunk + 1) * kChunkD));
    store_rows<kChunkV>(dv_out, dv, one, out_at, row0, int(params.seqlen_k), chunk * kChunkV,
                        min_of(head_dim_v, (chunk + 1) * kChunkV));
  }
}

}  // namespace simt
}  // namespace cupy_flash
