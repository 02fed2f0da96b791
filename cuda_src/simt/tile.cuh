// Tiles in shared memory and their products, without tensor cores.
//
// A block of kThreads threads works on products of kRows rows by some columns. Its threads form a
// grid of kThreads/16 by 16: thread (ty, tx) holds rows ty + i * kThreadRows and, of a tile of
// logits, columns tx + j * 16. One row is therefore spread over the 16 lanes of half a warp.
#pragma once

#include "common/batch.cuh"
#include "common/dtypes.cuh"

namespace cupy_flash {
namespace simt {

constexpr int kThreadColumns = 16;

// A row-major tile whose rows are padded by 16 bytes: 16-byte reads of consecutive rows at one
// column then fall into different banks.
template <class Acc, int kRows_, int kColumns_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPitch = kColumns + 16 / int(sizeof(Acc));
  Acc data[kRows * kPitch];

  CUPY_FLASH_DEVICE Acc* row(int r) { return data + r * kPitch; }
};

template <class Acc, int kCount>
struct alignas(sizeof(Acc) * kCount) Pack {
  Acc element[kCount];
};

template <class Acc, int kCount>
CUPY_FLASH_DEVICE Pack<Acc, kCount> read_pack(const Acc* from) {
  return *reinterpret_cast<const Pack<Acc, kCount>*>(from);
}

template <int kThreads>
struct ThreadGrid {
  static constexpr int kThreadRows = kThreads / kThreadColumns;
  int ty = threadIdx.x / kThreadColumns;
  int tx = threadIdx.x % kThreadColumns;

  CUPY_FLASH_DEVICE int row(int i) const { return ty + i * kThreadRows; }
  CUPY_FLASH_DEVICE int column(int j) const { return tx + j * kThreadColumns; }
};

// Columns of a product with a row-major right factor: they are read in packs, so a thread holds
// runs of kPack columns.
template <class Acc, int kColumns>
struct OutputColumns {
  static constexpr int kCount = kColumns / kThreadColumns;
  static constexpr int kWidest = 16 / int(sizeof(Acc));
  static constexpr int kPack = kCount % kWidest == 0 ? kWidest : 2;
  static_assert(kCount % kPack == 0, "a tile's columns are a multiple of 32");

  CUPY_FLASH_DEVICE static int column(int tx, int j) {
    return (tx + j / kPack * kThreadColumns) * kPack + j % kPack;
  }
};

// Copies rows [row0, row0 + kRows) and columns [column0, column0 + kColumns) of a matrix into a
// tile, with zeros past row_end and column_end: what lies there is never read, so it can't leak.
// Returns whether everything that this thread copied is finite.
template <int kThreads, class Acc, int kRows, int kColumns, int kRowsUsed = kRows,
          int kColumnsUsed = kColumns, class Element>
CUPY_FLASH_DEVICE bool load_tile(Tile<Acc, kRows, kColumns>& tile,
                                 const Matrix<const Element>& matrix, int row0, int row_end,
                                 int column0, int column_end) {
  constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kRowsUsed % kWarps == 0 && kColumnsUsed % kWarpSize == 0, "whole warps");
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const Element* from = matrix.data + (row0 + warp) * matrix.row_stride +
                        (column0 + lane) * matrix.column_stride;
  const i64 row_step = kWarps * matrix.row_stride;
  const i64 column_step = kWarpSize * matrix.column_stride;
  Acc zero_if_finite = Acc(0);
#pragma unroll 8
  for (int i = 0; i < kRowsUsed / kWarps; ++i) {
    const int r = warp + i * kWarps;
    const Element* at = from;
#pragma unroll
    for (int j = 0; j < kColumnsUsed / kWarpSize; ++j) {
      const int c = lane + j * kWarpSize;
      const bool inside = row0 + r < row_end && column0 + c < column_end;
      const Acc value = inside ? Acc(widen(*at)) : Acc(0);
      tile.row(r)[c] = value;
      zero_if_finite = fma_of(value, Acc(0), zero_if_finite);
      at += column_step;
    }
    from += row_step;
  }
  return zero_if_finite == Acc(0);
}

// sums += A Bᵀ over kDepth channels; A and B are row-major tiles with the channels as columns.
template <int kDepth, int kThreads, int kM, int kN, class TileA, class TileB, class Acc>
CUPY_FLASH_DEVICE void multiply_transposed(Acc (&sums)[kM][kN], TileA& a, TileB& b,
                                           const ThreadGrid<kThreads>& at) {
  constexpr int kPack = 16 / int(sizeof(Acc));
#pragma unroll 2
  for (int d = 0; d < kDepth; d += kPack) {
    Pack<Acc, kPack> left[kM];
    Pack<Acc, kPack> right[kN];
#pragma unroll
    for (int i = 0; i < kM; ++i) left[i] = read_pack<Acc, kPack>(a.row(at.row(i)) + d);
#pragma unroll
    for (int j = 0; j < kN; ++j) right[j] = read_pack<Acc, kPack>(b.row(at.column(j)) + d);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          sums[i][j] = fma_of(left[i].element[e], right[j].element[e], sums[i][j]);
        }
      }
    }
  }
}

// sums += A B; A is a tile of weights (P or dS), B a row-major tile with kColumns columns in use.
// With kSkipHidden, pairs marked as hidden are left out of the sum instead of entering it as
// zeros: 0 * NaN would reach rows that don't see the NaN.
template <int kColumns, bool kSkipHidden, int kThreads, int kM, int kN, class TileA, class TileB,
          class Acc>
CUPY_FLASH_DEVICE void multiply_rows(Acc (&sums)[kM][kN], TileA& a, TileB& b,
                                     const ThreadGrid<kThreads>& at) {
  using Columns = OutputColumns<Acc, kColumns>;
  static_assert(kN == Columns::kCount, "sums hold the columns in use");
  constexpr int kPack = 16 / int(sizeof(Acc));
#pragma unroll 1
  for (int k = 0; k < TileA::kColumns; k += kPack) {
    Pack<Acc, kPack> left[kM];
#pragma unroll
    for (int i = 0; i < kM; ++i) left[i] = read_pack<Acc, kPack>(a.row(at.row(i)) + k);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
#pragma unroll
      for (int j = 0; j < kN; j += Columns::kPack) {
        const auto right =
            read_pack<Acc, Columns::kPack>(b.row(k + e) + Columns::column(at.tx, j));
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          const Acc weight = left[i].element[e];
          if (kSkipHidden && is_hidden_mark(weight)) continue;
#pragma unroll
          for (int c = 0; c < Columns::kPack; ++c) {
            sums[i][j + c] = fma_of(weight, right.element[c], sums[i][j + c]);
          }
        }
      }
    }
  }
}

template <int kColumns, int kThreads, int kM, int kN, class TileA, class TileB, class Acc>
CUPY_FLASH_DEVICE void multiply_rows(Acc (&sums)[kM][kN], TileA& a, TileB& b,
                                     const ThreadGrid<kThreads>& at, bool skip_hidden) {
  if (skip_hidden) {
    multiply_rows<kColumns, true>(sums, a, b, at);
  } else {
    multiply_rows<kColumns, false>(sums, a, b, at);
  }
}

template <class Acc>
CUPY_FLASH_DEVICE Acc row_max(Acc x) {
#pragma unroll
  for (int lanes = kThreadColumns / 2; lanes > 0; lanes /= 2) {
    x = max_of(x, __shfl_xor_sync(kAllLanes, x, lanes));
  }
  return x;
}

template <class Acc>
CUPY_FLASH_DEVICE Acc row_sum(Acc x) {
#pragma unroll
  for (int lanes = kThreadColumns / 2; lanes > 0; lanes /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, lanes);
  }
  return x;
}

// Writes a block's accumulators, times `factor` of their row, to columns [column0, column_end) and
// rows [row0, row_end) of a matrix.
template <int kColumns, int kThreads, int kM, int kN, class Acc, class Element>
CUPY_FLASH_DEVICE void store_rows(const Matrix<Element>& matrix, const Acc (&sums)[kM][kN],
                                  const Acc (&factor)[kM], const ThreadGrid<kThreads>& at,
                                  int row0, int row_end, int column0, int column_end) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
    const int r = row0 + at.row(i);
    if (r >= row_end) continue;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int c = column0 + OutputColumns<Acc, kColumns>::column(at.tx, j);
      if (c < column_end) narrow(sums[i][j] * factor[i], *matrix.at(r, c));
    }
  }
}

}  // namespace simt
}  // namespace cupy_flash
