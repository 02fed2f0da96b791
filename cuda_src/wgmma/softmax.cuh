// The running softmax of the two rows that a lane has a part of.
//
// Exponentials are taken relative to a reference that is about the maximum of the row so far. Most
// tiles don't raise the maximum, so the reference is first assumed to hold: exponentials are made
// and summed without looking for a maximum. Only if a sum comes out too large, or isn't a number,
// are they taken back and made again relative to the new maximum. The logits are still there, so
// nothing is lost, whatever they are.
#pragma once

#include "mma/softmax.cuh"
#include "wgmma/products.cuh"

namespace cupy_flash {
namespace wgmma {

template <class Element>
class Softmax {
 public:
  float sum[2];  // of this lane's exponentials; the row's sum is taken once, at the end

  CUPY_FLASH_DEVICE Softmax() : careful_(kAlways), huge_(false) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = 0;
      shift_[half] = 0;
      reference_[half] = -Constants<float>::infinity();
    }
  }

  // The logarithm of the sum of a row's exponentials, given what `sum` adds up to.
  CUPY_FLASH_DEVICE float log_sum(int half, float row_sum, float to_logit) const {
    constexpr float kLn2 = 0.693147180559945309417f;
    return reference_[half] * to_logit + (log_of(row_sum) + kHeadroom * kLn2);
  }

  // Turns logits into exponentials; `to_exponent` is the factor from their unit to a base-2
  // exponent. Returns whether what was summed before has to be multiplied by `rescale`.
  template <int kN>
  CUPY_FLASH_DEVICE bool update(Sums<kN>& s, Weights<kN>& p, float to_exponent,
                                float (&rescale)[2]) {
    float part[2];
    bool moved = false;
    if (careful_ == 0) {
      exponentials<kN>(s, p, part, to_exponent);
      const bool fits = max_of(part[0], part[1]) <= kMost;  // false of NaN
      if (__any_sync(kAllLanes, !fits)) careful_ = kPatience;
    }
    if (careful_ != 0) {
      float most[2];
      row_maxima<kN>(s, most);
      const bool moves = (most[0] - reference_[0]) * to_exponent > kSlack ||
                         (most[1] - reference_[1]) * to_exponent > kSlack;
      if (__any_sync(kAllLanes, moves)) {
        moved = move_references(most, to_exponent, rescale);
      } else if (careful_ != kAlways) {
        --careful_;
      }
      float factor = to_exponent;
      if (huge_) {
        subtract<kN>(s, to_exponent);
        factor = 1;
      }
      exponentials<kN>(s, p, part, factor);
    }
    sum[0] += part[0];
    sum[1] += part[1];
    return moved;
  }

 private:
  // Exponentials begin this far below 1, as powers of 2, and a lane's sum of a tile may reach kMost
  // before the reference moves: the maximum of a row grows that much for nothing. fp16 has
  // little room for weights; in bf16 and float it is the room for values of any size that counts.
  static constexpr bool kNarrow = ptx::kIsFp16<Element>;
  static constexpr float kHeadroom = kNarrow ? 4 : 20;
  static constexpr float kMost = kNarrow ? 1 << 15 : 1 << 20;
  // Where the maximum is looked at, it may grow by this exponent before the reference follows.
  static constexpr float kSlack = 8;
  // Data that moves a reference once is likely to do it again, and what is taken back costs time:
  // so many tiles are looked at first.
  static constexpr int kPatience = 6;
  static constexpr int kAlways = -1;

  float reference_[2];
  float shift_[2];  // the exponent that exponentials are relative to; 0 if it is taken off before
  int careful_;     // tiles for which to look at the maximum first, or kAlways
  bool huge_;       // the reference of some row of the warp is

  template <int kN>
  CUPY_FLASH_DEVICE void exponentials(const Sums<kN>& s, Weights<kN>& p, float (&part)[2],
                                      float factor) const {
    part[0] = part[1] = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = exp2_of(fma_of(s[0][j][2 * half], factor, -shift_[half]));
        const float high = exp2_of(fma_of(s[0][j][2 * half + 1], factor, -shift_[half]));
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
      // Not true if both are -inf.
      const bool moves = (most[half] - before) * to_exponent > kSlack;
      const float after = moves ? most[half] : before;
      const bool huge = mma::is_huge(before, to_exponent) || mma::is_huge(after, to_exponent);
      const float exponent =
          huge ? (before - after) * to_exponent : before * to_exponent - after * to_exponent;
      rescale[half] = moves ? exp2_of(exponent) : 1.0f;
      sum[half] *= rescale[half];
      reference_[half] = after;
      // If a row has seen no key yet, -inf - (-inf) would be NaN.
      const bool none = after == -Constants<float>::infinity();
      shift_[half] = none ? 0.0f : after * to_exponent + kHeadroom;
      moved = moved || (moves && !(before == -Constants<float>::infinity()));
      some_huge = some_huge || mma::is_huge(after, to_exponent);
      unknown = unknown || none;
    }
    moved = __any_sync(kAllLanes, moved);
    careful_ = moved ? kPatience : 0;
    huge_ = false;
    if (__any_sync(kAllLanes, some_huge || unknown)) {
      careful_ = kAlways;
      huge_ = __any_sync(kAllLanes, some_huge);
    }
    return moved;
  }

  // Turns logits into exponents. Where the rounding of a huge shift is too coarse, logits are
  // subtracted first, so that equal ones of any size give exactly 1.
  template <int kN>
  CUPY_FLASH_DEVICE void subtract(Sums<kN>& s, float to_exponent) {
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
      shift_[half] = 0;
    }
  }
};

}  // namespace wgmma
}  // namespace cupy_flash
