// delta_i = sum over channels of dO_i * O_i, minus dlse_i: what the softmax's derivative subtracts
// from dP in row i. Eight lanes for a row.
#pragma once

#include "common/pack.cuh"
#include "common/seqlen.cuh"

namespace cupy_flash {
namespace passes {

// Of this lane's part of a row.
template <class Element, int kLanes>
CUPY_FLASH_DEVICE Accumulator<Element> partial_delta(const Matrix<const Element>& out,
                                                     const Matrix<const Element>& dout, int row,
                                                     int lane, int columns, bool whole_packs) {
  using Acc = Accumulator<Element>;
  constexpr int kPack = 16 / int(sizeof(Element));
  Acc sum = Acc(0);
  // In the same order whatever the strides are, so that they don't show in the result.
  for (int first = lane * kPack; first < columns; first += kLanes * kPack) {
    Pack<Element, kPack> a = {};
    Pack<Element, kPack> b = {};
    if (whole_packs) {
      a = read_pack<Element, kPack>(dout.at(row, first));
      b = read_pack<Element, kPack>(out.at(row, first));
    } else {
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        if (first + e >= columns) break;
        a.element[e] = *dout.at(row, first + e);
        b.element[e] = *out.at(row, first + e);
      }
    }
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      sum = fma_of(Acc(widen(a.element[e])), Acc(widen(b.element[e])), sum);
    }
  }
  return sum;
}

template <class Element>
CUPY_FLASH_DEVICE bool has_whole_packs(const Matrix<const Element>& matrix, int columns) {
  const i64 bytes = reinterpret_cast<i64>(matrix.data) |
                    ((matrix.row_stride | i64(columns)) * i64(sizeof(Element)));
  return matrix.column_stride == 1 && bytes % 16 == 0;
}

// delta of one row, which kLanes lanes compute together, each a part; and lse, -inf if the row is
// past the end. All lanes of the warp take part, with rows of their own.
template <class Element>
struct RowDelta {
  using Acc = Accumulator<Element>;
  static constexpr int kLanes = 8;
  Acc lse;
  Acc delta;

  template <int kBatchAxes>
  CUPY_FLASH_DEVICE RowDelta(const Params<kBatchAxes>& params, const BatchIndex<kBatchAxes>& batch,
                             int head, int i, bool exists)
      : lse(-Constants<Acc>::infinity()), delta(0) {
    const int columns = int(params.head_dim_v);
    if (exists && i < Seqlen(params, batch).q) {
      const auto all = head_vector<const Acc>(params.lse, params.lse_strides, batch, head);
      lse = all.data[i * all.stride];
    }
    // Nothing comes from a row that sees no key, whatever dO and dlse are there.
    const bool counts = lse != -Constants<Acc>::infinity();
    if (counts) {
      const auto out = head_matrix<const Element>(params.out, params.out_strides, batch, head);
      const auto dout = head_matrix<const Element>(params.dout, params.dout_strides, batch, head);
      const bool whole_packs = has_whole_packs(out, columns) && has_whole_packs(dout, columns);
      delta =
          partial_delta<Element, kLanes>(out, dout, i, threadIdx.x % kLanes, columns, whole_packs);
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      delta += __shfl_xor_sync(kAllLanes, delta, lanes);
    }
    if (counts && params.dlse != nullptr) {
      const auto dlse = head_vector<const Acc>(params.dlse, params.dlse_strides, batch, head);
      delta -= dlse.data[i * dlse.stride];
    }
  }
};

template <class Traits>
CUPY_FLASH_DEVICE void delta(const Params<Traits::kBatchAxes>& params) {
  using Row = RowDelta<typename Traits::Element>;
  constexpr int kRows = Traits::kThreads / Row::kLanes;
  const i64 rows = batch_size(params) * params.heads_q * params.seqlen_q;
  auto* const delta = static_cast<typename Row::Acc*>(params.delta);

  // All lanes of a warp make the same number of rounds, for the sums over lanes.
  for (i64 first = i64(blockIdx.x) * kRows; first < rows; first += i64(gridDim.x) * kRows) {
    const i64 row = first + threadIdx.x / Row::kLanes;
    const int i = int(row % params.seqlen_q);
    const i64 rest = row / params.seqlen_q;
    const BatchIndex<Traits::kBatchAxes> batch(params, rest / params.heads_q);
    const Row found(params, batch, int(rest % params.heads_q), i, row < rows);
    if (threadIdx.x % Row::kLanes == 0 && row < rows) delta[row] = found.delta;
  }
}

}  // namespace passes
}  // namespace cupy_flash
