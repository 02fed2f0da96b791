// What the backward kernels of this family share.
//
// Each gradient has its own kernel, in which a block owns the rows of its result and walks over
// all that contributes to them: nothing is added by atomics, every run gives the same bits.
#pragma once

#include "common/logits.cuh"
#include "common/mask.cuh"
#include "simt/tile.cuh"

namespace cupy_flash {
namespace simt {

// The block owns rows of A (q and dO, or k and v) and walks over tiles of B (the others). Resident:
// the whole head fits, A is loaded once and B once per tile. Otherwise one chunk of channels of
// one matrix at a time goes through a[0] and b[0].
template <class Traits>
struct BackwardStorage {
  using Acc = Accumulator<typename Traits::Element>;
  static constexpr int kWidest =
      Traits::kChunkD > Traits::kChunkV ? Traits::kChunkD : Traits::kChunkV;
  static constexpr int kCopies = Traits::kResident ? 2 : 1;
  Tile<Acc, Traits::kRows, kWidest> a[kCopies];
  Tile<Acc, Traits::kColumns, kWidest> b[kCopies];
  Tile<Acc, Traits::kRows, Traits::kColumns> weights;  // P, then dS

  CUPY_FLASH_DEVICE auto& a_d() { return a[0]; }            // rows of q, or of k
  CUPY_FLASH_DEVICE auto& a_v() { return a[kCopies - 1]; }  // rows of dO, or of v
  CUPY_FLASH_DEVICE auto& b_d() { return b[0]; }
  CUPY_FLASH_DEVICE auto& b_v() { return b[kCopies - 1]; }
};

// S and dP are spread over the threads in small squares, the results in larger ones.
template <int kThreads>
using LogitGrid = ThreadGrid<kThreads, 8, 8>;

template <class Traits>
constexpr bool threads_cover_tile() {
  return Traits::kRows % LogitGrid<Traits::kThreads>::kHeight == 0 &&
         Traits::kColumns % LogitGrid<Traits::kThreads>::kWidth == 0 &&
         Traits::kRows % OutputGrid<Traits::kThreads>::kHeight == 0;
}

// One row's part of the softmax's derivative: its lse and delta.
template <class Acc>
struct RowTerms {
  Acc lse;
  Acc delta;
};

template <class Traits>
struct RowTermReader {
  using Acc = Accumulator<typename Traits::Element>;
  Vector<const Acc> lse;
  const Acc* delta;
  int rows;

  CUPY_FLASH_DEVICE RowTermReader(const Params<Traits::kBatchAxes>& params,
                                  const BatchIndex<Traits::kBatchAxes>& batch, int head, int q_len)
      : lse(head_vector<const Acc>(params.lse, params.lse_strides, batch, head)),
        delta(static_cast<const Acc*>(params.delta) +
              (batch.flat * params.heads_q + head) * params.seqlen_q),
        rows(q_len) {}

  // A row that sees no key gets lse = +inf, so that all its probabilities are 0.
  CUPY_FLASH_DEVICE RowTerms<Acc> read(int i) const {
    constexpr Acc kZero = Acc(0);
    if (i >= rows) return {Constants<Acc>::infinity(), kZero};
    const Acc value = lse.data[i * lse.stride];
    if (value == -Constants<Acc>::infinity()) return {Constants<Acc>::infinity(), kZero};
    return {value, delta[i]};
  }
};

// P of one pair, recomputed; chain is d(logit) / d(scaled product).
template <class Traits, class Acc>
CUPY_FLASH_DEVICE Acc probability(const Logits<Traits>& logits, const RowTerms<Acc>& terms,
                                  Acc product, int query, int key, Acc& chain) {
  const Acc logit = logits.value(product, query, key, chain) * logits.to_logit();
  const Acc below = logit - terms.lse;
  // A logit is never above its row's lse; rounding may put it there, and for huge ones far. Not by
  // a minimum, which would make 1 of NaN.
  return exp2_of((below > Acc(0) ? Acc(0) : below) * Constants<Acc>::kLog2E);
}

}  // namespace simt
}  // namespace cupy_flash
