// What the backward kernels of this family share: P recomputed from lse, and dS.
#pragma once

#include "mma/masking.cuh"
#include "mma/products.cuh"

namespace cupy_flash {
namespace mma {

// One query's part of the softmax's derivative.
template <class Acc>
struct RowTerms {
  Acc lse;  // as a base-2 exponent
  Acc delta;

  // A row that sees no key gets lse = +inf, so that all its probabilities are 0.
  CUPY_FLASH_DEVICE static RowTerms of(Acc lse, Acc delta) {
    if (lse == -Constants<Acc>::infinity()) return {Constants<Acc>::infinity(), delta};
    // Of the lowest numbers the product is -inf, which would make NaN of a logit as low.
    const Acc exponent = lse * Constants<Acc>::kLog2E;
    return {exponent < Constants<Acc>::lowest() ? Constants<Acc>::lowest() : exponent, delta};
  }
};

// delta of one head: element i belongs to query i.
template <class Traits>
CUPY_FLASH_DEVICE auto head_delta(const Params<Traits::kBatchAxes>& params,
                                  const BatchIndex<Traits::kBatchAxes>& batch, int head) {
  using Acc = Accumulator<typename Traits::Element>;
  return Vector<const Acc>{static_cast<const Acc*>(params.delta) +
                               (batch.flat * params.heads_q + head) * params.seqlen_q,
                           i64(1)};
}

template <class Acc>
CUPY_FLASH_DEVICE Acc probability(Acc logit, Acc to_exponent, const RowTerms<Acc>& terms) {
  const Acc exponent = fma_of(logit, to_exponent, -terms.lse);
  // A logit is never above its row's lse; rounding may put it there, and for huge ones far. Not by
  // a minimum, which would make 1 of NaN.
  return exp2_of(exponent > Acc(0) ? Acc(0) : exponent);
}

// P of one pair from the product of its query and key, and dS from dP; both 0 if it is hidden.
template <class Traits, class Acc>
CUPY_FLASH_DEVICE void differentiate(const Logits<Traits>& logits, const RowTerms<Acc>& terms,
                                     int query, int key, bool visible, Acc& product_to_p,
                                     Acc& dp_to_ds) {
  if constexpr (!Logits<Traits>::kDeferScale) {
    // What a logit is made of must not be read for a hidden pair.
    if (!visible) {
      product_to_p = dp_to_ds = Acc(0);
      return;
    }
  }
  Acc chain;
  const Acc x = logits.value(product_to_p, query, key, chain);
  const Acc p = probability(x, logits.to_exponent(), terms);
  const Acc ds = p * (dp_to_ds - terms.delta) * chain;
  // A bias of -inf hides a key too, whose V may be anything.
  const bool counts = visible && !(Traits::kBias && p == Acc(0));
  product_to_p = visible ? p : Acc(0);
  dp_to_ds = counts ? ds : Acc(0);
}

// The same of all of a warp's products, whose rows are queries. kMasked: some may be hidden.
template <bool kMasked, class Traits, int kM, int kN, class Acc>
CUPY_FLASH_DEVICE void differentiate_rows(Acc (&s)[kM][kN][4], Acc (&dp)[kM][kN][4],
                                          const RowTerms<Acc> (&terms)[kM][2],
                                          const Mask<Traits>& mask, const Logits<Traits>& logits,
                                          int query0, int key0) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query0 + 16 * i + 8 * half + lane.g;
      Range keys = {0, 0};
      if constexpr (kMasked) keys = mask.band.keys_of(query, query + 1);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = key0 + 8 * j + 2 * lane.t + c;
          const bool visible = !kMasked || (contains(keys, key) && mask.keeps(query, key));
          differentiate(logits, terms[i][half], query, key, visible, s[i][j][2 * half + c],
                        dp[i][j][2 * half + c]);
        }
      }
    }
  }
}

// Products whose rows are keys become -inf where the pair is hidden.
template <class Traits, int kM, int kN, class Acc>
CUPY_FLASH_DEVICE void hide_columns(Acc (&s)[kM][kN][4], const Mask<Traits>& mask, int query0,
                                    int key0) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = key0 + 16 * i + 8 * half + lane.g;
      const Range queries = mask.band.queries_of(key, key + 1);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int query = query0 + 8 * j + 2 * lane.t + c;
          if (!(contains(queries, query) && mask.keeps(query, key))) {
            s[i][j][2 * half + c] = -Constants<Acc>::infinity();
          }
        }
      }
    }
  }
}

// Calls `pair(terms, column, s, dp)` for the pairs of a fragment whose rows are keys, with the
// terms of the query in each column of the tile.
template <int kM, int kN, class Acc, class Pair>
CUPY_FLASH_DEVICE void for_columns(const Acc* lse, const Acc* delta, const Pair& pair) {
  const Lane lane;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int column = 8 * j + 2 * lane.t;
    const auto lse_pair = read_pack<Acc, 2>(lse + column);
    const auto delta_pair = read_pack<Acc, 2>(delta + column);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const auto terms = RowTerms<Acc>::of(lse_pair.element[c], delta_pair.element[c]);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) pair(terms, i, j, half, c);
      }
    }
  }
}

// The terms of a warp's rows.
template <class Traits, int kM, class Acc>
CUPY_FLASH_DEVICE void read_terms(RowTerms<Acc> (&terms)[kM][2], const Vector<const Acc>& lse,
                                  const Vector<const Acc>& delta, int query0, int q_len) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query0 + 16 * i + 8 * half + lane.g;
      terms[i][half] = {Constants<Acc>::infinity(), Acc(0)};
      if (query < q_len) {
        terms[i][half] =
            RowTerms<Acc>::of(lse.data[query * lse.stride], delta.data[query * delta.stride]);
      }
    }
  }
}

}  // namespace mma
}  // namespace cupy_flash
