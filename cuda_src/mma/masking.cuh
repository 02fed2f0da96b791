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

CUPY_FLASH_DEVICE bool contains(const Range& range, int i) {
  return i >= range.begin && i < range.end;
}

// Whether no pair of a tile has to be looked at. Queries past the end do no harm as long as nothing
// is read for them: their rows of q and dO are zeros, and they aren't stored.
template <class Traits>
CUPY_FLASH_DEVICE bool all_visible(const Mask<Traits>& mask, int query0, int rows, int key0,
                                   int columns) {
  int query1 = query0 + rows;
  if constexpr (Logits<Traits>::kDeferScale) query1 = min_of(query1, mask.band.seqlen.q);
  return mask.all_visible(query0, query1, key0, key0 + columns);
}

// The keys that all of some queries see, as far as the band decides; none if a mask array does.
template <class Traits>
CUPY_FLASH_DEVICE Range clear_keys(const Mask<Traits>& mask, int query0, int rows) {
  if constexpr (Traits::kMask) return {0, 0};
  if constexpr (Logits<Traits>::kDeferScale) {
    if (query0 >= mask.band.seqlen.q) return {0, 0x7fffffff};
  }
  const Range last = mask.band.keys_of(query0 + rows - 1, query0 + rows);
  const Range first = mask.band.keys_of(query0, query0 + 1);
  Range clear = {0, first.end};
  if constexpr (Traits::kBandLeft) clear.begin = last.begin;
  // The last queries may lie past the end.
  if (query0 + rows > mask.band.seqlen.q) {
    if constexpr (!Logits<Traits>::kDeferScale) return {0, 0};
    if constexpr (Traits::kBandLeft) {
      clear.begin = mask.band.keys_of(mask.band.seqlen.q - 1, mask.band.seqlen.q).begin;
    }
  }
  return clear;
}

// Products whose rows are queries become -inf where the pair is hidden.
template <class Traits, int kM, int kN, class Acc>
CUPY_FLASH_DEVICE void hide_rows(Acc (&s)[kM][kN][4], const Mask<Traits>& mask, int query0,
                                 int key0) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query0 + 16 * i + 8 * half + lane.g;
      const Range keys = mask.band.keys_of(query, query + 1);
      // Relative to this lane's first key, so that each is compared with a constant.
      const int lane_key0 = key0 + 2 * lane.t;
      const int begin = keys.begin - lane_key0;
      const int end = keys.end - lane_key0;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 8 * j + c;
          bool seen = column < end;
          if constexpr (Traits::kBandLeft) seen = seen && column >= begin;
          if constexpr (Traits::kMask) {
            seen = seen && column >= begin && mask.keeps(query, lane_key0 + column);
          }
          if (!seen) s[i][j][2 * half + c] = -Constants<Acc>::infinity();
        }
      }
    }
  }
}

// Products of queries and keys become logits; -inf where hidden.
template <class Traits, int kM, int kN, class Acc>
CUPY_FLASH_DEVICE void make_logits(Acc (&s)[kM][kN][4], const Mask<Traits>& mask,
                                   const Logits<Traits>& logits, bool all_visible, int query0,
                                   int key0) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query0 + 16 * i + 8 * half + lane.g;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = key0 + 8 * j + 2 * lane.t + c;
          Acc& x = s[i][j][2 * half + c];
          // A bias must not be read where it is hidden.
          if (!Traits::kBias || all_visible || mask.visible(query, key)) {
            x = logits.value(x, query, key);
          } else {
            x = -Constants<Acc>::infinity();
          }
        }
      }
    }
  }
  if constexpr (!Traits::kBias) {
    if (!all_visible) hide_rows(s, mask, query0, key0);
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
