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
  i64 low;
  i64 high;

  CUPY_FLASH_DEVICE Band(const Params<Traits::kBatchAxes>& params, const Seqlen& lengths)
      : seqlen(lengths), low(lengths.offset - params.left), high(lengths.offset + params.right) {}

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
    i64 begin = 0;
    i64 end = seqlen.k;
    if constexpr (Traits::kBandLeft) begin = max_of(begin, q0 + low);
    if constexpr (Traits::kBandRight) end = min_of(end, q1 + high);
    return {int(min_of(begin, i64(seqlen.k))), int(max_of(end, i64(0)))};
  }

  // The queries that may see some key in [k0, k1).
  CUPY_FLASH_DEVICE Range queries_of(int k0, int k1) const {
    k1 = min_of(k1, seqlen.k);
    if (k0 >= k1) return {0, 0};
    i64 begin = 0;
    i64 end = seqlen.q;
    if constexpr (Traits::kBandRight) begin = max_of(begin, k0 - high);
    if constexpr (Traits::kBandLeft) end = min_of(end, k1 - low);
    return {int(min_of(begin, i64(seqlen.q))), int(max_of(end, i64(0)))};
  }
};

}  // namespace cupy_flash
