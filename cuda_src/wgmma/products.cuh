// The two products of attention, as groups of wgmma that run while the warps go on.
#pragma once

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

// Begins S = Q Kᵀ, for 64 rows of Q from `row` on.
template <class Element, int kDepth, int kN, class TileQ, class TileK>
CUPY_FLASH_DEVICE void begin_logits(Sums<kN>& s, TileQ& q, int row, TileK& k) {
  const u64 left = q.along_depth(row);
  const u64 right = k.along_depth(0);
#pragma unroll
  for (int channel = 0; channel < kDepth; channel += 16) {
    ptx::wgmma_ss<Element, 8 * kN, false>(flat<kN>(s), left + TileQ::channel_step(channel),
                                          right + TileK::channel_step(channel), channel != 0);
  }
  ptx::wgmma_commit();
}

// Begins O += P V.
template <class Element, int kO, int kFragments, class TileV>
CUPY_FLASH_DEVICE void begin_output(Sums<kO>& o, const u32 (&p)[kFragments][4], TileV& v) {
  const u64 right = v.across_depth();
#pragma unroll
  for (int t = 0; t < kFragments; ++t) {
    ptx::wgmma_rs<Element, 8 * kO, true>(flat<kO>(o), p[t], right + TileV::row_step(16 * t), true);
  }
  ptx::wgmma_commit();
}

template <int kO>
CUPY_FLASH_DEVICE void clear_sums(Sums<kO>& o) {
#pragma unroll
  for (int j = 0; j < kO; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) o[0][j][c] = 0;
  }
}

template <int kO>
CUPY_FLASH_DEVICE void rescale_output(Sums<kO>& o, const float (&factor)[2]) {
#pragma unroll
  for (int j = 0; j < kO; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) o[0][j][c] *= factor[c / 2];
  }
}

template <int kFragments>
CUPY_FLASH_DEVICE void copy_weights(u32 (&to)[kFragments][4], const u32 (&from)[kFragments][4]) {
#pragma unroll
  for (int t = 0; t < kFragments; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) to[t][c] = from[t][c];
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
