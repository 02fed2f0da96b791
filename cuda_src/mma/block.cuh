// Which rows of which head a block owns.
#pragma once

#include "common/batch.cuh"
#include "ptx/opaque.cuh"

namespace cupy_flash {
namespace mma {

template <class Traits>
struct Block {
  int row0;
  int head;
  BatchIndex<Traits::kBatchAxes> batch;

  // Queries, the last ones first: under a causal mask they take longest.
  CUPY_FLASH_DEVICE static Block of_queries(const Params<Traits::kBatchAxes>& params) {
    return Block(params, params.seqlen_q, params.heads_q, true);
  }

  // Keys, the first ones first: under a causal mask most queries see them.
  CUPY_FLASH_DEVICE static Block of_keys(const Params<Traits::kBatchAxes>& params) {
    return Block(params, params.seqlen_k, params.heads_kv, false);
  }

 private:
  // Made anew wherever it is asked for, so that it takes no registers in between.
  CUPY_FLASH_DEVICE Block(const Params<Traits::kBatchAxes>& params, i64 seqlen, i64 heads,
                          bool last_first)
      : Block(params, ptx::opaque(int(blockIdx.x)), ceil_div(int(seqlen), Traits::kRows),
              int(heads), last_first) {}

  CUPY_FLASH_DEVICE Block(const Params<Traits::kBatchAxes>& params, int index, int row_blocks,
                          int heads, bool last_first)
      : row0((last_first ? row_blocks - 1 - index % row_blocks : index % row_blocks) *
             Traits::kRows),
        head(index / row_blocks % heads),
        batch(params, index / row_blocks / heads) {}
};

}  // namespace mma
}  // namespace cupy_flash
