// Which tiles a block has to visit: causal masking, windows and lengths are one band of the
// S x S square, low <= j - i <= high, cut off at the valid lengths.
#pragma once

#include "common/seqlen.cuh"

namespace cupy_flash {

struct Range {
  int begin;
  int end;
};

template <class Traits>
struct Band {
  Seqlen seqlen;
  int low;
  int high;

  CUPY_FLASH_DEVICE Band(const Params<Traits::kBatchAxes>& params, const Seqlen& lengths)
      : seqlen(lengths),
        low(clamp(lengths.offset - params.left)),
        high(clamp(lengths.offset + params.right)) {}

  CUPY_FLASH_DEVICE bool contains(int i, int j) const {
    bool inside = i < seqlen.q && j < seqlen.k;
    if constexpr (Traits::kBandLeft) inside = inside && j - i >= low;
    if constexpr (Traits::kBandRight) inside = inside && j - i <= high;
    return inside;
  }

  // Whether every pair of queries [q0, q1) and keys [k0, k1) lies inside.
  CUPY_FLASH_DEVICE bool contains_all(int q0, int q1, int k0, int k1) const {
    bool inside = q1 <= seqlen.q && k1 <= seqlen.k;
    if constexpr (Traits::kBandLeft) inside = inside && k0 - (q1 - 1) >= low;
    if constexpr (Traits::kBandRight) inside = inside && (k1 - 1) - q0 <= high;
    return inside;
  }

  // The keys that some query in [q0, q1) may see.
  CUPY_FLASH_DEVICE Range keys_of(int q0, int q1) const {
    q1 = min_of(q1, seqlen.q);
    if (q0 >= q1) return {0, 0};
    Range keys = {0, seqlen.k};
    if constexpr (Traits::kBandLeft) keys.begin = within(i64(q0) + low, seqlen.k);
    if constexpr (Traits::kBandRight) keys.end = within(i64(q1) + high, seqlen.k);
    return keys;
  }

  // The queries that may see some key in [k0, k1).
  CUPY_FLASH_DEVICE Range queries_of(int k0, int k1) const {
    k1 = min_of(k1, seqlen.k);
    if (k0 >= k1) return {0, 0};
    Range queries = {0, seqlen.q};
    if constexpr (Traits::kBandRight) queries.begin = within(i64(k0) - high, seqlen.q);
    if constexpr (Traits::kBandLeft) queries.end = within(i64(k1) - low, seqlen.q);
    return queries;
  }

 private:
  // No two tokens are further apart than an int can tell.
  CUPY_FLASH_DEVICE static int clamp(i64 distance) {
    constexpr i64 kFurthest = 0x7fffffff;
    return int(max_of(min_of(distance, kFurthest), -kFurthest));
  }

  // The nearest to `x` of 0 ... length.
  CUPY_FLASH_DEVICE static int within(i64 x, int length) {
    return int(max_of(min_of(x, i64(length)), i64(0)));
  }
};

}  // namespace cupy_flash
