// The running softmax of the rows that a thread holds a part of.
#pragma once

#include "simt/tile.cuh"

namespace cupy_flash {
namespace simt {

template <class Acc, int kM, int kWidth>
struct OnlineSoftmax {
  Acc maximum[kM];  // of the logits seen so far, in the unit of Logits::value
  Acc sum[kM];      // of this thread's exponentials; the row's sum is taken once, at the end

  CUPY_FLASH_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      maximum[i] = -Constants<Acc>::infinity();
      sum[i] = Acc(0);
    }
  }

  // Turns the logits of row i into exponentials relative to the row's maximum and returns the
  // factor by which what was accumulated before has to be multiplied.
  template <int kN>
  CUPY_FLASH_DEVICE Acc update(int i, Acc (&s)[kN], Acc to_exponent) {
    Acc largest = s[0];
#pragma unroll
    for (int j = 1; j < kN; ++j) largest = max_of(largest, s[j]);
    const Acc before = maximum[i];
    maximum[i] = max_of(before, row_max<kWidth>(largest));
    // A row that has seen no key yet: -inf - (-inf) would be NaN.
    const Acc base = maximum[i] == -Constants<Acc>::infinity() ? Acc(0) : maximum[i];
    // Subtract first, then multiply: equal logits of any size then give exactly 1.
    const Acc rescale = exp2_of((before - base) * to_exponent);
    Acc added = Acc(0);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      s[j] = exp2_of((s[j] - base) * to_exponent);
      added += s[j];
    }
    sum[i] = fma_of(sum[i], rescale, added);
    return rescale;
  }
};

}  // namespace simt
}  // namespace cupy_flash
