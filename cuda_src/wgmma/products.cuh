// The products of attention, as groups of wgmma that run while the warps go on.
#pragma once

#include "mma/atom.cuh"
#include "ptx/opaque.cuh"
#include "wgmma/panels.cuh"

namespace cupy_flash {
namespace wgmma {

// What a product of 64 x 8 kN leaves in a lane: fragments as those of mma.sync.
template <int kN>
using Sums = float[1][kN][4];

// A left factor of 64 x 8 kN in registers: a fragment of 16 columns is one of two of sums.
template <int kN>
using Weights = u32[kN / 2][4];

// The same registers as instructions take them.
template <int kN>
CUPY_FLASH_DEVICE float (&flat(Sums<kN>& sums))[4 * kN] {
  return reinterpret_cast<float (&)[4 * kN]>(sums);
}
template <int kFragments>
CUPY_FLASH_DEVICE u32 (&flat(u32 (&weights)[kFragments][4]))[4 * kFragments] {
  return reinterpret_cast<u32(&)[4 * kFragments]>(weights);
}

template <int kN>
CUPY_FLASH_DEVICE void clear_sums(Sums<kN>& sums) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[0][j][c] = 0;
  }
}

// Begins S = Q Kᵀ, for 64 rows of Q from `row` on; kAccumulate: adds to what `s` holds.
template <class Element, int kDepth, int kN, bool kAccumulate = false, class TileQ, class TileK>
CUPY_FLASH_DEVICE void begin_logits(Sums<kN>& s, TileQ& q, int row, TileK& k) {
  const u64 left = q.along_depth(row);
  const u64 right = k.along_depth(0);
#pragma unroll
  for (int channel = 0; channel < kDepth; channel += 16) {
    ptx::wgmma_ss<Element, 8 * kN, false>(
        flat<kN>(s), ptx::wgmma_advance(left, TileQ::channel_step(channel)),
        ptx::wgmma_advance(right, TileK::channel_step(channel)), kAccumulate || channel != 0);
  }
  ptx::wgmma_commit();
}

// S = Q Kᵀ of a warp by itself, for its 16 rows from `row` on. Slow: for what is seldom needed
// again.
template <class Element, int kDepth, int kN, class TileQ, class TileK>
CUPY_FLASH_DEVICE void repeat_logits(Sums<kN>& s, TileQ& q, int row, TileK& k) {
  using Atom = mma::HalfAtom<Element>;
  clear_sums<kN>(s);
#pragma unroll 1
  for (int channel = 0; channel < kDepth; channel += Atom::kReadDepth) {
    typename Atom::Left left;
    Atom::read_left(left, q, row, channel);
#pragma unroll
    for (int j = 0; j < kN; j += Atom::kReadTiles) {
      typename Atom::Right right[Atom::kReadTiles];
      Atom::read_right(right, k, 8 * j, channel);
#pragma unroll
      for (int i = 0; i < Atom::kReadTiles; ++i) Atom::multiply(s[0][j + i], left, right[i]);
    }
  }
}

// Begins O += P V, for the channels of V from `channel` on.
template <class Element, int kO, int kFragments, class TileV>
CUPY_FLASH_DEVICE void begin_output(Sums<kO>& o, const u32 (&p)[kFragments][4], TileV& v,
                                    int channel = 0) {
  const u64 right = ptx::wgmma_advance(v.across_depth(), TileV::channel_step(channel));
#pragma unroll
  for (int t = 0; t < kFragments; ++t) {
    ptx::wgmma_rs<Element, 8 * kO, true>(flat<kO>(o), p[t],
                                         ptx::wgmma_advance(right, TileV::row_step(16 * t)), true);
  }
  ptx::wgmma_commit();
}

// Begins dQ = dS K, with the 64 rows of dS and the 8 kN channels of K that descriptors tell.
template <class Element, class TileS, class TileK, int kN>
CUPY_FLASH_DEVICE void begin_dq(Sums<kN>& dq, u64 ds, u64 k) {
#pragma unroll
  for (int key = 0; key < TileK::kRows; key += 16) {
    ptx::wgmma_ss<Element, 8 * kN, true>(flat<kN>(dq),
                                         ptx::wgmma_advance(ds, TileS::channel_step(key)),
                                         ptx::wgmma_advance(k, TileK::row_step(key)), key != 0);
  }
  ptx::wgmma_commit();
}

// Writes a warpgroup's weights, whose rows are keys, from `row` on, into a tile whose rows are
// queries.
template <int kN, class TileS>
CUPY_FLASH_DEVICE void write_transposed(TileS& tile, const Weights<kN>& weights, int row) {
  const int thread = ptx::opaque(int(threadIdx.x)) % kWarpgroup;
  const int lane = thread % kWarpSize;
#pragma unroll
  for (int t = 0; t < kN / 2; ++t) {
    ptx::stmatrix_transposed(tile.address(16 * t + lane / 16 * 8 + lane % 8,
                                          row + thread / kWarpSize * 16 + lane / 8 % 2 * 8),
                             weights[t]);
  }
}

// The two rows that a lane has a part of, each by its factor.
template <int kN>
CUPY_FLASH_DEVICE void multiply_rows(Sums<kN>& sums, const float (&factor)[2]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[0][j][c] *= factor[c / 2];
  }
}

// Rounds sums to the left factor of a product.
template <class Element, int kN>
CUPY_FLASH_DEVICE void make_weights(Weights<kN>& p, const Sums<kN>& s) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      p[j / 2][j % 2 * 2 + half] =
          mma::narrow_pair(s[0][j][2 * half], s[0][j][2 * half + 1], Element{});
    }
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
