// The valid lengths of one sequence and where its diagonal lies.
#pragma once

#include "common/batch.cuh"
#include "common/dtypes.cuh"

namespace cupy_flash {

template <int kBatchAxes>
CUPY_FLASH_DEVICE int read_length(const void* lengths, i64 bytes, const i64 (&strides)[kBatchAxes],
                                  const BatchIndex<kBatchAxes>& batch, i64 limit) {
  if (lengths == nullptr) return int(limit);
  const i64 at = batch.offset(strides);
  const i64 length =
      bytes == 8 ? static_cast<const i64*>(lengths)[at] : i64(static_cast<const int*>(lengths)[at]);
  // Clamped, because the host never sees it: a wrong length must not reach outside an array.
  return int(min_of(max_of(length, i64(0)), limit));
}

struct Seqlen {
  int q;
  int k;
  int offset;  // query i stands at key position i + offset

  template <int kBatchAxes>
  CUPY_FLASH_DEVICE Seqlen(const Params<kBatchAxes>& p, const BatchIndex<kBatchAxes>& batch)
      : q(read_length(p.q_lengths, p.q_lengths_bytes, p.q_lengths_strides, batch, p.seqlen_q)),
        k(read_length(p.k_lengths, p.k_lengths_bytes, p.k_lengths_strides, batch, p.seqlen_k)),
        offset(p.top_left ? 0 : k - q) {}
};

}  // namespace cupy_flash
