// What a block of the backward pass owns, walks over and keeps in shared memory.
#pragma once

#include "mma/masking.cuh"
#include "ptx/tensor_map.cuh"
#include "wgmma/panels.cuh"
#include "wgmma/pipeline.cuh"
#include "wgmma/schedule.cuh"

namespace cupy_flash {
namespace wgmma {

// Mirrored by cupy_flash/plan_wgmma.py. The axes of a map are those of ForwardMaps.
struct BackwardMaps {
  ptx::TensorMap q;
  ptx::TensorMap k;
  ptx::TensorMap v;
  ptx::TensorMap dout;
  ptx::TensorMap dk;
  ptx::TensorMap dv;
};

// Tiles of queries of a head in the workspaces that are padded to whole tiles.
template <class Traits>
CUPY_FLASH_DEVICE int query_tiles(const Params<Traits::kBatchAxes>& params) {
  return ceil_div(int(params.seqlen_q), Traits::kColumns);
}

// Keys of one kv head, and the tiles of queries that may see them, which are the same in each of
// the heads that read it. Made in shared memory, where it stays: those who compute have few
// registers to spare.
template <class Traits>
struct KeyBlock {
  static constexpr int kGroups = Traits::kRows / kGroupRows;
  static constexpr bool kLastFirst = false;

  int row0;  // negative: there is no more work
  int head;
  int first_head_q;
  BatchIndex<Traits::kBatchAxes> batch;
  Seqlen seqlen;
  Range tiles;  // of queries
  int count;    // of all heads
  // Rows that somebody sees: what the arrays hold outside must not reach a sum as 0 * NaN. Without
  // an end where they reach the array's, because what lies past it is zeros already.
  Range keys;
  Range queries;
  float* dq_sums;  // of these heads
  float to_exponent;
  // Of each 64 keys: first queries of tiles all of whose pairs are seen.
  Range clear[kGroups];
  // The same of those that need no clearing of rows either. Inside `queries`, so that all who
  // compute find out of a tile with rows to be cleared.
  Range plain[kGroups];

  CUPY_FLASH_DEVICE static i64 heads(const Params<Traits::kBatchAxes>& params) {
    return params.heads_kv;
  }
  CUPY_FLASH_DEVICE static i64 rows(const Params<Traits::kBatchAxes>& params) {
    return params.seqlen_k;
  }

  CUPY_FLASH_DEVICE void describe(const Params<Traits::kBatchAxes>& params, int key_tile,
                                  int flat_head) {
    const int group = int(params.heads_q / params.heads_kv);
    row0 = key_tile * Traits::kRows;
    head = flat_head % int(params.heads_kv);
    first_head_q = head * group;
    batch = BatchIndex<Traits::kBatchAxes>(params, flat_head / int(params.heads_kv));
    seqlen = Seqlen(params, batch);
    const Band<Traits> band(params, seqlen);
    const Range own = band.queries_of(row0, row0 + Traits::kRows);
    tiles = {0, 0};
    if (own.begin < own.end) {
      tiles = {own.begin / Traits::kColumns, ceil_div(own.end, Traits::kColumns)};
    }
    count = group * (tiles.end - tiles.begin);
    keys = up_to_end(band.keys_of(0, seqlen.q), params.seqlen_k);
    queries = up_to_end(band.queries_of(0, seqlen.k), params.seqlen_q);
    dq_sums = static_cast<float*>(params.dq_sums) +
              heads_before(params) * params.dq_row_tiles * (16 * Traits::kDepth);
    to_exponent = Logits<Traits>::to_exponent(params);
#pragma unroll 1
    for (int g = 0; g < kGroups; ++g) {
      clear[g] = clear_queries(band, row0 + g * kGroupRows);
      plain[g] = {max_of(clear[g].begin, queries.begin),
                  min_of(clear[g].end, queries.end - Traits::kColumns + 1)};
    }
  }

  // The heads before those that read these keys.
  CUPY_FLASH_DEVICE i64 heads_before(const Params<Traits::kBatchAxes>& params) const {
    return batch.flat * params.heads_q + first_head_q;
  }

 private:
  static constexpr int kFarthest = 0x7fffffff;

  CUPY_FLASH_DEVICE static Range up_to_end(const Range& rows, i64 seqlen) {
    return {rows.begin, rows.end == int(seqlen) ? kFarthest : rows.end};
  }

  CUPY_FLASH_DEVICE static Range clear_queries(const Band<Traits>& band, int key0) {
    const int last = key0 + kGroupRows - 1;
    if (last >= band.seqlen.k) return {0, 0};
    // What lies past the last query does no harm.
    Range clear = {0, kFarthest};
    if constexpr (Traits::kBandRight) clear.begin = band.queries_of(last, last + 1).begin;
    if constexpr (Traits::kBandLeft) {
      const int end = band.queries_of(key0, key0 + 1).end;
      if (end < band.seqlen.q) clear.end = end - Traits::kColumns + 1;
    }
    return clear;
  }
};

// A place in the walk over tiles of queries, head by head.
struct QueryTile {
  int tile;   // of its head
  int index;  // among all tiles of the heads that read the keys

  CUPY_FLASH_DEVICE static QueryTile before_first(const Range& tiles) {
    return {tiles.begin - 1, tiles.begin - 1};
  }

  CUPY_FLASH_DEVICE void advance(const Range& tiles, int per_head) {
    ++index;
    if (++tile == tiles.end) {
      tile = tiles.begin;
      index += per_head - (tiles.end - tiles.begin);
    }
  }
};

constexpr int kHopperSharedMemory = 227 * 1024;  // that a block can have

// What the pass before the gradients leaves of each query: lse as a base-2 exponent, +inf where no
// key is seen, and -delta.
template <int kColumns>
struct alignas(16) RowTermsTile {
  float exponent[kColumns];
  float minus_delta[kColumns];
};

// Weights on their way from the warpgroup that makes them to the one that makes dS of them, each
// thread's to the thread in the same place; nothing if a warpgroup does both.
template <class Traits, bool kByRole>
struct WeightSlots {
  Pack<u32, 4> values[Traits::kStages][Traits::kColumns / 16][kWarpgroup];
  Pipeline<Traits::kStages> pipeline;

  CUPY_FLASH_DEVICE void init(int publishes, int releases) { pipeline.init(publishes, releases); }
};
template <class Traits>
struct WeightSlots<Traits, false> {
  CUPY_FLASH_DEVICE void init(int, int) {}
};

// kByRole: of the kernel whose warpgroups each make other products, of the same 64 keys.
template <class Traits, bool kByRole = false>
struct BackwardStorage {
  using Element = typename Traits::Element;
  using TileK = Panels<Element, Traits::kRows, Traits::kDepth>;
  using TileV = Panels<Element, Traits::kRows, Traits::kDepthV>;
  using TileQ = Panels<Element, Traits::kColumns, Traits::kDepth>;
  using TileO = Panels<Element, Traits::kColumns, Traits::kDepthV>;
  using TileDs = Panels<Element, Traits::kColumns, Traits::kRows>;
  using Terms = RowTermsTile<Traits::kColumns>;
  using Queue = WorkQueue<Traits, KeyBlock<Traits>>;
  static_assert(Traits::kStages == 2, "tiles of dS are as many: this one and the one before");
  // The next keys are loaded beside the work on these if there is room for both.
  static constexpr int kKeyBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kWeightBytes = kByRole ? Traits::kColumns * Traits::kRows * 2 : 0;
  static constexpr int kOtherBytes =
      Traits::kStages *
          (TileQ::kBytes + TileO::kBytes + TileDs::kBytes + int(sizeof(Terms)) + kWeightBytes) +
      kAtom;
  static constexpr int kKeyStages = 2 * kKeyBytes + kOtherBytes <= kHopperSharedMemory ? 2 : 1;

  TileK k[kKeyStages];  // dK in the end
  TileV v[kKeyStages];  // dV in the end
  TileQ q[Traits::kStages];
  TileO dout[Traits::kStages];
  TileDs ds[Traits::kStages];  // rows are queries; that of the tile before is still read
  Terms terms[Traits::kStages];
  WeightSlots<Traits, kByRole> weights;
  Pipeline<kKeyStages> k_pipeline;
  Pipeline<kKeyStages> v_pipeline;
  Pipeline<kKeyStages> out_pipeline;     // dK and dV, where the keys and values were
  Pipeline<Traits::kStages> q_pipeline;  // with terms
  Pipeline<Traits::kStages> dout_pipeline;
  Pipeline<Traits::kStages> ds_pipeline;
  Queue queue;

  // One thread of the block does it.
  CUPY_FLASH_DEVICE void start(const BackwardMaps& maps) {
    constexpr int kWarps = kWarpgroup / kWarpSize;
    // Warpgroups that read queries, those that write a tile of dS, and those that write dK or dV.
    constexpr int kReaders = kByRole ? 2 : Traits::kConsumers;
    constexpr int kWriters = kByRole ? 1 : Traits::kConsumers;
    k_pipeline.init(1, 1);
    v_pipeline.init(1, 1);
    out_pipeline.init(kReaders * kWarps, 1);
    q_pipeline.init(1, kReaders * kWarps);
    dout_pipeline.init(1, kReaders * kWarps);
    weights.init(kWarps, kWarps);
    ds_pipeline.init(kWriters * kWarps, kWarps);
    queue.init(Traits::kConsumers * kWarps + 3);  // and the threads of queries, keys and output
    ptx::mbarrier_init_fence();
    ptx::prefetch(maps.q);
    ptx::prefetch(maps.k);
    ptx::prefetch(maps.v);
    ptx::prefetch(maps.dout);
  }
};

}  // namespace wgmma
}  // namespace cupy_flash
