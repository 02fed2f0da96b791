// The running softmax of the rows that a warp owns.
#pragma once

#include "mma/atom.cuh"

namespace cupy_flash {
namespace mma {

// Over the four lanes that hold one row of a fragment.
template <class Acc>
CUPY_FLASH_DEVICE Acc row_max(Acc value) {
  value = max_of(value, __shfl_xor_sync(kAllLanes, value, 1));
  return max_of(value, __shfl_xor_sync(kAllLanes, value, 2));
}

template <class Acc>
CUPY_FLASH_DEVICE Acc row_sum(Acc value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// Whether a logit is finite and its exponent so large that rounding shows in the exponential, or
// beyond all numbers.
template <class Acc>
CUPY_FLASH_DEVICE bool is_huge(Acc logit, Acc to_exponent) {
  // Exponents beyond this have no digits left behind the point.
  constexpr Acc kHuge = sizeof(Acc) == 4 ? Acc(1 << 22) : Acc(1ll << 50);
  return abs_of(logit) * to_exponent > kHuge && abs_of(logit) < Constants<Acc>::infinity();
}

template <class Element, int kM>
struct OnlineSoftmax {
  using Acc = Accumulator<Element>;
  // Exponentials of 16-bit types may grow to 2^8 before the reference is moved and all that was
  // summed is rescaled: float sums hold that easily, and so does fp16.
  static constexpr int kSlack = sizeof(Element) == 2 ? 8 : 0;

  Acc reference[kM][2];  // the logit that exponentials are relative to: about the maximum so far
  Acc sum[kM][2];        // of this lane's exponentials; the row's sum is taken once, at the end
  bool huge;             // whether the reference of some row of the warp is

  CUPY_FLASH_DEVICE OnlineSoftmax() : huge(false) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[i][half] = -Constants<Acc>::infinity();
        sum[i][half] = Acc(0);
      }
    }
  }

  // Turns logits into exponentials; `to_exponent` is the factor from their unit to a base-2
  // exponent. Rescales the output if a reference moves.
  template <int kN, int kO>
  CUPY_FLASH_DEVICE void update(Acc (&s)[kM][kN][4], Acc (&o)[kM][kO][4], Acc to_exponent) {
    Acc largest[kM][2];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Acc& most = largest[i][half];
        most = max_of(s[i][0][2 * half], s[i][0][2 * half + 1]);
#pragma unroll
        for (int j = 1; j < kN; ++j) {
          most = max_of(most, max_of(s[i][j][2 * half], s[i][j][2 * half + 1]));
        }
        most = row_max(most);
        moves = moves || (most - reference[i][half]) * to_exponent > Acc(kSlack);
      }
    }
    if (__any_sync(kAllLanes, moves)) move_references(largest, o, to_exponent);

    // Exponentials are relative to the rounded exponent of the reference, which costs one operation
    // for each: a softmax doesn't change if all logits of a row are shifted alike.
    Acc factor = to_exponent;
    Acc shift[kM][2];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) shift[i][half] = base(i, half) * to_exponent;
    }
    if (huge) {
      subtract(s, shift, to_exponent);
      factor = Acc(1);
    }
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            Acc& x = s[i][j][2 * half + c];
            x = exp2_of(fma_of(x, factor, -shift[i][half]));
            sum[i][half] += x;
          }
        }
      }
    }
  }

 private:
  template <int kO>
  CUPY_FLASH_DEVICE void move_references(const Acc (&largest)[kM][2], Acc (&o)[kM][kO][4],
                                         Acc to_exponent) {
    bool some_huge = false;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Acc before = reference[i][half];
        const Acc after = max_of(before, largest[i][half]);
        const Acc shift_before = before * to_exponent;
        const Acc shift_after = after * to_exponent;
        const bool subtracts = is_huge(before, to_exponent) || is_huge(after, to_exponent);
        const Acc exponent =
            subtracts ? (before - after) * to_exponent : shift_before - shift_after;
        // Both may be -inf.
        const Acc rescale = before == after ? Acc(1) : exp2_of(exponent);
        reference[i][half] = after;
        some_huge = some_huge || is_huge(after, to_exponent);
        sum[i][half] *= rescale;
#pragma unroll
        for (int j = 0; j < kO; ++j) {
          o[i][j][2 * half] *= rescale;
          o[i][j][2 * half + 1] *= rescale;
        }
      }
    }
    huge = __any_sync(kAllLanes, some_huge);
  }

  // What logits of a row are relative to. If it has seen no key yet, -inf - (-inf) would be NaN.
  CUPY_FLASH_DEVICE Acc base(int i, int half) const {
    return reference[i][half] == -Constants<Acc>::infinity() ? Acc(0) : reference[i][half];
  }

  // Turns logits into exponents. Where the rounding of a huge shift is too coarse, logits are
  // subtracted first, so that equal ones of any size give exactly 1.
  template <int kN>
  CUPY_FLASH_DEVICE void subtract(Acc (&s)[kM][kN][4], Acc (&shift)[kM][2], Acc to_exponent) const {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool exact = is_huge(base(i, half), to_exponent);
#pragma unroll
        for (int j = 0; j < kN; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            Acc& x = s[i][j][2 * half + c];
            x = exact ? (x - base(i, half)) * to_exponent : fma_of(x, to_exponent, -shift[i][half]);
          }
        }
        shift[i][half] = Acc(0);
      }
    }
  }
};

}  // namespace mma
}  // namespace cupy_flash
