// The running softmax of the two rows that a lane has a part of.
//
// Exponentials are taken relative to a reference that is about the maximum of the row so far. Most
// tiles don't raise the maximum, so the reference is first assumed to hold: exponentials are made
// and summed without looking for a maximum. If a sum comes out too large, they are divided by a
// power of 2, and the reference moves with them. Only where that power would be too small for a
// float they can't be used: then the logits are needed once more, and their maximum is taken first.
#pragma once

#include "mma/softmax.cuh"
#include "wgmma/products.cuh"

namespace cupy_flash {
namespace wgmma {

template <class Element>
class Softmax {
 public:
  float sum[2];  // of this lane's exponentials; the row's sum is taken once, at the end

  CUPY_FLASH_DEVICE Softmax() : state_(kUnknown) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = 0;
      reference_[half] = -Constants<float>::infinity();
    }
  }

  // The logarithm of the sum of a row's exponentials, given what `sum` adds up to. It begins from
  // the reference as it was rounded, because that is what was taken off.
  CUPY_FLASH_DEVICE float log_sum(int half, float row_sum, float to_exponent) const {
    constexpr float kLn2 = 0.693147180559945309417f;
    const float exponent =
        is_huge() ? reference_[half] * to_exponent : reference_[half] - float(kHeadroom);
    return exponent * kLn2 + log_of(row_sum * float(1 << kHeadroom));
  }

  // Whether exponentials can be made before anyone has looked for a maximum.
  CUPY_FLASH_DEVICE bool is_settled() const { return state_ == kSettled; }

  // Turns logits into exponentials, relative to the reference as it is; `to_exponent` is the factor
  // from their unit to a base-2 exponent. Returns whether that could be done: if not, the logits
  // are lost, and nothing else has changed. `moved` tells whether what was summed before has to be
  // multiplied by `rescale`.
  template <int kN>
  CUPY_FLASH_DEVICE bool assume(Sums<kN>& s, float to_exponent, bool& moved, float (&rescale)[2]) {
    float part[2];
    exponentials<kN>(s, part, to_exponent, reference_);
    moved = false;
    if (__any_sync(kAllLanes, !(max_of(part[0], part[1]) <= kMost))) {
      const float most[2] = {mma::row_max(part[0]), mma::row_max(part[1])};
      if (__any_sync(kAllLanes, !(most[0] < kLost && most[1] < kLost))) return false;
      lower<kN>(s, part, most, rescale);
      moved = true;
    }
    sum[0] += part[0];
    sum[1] += part[1];
    return true;
  }

  // The same relative to a reference that fits the logits. Returns `moved`.
  template <int kN>
  CUPY_FLASH_DEVICE bool update(Sums<kN>& s, float to_exponent, float (&rescale)[2]) {
    float most[2];
    row_maxima<kN>(s, most);
    const bool moved = move_references(most, to_exponent, rescale);
    if (is_huge()) subtract<kN>(s, to_exponent);
    const float factor = is_huge() ? 1.0f : to_exponent;
    const float shift[2] = {this->shift(0), this->shift(1)};
    float part[2];
    exponentials<kN>(s, part, factor, shift);
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
  static constexpr int kHeadroom = kNarrow ? 4 : 26;
  static constexpr float kMost = kNarrow ? 1 << 15 : 4;
  // Where the maximum is looked at, it may grow by this exponent before the reference follows.
  static constexpr int kSlack = 8;
  // From here on, 2^100, the factor that brings an exponential back would be a subnormal number.
  static constexpr float kLost = 1.2676506e30f;

  // What exponentials are relative to: an exponent, which is that of a logit and kHeadroom more, or
  // if the warp has huge ones, a logit; -inf if no key was seen yet.
  float reference_[2];
  enum State {
    kUnknown,  // some row of the warp has no reference
    kSettled,
    kHuge,  // the reference of some row is
  };
  State state_;

  CUPY_FLASH_DEVICE bool is_huge() const { return state_ == kHuge; }
  CUPY_FLASH_DEVICE static bool is_none(float reference) {
    return reference == -Constants<float>::infinity();
  }

  // Where the first logits are large, larger ones may come later: there is more room, which costs
  // no more digits than such logits lack. It is a power of 2, so that a single weight is exact.
  // Sums begin at 2^-42 at least, so that values from 1e-25 on are seen in float.
  CUPY_FLASH_DEVICE static float margin(float first_exponent) {
    return kNarrow ? 0.0f : floorf(min_of(0.5f * abs_of(first_exponent), 16.0f));
  }

  CUPY_FLASH_DEVICE float shift(int half) const {
    return is_huge() || is_none(reference_[half]) ? 0.0f : reference_[half];
  }

  // Turns logits into exponentials in place.
  template <int kN>
  CUPY_FLASH_DEVICE static void exponentials(Sums<kN>& s, float (&part)[2], float factor,
                                             const float (&shift)[2]) {
    part[0] = part[1] = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[0][j][c] = exp2_of(fma_of(s[0][j][c], factor, -shift[c / 2]));
        part[c / 2] += s[0][j][c];
      }
    }
  }

  // Divides exponentials by powers of 2, so that those of a row are about where they begin, and
  // moves the references along. `most` is about the largest. When one row has to move, all do that
  // are far behind, so that the next time is far off.
  template <int kN>
  CUPY_FLASH_DEVICE void lower(Sums<kN>& s, float (&part)[2], const float (&most)[2],
                               float (&rescale)[2]) {
    constexpr float kFar = float(1 << kSlack) / (1 << kHeadroom);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = reference_[half];
      const int exponent = int(__float_as_uint(most[half]) >> 23) - 126;
      if (most[half] > kFar) reference_[half] += float(exponent + kHeadroom);
      rescale[half] = exp2_of(before - reference_[half]);
      part[half] *= rescale[half];
      sum[half] *= rescale[half];
    }
    multiply_rows<kN>(s, rescale);
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

  // Lets the references follow the maxima. Returns whether anything was summed relative to one that
  // has moved.
  CUPY_FLASH_DEVICE bool move_references(const float (&most)[2], float to_exponent,
                                         float (&rescale)[2]) {
    float before[2], after[2];
    bool some_huge = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      before[half] = is_huge() || is_none(reference_[half])
                         ? reference_[half]
                         : (reference_[half] - float(kHeadroom)) / to_exponent;
      // Not true if both are -inf.
      const bool moves = (most[half] - before[half]) * to_exponent > float(kSlack);
      after[half] = moves ? most[half] : before[half];
      some_huge = some_huge || mma::is_huge(after[half], to_exponent);
    }
    const bool was_huge = is_huge();
    const bool huge = __any_sync(kAllLanes, some_huge);
    bool moved = false, unknown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool none = is_none(after[half]);
      const bool known = !is_none(before[half]);
      // Also those that stay where they are, if exponent and logit are rounded differently.
      const bool changes = after[half] != before[half] || (known && huge != was_huge);
      const float shift_before = reference_[half];
      if (changes) {
        const float exponent = after[half] * to_exponent;
        reference_[half] =
            huge ? after[half] : exponent + float(kHeadroom) + (known ? 0 : margin(exponent));
      }
      const float headroom = float(kHeadroom);
      const float exponent = huge && was_huge ? (before[half] - after[half]) * to_exponent
                             : huge ? -fma_of(after[half], to_exponent, headroom - shift_before)
                             : was_huge
                                 ? fma_of(before[half], to_exponent, headroom - reference_[half])
                                 : shift_before - reference_[half];
      rescale[half] = !changes ? 1.0f : known ? exp2_of(exponent) : 0.0f;
      sum[half] *= rescale[half];
      moved = moved || (changes && known);
      unknown = unknown || none;
    }
    unknown = __any_sync(kAllLanes, unknown);
    state_ = huge ? kHuge : unknown ? kUnknown : kSettled;
    return __any_sync(kAllLanes, moved);
  }

  // Turns logits into exponents. Where the rounding of a huge shift is too coarse, logits are
  // subtracted first, so that equal ones of any size give exactly 1.
  template <int kN>
  CUPY_FLASH_DEVICE void subtract(Sums<kN>& s, float to_exponent) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = is_none(reference_[half]) ? 0.0f : reference_[half];
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[0][j][2 * half + c];
          x = (x - reference) * to_exponent - float(kHeadroom);
        }
      }
    }
  }
};

}  // namespace wgmma
}  // namespace cupy_flash
