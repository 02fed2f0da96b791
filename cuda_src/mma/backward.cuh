// dV = Pᵀ dO, dK = scale * dSᵀ Q and, in the same pass, the sums of dQ = scale * dS K: a block owns
// kRows keys of one kv head and walks over the queries of all heads that read them.
//
// Its tiles of S and dP are transposed: keys are rows, and a warp owns some of them. So P and dS
// are left factors of dV and dK as they are in registers. With kAcross > 1, as many warps share the
// same keys, each with a part of the queries of S and of the channels of dK and dV; P and dS then
// pass through shared memory. So does dS for dQ, in which every key takes part.
#pragma once

#include "mma/block.cuh"
#include "mma/dq_sums.cuh"
#include "mma/gradient.cuh"
#include "ptx/barrier.cuh"

namespace cupy_flash {
namespace mma {

// Tiles of weights that may be missing.
template <class TileW, int kCount>
struct WeightTiles {
  TileW weights[kCount];
};
template <class TileW>
struct WeightTiles<TileW, 0> {};

// dS of this tile and, for dQ, of the one before; P where warps share keys.
template <class Traits, bool kSumsDq>
constexpr int kDsTiles = kSumsDq ? 2 : (Traits::kAcross > 1 ? 1 : 0);
template <class Traits, bool kSumsDq>
constexpr int kWeightTiles = kDsTiles<Traits, kSumsDq> + (Traits::kAcross > 1 ? 1 : 0);

template <class Traits, bool kSumsDq>
struct BackwardStorage
    : WeightTiles<Tile<typename Traits::Element, Traits::kRows, Traits::kColumns>,
                  kWeightTiles<Traits, kSumsDq>> {
  using Element = typename Traits::Element;
  using Acc = Accumulator<Element>;
  Tile<Element, Traits::kRows, Traits::kDepth> k;   // dK in the end
  Tile<Element, Traits::kRows, Traits::kDepthV> v;  // dV in the end
  Tile<Element, Traits::kColumns, Traits::kDepth> q[Traits::kStages];
  Tile<Element, Traits::kColumns, Traits::kDepthV> dout[Traits::kStages];
  alignas(16) Acc lse[Traits::kStages][Traits::kColumns];
  alignas(16) Acc delta[Traits::kStages][Traits::kColumns];
};

// How the warps divide a tile of dQ: units of 16 kTiles queries by 8 kN channels, one for each
// warp.
template <class Traits>
struct DqUnits {
  static constexpr int kRowTiles = Traits::kColumns / 16;
  static constexpr int kSmallest = Atom<Traits>::kGroup;  // of kN

  // The fewest fragments of channels for which there are no more units than warps.
  static constexpr int width(int tiles) {
    const int down = kRowTiles / tiles;
    int n = kSmallest;
    while (n < Traits::kDepth / 8 &&
           (Traits::kDepth / 8 % n != 0 || Traits::kDepth / 8 / n * down > Traits::kWarps)) {
      n += kSmallest;
    }
    return n;
  }
  // Squarer units read less, if they don't leave warps idle.
  static constexpr int kTiles = kRowTiles % 2 == 0 && 2 * width(2) <= width(1) ? 2 : 1;
  static constexpr int kN = width(kTiles);
  static constexpr int kAcross = Traits::kDepth / 8 / kN;
  static constexpr int kCount = kRowTiles / kTiles * kAcross;
};

// A key that no query sees must not reach a sum as 0 * NaN: rows of K and V that aren't finite
// become zeros if nobody sees them. `seen` tells of a key.
template <int kThreads, class TileK, class TileV, class Seen>
CUPY_FLASH_DEVICE void drop_never_seen(TileK& k, TileV& v, int key0, const Seen& seen) {
  const auto finite = [](auto& tile, int row) {
    float zero_if_finite = 0.0f;
    for (int c = 0; c < tile.kColumns; ++c) {
      zero_if_finite += float(widen(*tile.at(row, c))) * 0.0f;
    }
    return zero_if_finite == 0.0f;
  };
#pragma unroll 1
  for (int row = threadIdx.x; row < TileK::kRows; row += kThreads) {
    if ((finite(k, row) && finite(v, row)) || seen(key0 + row)) continue;
    for (int c = 0; c < TileK::kColumns; ++c) *k.at(row, c) = {};
    for (int c = 0; c < TileV::kColumns; ++c) *v.at(row, c) = {};
  }
}

template <class Traits, bool kSumsDq>
CUPY_FLASH_DEVICE void backward_keys(const Params<Traits::kBatchAxes>& params) {
  using Element = typename Traits::Element;
  using Atom = mma::Atom<Traits>;
  using Acc = typename Atom::Acc;
  constexpr int kThreads = Traits::kThreads;
  constexpr int kRows = Traits::kRows;
  constexpr int kColumns = Traits::kColumns;
  constexpr int kStages = Traits::kStages;
  constexpr int kAcross = Traits::kAcross;
  static_assert(kRows % (16 * Traits::kWarps / kAcross) == 0, "every warp owns whole fragments");
  constexpr int kM = kRows / (16 * Traits::kWarps / kAcross);
  constexpr int kN = kColumns / 8 / kAcross;
  constexpr int kD = Traits::kDepth / 8 / kAcross;
  constexpr int kV = Traits::kDepthV / 8 / kAcross;

  auto& shared = shared_storage<BackwardStorage<Traits, kSumsDq>>();
  const Lane lane;
  const int warp = threadIdx.x / kWarpSize;
  const int warp_row = warp / kAcross * 16 * kM;
  const int part = warp % kAcross;
  const int head_dim = int(params.head_dim);
  const int head_dim_v = int(params.head_dim_v);
  const int group = int(params.heads_q / params.heads_kv);
  const auto block = Block<Traits>::of_keys(params);
  const int row0 = block.row0;
  const int kv_head = block.head;
  const auto& batch = block.batch;
  const Seqlen seqlen(params, batch);
  const Band<Traits> band(params, seqlen);
  const Range queries = band.queries_of(row0, row0 + kRows);
  const int first = queries.begin / kColumns * kColumns;

  const auto load_queries = [&](int stage, int head, int query0) {
    const Range valid = {0, seqlen.q};
    load_tile<kThreads, Traits::kRagged>(
        shared.q[stage], head_matrix<const Element>(params.q, params.q_strides, batch, head),
        query0, valid, head_dim);
    load_tile<kThreads, Traits::kRagged>(
        shared.dout[stage],
        head_matrix<const Element>(params.dout, params.dout_strides, batch, head), query0, valid,
        head_dim_v);
    load_vector<kThreads>(shared.lse[stage],
                          head_vector<const Acc>(params.lse, params.lse_strides, batch, head),
                          query0, seqlen.q);
    load_vector<kThreads>(shared.delta[stage], head_delta<Traits>(params, batch, head), query0,
                          seqlen.q);
  };

  Acc dk[kM][kD][4] = {};
  Acc dv[kM][kV][4] = {};

  const Range seen_keys = band.keys_of(0, seqlen.q);
  load_tile<kThreads, Traits::kRagged>(
      shared.k, head_matrix<const Element>(params.k, params.k_strides, batch, kv_head), row0,
      seen_keys, head_dim);
  load_tile<kThreads, Traits::kRagged>(
      shared.v, head_matrix<const Element>(params.v, params.v_strides, batch, kv_head), row0,
      seen_keys, head_dim_v);
  // The tiles of all heads in the group are walked over, one head after the other.
  int head = kv_head * group;
  const int last_head = first < queries.end ? head + group : head;
  int query0 = first;
  if (head < last_head) load_queries(0, head, query0);
  ptx::cp_async_commit();
  if constexpr (kDropsUnseen<Traits>) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    drop_never_seen<kThreads>(shared.k, shared.v, row0, [&](int key) {
      for (int reader = kv_head * group; reader < (kv_head + 1) * group; ++reader) {
        const Mask<Traits> mask(params, batch, reader, seqlen);
        const Logits<Traits> logits(params, batch, reader, seqlen);
        for (int query = queries.begin; query < queries.end; ++query) {
          if (mask.visible(query, key) &&
              logits.value(Acc(0), query, key) != -Constants<Acc>::infinity()) {
            return true;
          }
        }
      }
      return false;
    });
  }

  using TileW = Tile<Element, kRows, kColumns>;
  [[maybe_unused]] const auto add_dq = [&](int slot, int of_head, int of_query0) {
    if constexpr (kSumsDq) {
      using Units = DqUnits<Traits>;
      const DqSums<Traits> sums(params, batch.flat, of_head);
#pragma unroll 1
      for (int unit = warp; unit < Units::kCount; unit += Traits::kWarps) {
        const int row_tile = unit / Units::kAcross * Units::kTiles;
        const int tile = unit % Units::kAcross * Units::kN;
        Acc dq[Units::kTiles][Units::kN][4] = {};
        multiply_rows<Atom, kRows>(
            dq, TransposedWeights<Atom, TileW>{shared.weights[slot], 16 * row_tile}, shared.k,
            8 * tile);
#pragma unroll
        for (int i = 0; i < Units::kTiles; ++i) {
          if (of_query0 + 16 * (row_tile + i) >= params.seqlen_q) continue;
#pragma unroll
          for (int j = 0; j < Units::kN; ++j) {
            sums.add(of_query0 / 16 + row_tile + i, tile + j, dq[i][j]);
          }
        }
      }
    }
  };

  int stage = 0;
  int parity = 0;
  int before_head = -1;
  int before_query0 = 0;
#pragma unroll 1
  while (head < last_head) {
    const bool ends_head = query0 + kColumns >= queries.end;
    const int next_head = head + int(ends_head);
    const int next_query0 = ends_head ? first : query0 + kColumns;
    const Mask<Traits> mask(params, batch, head, seqlen);
    const Logits<Traits> logits(params, batch, head, seqlen);
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && next_head < last_head) load_queries(stage ^ 1, next_head, next_query0);
    ptx::cp_async_commit();

    const int key0 = row0 + warp_row;
    const int part_query0 = query0 + 8 * kN * part;
    const bool clear = all_visible(mask, part_query0, 8 * kN, key0, 16 * kM);
    const Acc* const lse = shared.lse[stage] + 8 * kN * part;
    const Acc* const delta = shared.delta[stage] + 8 * kN * part;
    // dQ += dS K of the tile before, of which all warps have written their part by now.
    if constexpr (kSumsDq) {
      if (before_head >= 0) add_dq(parity ^ 1, before_head, before_query0);
    }
    Acc s[kM][kN][4] = {};
    Acc dp[kM][kN][4] = {};
    const auto multiply_dp = [&] {
      multiply_transposed<Atom, Traits::kDepthV>(dp, shared.v, warp_row, shared.dout[stage],
                                                 8 * kN * part);
    };

    // Sᵀ = K Qᵀ
    multiply_transposed<Atom, Traits::kDepth>(s, shared.k, warp_row, shared.q[stage],
                                              8 * kN * part);
    if constexpr (Logits<Traits>::kDeferScale) {
      // P = exp(S - lse), beside dPᵀ = V dOᵀ, then dS = P (dP - delta)
      if (!clear) hide_columns(s, mask, part_query0, key0);
      for_columns<kM, kN>(lse, delta,
                          [&](const RowTerms<Acc>& terms, int i, int j, int half, int c) {
                            Acc& x = s[i][j][2 * half + c];
                            x = probability(x, logits.to_exponent(), terms);
                          });
      multiply_dp();
      for_columns<kM, kN>(lse, delta,
                          [&](const RowTerms<Acc>& terms, int i, int j, int half, int c) {
                            const int x = 2 * half + c;
                            dp[i][j][x] = s[i][j][x] * (dp[i][j][x] - terms.delta);
                          });
    } else {
      multiply_dp();
      for_columns<kM, kN>(lse, delta,
                          [&](const RowTerms<Acc>& terms, int i, int j, int half, int c) {
                            const int query = part_query0 + 8 * j + 2 * lane.t + c;
                            const int key = key0 + 16 * i + 8 * half + lane.g;
                            const bool visible = clear || mask.visible(query, key);
                            differentiate(logits, terms, query, key, visible, s[i][j][2 * half + c],
                                          dp[i][j][2 * half + c]);
                          });
    }

    // dV += Pᵀ dO, dK += dSᵀ Q
    if constexpr (kAcross == 1) {
      multiply_rows<Atom, kColumns>(dv, HeldWeights<Atom, kM, kN>{s}, shared.dout[stage], 0);
      if constexpr (kSumsDq) write_weights<Atom>(shared.weights[parity], dp, warp_row, 0);
      multiply_rows<Atom, kColumns>(dk, HeldWeights<Atom, kM, kN>{dp}, shared.q[stage], 0);
    } else {
      auto& p_tile = shared.weights[kDsTiles<Traits, kSumsDq>];
      auto& ds_tile = shared.weights[kSumsDq ? parity : 0];
      write_weights<Atom>(p_tile, s, warp_row, 8 * kN * part);
      write_weights<Atom>(ds_tile, dp, warp_row, 8 * kN * part);
      ptx::named_barrier(1 + warp / kAcross, kAcross * kWarpSize);
      multiply_rows<Atom, kColumns>(dv, StoredWeights<Atom, TileW>{p_tile, warp_row},
                                    shared.dout[stage], 8 * kV * part);
      multiply_rows<Atom, kColumns>(dk, StoredWeights<Atom, TileW>{ds_tile, warp_row},
                                    shared.q[stage], 8 * kD * part);
    }
    before_head = head;
    before_query0 = query0;
    parity ^= 1;

    if constexpr (kStages > 1) {
      stage ^= 1;
    } else if (next_head < last_head) {
      __syncthreads();
      load_queries(0, next_head, next_query0);
      ptx::cp_async_commit();
    }
    head = next_head;
    query0 = next_query0;
  }

  Acc one[kM][2];
  Acc scale[kM][2];
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Keys past the end: their weights are 0, but not 0 times NaN.
      const bool inside = row0 + warp_row + 16 * i + 8 * half + lane.g < seqlen.k;
      one[i][half] = inside ? Acc(1) : Acc(0);
      scale[i][half] = inside ? Acc(params.scale) : Acc(0);
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  if constexpr (kSumsDq) {
    if (before_head >= 0) add_dq(parity ^ 1, before_head, before_query0);
    __syncthreads();  // every warp has read k
  }
  write_results<Atom>(shared.k, dk, scale, warp_row, 8 * kD * part);
  write_results<Atom>(shared.v, dv, one, warp_row, 8 * kV * part);
  __syncthreads();
  store_tile<kThreads>(head_matrix<Element>(params.dk, params.dk_strides, batch, kv_head), shared.k,
                       row0, int(params.seqlen_k), head_dim);
  store_tile<kThreads>(head_matrix<Element>(params.dv, params.dv_strides, batch, kv_head), shared.v,
                       row0, int(params.seqlen_k), head_dim_v);
}

template <class Traits>
CUPY_FLASH_DEVICE void backward(const Params<Traits::kBatchAxes>& params) {
  backward_keys<Traits, true>(params);
}

template <class Traits>
CUPY_FLASH_DEVICE void backward_dkdv(const Params<Traits::kBatchAxes>& params) {
  backward_keys<Traits, false>(params);
}

}  // namespace mma
}  // namespace cupy_flash
