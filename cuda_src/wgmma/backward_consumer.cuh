// A warpgroup of the backward pass: 64 keys of the block, of which it sums dK and dV over all tiles
// of queries, and a part of each tile of dQ.
//
// S and dP are transposed, keys are rows: so P and dS are left factors of dV and dK as they are in
// registers. For dQ, in which all keys of the block take part, dS passes through shared memory; the
// product is made one tile later, beside the arithmetic that makes the next dS, so that no
// warpgroup has to wait for the other.
#pragma once

#include "wgmma/backward_steps.cuh"

namespace cupy_flash {
namespace wgmma {

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

// All bits of values, so that something can be made to depend on each of them.
template <int kCount>
CUPY_FLASH_DEVICE u32 bits_of(const u32 (&values)[kCount]) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits |= values[i];
  return bits;
}
template <int kCount>
CUPY_FLASH_DEVICE u32 bits_of(const float (&values)[kCount]) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits |= __float_as_uint(values[i]);
  return bits;
}

// A 0 that the compiler doesn't know for one.
template <class Traits>
CUPY_FLASH_DEVICE u32 unknown_zero(const Params<Traits::kBatchAxes>& params) {
  return u32(params.top_left) >> 1;
}

// The gradients of one block of keys.
template <class Traits>
CUPY_FLASH_DEVICE void differentiate(const Params<Traits::kBatchAxes>& params,
                                     BackwardStorage<Traits>& shared, const KeyBlock<Traits>& block,
                                     int group, const Progress& progress) {
  using Element = typename Traits::Element;
  using Storage = BackwardStorage<Traits>;
  using TileK = typename Storage::TileK;
  using TileDs = typename Storage::TileDs;
  constexpr int kStages = Traits::kStages;
  constexpr int kColumns = Traits::kColumns;
  constexpr int kN = kColumns / 8;
  constexpr int kD = Traits::kDepth / 8;
  constexpr int kV = Traits::kDepthV / 8;
  constexpr int kQ = DqPart<Traits>::kN;
  constexpr int kThreads = Traits::kConsumers * kWarpgroup;
  // With 64 queries, P stays in floats until dS is made. With 128 there are no registers for that
  // beside dQ: dS is made of P as weights. What that leaves holds the weights while dV is computed
  // beside dS, and what dP of the next tile begins with.
  constexpr bool kKeepsFloats = kN <= 8;
  const int group_row = group * kGroupRows;
  const DqPart<Traits> part(group);
  const int count = uniform(block.count);
  const int first = progress.tile;
  const int end = first + count;
  const auto keys_slot = slot_of<Storage::kKeyStages>(progress.block);
  TileK& keys = shared.k[keys_slot.stage];
  auto& values = shared.v[keys_slot.stage];

  shared.k_pipeline.wait(keys_slot);
  shared.v_pipeline.wait(keys_slot);
  if (!contains_rows(uniform(block.keys), block.row0, Traits::kRows)) {
    clear_rows<kThreads, true>(keys, block.row0, block.keys);
    clear_rows<kThreads, true>(values, block.row0, block.keys);
    ptx::async_proxy_fence();
    consumers_barrier<Traits>();
  }

  Sums<kD> dk = {};
  Sums<kV> dv = {};
  // What decides about the steps is uniform and in registers: shared memory is slow while tensor
  // cores read it.
  const Range plain = uniform(block.plain[group]);
  const float to_exponent = block.to_exponent;
  int query0 = uniform(block.tiles.begin) * kColumns;
  int left = uniform(block.tiles.end - block.tiles.begin);  // tiles of this head
  // Where dQ of the tile before is summed, and the tiles between that one and this one.
  float* dq_to = block.dq_sums + dq_offset<Traits>(part.row, part.channel) +
                 i64(block.tiles.begin - 1) * (kColumns * Traits::kDepth);
  int skipped = 0;
  const auto begin_dq_in = [&](Sums<kQ>& dq, const Slot<kStages>& slot) {
    shared.ds_pipeline.wait(slot);
    ptx::hold(flat<kQ>(dq));
    ptx::wgmma_fence();
    begin_dq<Element, TileDs, TileK>(
        dq, shared.ds[slot.stage].along_depth(part.row),
        ptx::wgmma_advance(keys.across_depth(), TileK::channel_step(part.channel)));
  };

  const auto begin_dv = [&](Weights<kN>& p, typename Storage::TileO& dout) {
    ptx::hold(flat(p));
    ptx::hold(flat<kV>(dv));
    ptx::wgmma_fence();
    begin_output<Element, kV>(dv, p, dout);
  };
  Pack<float, 2> minus_delta[kN];
  const auto read_minus_delta = [&](int n) {
    const auto& terms = shared.terms[slot_of<kStages>(n).stage];
#pragma unroll
    for (int j = 0; j < kN; ++j) minus_delta[j] = pair_at(terms.minus_delta, j);
  };
  if (count > 0) {
    shared.q_pipeline.wait(slot_of<kStages>(first));
    if constexpr (!kKeepsFloats) read_minus_delta(first);
  }

#pragma unroll 1
  for (int n = first; n < end; ++n) {
    const auto slot = slot_of<kStages>(n);
    // Of the block before, or of none, the last slot as if it had been written.
    auto slot_before = slot_of<kStages>(n - 1);
    auto& q = shared.q[slot.stage];
    auto& dout = shared.dout[slot.stage];
    const auto& terms = shared.terms[slot.stage];
    const bool is_plain = mma::contains(plain, query0);
    shared.dout_pipeline.wait(slot);
    if (!is_plain && !contains_rows(uniform(block.queries), query0, kColumns)) {
      clear_rows<kThreads, true>(q, query0, block.queries);
      clear_rows<kThreads, true>(dout, query0, block.queries);
      ptx::async_proxy_fence();
      consumers_barrier<Traits>();
    }

    // Sᵀ = K Qᵀ, dPᵀ - delta = V dOᵀ - delta
    Sums<kN> s, dp;
    if constexpr (kKeepsFloats) read_minus_delta(n);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) dp[0][j][c] = minus_delta[j].element[c % 2];
    }
    ptx::hold(flat<kN>(s));
    ptx::hold(flat<kN>(dp));
    ptx::wgmma_fence();
    begin_logits<Element, Traits::kDepth, kN>(s, keys, group_row, q);
    begin_logits<Element, Traits::kDepthV, kN, true>(dp, values, group_row, dout);
    ptx::wgmma_wait<1>();
    ptx::hold(flat<kN>(s));

    // P = exp(S - lse), at most 1
    if (!is_plain && !mma::contains(uniform(block.clear[group]), query0)) {
      const Mask<Traits> mask(params, block.batch, 0, block.seqlen);
      mma::hide_columns(s, mask, query0, block.row0 + group_row + 16 * Thread().warp);
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const auto pair = pair_at(terms.exponent, j);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float exponent = fma_of(s[0][j][c], to_exponent, -pair.element[c % 2]);
        s[0][j][c] = exp2_of(kKeepsFloats ? ptx::min_or_nan(exponent, 0) : exponent);
      }
    }
    ptx::hold(flat<kN>(s));
    Weights<kN> p, ds;
    u32 bits;
    if constexpr (kKeepsFloats) {
      bits = bits_of(flat<kN>(s));
    } else {
      make_weights<Element, kN>(p, s);
      limit_to_one<Element, kN>(p);
      bits = bits_of(flat(p));
      ptx::hold(flat(p));
    }
    // The next wait depends on P, or exponentials would be moved behind the products that come
    // after it, where there are no registers for what they are made of.
    slot_before.parity ^= int(bits & unknown_zero<Traits>(params));

    // dQ = dS K of the tile before, and dS meanwhile
    Sums<kQ> dq;
    begin_dq_in(dq, slot_before);
    if constexpr (kKeepsFloats) {
      ptx::wgmma_wait<1>();
      ptx::hold(flat<kN>(dp));
      make_weights<Element, kN>(p, s);
      make_ds<Element, kN>(ds, s, dp);
    } else {
      begin_dv(p, dout);
      ptx::wgmma_wait<2>();
      ptx::hold(flat<kN>(dp));
      // P is read while dV is computed from it, which PTX doesn't promise to be right. Nothing
      // writes there; test_wgmma_machine_code.py looks at what became of it.
      make_ds<Element, kN>(ds, p, dp);
    }
    write_transposed<kN>(shared.ds[slot.stage], ds, group_row);
    ptx::async_proxy_fence();
    ptx::wgmma_wait<kKeepsFloats ? 0 : 1>();
    ptx::hold(flat<kQ>(dq));
    __syncwarp();  // all lanes have written
    shared.ds_pipeline.publish(slot);
    if (n > first) add_dq<kQ>(dq_to, dq);

    // dV += Pᵀ dO, dK += dSᵀ Q
    if constexpr (kKeepsFloats) begin_dv(p, dout);
    ptx::hold(flat(ds));
    ptx::hold(flat<kD>(dk));
    ptx::wgmma_fence();
    begin_output<Element, kD>(dk, ds, q);
    ptx::wgmma_wait<1>();
    ptx::hold(flat<kV>(dv));
    ptx::hold(flat(p));
    shared.dout_pipeline.release(slot);
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kD>(dk));
    ptx::hold(flat(ds));
    // Behind the block's last tile, its own terms are read once more and not used: the next block's
    // tile may come only after this block is done.
    if (n + 1 < end) {
      shared.q_pipeline.release(slot);
      shared.q_pipeline.wait(slot_of<kStages>(n + 1));
    }
    if constexpr (!kKeepsFloats) read_minus_delta(min_of(n + 1, end - 1));

    dq_to += i64(skipped + 1) * (kColumns * Traits::kDepth);
    skipped = 0;
    query0 += kColumns;
    if (--left == 0) {  // on to the next head
      left = uniform(block.tiles.end - block.tiles.begin);
      query0 = uniform(block.tiles.begin) * kColumns;
      skipped = query_tiles<Traits>(params) - left;
    }
  }
  if (count > 0) {
    Sums<kQ> dq;
    begin_dq_in(dq, slot_of<kStages>(end - 1));
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kQ>(dq));
    shared.q_pipeline.release(slot_of<kStages>(end - 1));
    add_dq<kQ>(dq_to, dq);
  }
  write_gradient(block, values, group_row, dv, 1.0f);
  consumers_barrier<Traits>();  // both have read all keys
  write_gradient(block, keys, group_row, dk, float(params.scale));
  __syncwarp();  // all lanes have written
  shared.out_pipeline.publish(keys_slot);
}

}  // namespace wgmma
}  // namespace cupy_flash
