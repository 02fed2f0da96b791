// Products of tiles, and what leaves through their fragments.
#pragma once

#include "mma/atom.cuh"

namespace cupy_flash {
namespace mma {

// sums += A Bᵀ over kDepth channels: rows [row_a, row_a + 16 kM) of A, [row_b, row_b + 8 kN) of B.
template <class Atom, int kDepth, int kM, int kN, class TileA, class TileB>
CUPY_FLASH_DEVICE void multiply_transposed(typename Atom::Acc (&sums)[kM][kN][4], TileA& a,
                                           int row_a, TileB& b, int row_b) {
  static_assert(kDepth % Atom::kReadDepth == 0 && kN % Atom::kReadTiles == 0, "whole reads");
#pragma unroll
  for (int d = 0; d < kDepth; d += Atom::kReadDepth) {
    typename Atom::Left left[kM];
#pragma unroll
    for (int i = 0; i < kM; ++i) Atom::read_left(left[i], a, row_a + 16 * i, d);
#pragma unroll
    for (int j = 0; j < kN; j += Atom::kReadTiles) {
      typename Atom::Right right[Atom::kReadTiles];
      Atom::read_right(right, b, row_b + 8 * j, d);
#pragma unroll
      for (int e = 0; e < Atom::kReadTiles; ++e) {
#pragma unroll
        for (int i = 0; i < kM; ++i) Atom::multiply(sums[i][j + e], left[i], right[e]);
      }
    }
  }
}

// Where the weights of a product come from. `get` makes those of rows 16 i to 16 i + 15 and of step
// `step`, which is kStepDepth rows of B.

// Sums that a warp holds.
template <class Atom, int kM, int kColumns>
struct HeldWeights {
  const typename Atom::Acc (&sums)[kM][kColumns][4];

  CUPY_FLASH_DEVICE void get(typename Atom::Weights& weights, int i, int step) const {
    Atom::make_weights(weights, sums[i] + step * Atom::kStepDepth / 8);
  }
};

// A tile in shared memory, from its row `row` on.
template <class Atom, class TileW>
struct StoredWeights {
  TileW& tile;
  int row;

  CUPY_FLASH_DEVICE void get(typename Atom::Weights& weights, int i, int step) const {
    Atom::read_weights(weights, tile, row + 16 * i, step * Atom::kStepDepth);
  }
};

// The transpose of a tile in shared memory, from its column `column` on.
template <class Atom, class TileW>
struct TransposedWeights {
  TileW& tile;
  int column;

  CUPY_FLASH_DEVICE void get(typename Atom::Weights& weights, int i, int step) const {
    Atom::read_weights_transposed(weights, tile, step * Atom::kStepDepth, column + 16 * i);
  }
};

// sums += W B: all kRows rows of B, columns [column, column + 8 kN).
template <class Atom, int kRows, int kM, int kN, class Source, class TileB>
CUPY_FLASH_DEVICE void multiply_rows(typename Atom::Acc (&sums)[kM][kN][4], const Source& source,
                                     TileB& b, int column) {
  using Acc = typename Atom::Acc;
  constexpr int kSteps = kRows / Atom::kStepDepth;
  constexpr int kGroup = Atom::kGroup;
  static_assert(kRows % Atom::kStepDepth == 0 && kN % kGroup == 0, "whole reads");
  if constexpr (Atom::kFlush) {
#pragma unroll
    for (int j = 0; j < kN; j += kGroup) {
      Acc partial[kM][kGroup][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        typename Atom::Rows rows[kGroup];
        Atom::read_rows(rows, b, step * Atom::kStepDepth, column + 8 * j);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          typename Atom::Weights weights;
          source.get(weights, i, step);
#pragma unroll
          for (int e = 0; e < kGroup; ++e) Atom::multiply(partial[i][e], weights, rows[e]);
        }
      }
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
#pragma unroll
          for (int x = 0; x < 4; ++x) sums[i][j + e][x] += partial[i][e][x];
        }
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      typename Atom::Weights weights[kM];
#pragma unroll
      for (int i = 0; i < kM; ++i) source.get(weights[i], i, step);
#pragma unroll
      for (int j = 0; j < kN; j += kGroup) {
        typename Atom::Rows rows[kGroup];
        Atom::read_rows(rows, b, step * Atom::kStepDepth, column + 8 * j);
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
#pragma unroll
          for (int i = 0; i < kM; ++i) Atom::multiply(sums[i][j + e], weights[i], rows[e]);
        }
      }
    }
  }
}

// Writes weights into a tile: rows [row, row + 16 kM), columns [column, column + 8 kN).
template <class Atom, int kM, int kN, class TileW>
CUPY_FLASH_DEVICE void write_weights(TileW& tile, const typename Atom::Acc (&sums)[kM][kN][4],
                                     int row, int column) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Atom::write_pair(tile.at(row + 16 * i + 8 * half + lane.g, column + 8 * j + 2 * lane.t),
                         sums[i][j][2 * half], sums[i][j][2 * half + 1]);
      }
    }
  }
}

// Writes the rows of a product into a tile, each multiplied by its factor. A factor of 0 makes a
// row 0 whatever its sums are.
template <class Atom, int kM, int kN, class TileOut>
CUPY_FLASH_DEVICE void write_results(TileOut& tile, const typename Atom::Acc (&sums)[kM][kN][4],
                                     const typename Atom::Acc (&factor)[kM][2], int row,
                                     int column) {
  using Acc = typename Atom::Acc;
  constexpr int kGroup = Atom::kGroup;
  const Lane lane;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Acc f = factor[i][half];
#pragma unroll
      for (int j = 0; j < kN; j += kGroup) {
        Acc low[kGroup], high[kGroup];
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
          low[e] = f == Acc(0) ? Acc(0) : sums[i][j + e][2 * half] * f;
          high[e] = f == Acc(0) ? Acc(0) : sums[i][j + e][2 * half + 1] * f;
        }
        Atom::write_results(tile, row + 16 * i + 8 * half + lane.g, column + 8 * j, low, high);
      }
    }
  }
}

}  // namespace mma
}  // namespace cupy_flash
