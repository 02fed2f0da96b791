// The gradients of large heads on Hopper: a block takes 64 keys of one kv head after the other and
// walks over the queries of all heads that read them, 64 at a time. Threads of its first warpgroup
// load and store. As sums of dK and of dV fill the registers of a warpgroup each, every other one
// makes what its own gradient needs:
//
//   values   S = K Qᵀ, P, dV += Pᵀ dO    and hands P over in shared memory
//   keys     dP = V dOᵀ, dS, dK += dSᵀ Q    and hands dS over, as a factor of a product
//   queries  dQ = dS K    in parts of 64 channels, which it adds to sums in global memory
//
// Products of the next tile, S and dP, are begun behind those of this one, so that tensor cores
// have work while P and dS are made. Behind a block's last tile its own are made once more, and not
// used: a branch around them would cost registers. S and dP are transposed, as in
// backward_consumer.cuh.
#pragma once

#include "ptx/registers.cuh"
#include "wgmma/backward_producer.cuh"
#include "wgmma/backward_steps.cuh"

namespace cupy_flash {
namespace wgmma {

enum class Role { kSupply, kValues, kKeys, kQueries };

// Registers of a thread, together those of the launch, where all threads have as many.
template <Role kRole>
constexpr int kRegisters = kRole == Role::kValues    ? 208
                           : kRole == Role::kKeys    ? 216
                           : kRole == Role::kQueries ? 64
                                                     : 24;

template <class Traits>
using RoleStorage = BackwardStorage<Traits, true>;

// Where keys and values of a block are.
template <class Traits>
CUPY_FLASH_DEVICE auto key_slot(const Progress& progress) {
  return slot_of<RoleStorage<Traits>::kKeyStages>(progress.block);
}

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
CUPY_FLASH_DEVICE void await_keys(RoleStorage<Traits>& shared, const KeyBlock<Traits>& block,
                                  const Progress& progress, Role role) {
  const auto slot = key_slot<Traits>(progress);
  shared.k_pipeline.wait(slot);
  shared.v_pipeline.wait(slot);
  if (!contains_rows(uniform(block.keys), block.row0, Traits::kRows)) {
    if (role == Role::kValues)
      clear_rows<kWarpgroup, true>(shared.k[slot.stage], block.row0, block.keys);
    if (role == Role::kKeys)
      clear_rows<kWarpgroup, true>(shared.v[slot.stage], block.row0, block.keys);
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

  // Goes on to the next tile, which is the n-th of all blocks, and waits for it.
  CUPY_FLASH_DEVICE void next(RoleStorage<Traits>& shared, const KeyBlock<Traits>& block, int n) {
    const auto slot = slot_of<Traits::kStages>(n);
    at.advance(tiles, per_head);
    shared.q_pipeline.wait(slot);
    if constexpr (kRole == Role::kKeys) shared.dout_pipeline.wait(slot);
    if (!is_plain()) {
      const Range queries = uniform(block.queries);
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

// Writes dV or dK once nobody reads values or keys any more.
template <class Traits, class Tile, int kN>
CUPY_FLASH_DEVICE void finish(RoleStorage<Traits>& shared, const KeyBlock<Traits>& block,
                              const Progress& progress, Tile& tile, const Sums<kN>& sums,
                              float scale) {
  consumers_barrier<Traits>();
  write_gradient(block, tile, 0, sums, scale);
  __syncwarp();  // all lanes have written
  shared.out_pipeline.publish(key_slot<Traits>(progress));
}

template <class Traits>
CUPY_FLASH_DEVICE void sum_dv(const Params<Traits::kBatchAxes>& params, RoleStorage<Traits>& shared,
                              const KeyBlock<Traits>& block, const Progress& progress) {
  using Element = typename Traits::Element;
  constexpr int kStages = Traits::kStages;
  constexpr int kN = Traits::kColumns / 8;
  constexpr int kV = Traits::kDepthV / 8;
  const int first = progress.tile;
  const int end = first + uniform(block.count);
  const float to_exponent = block.to_exponent;
  Reader<Traits, Role::kValues> reader(params, block);
  auto& keys = shared.k[key_slot<Traits>(progress).stage];
  auto& values = shared.v[key_slot<Traits>(progress).stage];
  Sums<kV> dv = {};
  Sums<kN> s;
  const auto begin_s = [&](int n) {
    begin_logits<Element, Traits::kDepth, kN>(s, keys, 0, shared.q[slot_of<kStages>(n).stage]);
  };
  await_keys(shared, block, progress, Role::kValues);
  if (first < end) {
    reader.next(shared, block, first);
    ptx::hold(flat<kN>(s));
    ptx::hold(flat<kV>(dv));
    ptx::wgmma_fence();
    begin_s(first);
#pragma unroll 1
    for (int n = first; n < end; ++n) {
      const auto slot = slot_of<kStages>(n);
      ptx::wgmma_wait<0>();
      ptx::hold(flat<kN>(s));
      ptx::hold(flat<kV>(dv));
      if (n > first) shared.dout_pipeline.release(slot_of<kStages>(n - 1));

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
      if (n + 1 < end) shared.q_pipeline.release(slot);

      // dV += Pᵀ dO, and S of the next tile
      if (n + 1 < end) reader.next(shared, block, n + 1);
      shared.dout_pipeline.wait(slot);
      ptx::hold(flat(p));
      ptx::hold(flat<kV>(dv));
      ptx::hold(flat<kN>(s));
      ptx::wgmma_fence();
      begin_sums<Element>(dv, p, shared.dout[slot.stage]);
      begin_s(min_of(n + 1, end - 1));
    }
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kV>(dv));
    shared.q_pipeline.release(slot_of<kStages>(end - 1));
    shared.dout_pipeline.release(slot_of<kStages>(end - 1));
  }
  finish(shared, block, progress, values, dv, 1.0f);
}

template <class Traits>
CUPY_FLASH_DEVICE void sum_dk(const Params<Traits::kBatchAxes>& params, RoleStorage<Traits>& shared,
                              const KeyBlock<Traits>& block, const Progress& progress) {
  using Element = typename Traits::Element;
  constexpr int kStages = Traits::kStages;
  constexpr int kN = Traits::kColumns / 8;
  constexpr int kD = Traits::kDepth / 8;
  const int first = progress.tile;
  const int end = first + uniform(block.count);
  Reader<Traits, Role::kKeys> reader(params, block);
  auto& keys = shared.k[key_slot<Traits>(progress).stage];
  auto& values = shared.v[key_slot<Traits>(progress).stage];
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
    begin_logits<Element, Traits::kDepthV, kN, true>(dp, values, 0,
                                                     shared.dout[slot_of<kStages>(n).stage]);
  };
  await_keys(shared, block, progress, Role::kKeys);
  if (first < end) {
    reader.next(shared, block, first);
    read_minus_delta(first);
    ptx::hold(flat<kD>(dk));
    ptx::wgmma_fence();
    begin_dp(first);
#pragma unroll 1
    for (int n = first; n < end; ++n) {
      const auto slot = slot_of<kStages>(n);
      ptx::wgmma_wait<0>();
      ptx::hold(flat<kN>(dp));
      ptx::hold(flat<kD>(dk));
      if (n > first) shared.q_pipeline.release(slot_of<kStages>(n - 1));
      if (n + 1 < end) shared.dout_pipeline.release(slot);
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
      const int next = min_of(n + 1, end - 1);
      if (n + 1 < end) reader.next(shared, block, n + 1);
      read_minus_delta(next);
      ptx::hold(flat(ds));
      ptx::hold(flat<kD>(dk));
      ptx::wgmma_fence();
      begin_sums<Element>(dk, ds, shared.q[slot.stage]);
      begin_dp(next);
    }
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kD>(dk));
    shared.q_pipeline.release(slot_of<kStages>(end - 1));
    shared.dout_pipeline.release(slot_of<kStages>(end - 1));
  }
  finish(shared, block, progress, keys, dk, float(params.scale));
}

template <class Traits>
CUPY_FLASH_DEVICE void sum_dq(const Params<Traits::kBatchAxes>& params, RoleStorage<Traits>& shared,
                              const KeyBlock<Traits>& block, const Progress& progress) {
  using Element = typename Traits::Element;
  using Storage = RoleStorage<Traits>;
  using TileK = typename Storage::TileK;
  constexpr int kStages = Traits::kStages;
  constexpr int kN = kPanelColumns / 8;
  static_assert(Traits::kDepth % kPanelColumns == 0, "whole parts");
  const int first = progress.tile;
  const int end = first + uniform(block.count);
  const int per_head = query_tiles<Traits>(params);
  const Range tiles = uniform(block.tiles);
  auto& keys = shared.k[key_slot<Traits>(progress).stage];
  float* const sums = block.dq_sums + dq_offset<Traits>(0, 0);
  QueryTile at = QueryTile::before_first(tiles);
  await_keys(shared, block, progress, Role::kQueries);
#pragma unroll 1
  for (int n = first; n < end; ++n) {
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
          ptx::wgmma_advance(keys.across_depth(), TileK::channel_step(channel)));
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

  if (threadIdx.x == 0) shared.start(maps);
  __syncthreads();

  using Block = const KeyBlock<Traits>&;
  if (role == Role::kSupply) {
    ptx::registers_decrease<kRegisters<Role::kSupply>>();
    supply(params, maps, shared);
  } else if (role == Role::kValues) {
    ptx::registers_increase<kRegisters<Role::kValues>>();
    walk_blocks(shared,
                [&](Block block, const Progress& at) { sum_dv(params, shared, block, at); });
  } else if (role == Role::kKeys) {
    ptx::registers_increase<kRegisters<Role::kKeys>>();
    walk_blocks(shared,
                [&](Block block, const Progress& at) { sum_dk(params, shared, block, at); });
  } else {
    ptx::registers_decrease<kRegisters<Role::kQueries>>();
    walk_blocks(shared,
                [&](Block block, const Progress& at) { sum_dq(params, shared, block, at); });
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
