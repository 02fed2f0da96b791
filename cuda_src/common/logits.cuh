// From the product of a query and a key to a logit: scale, softcap, ALiBi, bias.
#pragma once

#include "common/seqlen.cuh"

namespace cupy_flash {

template <class Traits>
struct Logits {
  using Acc = Accumulator<typename Traits::Element>;
  using BiasElement = typename Traits::BiasElement;
  static constexpr int kBatchAxes = Traits::kBatchAxes;

  // With nothing between product and softmax the scale can wait: a maximum of products is then
  // the maximum of logits, and the scale becomes part of the exponential's factor. That needs a
  // positive scale; others are applied first (kScaleFirst).
  static constexpr bool kDeferScale =
      !(Traits::kSoftcap || Traits::kAlibi || Traits::kBias || Traits::kScaleFirst);

  Acc scale;
  Acc softcap;
  Acc inverse_softcap;
  Acc slope;
  int offset;
  const BiasElement* bias;  // of this batch entry and head
  i64 query_stride;
  i64 key_stride;

  CUPY_FLASH_DEVICE Logits(const Params<kBatchAxes>& params, const BatchIndex<kBatchAxes>& batch,
                           int head, const Seqlen& seqlen)
      : scale(Acc(params.scale)),
        softcap(Acc(params.softcap)),
        inverse_softcap(Traits::kSoftcap ? Acc(1) / softcap : Acc(0)),
        slope(0),
        offset(seqlen.offset),
        bias(static_cast<const BiasElement*>(params.bias) +
             batch.offset(params.bias_strides.batch) + head * params.bias_strides.axis[0]),
        query_stride(params.bias_strides.axis[1]),
        key_stride(params.bias_strides.axis[2]) {
    if constexpr (Traits::kAlibi) {
      slope =
          static_cast<const float*>(params.alibi_slopes)[batch.offset(params.alibi_strides.batch) +
                                                         head * params.alibi_strides.axis[0]];
    }
  }

  // Factor from the unit of `value` to that of a base-2 exponent, and to that of a logit.
  CUPY_FLASH_DEVICE Acc to_exponent() const {
    return kDeferScale ? scale * Constants<Acc>::kLog2E : Constants<Acc>::kLog2E;
  }
  CUPY_FLASH_DEVICE Acc to_logit() const { return kDeferScale ? scale : Acc(1); }
  // The same of all heads.
  CUPY_FLASH_DEVICE static Acc to_logit(const Params<kBatchAxes>& params) {
    return kDeferScale ? Acc(params.scale) : Acc(1);
  }
  CUPY_FLASH_DEVICE static Acc to_exponent(const Params<kBatchAxes>& params) {
    return to_logit(params) * Constants<Acc>::kLog2E;
  }

  // The logit of query i and key j; the product itself where the scale is deferred.
  CUPY_FLASH_DEVICE Acc value(Acc product, int i, int j) const {
    Acc unused;
    return value(product, i, j, unused);
  }

  // The same, and the derivative of the logit by the scaled product.
  CUPY_FLASH_DEVICE Acc value(Acc product, int i, int j, Acc& derivative) const {
    derivative = Acc(1);
    if constexpr (kDeferScale) return product;
    Acc x = product * scale;
    if constexpr (Traits::kSoftcap) {
      const Acc t = squash(x * inverse_softcap);
      derivative = Acc(1) - t * t;
      x = softcap * t;
    }
    if constexpr (Traits::kAlibi) {
      x -= slope * abs_of(Acc(i + offset - j));
    }
    if constexpr (Traits::kBias) {
      x += widen_to<Acc>(bias[i * query_stride + j * key_stride]);
    }
    return x;
  }

 private:
  // The hyperbolic tangent; for 16-bit elements without a branch, to about 1e-6.
  CUPY_FLASH_DEVICE static Acc squash(Acc x) {
    if constexpr (sizeof(typename Traits::Element) == 2) {
      // 1 - 2 / (e^2x + 1), where e^2x may be infinite; near 0, where that has no digits left, its
      // series.
      const Acc power = exp2_of(x * (2 * Constants<Acc>::kLog2E));
      const Acc far = Acc(1) - quotient_of(Acc(2), power + Acc(1));
      const Acc square = x * x;
      const Acc ratio = fma_of(square, fma_of(square, Acc(2.0f / 15), Acc(-1.0f / 3)), Acc(1));
      return square < Acc(0.01f) ? x * ratio : far;
    } else {
      return tanh_of(x);
    }
  }
};

}  // namespace cupy_flash
