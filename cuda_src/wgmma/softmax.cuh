// The running softmax of the two rows that a lane has a part of.
//
// Exponentials are taken relative to a reference that is about the maximum of the row so far. Most
// tiles don't raise the maximum, so the reference is first assumed to hold: exponentials are made
// and summed without looking for a maximum. Only if a sum comes out too large are they taken back
// and made again relative to the new maximum. The logits are still there, so nothing is lost,
// whatever they are.
#pragma once

#include "mma/softmax.cuh"
#include "wgmma/products.cuh"

namespace cupy_flash {
namespace wgmma {

template <class Element>
class Softmax {
 public:
  float sum[2];  // of this lane's exponentials; the row's sum is taken once, at the end

  CUPY_FLASH_DEVICE Softmax() : settled_(false), huge_(false) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = 0;
      shift_[half] = 0;
      reference_[half] = -Constants<float>::infinity();
    }
  }

  // The logarithm of the sum of a row's exponentials, given what `sum` adds up to. It begins from
  // the shift as it was rounded, because that is what was taken off.
  CUPY_FLASH_DEVICE float log_sum(int half, float row_sum) const {
    constexpr float kLn2 = 0.693147180559945309417f;
    return (shift_[half] - kHeadroom) * kLn2 + log_of(row_sum * float(1 << kHeadroom));
  }

  // Turns logits into exponentials; `to_exponent` is the factor from their unit to a base-2
  // exponent. Returns whether what was summed before has to be multiplied by `rescale`.
  template <int kN>
  CUPY_FLASH_DEVICE bool update(Sums<kN>& s, Weights<kN>& p, float to_exponent,
                                float (&rescale)[2]) {
    float part[2];
    bool moved = false;
    bool repeat = !settled_;
    if (settled_) {
      exponentials<kN>(s, p, part, to_exponent, shift_);
      const bool fits = max_of(part[0], part[1]) <= kMost;
      repeat = __any_sync(kAllLanes, !fits);
    }
    if (repeat) {
      float most[2];
      row_maxima<kN>(s, most);
      const bool moves = (most[0] - reference_[0]) * to_exponent > kSlack ||
                         (most[1] - reference_[1]) * to_exponent > kSlack;
      if (__any_sync(kAllLanes, moves)) moved = move_references(most, to_exponent, rescale);
      float factor = to_exponent;
      float shift[2] = {shift_[0], shift_[1]};
      if (huge_) {
        subtract<kN>(s, to_exponent);
        factor = 1;
        shift[0] = shift[1] = 0;
      }
      exponentials<kN>(s, p, part, factor, shift);
    }
    sum[0] += part[0];
    sum[1] += part[1];
    return moved;
  }

 private:
  // Exponentials begin this far below 1, as powers of 2, and a lane's sum of a tile may reach kMost
  // before the reference moves: the maximum of a row may grow that much for nothing. In fp16
  // weights have little room below 1. In bf16 they have, and room above 1 would be taken from the
  // values that they are multiplied with; much further below 1, exponents would have fewer digits.
  static constexpr bool kNarrow = kIsFp16<Element>;
  static constexpr int kHeadroom = kNarrow ? 4 : 20;
  static constexpr float kMost = kNarrow ? 1 << 15 : 1 << 10;
  // Where the maximum is looked at, it may grow by this exponent before the reference follows.
  static constexpr float kSlack = 8;

  float reference_[2];
  float shift_[2];  // the exponent that exponentials are relative to
  bool settled_;    // all rows of the warp have a reference, and none is huge
  bool huge_;       // some is

  template <int kN>
  CUPY_FLASH_DEVICE static void exponentials(const Sums<kN>& s, Weights<kN>& p, float (&part)[2],
                                             float factor, const float (&shift)[2]) {
    part[0] = part[1] = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = exp2_of(fma_of(s[0][j][2 * half], factor, -shift[half]));
        const float high = exp2_of(fma_of(s[0][j][2 * half + 1], factor, -shift[half]));
        part[half] += low;
        part[half] += high;
        p[j / 2][j % 2 * 2 + half] = mma::narrow_pair(low, high, Element{});
      }
    }
  }

  template <int kN>
  CUPY_FLASH_DEVICE static void row_maxima(const Sums<kN>& s, float (&most)[2]) {
    // Several maxima side by side, because one operation waits for the other.
    constexpr int kChains = kN % 4 == 0 ? 4 : 2;
    float chain[2][kChains];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float pair = max_of(s[0][j][2 * half], s[0][j][2 * half + 1]);
        float& largest = chain[half][j % kChains];
        largest = j < kChains ? pair : max_of(largest, pair);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = chain[half][0];
#pragma unroll
      for (int i = 1; i < kChains; ++i) most[half] = max_of(most[half], chain[half][i]);
      most[half] = mma::row_max(most[half]);
    }
  }

  // Returns whether anything was summed relative to a reference that has moved.
  CUPY_FLASH_DEVICE bool move_references(const float (&most)[2], float to_exponent,
                                         float (&rescale)[2]) {
    bool moved = false, some_huge = false, unknown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = reference_[half];
      const float shift_before = shift_[half];
      // Not true if both are -inf.
      const bool moves = (most[half] - before) * to_exponent > kSlack;
      const float after = moves ? most[half] : before;
      // If a row has seen no key yet, -inf - (-inf) would be NaN.
      const bool none = after == -Constants<float>::infinity();
      reference_[half] = after;
      shift_[half] = none ? 0.0f : after * to_exponent + kHeadroom;
      const bool huge = mma::is_huge(before, to_exponent) || mma::is_huge(after, to_exponent);
      const float exponent = huge ? (before - after) * to_exponent : shift_before - shift_[half];
      const bool known = !(before == -Constants<float>::infinity());
      rescale[half] = !moves ? 1.0f : known ? exp2_of(exponent) : 0.0f;
      sum[half] *= rescale[half];
      moved = moved || (moves && known);
      some_huge = some_huge || mma::is_huge(after, to_exponent);
      unknown = unknown || none;
    }
    moved = __any_sync(kAllLanes, moved);
    settled_ = !__any_sync(kAllLanes, some_huge || unknown);
    huge_ = !settled_ && __any_sync(kAllLanes, some_huge);
    return moved;
  }

  // Turns logits into exponents. Where the rounding of a huge shift is too coarse, logits are
  // subtracted first, so that equal ones of any size give exactly 1.
  template <int kN>
  CUPY_FLASH_DEVICE void subtract(Sums<kN>& s, float to_exponent) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exact = mma::is_huge(reference_[half], to_exponent);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[0][j][2 * half + c];
          x = exact ? (x - reference_[half]) * to_exponent - kHeadroom
                    : fma_of(x, to_exponent, -shift_[half]);
        }
      }
    }
  }
};

}  // namespace wgmma
}  // namespace cupy_flash
