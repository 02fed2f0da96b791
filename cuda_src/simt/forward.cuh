// Forward pass: a block owns kRows queries of one head and walks over the keys they see.
#pragma once

#include "common/logits.cuh"
#include "common/mask.cuh"
#include "simt/softmax.cuh"

namespace cupy_flash {
namespace simt {

template <class Traits>
struct ForwardStorage {
  using Acc = Accumulator<typename Traits::Element>;
  static constexpr int kWidest =
      Traits::kChunkD > Traits::kChunkV ? Traits::kChunkD : Traits::kChunkV;
  Tile<Acc, Traits::kRows, Traits::kChunkD> q;
  Tile<Acc, Traits::kColumns, kWidest> kv;
  Tile<Acc, Traits::kRows, Traits::kColumns> p;
};

template <class Traits>
CUPY_FLASH_DEVICE void forward(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Acc = Accumulator<Element>;
  constexpr int kThreads = Traits::kThreads;
  using Grid = ThreadGrid<kThreads, kOutputWidth, 16>;  // of S and of O
  static_assert(Traits::kRows % Grid::kHeight == 0 && Traits::kColumns % Grid::kWidth == 0,
                "the threads cover the tile");
  constexpr int kM = Traits::kRows / Grid::kHeight;
  constexpr int kN = Traits::kColumns / Grid::kWidth;
  constexpr int kOutput = Traits::kChunkV / Grid::kWidth;

  auto& shared = shared_storage<ForwardStorage<Traits>>();
  const Grid at;
  const int head_dim = int(params.head_dim);
  const int head_dim_v = int(params.head_dim_v);
  const i64 row_blocks = ceil_div(int(params.seqlen_q), Traits::kRows);
  const i64 chunks = ceil_div(head_dim_v, Traits::kChunkV);
  const i64 blocks = row_blocks * chunks * params.heads_q * batch_size(params);

  for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
    i64 rest = block;
    // Last rows first: under a causal mask they take longest.
    const int row0 = int(row_blocks - 1 - rest % row_blocks) * Traits::kRows;
    rest /= row_blocks;
    const int chunk = int(rest % chunks);
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
    const int v0 = chunk * Traits::kChunkV;

    OnlineSoftmax<Acc, kM, Grid::kWidth> softmax;
    Acc o[kM][kOutput] = {};

    __syncthreads();  // the previous round has read its tiles
    if constexpr (Traits::kResident) {
      load_tile<Traits::kChunkD, kThreads>(shared.q, q, row0, seqlen.q, 0, head_dim);
    }
    const Range keys = mask.band.keys_of(row0, row0 + Traits::kRows);
    for (int key0 = keys.begin / Traits::kColumns * Traits::kColumns; key0 < keys.end;
         key0 += Traits::kColumns) {
      // S = Q Kᵀ
      Acc s[kM][kN] = {};
      for (int d0 = 0; d0 < head_dim; d0 += Traits::kChunkD) {
        __syncthreads();
        if constexpr (!Traits::kResident) {
          load_tile<Traits::kChunkD, kThreads>(shared.q, q, row0, seqlen.q, d0, head_dim);
        }
        load_tile<Traits::kChunkD, kThreads>(shared.kv, k, key0, seqlen.k, d0, head_dim);
        __syncthreads();
        multiply_transposed<Traits::kChunkD>(s, shared.q, shared.kv, at);
      }
      __syncthreads();
      const bool v_finite =
          load_tile<Traits::kChunkV, kThreads>(shared.kv, v, key0, seqlen.k, v0, head_dim_v);
      bool skip_hidden = false;
      if constexpr (Mask<Traits>::kHidesInsideTiles) skip_hidden = !__syncthreads_and(v_finite);

      // P = exp(S - m)
      const bool all_visible =
          mask.all_visible(row0, row0 + Traits::kRows, key0, key0 + Traits::kColumns);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        bool hidden[kN];
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          const int query = row0 + at.row(i);
          const int key = key0 + at.column(j);
          s[i][j] = all_visible || mask.visible(query, key) ? logits.value(s[i][j], query, key)
                                                            : -Constants<Acc>::infinity();
          hidden[j] = s[i][j] == -Constants<Acc>::infinity();
        }
        const Acc rescale = softmax.update(i, s[i], logits.to_exponent());
#pragma unroll
        for (int j = 0; j < kOutput; ++j) o[i][j] *= rescale;
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          shared.p.row(at.row(i))[at.column(j)] =
              skip_hidden && hidden[j] ? hidden_mark(Acc(0)) : s[i][j];
        }
      }
      __syncthreads();

      // O += P V
      multiply_rows<Traits::kChunkV, kOutput>(o, shared.p, shared.kv, at, skip_hidden);
    }

    // O / l, and lse = m + log l. A row that sees no key is 0 and -inf.
    const auto out = head_matrix<Element>(params.out, params.out_strides, batch, head);
    const auto lse = head_vector<Acc>(params.lse, params.lse_strides, batch, head);
    Acc inverse[kM];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      const Acc sum = row_sum<Grid::kWidth>(softmax.sum[i]);
      inverse[i] = sum == Acc(0) ? Acc(0) : Acc(1) / sum;
      const int query = row0 + at.row(i);
      if (params.lse != nullptr && chunk == 0 && at.tx == 0 && query < params.seqlen_q) {
        lse.data[query * lse.stride] = sum == Acc(0)
                                           ? -Constants<Acc>::infinity()
                                           : softmax.maximum[i] * logits.to_logit() + log_of(sum);
      }
    }
    store_rows<Traits::kChunkV>(out, o, inverse, at, row0, int(params.seqlen_q), v0,
                                min_of(head_dim_v, v0 + Traits::kChunkV));
  }
}

}  // namespace simt
}  // namespace cupy_flash
