// Which keys a query sees: the band and the caller's boolean mask.
#pragma once

#include "common/block_range.cuh"

namespace cupy_flash {

template <class Traits>
struct Mask {
  static constexpr int kBatchAxes = Traits::kBatchAxes;

  // Whether a key may be hidden from one query of a tile and seen by another. The ends of the
  // sequences don't count: what lies past them is never read, and results there are set to 0.
  static constexpr bool kHidesInsideTiles =
      Traits::kBandLeft || Traits::kBandRight || Traits::kMask || Traits::kBias;

  Band<Traits> band;
  const unsigned char* keep;  // of this batch entry and head
  i64 query_stride;
  i64 key_stride;

  CUPY_FLASH_DEVICE Mask(const Params<kBatchAxes>& params, const BatchIndex<kBatchAxes>& batch,
                         int head, const Seqlen& seqlen)
      : band(params, seqlen),
        keep(static_cast<const unsigned char*>(params.mask) +
             batch.offset(params.mask_strides.batch) + head * params.mask_strides.axis[0]),
        query_stride(params.mask_strides.axis[1]),
        key_stride(params.mask_strides.axis[2]) {}

  CUPY_FLASH_DEVICE bool visible(int i, int j) const { return band.contains(i, j) && keeps(i, j); }

  // Whether the boolean mask keeps a pair, which lies inside the sequences.
  CUPY_FLASH_DEVICE bool keeps(int i, int j) const {
    if constexpr (Traits::kMask) return keep[i * query_stride + j * key_stride] != 0;
    return true;
  }

  // Whether `visible` is true of the whole tile, so that it need not be asked.
  CUPY_FLASH_DEVICE bool all_visible(int q0, int q1, int k0, int k1) const {
    return !Traits::kMask && band.contains_all(q0, q1, k0, k1);
  }
};

}  // namespace cupy_flash
