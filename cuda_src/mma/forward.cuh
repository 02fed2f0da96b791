// Forward pass: a block owns kRows queries of one head and walks over the keys they see. Each warp
// owns some of the rows and takes all keys of a tile, so warps exchange nothing in the loop.
#pragma once

#include "mma/block.cuh"
#include "mma/masking.cuh"
#include "mma/products.cuh"
#include "mma/softmax.cuh"

namespace cupy_flash {
namespace mma {

template <class Traits>
struct ForwardStorage : SeenKeys<Traits::kColumns, kDropsUnseen<Traits>> {
  using Element = typename Traits::Element;
  // Later the output is collected here.
  static constexpr int kWidest = max_of(Traits::kDepth, Traits::kDepthV);
  Tile<Element, Traits::kRows, kWidest> q;
  Tile<Element, Traits::kColumns, Traits::kDepth> k[Traits::kStages];
  Tile<Element, Traits::kColumns, Traits::kDepthV> v[Traits::kStages];
};

// O / l, and lse = m + log l. A row that sees no key is 0 and -inf.
template <class Traits, int kM, int kO, class TileO, class Acc>
CUPY_FLASH_DEVICE void store_output(const Params<Traits::kBatchAxes>& params, TileO& tile,
                                    const Acc (&o)[kM][kO][4],
                                    const OnlineSoftmax<typename Traits::Element, kM>& softmax,
                                    Acc to_logit, int warp_row) {
  using Element = typename Traits::Element;
  const Lane lane;
  const auto at = Block<Traits>::of_queries(params);
  const int q_len = Seqlen(params, at.batch).q;
  const auto lse = head_vector<Acc>(params.lse, params.lse_strides, at.batch, at.head);
  Acc inverse[kM][2];
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = at.row0 + warp_row + 16 * i + 8 * half + lane.g;
      Acc sum = row_sum(softmax.sum[i][half]);
      if (query >= q_len) sum = Acc(0);
      inverse[i][half] = sum == Acc(0) ? Acc(0) : Acc(1) / sum;
      if (params.lse != nullptr && lane.t == 0 && query < params.seqlen_q) {
        lse.data[query * lse.stride] = sum == Acc(0)
                                           ? -Constants<Acc>::infinity()
                                           : softmax.reference[i][half] * to_logit + log_of(sum);
      }
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // the tile has been read
  write_results<Atom<Traits>>(tile, o, inverse, warp_row, 0);
  __syncthreads();
  store_tile<Traits::kThreads>(
      head_matrix<Element>(params.out, params.out_strides, at.batch, at.head), tile, at.row0,
      int(params.seqlen_q), int(params.head_dim_v));
}

// The mask of the block's head, made anew: few tiles need it, and registers are short.
template <class Traits>
CUPY_FLASH_DEVICE Mask<Traits> make_mask(const Params<Traits::kBatchAxes>& params) {
  const auto at = Block<Traits>::of_queries(params);
  return Mask<Traits>(params, at.batch, at.head, Seqlen(params, at.batch));
}

template <class Traits>
CUPY_FLASH_DEVICE void forward(const Params<Traits::kBatchAxes>& params) {
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
  constexpr int kO = Traits::kDepthV / 8;

  auto& shared = shared_storage<ForwardStorage<Traits>>();
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
  const auto q = head_matrix<const Element>(params.q, params.q_strides, batch, head);
  const auto k = head_matrix<const Element>(params.k, params.k_strides, batch, kv_head);
  const auto v = head_matrix<const Element>(params.v, params.v_strides, batch, kv_head);
  const Range keys = mask.band.keys_of(row0, row0 + kRows);
  const int first = keys.begin / kColumns * kColumns;
  const Range clear_of_mask = clear_keys(mask, row0 + warp_row, 16 * kM);

  const auto load_k = [&](int stage, int key0) {
    load_tile<kThreads, Traits::kRagged>(shared.k[stage], k, key0, keys, head_dim);
  };
  const auto load_v = [&](int stage, int key0) {
    load_tile<kThreads, Traits::kRagged>(shared.v[stage], v, key0, keys, head_dim_v);
  };

  OnlineSoftmax<Element, kM> softmax;
  Acc o[kM][kO][4] = {};

  if constexpr (kDropsUnseen<Traits>) {
    if (threadIdx.x < 2 * shared.kWords) {
      shared.seen[threadIdx.x / shared.kWords][threadIdx.x % shared.kWords] = 0;
    }
  }
  load_tile<kThreads, Traits::kRagged>(shared.q, q, row0, {0, seqlen.q}, head_dim);
  if (first < keys.end) {
    load_k(0, first);
    if constexpr (kStages > 1) load_v(0, first);
  }
  ptx::cp_async_commit();

  int stage = 0;
  [[maybe_unused]] int parity = 0;
#pragma unroll 1
  for (int key0 = first; key0 < keys.end; key0 += kColumns) {
    // With one stage, V is on its way while S is computed, and the next K after that. With two,
    // the next K and V are on their way all the time.
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages == 1) {
      load_v(0, key0);
    } else if (key0 + kColumns < keys.end) {
      load_k(stage ^ 1, key0 + kColumns);
      load_v(stage ^ 1, key0 + kColumns);
    }
    ptx::cp_async_commit();

    // S = Q Kᵀ
    Acc s[kM][kN][4] = {};
    multiply_transposed<Atom, Traits::kDepth>(s, shared.q, warp_row, shared.k[stage], 0);
    const bool clear = key0 >= clear_of_mask.begin && key0 + kColumns <= clear_of_mask.end;
    if constexpr (Logits<Traits>::kDeferScale) {
      if (!clear) hide_rows(s, make_mask<Traits>(params), row0 + warp_row, key0);
    } else {
      make_logits(s, mask, logits, clear, row0 + warp_row, key0);
    }
    if constexpr (kDropsUnseen<Traits>) {
      note_seen<Traits>(shared.seen[parity], s,
                        [](Acc x) { return !(x == -Constants<Acc>::infinity()); });
    }

    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (key0 + kColumns < keys.end) load_k(0, key0 + kColumns);
      ptx::cp_async_commit();
    }
    if constexpr (kDropsUnseen<Traits>) {
      if constexpr (kStages > 1) __syncthreads();
      drop_unseen<kThreads>(shared.v[stage], shared.seen[parity]);
      parity ^= 1;
      if (threadIdx.x < shared.kWords) shared.seen[parity][threadIdx.x] = 0;
      __syncthreads();
    }

    // P = exp(S - m), O += P V
    softmax.update(s, o, logits.to_exponent());
    multiply_rows<Atom, kColumns>(o, HeldWeights<Atom, kM, kN>{s}, shared.v[stage], 0);
    if constexpr (kStages > 1) stage ^= 1;
  }

  store_output<Traits>(params, shared.q, o, softmax, logits.to_logit(), warp_row);
}

}  // namespace mma
}  // namespace cupy_flash
