// The one argument of every kernel, mirrored by cupy_flash/params.py.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {

// Strides in elements: of each batch axis, then of the axes named where it is used.
template <int kBatchAxes, int kAxes>
struct Strides {
  i64 batch[kBatchAxes];
  i64 axis[kAxes];
};

template <int kBatchAxes>
using SequenceStrides = Strides<kBatchAxes, 3>;  // seqlen, heads, head_dim
template <int kBatchAxes>
using RowStrides = Strides<kBatchAxes, 2>;  // heads, seqlen_q
template <int kBatchAxes>
using LogitStrides = Strides<kBatchAxes, 3>;  // heads, seqlen_q, seqlen_k

// Every field is eight bytes wide, so that there is no padding to agree about. An array that a
// call doesn't have is a null pointer.
template <int kBatchAxes>
struct Params {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  void* lse;
  const void* alibi_slopes;
  const void* bias;
  const void* mask;
  const void* q_lengths;
  const void* k_lengths;
  const void* dout;
  const void* dlse;
  void* dq;
  void* dk;
  void* dv;
  void* dbias;
  void* delta;          // workspace: rowsum(dO * O) - dlse, (batch, heads_q, seqlen_q)
  void* dbias_partial;  // workspace: one tile of dbias for each split
  void* dq_sums;        // workspace: dq before scaling, in the order of mma fragments
  void* row_terms;      // workspace: lse and -delta of each query, as wgmma takes them
  void* claims;         // workspace: counts the tiles that blocks claim beside their first
  u64 first_claim;      // what it counts from: another number for each launch, but for replays of a
                        // graph, which find the counter where the last claim left it

  SequenceStrides<kBatchAxes> q_strides;
  SequenceStrides<kBatchAxes> k_strides;
  SequenceStrides<kBatchAxes> v_strides;
  SequenceStrides<kBatchAxes> out_strides;
  SequenceStrides<kBatchAxes> dout_strides;
  SequenceStrides<kBatchAxes> dq_strides;
  SequenceStrides<kBatchAxes> dk_strides;
  SequenceStrides<kBatchAxes> dv_strides;
  RowStrides<kBatchAxes> lse_strides;
  RowStrides<kBatchAxes> dlse_strides;
  LogitStrides<kBatchAxes> bias_strides;
  LogitStrides<kBatchAxes> mask_strides;
  LogitStrides<kBatchAxes> dbias_strides;
  Strides<kBatchAxes, 1> alibi_strides;  // heads
  i64 q_lengths_strides[kBatchAxes];
  i64 k_lengths_strides[kBatchAxes];

  i64 batch_shape[kBatchAxes];
  i64 seqlen_q;
  i64 seqlen_k;
  i64 heads_q;
  i64 heads_kv;
  i64 head_dim;
  i64 head_dim_v;
  i64 left;  // a key is seen if -left <= j - i - offset <= right
  i64 right;
  i64 top_left;         // 1: offset is 0; 0: offset is k_len - q_len
  i64 q_lengths_bytes;  // 4 or 8: size of one length
  i64 k_lengths_bytes;
  i64 dbias_splits;
  i64 section;       // heads that share the L2 cache, as far as their order matters
  i64 dq_row_tiles;  // of 16 queries of a head in dq_sums
  double scale;
  double softcap;
};

}  // namespace cupy_flash
