// Masks on fragments of S, and keys that no row of a block sees.
#pragma once

#include "common/logits.cuh"
#include "common/mask.cuh"
#include "mma/atom.cuh"
#include "mma/tile.cuh"

namespace cupy_flash {
namespace mma {

// Whether a key can be hidden from all rows by what only its elements tell: the tile is loaded as
// if it were seen, and 0 * NaN must not reach a sum.
template <class Traits>
constexpr bool kDropsUnseen = Traits::kMask || Traits::kBias;

// Bits of the keys that some row sees, for this tile and the next.
template <int kColumns, bool kUsed>
struct alignas(16) SeenKeys {
  static constexpr int kWords = (kColumns + 31) / 32;
  u32 seen[2][kWords];
};
template <int kColumns>
struct SeenKeys<kColumns, false> {};

// Where a tile of S lies, and whether its elements have to be looked at.
template <class Traits>
struct TileView {
  int query0;
  int key0;
  bool all_visible;

  // Queries past the end do no harm as long as nothing is read for them: their rows of q and dO are
  // zeros, and they aren't stored.
  CUPY_FLASH_DEVICE TileView(const Mask<Traits>& mask, int q0, int rows, int k0, int columns)
      : query0(q0), key0(k0) {
    const int q1 = Logits<Traits>::kDeferScale ? min_of(q0 + rows, mask.band.seqlen.q) : q0 + rows;
    all_visible = mask.all_visible(q0, q1, k0, k0 + columns);
  }
};

// The keys that a query sees by the band, or the queries that see a key, as plain limits.
CUPY_FLASH_DEVICE bool contains(const Range& range, int i) {
  return i >= range.begin && i < range.end;
}

// Products of a warp's rows with all keys of the tile become logits; -inf where hidden.
template <class Traits, int kM, int kN>
CUPY_FLASH_DEVICE void make_logits(Accumulator<typename Traits::Element> (&s)[kM][kN][4],
                                   const Mask<Traits>& mask, const Logits<Traits>& logits,
                                   const TileView<Traits>& view) {
  using Acc = Accumulator<typename Traits::Element>;
  if (Logits<Traits>::kDeferScale && view.all_visible) return;
  const Lane lane;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = view.query0 + 16 * i + 8 * half + lane.g;
      const Range keys = mask.band.keys_of(query, query + 1);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          Acc& x = s[i][j][2 * half + c];
          const int key = view.key0 + 8 * j + 2 * lane.t + c;
          const bool visible = view.all_visible || (contains(keys, key) && mask.keeps(query, key));
          x = visible ? logits.value(x, query, key) : -Constants<Acc>::infinity();
        }
      }
    }
  }
}

// Sets the bits of the keys that a warp's rows see; `shown` tells it of a sum.
template <class Traits, int kM, int kN, class Acc, class Shown>
CUPY_FLASH_DEVICE void note_seen(u32* seen, const Acc (&s)[kM][kN][4], const Shown& shown) {
  const Lane lane;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      bool any = false;
#pragma unroll
      for (int i = 0; i < kM; ++i) any = any || shown(s[i][j][c]) || shown(s[i][j][2 + c]);
      const u32 votes = __ballot_sync(kAllLanes, any);
      // Lanes 4g + t of one column have the same t.
      const u32 column = 0x11111111u << lane.t;
      const int key = 8 * j + 2 * lane.t + c;
      if (lane.g == 0 && (votes & column) != 0) atomicOr(&seen[key / 32], 1u << (key % 32));
    }
  }
}

// Makes the rows of keys that aren't seen zeros.
template <int kThreads, class Element, int kRows, int kColumns>
CUPY_FLASH_DEVICE void drop_unseen(Tile<Element, kRows, kColumns>& tile, const u32* seen) {
  constexpr int kPack = 16 / int(sizeof(Element));
  constexpr int kPerRow = kColumns / kPack;
#pragma unroll 1
  for (int index = threadIdx.x; index < kRows * kPerRow; index += kThreads) {
    const int r = index / kPerRow;
    if ((seen[r / 32] >> (r % 32) & 1) == 0) {
      write_pack<Element, kPack>(tile.at(r, index % kPerRow * kPack), {});
    }
  }
}

}  // namespace mma
}  // namespace cupy_flash
