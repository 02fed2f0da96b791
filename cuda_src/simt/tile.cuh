// Tiles in shared memory and their products, without tensor cores.
//
// The threads of a block form a grid over the rows and columns of a product: thread (ty, tx) holds
// every kHeight-th row from ty on, and every kWidth-th column (or pack of columns) from tx on.
#pragma once

#include "common/batch.cuh"
#include "common/dtypes.cuh"
#include "common/pack.cuh"

namespace cupy_flash {
namespace simt {

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

// A warp is kWarpWidth threads wide. The hardware serves 16-byte reads half a warp at a time, 128
// bytes per clock, so that a width of 8 reads the right factor twice as fast as 16; with 16, half a
// warp holds whole rows, which shuffles can then reduce.
template <int kThreads, int kWidth_, int kWarpWidth>
struct ThreadGrid {
  static constexpr int kWidth = kWidth_;
  static constexpr int kHeight = kThreads / kWidth;
  int ty;
  int tx;

  CUPY_FLASH_DEVICE ThreadGrid() {
    constexpr int kWarpHeight = kWarpSize / kWarpWidth;
    constexpr int kWarpsAcross = kWidth / kWarpWidth;
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    ty = warp / kWarpsAcross * kWarpHeight + lane / kWarpWidth;
    tx = warp % kWarpsAcross * kWarpWidth + lane % kWarpWidth;
  }

  CUPY_FLASH_DEVICE int row(int i) const { return ty + i * kHeight; }
  CUPY_FLASH_DEVICE int column(int j) const { return tx + j * kWidth; }
};

constexpr int kOutputWidth = 16;
template <int kThreads>
using OutputGrid = ThreadGrid<kThreads, kOutputWidth, 8>;

// Columns of a product with a row-major right factor: they are read in packs, so a thread holds
// runs of kPack columns.
template <class Acc, int kColumns>
struct OutputColumns {
  static constexpr int kCount = kColumns / kOutputWidth;
  static constexpr int kWidest = 16 / int(sizeof(Acc));
  static constexpr int kPack = kCount % kWidest == 0 ? kWidest : 2;
  static_assert(kCount % kPack == 0, "a tile's columns are a multiple of 32");

  CUPY_FLASH_DEVICE static int column(int tx, int j) {
    return (tx + j / kPack * kOutputWidth) * kPack + j % kPack;
  }
};

// Copies rows [row0, row0 + kRows) and columns [column0, column0 + kColumnsUsed) of a matrix into a
// tile, with zeros past row_end and column_end: what lies there is never read, so it can't leak.
// Returns whether everything that this thread copied is finite.
template <int kColumnsUsed, int kThreads, class Acc, int kRows, int kColumns, class Element>
CUPY_FLASH_DEVICE bool load_tile(Tile<Acc, kRows, kColumns>& tile,
                                 const Matrix<const Element>& matrix, int row0, int row_end,
                                 int column0, int column_end) {
  constexpr int kPack = 16 / int(sizeof(Acc));
  using Source = Pack<Element, kPack>;
  const Element* const from =
      matrix.data + row0 * matrix.row_stride + column0 * matrix.column_stride;
  const i64 misaligned = reinterpret_cast<i64>(from) | (matrix.row_stride * i64(sizeof(Element)));
  Acc zero_if_finite = Acc(0);
  if (matrix.column_stride == 1 && (column_end - column0) % kPack == 0 &&
      misaligned % i64(sizeof(Source)) == 0) {
    // Several elements at a time; a pass of the block covers some rows of one segment.
    constexpr int kSegment = kColumnsUsed & -kColumnsUsed;  // a power of two, for the division
    constexpr int kPerRow = kSegment / kPack;
    constexpr int kRowsPerPass = kThreads / kPerRow;
    static_assert(kRows % kRowsPerPass == 0, "every thread copies as much");
    const int first = threadIdx.x / kPerRow;
    const i64 step = kRowsPerPass * matrix.row_stride;
#pragma unroll
    for (int segment = 0; segment < kColumnsUsed; segment += kSegment) {
      const int c = segment + threadIdx.x % kPerRow * kPack;
      const Element* at = from + first * matrix.row_stride + c;
#pragma unroll 8
      for (int r = first; r < first + kRows; r += kRowsPerPass, at += step) {
        Pack<Acc, kPack> values = {};
        if (row0 + r < row_end && column0 + c < column_end) {
          const Source read = *reinterpret_cast<const Source*>(at);
#pragma unroll
          for (int e = 0; e < kPack; ++e) values.element[e] = widen(read.element[e]);
        }
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
          zero_if_finite = fma_of(values.element[e], Acc(0), zero_if_finite);
        }
        *reinterpret_cast<Pack<Acc, kPack>*>(tile.row(r) + c) = values;
      }
    }
  } else {
    // Any strides, one element at a time.
#pragma unroll 4
    for (int index = threadIdx.x; index < kRows * kColumnsUsed; index += kThreads) {
      const int r = index / kColumnsUsed;
      const int c = index % kColumnsUsed;
      const bool inside = row0 + r < row_end && column0 + c < column_end;
      const Acc value =
          inside ? Acc(widen(from[r * matrix.row_stride + c * matrix.column_stride])) : Acc(0);
      zero_if_finite = fma_of(value, Acc(0), zero_if_finite);
      tile.row(r)[c] = value;
    }
  }
  return zero_if_finite == Acc(0);
}

// sums += A Bᵀ over kDepth channels; A and B are row-major tiles with the channels as columns.
template <int kDepth, int kM, int kN, class TileA, class TileB, class Acc, class Grid>
CUPY_FLASH_DEVICE void multiply_transposed(Acc (&sums)[kM][kN], TileA& a, TileB& b,
                                           const Grid& at) {
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
//
// The product of the tile is summed by itself first, kGroup of a thread's columns at a time: one
// sum over all of a long sequence would lose digits with the square root of its length.
//
// With kSkipHidden, pairs marked as hidden are left out of the sum instead of entering it as
// zeros: 0 * NaN would reach rows that don't see the NaN.
template <int kColumns, int kGroup, bool kSkipHidden, int kM, int kN, class TileA, class TileB,
          class Acc, class Grid>
CUPY_FLASH_DEVICE void multiply_rows(Acc (&sums)[kM][kN], TileA& a, TileB& b, const Grid& at) {
  using Columns = OutputColumns<Acc, kColumns>;
  static_assert(kN == Columns::kCount, "sums hold the columns in use");
  constexpr int kPack = 16 / int(sizeof(Acc));
  static_assert(kN % kGroup == 0 && kGroup % Columns::kPack == 0, "groups of whole packs");
#pragma unroll
  for (int group = 0; group < kN; group += kGroup) {
    Acc product[kM][kGroup] = {};
#pragma unroll 2
    for (int k = 0; k < TileA::kColumns; k += kPack) {
      Pack<Acc, kPack> left[kM];
#pragma unroll
      for (int i = 0; i < kM; ++i) left[i] = read_pack<Acc, kPack>(a.row(at.row(i)) + k);
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
#pragma unroll
        for (int j = 0; j < kGroup; j += Columns::kPack) {
          const auto right =
              read_pack<Acc, Columns::kPack>(b.row(k + e) + Columns::column(at.tx, group + j));
#pragma unroll
          for (int i = 0; i < kM; ++i) {
            const Acc weight = left[i].element[e];
            if (kSkipHidden && is_hidden_mark(weight)) continue;
#pragma unroll
            for (int c = 0; c < Columns::kPack; ++c) {
              product[i][j + c] = fma_of(weight, right.element[c], product[i][j + c]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) sums[i][group + j] += product[i][j];
    }
  }
}

template <int kColumns, int kGroup, int kM, int kN, class TileA, class TileB, class Acc, class Grid>
CUPY_FLASH_DEVICE void multiply_rows(Acc (&sums)[kM][kN], TileA& a, TileB& b, const Grid& at,
                                     bool skip_hidden) {
  if (skip_hidden) {
    multiply_rows<kColumns, kGroup, true>(sums, a, b, at);
  } else {
    multiply_rows<kColumns, kGroup, false>(sums, a, b, at);
  }
}

// Over the kWidth neighbouring lanes that hold one row.
template <int kWidth, class Acc>
CUPY_FLASH_DEVICE Acc row_max(Acc x) {
#pragma unroll
  for (int lanes = kWidth / 2; lanes > 0; lanes /= 2) {
    x = max_of(x, __shfl_xor_sync(kAllLanes, x, lanes));
  }
  return x;
}

template <int kWidth, class Acc>
CUPY_FLASH_DEVICE Acc row_sum(Acc x) {
#pragma unroll
  for (int lanes = kWidth / 2; lanes > 0; lanes /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, lanes);
  }
  return x;
}

// Writes a block's accumulators, times `factor` of their row, to columns [column0, column_end) and
// rows [row0, row_end) of a matrix. A factor of 0 gives 0 whatever was accumulated.
template <int kColumns, int kM, int kN, class Acc, class Element, class Grid>
CUPY_FLASH_DEVICE void store_rows(const Matrix<Element>& matrix, const Acc (&sums)[kM][kN],
                                  const Acc (&factor)[kM], const Grid& at, int row0, int row_end,
                                  int column0, int column_end) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
    const int r = row0 + at.row(i);
    if (r >= row_end) continue;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int c = column0 + OutputColumns<Acc, kColumns>::column(at.tx, j);
      if (c < column_end)
        narrow(factor[i] == Acc(0) ? Acc(0) : sums[i][j] * factor[i], *matrix.at(r, c));
    }
  }
}

}  // namespace simt
}  // namespace cupy_flash
