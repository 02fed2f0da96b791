// The gradients of large heads on Hopper: a block owns 64 keys of one kv head and walks over the
// queries of all heads that read them, 64 at a time. One thread of the first warpgroup loads. As
// sums of dK and of dV fill the registers of a warpgroup each, every other one makes what its own
// gradient needs:
//
//   values   S = K Qᵀ, P, dV += Pᵀ dO    and hands P over in shared memory
//   keys     dP = V dOᵀ, dS, dK += dSᵀ Q    and hands dS over, as a factor of a product
//   queries  dQ = dS K    in parts of 64 channels, which it adds to sums in global memory
//
// Products of the next tile, S and dP, are begun behind those of this one, so that tensor cores
// have work while P and dS are made. S and dP are transposed, as in backward_consumer.cuh.
#pragma once

#include "ptx/registers.cuh"
#include "wgmma/backward_producer.cuh"
#include "wgmma/backward_steps.cuh"

namespace cupy_flash {
namespace wgmma {

enum class Role { kLoad, kValues, kKeys, kQueries };

// Registers of a thread: of those that sum dV and dK, of those that add dQ, and of those that load.
constexpr int kSumRegisters = 208;
constexpr int kAddRegisters = 72;
constexpr int kLoadRegisters = 24;

template <class Traits>
using RoleStorage = BackwardStorage<Traits, true>;

// Barrier of the warpgroups that read queries.
template <class Traits>
CUPY_FLASH_DEVICE void readers_barrier() {
  ptx::named_barrier(2 + Traits::kConsumers, 2 * kWarpgroup);
}

// Begins sums += weights * tile, in two halves of the channels if there are many: a product of 256
// would need more registers than the compiler gives to a block of so many threads.
template <class Element, int kN, int kFragments, class Tile>
CUPY_FLASH_DEVICE void begin_sums(Sums<kN>& sums, const u32 (&weights)[kFragments][4], Tile& tile) {
  constexpr int kParts = kN > 24 ? 2 : 1;
  constexpr int kPart = kN / kParts;
  static_assert(8 * kPart % kPanelColumns == 0, "whole panels");
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    auto& some = reinterpret_cast<Sums<kPart>&>(sums[0][part * kPart]);
    begin_output<Element, kPart>(some, weights, tile, 8 * part * kPart);
  }
}

// Waits for the keys and the values, rows of which that nobody sees become zeros.
template <class Traits>
CUPY_FLASH_DEVICE void await_keys(RoleStorage<Traits>& shared, Role role) {
  shared.k_pipeline.wait({});
  shared.v_pipeline.wait({});
  const KeyBlock<Traits>& block = shared.block;
  if (!contains_rows(block.keys, block.row0, Traits::kRows)) {
    if (role == Role::kValues) clear_rows<kWarpgroup, true>(shared.k, block.row0, block.keys);
    if (role == Role::kKeys) clear_rows<kWarpgroup, true>(shared.v, block.row0, block.keys);
    ptx::async_proxy_fence();
    consumers_barrier<Traits>();
  }
}

// Where one of the two that read queries is in its walk over their tiles. The one that sums dV
// clears rows of queries that nobody sees, the other one rows of dO.
template <class Traits, Role kRole>
struct Reader {
  Range tiles;
  Range plain;
  int per_head;
  QueryTile at;

  CUPY_FLASH_DEVICE Reader(const Params<Traits::kBatchAxes>& params, const KeyBlock<Traits>& block)
      : tiles(uniform(block.tiles)),
        plain(uniform(block.plain[0])),
        per_head(query_tiles<Traits>(params)),
        at(QueryTile::before_first(tiles)) {}

  CUPY_FLASH_DEVICE int query0() const { return at.tile * Traits::kColumns; }
  CUPY_FLASH_DEVICE bool is_plain() const { return mma::contains(plain, query0()); }

  // Goes on to the next tile, which is the n-th, and waits for it. Of the one after the last, the
  // producer only says that it is there.
  CUPY_FLASH_DEVICE void next(RoleStorage<Traits>& shared, int n) {
    const auto slot = slot_of<Traits::kStages>(n);
    at.advance(tiles, per_head);
    shared.q_pipeline.wait(slot);
    if constexpr (kRole == Role::kKeys) shared.dout_pipeline.wait(slot);
    if (!is_plain()) {
      const Range queries = uniform(shared.block.queries);
      if (!contains_rows(queries, query0(), Traits::kColumns)) {
        if constexpr (kRole == Role::kKeys) {
          clear_rows<kWarpgroup, true>(shared.dout[slot.stage], query0(), queries);
        } else {
          clear_rows<kWarpgroup, true>(shared.q[slot.stage], query0(), queries);
        }
        ptx::async_proxy_fence();
        readers_barrier<Traits>();
      }
    }
  }
};

// Writes dV or dK once nobody reads values or keys any more, and begins to store it.
template <class Traits, class Tile, int kN>
CUPY_FLASH_DEVICE void finish(const ptx::TensorMap& map,
                              const SequenceStrides<Traits::kBatchAxes>& strides,
                              const KeyBlock<Traits>& block, Tile& tile, const Sums<kN>& sums,
                              float scale, Role role) {
  consumers_barrier<Traits>();
  write_gradient(block, tile, 0, sums, scale);
  group_barrier(int(role));
  if (threadIdx.x % kWarpgroup == 0) {
    store_gradient(map, strides, block, tile, 0);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
}

template <class Traits>
CUPY_FLASH_DEVICE void sum_dv(const Params<Traits::kBatchAxes>& params, const BackwardMaps& maps,
                              RoleStorage<Traits>& shared) {
  using Element = typename Traits::Element;
  constexpr int kStages = Traits::kStages;
  constexpr int kN = Traits::kColumns / 8;
  constexpr int kV = Traits::kDepthV / 8;
  const KeyBlock<Traits>& block = shared.block;
  const int count = uniform(block.count);
  const float to_exponent = block.to_exponent;
  Reader<Traits, Role::kValues> reader(params, block);
  Sums<kV> dv = {};
  Sums<kN> s;
  const auto begin_s = [&](int n) {
    begin_logits<Element, Traits::kDepth, kN>(s, shared.k, 0, shared.q[slot_of<kStages>(n).stage]);
  };
  await_keys<Traits>(shared, Role::kValues);
  if (count > 0) {
    reader.next(shared, 0);
    ptx::hold(flat<kN>(s));
    ptx::hold(flat<kV>(dv));
    ptx::wgmma_fence();
    begin_s(0);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const auto slot = slot_of<kStages>(n);
      ptx::wgmma_wait<0>();
      ptx::hold(flat<kN>(s));
      ptx::hold(flat<kV>(dv));
      if (n > 0) shared.dout_pipeline.release(slot_of<kStages>(n - 1));

      // P = exp(S - lse), at most 1
      if (!reader.is_plain() && !mma::contains(uniform(block.clear[0]), reader.query0())) {
        const Mask<Traits> mask(params, block.batch, 0, block.seqlen);
        mma::hide_columns(s, mask, reader.query0(), block.row0 + 16 * Thread().warp);
      }
      const auto& terms = shared.terms[slot.stage];
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const auto pair = pair_at(terms.exponent, j);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[0][j][c] = exp2_of(fma_of(s[0][j][c], to_exponent, -pair.element[c % 2]));
        }
      }
      Weights<kN> p;
      make_weights<Element, kN>(p, s);
      limit_to_one<Element, kN>(p);
      shared.weights.pipeline.wait_empty(slot);
#pragma unroll
      for (int t = 0; t < kN / 2; ++t) {
        Pack<u32, 4> four;
#pragma unroll
        for (int r = 0; r < 4; ++r) four.element[r] = p[t][r];
        shared.weights.values[slot.stage][t][threadIdx.x % kWarpgroup] = four;
      }
      __syncwarp();  // all lanes have written, and read the terms
      shared.weights.pipeline.publish(slot);
      shared.q_pipeline.release(slot);

      // dV += Pᵀ dO, and S of the next tile
      reader.next(shared, n + 1);
      shared.dout_pipeline.wait(slot);
      ptx::hold(flat(p));
      ptx::hold(flat<kV>(dv));
      ptx::hold(flat<kN>(s));
      ptx::wgmma_fence();
      begin_sums<Element>(dv, p, shared.dout[slot.stage]);
      begin_s(n + 1);
    }
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kV>(dv));
  }
  finish(maps.dv, params.dv_strides, block, shared.v, dv, 1.0f, Role::kValues);
}

template <class Traits>
CUPY_FLASH_DEVICE void sum_dk(const Params<Traits::kBatchAxes>& params, const BackwardMaps& maps,
                              RoleStorage<Traits>& shared) {
  using Element = typename Traits::Element;
  constexpr int kStages = Traits::kStages;
  constexpr int kN = Traits::kColumns / 8;
  constexpr int kD = Traits::kDepth / 8;
  const KeyBlock<Traits>& block = shared.block;
  const int count = uniform(block.count);
  Reader<Traits, Role::kKeys> reader(params, block);
  Sums<kD> dk = {};
  Sums<kN> dp;
  // dPᵀ - delta = V dOᵀ - delta
  const auto read_minus_delta = [&](int n) {
    const auto& terms = shared.terms[slot_of<kStages>(n).stage];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const auto pair = pair_at(terms.minus_delta, j);
#pragma unroll
      for (int c = 0; c < 4; ++c) dp[0][j][c] = pair.element[c % 2];
    }
    ptx::hold(flat<kN>(dp));
  };
  const auto begin_dp = [&](int n) {
    begin_logits<Element, Traits::kDepthV, kN, true>(dp, shared.v, 0,
                                                     shared.dout[slot_of<kStages>(n).stage]);
  };
  await_keys<Traits>(shared, Role::kKeys);
  if (count > 0) {
    reader.next(shared, 0);
    read_minus_delta(0);
    ptx::hold(flat<kD>(dk));
    ptx::wgmma_fence();
    begin_dp(0);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const auto slot = slot_of<kStages>(n);
      ptx::wgmma_wait<0>();
      ptx::hold(flat<kN>(dp));
      ptx::hold(flat<kD>(dk));
      if (n > 0) shared.q_pipeline.release(slot_of<kStages>(n - 1));
      shared.dout_pipeline.release(slot);
      Weights<kN> p, ds;
      shared.weights.pipeline.wait(slot);
#pragma unroll
      for (int t = 0; t < kN / 2; ++t) {
        const Pack<u32, 4> four = shared.weights.values[slot.stage][t][threadIdx.x % kWarpgroup];
#pragma unroll
        for (int r = 0; r < 4; ++r) p[t][r] = four.element[r];
      }
      make_ds<Element, kN>(ds, p, dp);
      __syncwarp();  // all lanes have read
      shared.weights.pipeline.release(slot);
      shared.ds_pipeline.wait_empty(slot);
      write_transposed<kN>(shared.ds[slot.stage], ds, 0);
      ptx::async_proxy_fence();
      __syncwarp();  // all lanes have written
      shared.ds_pipeline.publish(slot);

      // dK += dSᵀ Q, and dP of the next tile
      reader.next(shared, n + 1);
      read_minus_delta(n + 1);
      ptx::hold(flat(ds));
      ptx::hold(flat<kD>(dk));
      ptx::wgmma_fence();
      begin_sums<Element>(dk, ds, shared.q[slot.stage]);
      begin_dp(n + 1);
    }
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kD>(dk));
  }
  finish(maps.dk, params.dk_strides, block, shared.k, dk, float(params.scale), Role::kKeys);
}

template <class Traits>
CUPY_FLASH_DEVICE void sum_dq(const Params<Traits::kBatchAxes>& params,
                              RoleStorage<Traits>& shared) {
  using Element = typename Traits::Element;
  using Storage = RoleStorage<Traits>;
  using TileK = typename Storage::TileK;
  constexpr int kStages = Traits::kStages;
  constexpr int kN = kPanelColumns / 8;
  static_assert(Traits::kDepth % kPanelColumns == 0, "whole parts");
  const KeyBlock<Traits>& block = shared.block;
  const int count = uniform(block.count);
  const int per_head = query_tiles<Traits>(params);
  const Range tiles = uniform(block.tiles);
  float* const sums = block.dq_sums + dq_offset<Traits>(0, 0);
  QueryTile at = QueryTile::before_first(tiles);
  await_keys<Traits>(shared, Role::kQueries);
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const auto slot = slot_of<kStages>(n);
    at.advance(tiles, per_head);
    float* const to = sums + i64(at.index) * (Traits::kColumns * Traits::kDepth);
    shared.ds_pipeline.wait(slot);
#pragma unroll
    for (int channel = 0; channel < Traits::kDepth; channel += kPanelColumns) {
      Sums<kN> dq;
      ptx::hold(flat<kN>(dq));
      ptx::wgmma_fence();
      begin_dq<Element, typename Storage::TileDs, TileK>(
          dq, shared.ds[slot.stage].along_depth(0),
          ptx::wgmma_advance(shared.k.across_depth(), TileK::channel_step(channel)));
      ptx::wgmma_wait<0>();
      ptx::hold(flat<kN>(dq));
      if (channel + kPanelColumns == Traits::kDepth) shared.ds_pipeline.release(slot);
      add_dq<kN>(to + channel / 8 * mma::kFragmentSize, dq);
    }
  }
  consumers_barrier<Traits>();  // keys have been read
}

template <class Traits>
CUPY_FLASH_DEVICE void backward_by_role(const Params<Traits::kBatchAxes>& params,
                                        const BackwardMaps& maps) {
  static_assert(Traits::kRows == kGroupRows && Traits::kColumns == kGroupRows, "one product");
  static_assert(Traits::kConsumers == 3 && Traits::kThreads == 4 * kWarpgroup, "one for each role");
  auto& shared = shared_storage<RoleStorage<Traits>>();
  const auto role = Role(uniform(int(threadIdx.x) / kWarpgroup));

  if (threadIdx.x == 0) {
    shared.init();
    shared.block.describe(params);
    ptx::prefetch(maps.q);
    ptx::prefetch(maps.k);
    ptx::prefetch(maps.v);
    ptx::prefetch(maps.dout);
  }
  __syncthreads();

  if (role == Role::kLoad) {
    ptx::registers_decrease<kLoadRegisters>();
    if (threadIdx.x == 0) load_backward(params, maps, shared);
  } else if (role == Role::kValues) {
    ptx::registers_increase<kSumRegisters>();
    sum_dv<Traits>(params, maps, shared);
  } else if (role == Role::kKeys) {
    ptx::registers_increase<kSumRegisters>();
    sum_dk<Traits>(params, maps, shared);
  } else {
    ptx::registers_decrease<kAddRegisters>();
    sum_dq<Traits>(params, shared);
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
