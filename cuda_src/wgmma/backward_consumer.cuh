// A warpgroup of the backward pass: 64 keys of the block, of which it sums dK and dV over all tiles
// of queries, and a part of each tile of dQ.
//
// S and dP are transposed, keys are rows: so P and dS are left factors of dV and dK as they are in
// registers. For dQ, in which all keys of the block take part, dS passes through shared memory; the
// product is made one tile later, beside the arithmetic that makes the next dS, so that no
// warpgroup has to wait for the other.
#pragma once

#include "mma/dq_sums.cuh"
#include "mma/gradient.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/reduce.cuh"
#include "wgmma/backward_storage.cuh"
#include "wgmma/epilogue.cuh"
#include "wgmma/products.cuh"

namespace cupy_flash {
namespace wgmma {

// Barriers of both consumers; those of one warpgroup are 1 + its number.
template <class Traits>
CUPY_FLASH_DEVICE void consumers_barrier() {
  ptx::named_barrier(1 + Traits::kConsumers, Traits::kConsumers * kWarpgroup);
}

// How the two consumers divide a tile of dQ: by queries, or by channels if it has only 64 queries.
template <class Traits>
struct DqPart {
  static constexpr bool kByQueries = Traits::kColumns == Traits::kConsumers * kGroupRows;
  static constexpr int kChannels = kByQueries ? Traits::kDepth : Traits::kDepth / 2;
  static constexpr int kN = kChannels / 8;
  static_assert(Traits::kConsumers == 2 && (kByQueries || Traits::kColumns == kGroupRows),
                "64 queries of one product");
  static_assert(kByQueries || kChannels % kPanelColumns == 0, "whole panels");

  int row;  // of the tile
  int channel;

  CUPY_FLASH_DEVICE explicit DqPart(int group)
      : row(kByQueries ? group * kGroupRows : 0), channel(kByQueries ? 0 : group * kChannels) {}
};

// Adds a warp's sums to fragments in global memory, each lane at its own place.
template <int kN>
CUPY_FLASH_DEVICE void add_fragments(float* to, const Sums<kN>& sums) {
#pragma unroll
  for (int j = 0; j < kN; ++j) ptx::red_add_4(to + j * mma::kFragmentSize, sums[0][j]);
}

CUPY_FLASH_DEVICE bool contains_rows(const Range& range, int row0, int rows) {
  return row0 >= range.begin && row0 + rows <= range.end;
}

// Writes 64 rows of dK and of dV, and begins to store them.
template <class Traits>
CUPY_FLASH_DEVICE void store_gradients(const Params<Traits::kBatchAxes>& params,
                                       const BackwardMaps& maps, BackwardStorage<Traits>& shared,
                                       const KeyBlock<Traits>& block, int group,
                                       const Sums<Traits::kDepth / 8>& dk,
                                       const Sums<Traits::kDepthV / 8>& dv) {
  using Element = typename Traits::Element;
  using Position = HeadPosition<Traits::kBatchAxes>;
  const mma::Lane lane;
  const int group_row = group * kGroupRows;
  const int warp_row = group_row + threadIdx.x % kWarpgroup / kWarpSize * 16;
  float one[2], scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool inside = block.row0 + warp_row + lane.g + 8 * half < block.seqlen.k;
    one[half] = inside ? 1.0f : -1.0f;
    scale[half] = inside ? float(params.scale) : -1.0f;
  }
  write_sums<Element>(shared.v, warp_row, dv, one);
  consumers_barrier<Traits>();  // both have read all keys
  write_sums<Element>(shared.k, warp_row, dk, scale);
  group_barrier(group);
  if (threadIdx.x % kWarpgroup == 0) {
    const int row0 = block.row0 + group_row;
    store_panels(maps.dv, shared.v, Position(params.dv_strides, block.batch, block.head), row0,
                 group_row);
    store_panels(maps.dk, shared.k, Position(params.dk_strides, block.batch, block.head), row0,
                 group_row);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
}

template <class Traits>
CUPY_FLASH_DEVICE void differentiate(const Params<Traits::kBatchAxes>& params,
                                     const BackwardMaps& maps, BackwardStorage<Traits>& shared,
                                     int group) {
  using Element = typename Traits::Element;
  using Storage = BackwardStorage<Traits>;
  constexpr int kColumns = Traits::kColumns;
  constexpr int kN = kColumns / 8;
  constexpr int kQ = DqPart<Traits>::kN;
  constexpr int kThreads = Traits::kConsumers * kWarpgroup;
  const int group_row = group * kGroupRows;
  const int warp_row = group_row + threadIdx.x % kWarpgroup / kWarpSize * 16;
  const mma::Lane lane;

  const KeyBlock<Traits>& block = shared.block;
  const int count = uniform(block.count);
  const int per_head = query_tiles<Traits>(params);
  const float to_exponent = Logits<Traits>::to_exponent(params);

  // Fragments of dQ's sums lie one after the other, first by queries, then by channels.
  const DqPart<Traits> part(group);
  constexpr int kFragments = Traits::kDepth / 8;
  float* const dq_sums =
      static_cast<float*>(params.dq_sums) +
      block.heads_before(params) * per_head * (kColumns * Traits::kDepth) +
      ((part.row / 16 + threadIdx.x % kWarpgroup / kWarpSize) * kFragments + part.channel / 8) *
          mma::kFragmentSize +
      4 * lane.index;

  Sums<Traits::kDepth / 8> dk = {};
  Sums<Traits::kDepthV / 8> dv = {};

  // dS of no tile, for the product that is made beside the first.
  clear_rows<kThreads>(shared.ds[Traits::kStages - 1], 0, {0, 0});
  shared.k_pipeline.wait({});
  shared.v_pipeline.wait({});
  if (!contains_rows(block.keys, block.row0, Traits::kRows)) {
    clear_rows<kThreads>(shared.k, block.row0, block.keys);
    clear_rows<kThreads>(shared.v, block.row0, block.keys);
  }
  ptx::async_proxy_fence();
  consumers_barrier<Traits>();

  QueryTile at(block.tiles);
  int before = 0;  // the index of the tile before
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const auto slot = slot_of<Traits::kStages>(n);
    const auto slot_before = slot_of<Traits::kStages>(n - 1);  // of none: the last, as if seen
    const int query0 = at.tile * kColumns;
    auto& q = shared.q[slot.stage];
    auto& dout = shared.dout[slot.stage];
    const auto& terms = shared.terms[slot.stage];
    shared.q_pipeline.wait(slot);
    shared.dout_pipeline.wait(slot);
    if (!contains_rows(block.queries, query0, kColumns)) {
      clear_rows<kThreads>(q, query0, block.queries);
      clear_rows<kThreads>(dout, query0, block.queries);
      ptx::async_proxy_fence();
      consumers_barrier<Traits>();
    }

    // Sᵀ = K Qᵀ, dPᵀ - delta = V dOᵀ - delta
    Sums<kN> s, dp;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const auto pair = read_pack<float, 2>(&terms.minus_delta[8 * j + 2 * lane.t]);
#pragma unroll
      for (int c = 0; c < 4; ++c) dp[0][j][c] = pair.element[c % 2];
    }
    ptx::hold(flat<kN>(s));
    ptx::hold(flat<kN>(dp));
    ptx::wgmma_fence();
    begin_logits<Element, Traits::kDepth, kN, false>(s, shared.k, group_row, q);
    begin_logits<Element, Traits::kDepthV, kN, true>(dp, shared.v, group_row, dout);
    ptx::wgmma_wait<1>();
    ptx::hold(flat<kN>(s));

    // P = exp(S - lse)
    if (!mma::contains(block.clear[group], query0)) {
      const Mask<Traits> mask(params, block.batch, 0, block.seqlen);
      mma::hide_columns(s, mask, query0, block.row0 + warp_row);
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const auto pair = read_pack<float, 2>(&terms.exponent[8 * j + 2 * lane.t]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float exponent = fma_of(s[0][j][c], to_exponent, -pair.element[c % 2]);
        // A logit is never above its row's lse, but rounding may put it there.
        s[0][j][c] = exp2_of(ptx::min_or_nan(exponent, 0));
      }
    }
    ptx::hold(flat<kN>(s));

    // dQ = dS K of the tile before, and dS = P (dP - delta) meanwhile
    shared.ds_pipeline.wait(slot_before);
    Sums<kQ> dq;
    ptx::hold(flat<kQ>(dq));
    ptx::wgmma_fence();
    begin_dq<Element, kQ>(dq, shared.ds[slot_before.stage], part.row, shared.k, part.channel);
    ptx::wgmma_wait<1>();
    ptx::hold(flat<kN>(dp));
    Weights<kN> p, ds;
    make_weights<Element, kN>(p, s);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[0][j][c] *= dp[0][j][c];
    }
    make_weights<Element, kN>(ds, s);
#ifdef EARLY
    write_transposed<kN>(shared.ds[slot.stage], ds, warp_row);
    ptx::async_proxy_fence();
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kQ>(dq));
#else
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kQ>(dq));
    write_transposed<kN>(shared.ds[slot.stage], ds, warp_row);
    ptx::async_proxy_fence();
#endif
    __syncwarp();  // all lanes have written
    shared.ds_pipeline.publish(slot);

#if RED == 1
    if (n > 0) add_fragments<kQ>(dq_sums + i64(before) * (kColumns * Traits::kDepth), dq);
#endif
    // dV += Pᵀ dO, dK += dSᵀ Q
    ptx::hold(flat(p));
    ptx::hold(flat<Traits::kDepthV / 8>(dv));
    ptx::wgmma_fence();
    begin_output<Element, Traits::kDepthV / 8>(dv, p, dout);
#if RED == 0
    if (n > 0) add_fragments<kQ>(dq_sums + i64(before) * (kColumns * Traits::kDepth), dq);
#endif
    ptx::hold(flat(ds));
    ptx::hold(flat<Traits::kDepth / 8>(dk));
    ptx::wgmma_fence();
    begin_output<Element, Traits::kDepth / 8>(dk, ds, q);
#if RED == 2
    if (n > 0) add_fragments<kQ>(dq_sums + i64(before) * (kColumns * Traits::kDepth), dq);
#endif
    ptx::wgmma_wait<1>();
    ptx::hold(flat<Traits::kDepthV / 8>(dv));
    ptx::hold(flat(p));
    shared.dout_pipeline.release(slot);
    before = at.index;
    at.advance(block.tiles, per_head);
    ptx::wgmma_wait<0>();
    ptx::hold(flat<Traits::kDepth / 8>(dk));
    ptx::hold(flat(ds));
    shared.q_pipeline.release(slot);
  }
  if (count > 0) {
    const auto slot_before = slot_of<Traits::kStages>(count - 1);
    shared.ds_pipeline.wait(slot_before);
    Sums<kQ> dq;
    ptx::hold(flat<kQ>(dq));
    ptx::wgmma_fence();
    begin_dq<Element, kQ>(dq, shared.ds[slot_before.stage], part.row, shared.k, part.channel);
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kQ>(dq));
    add_fragments<kQ>(dq_sums + i64(before) * (kColumns * Traits::kDepth), dq);
  }
  store_gradients<Traits>(params, maps, shared, block, group, dk, dv);
}

}  // namespace wgmma
}  // namespace cupy_flash
