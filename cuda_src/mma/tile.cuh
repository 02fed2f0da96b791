// Tiles in shared memory.
#pragma once

#include "common/batch.cuh"
#include "common/block_range.cuh"
#include "common/pack.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared_memory.cuh"

namespace cupy_flash {
namespace mma {

// A row-major tile whose rows are padded by 16 bytes: the same 16 bytes of eight consecutive rows
// then lie in different banks, as ldmatrix and the vector reads of fragments need it.
template <class Element, int kRows_, int kColumns_>
struct alignas(16) Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPitch = kColumns + 16 / int(sizeof(Element));
  Element data[kRows * kPitch];

  CUPY_FLASH_DEVICE Element* at(int row, int column) { return data + row * kPitch + column; }

  // What instructions take; base and offset apart, so that the constant part of the offset becomes
  // part of the instruction.
  CUPY_FLASH_DEVICE u32 address(int row, int column) {
    return ptx::shared_address(data) + u32(row * kPitch + column) * u32(sizeof(Element));
  }
};

// Begins to copy rows [row0, row0 + kRows) of a matrix whose rows lie on multiples of 16 bytes.
// Rows outside `valid` and columns past `columns` become zeros and are never read, so that nothing
// can leak from there. kRagged: the last pack of a row may be shorter than 16 bytes.
template <int kThreads, bool kRagged, class Element, int kRows, int kColumns>
CUPY_FLASH_DEVICE void load_tile(Tile<Element, kRows, kColumns>& tile,
                                 const Matrix<const Element>& matrix, int row0, const Range& valid,
                                 int columns) {
  constexpr int kSize = int(sizeof(Element));
  constexpr int kPack = 16 / kSize;
  // A pass of the block covers some rows of one segment of columns, whose size is a power of two.
  constexpr int kPerRow = min_of((kColumns & -kColumns) / kPack, kWarpSize);
  constexpr int kSegment = kPerRow * kPack;
  constexpr int kRowsPerPass = kThreads / kPerRow;
  // Computed anew, or what follows from it fills registers all through the loop. Tiles of doubles
  // have few passes, and more to lose.
  const u32 thread = kSize < 8 ? u32(ptx::opaque(int(threadIdx.x))) : threadIdx.x;
  const int first = thread / kPerRow;
  const int begin = valid.begin - row0;
  const u32 rows = u32(valid.end - valid.begin);
  const i64 step = kRowsPerPass * matrix.row_stride;
#pragma unroll
  for (int segment = 0; segment < kColumns; segment += kSegment) {
    const int c = segment + thread % kPerRow * kPack;
    const int width = kRagged ? max_of(min_of((columns - c) * kSize, 16), 0) : 16;
    Element* const to = tile.at(first, c);
    const Element* from = ptx::opaque(matrix.data + (row0 + first) * matrix.row_stride + c);
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsPerPass) {
      const bool inside = u32(first + r - begin) < rows && c < columns;
      if (kRows % kRowsPerPass == 0 || first + r < kRows) {
        ptx::cp_async<16>(to + r * tile.kPitch, from, inside ? width : 0);
      }
      from += step;
    }
  }
}

// Copies the rows of a tile from `row0` of the matrix on, up to row_end and the given columns; by
// all threads of a block or by those of a warp.
template <int kThreads, class Element, int kRows, int kColumns>
CUPY_FLASH_DEVICE void store_tile(const Matrix<Element>& matrix,
                                  Tile<Element, kRows, kColumns>& tile, int row0, int row_end,
                                  int columns) {
  constexpr int kPack = 16 / int(sizeof(Element));
  constexpr int kPerRow = kColumns / kPack;
  const i64 misaligned =
      reinterpret_cast<i64>(matrix.data) | (matrix.row_stride * i64(sizeof(Element)));
  const bool whole_packs = matrix.column_stride == 1 && misaligned % 16 == 0;
#pragma unroll 1
  for (int index = threadIdx.x % kThreads; index < kRows * kPerRow; index += kThreads) {
    const int r = index / kPerRow;
    const int c = index % kPerRow * kPack;
    if (row0 + r >= row_end) break;
    const auto values = read_pack<Element, kPack>(tile.at(r, c));
    if (whole_packs && c + kPack <= columns) {
      write_pack<Element, kPack>(matrix.at(row0 + r, c), values);
    } else {
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        if (c + e < columns) *matrix.at(row0 + r, c + e) = values.element[e];
      }
    }
  }
}

// Begins to copy elements [first, first + kCount) of a vector, with zeros from `end` on.
template <int kThreads, int kCount, class Element>
CUPY_FLASH_DEVICE void load_vector(Element (&to)[kCount], const Vector<const Element>& vector,
                                   int first, int end) {
#pragma unroll
  for (int pass = 0; pass < ceil_div(kCount, kThreads); ++pass) {
    const int index = pass * kThreads + threadIdx.x;
    const bool inside = first + index < end;
    const Element* const from = vector.data + (first + index) * vector.stride;
    if (kCount % kThreads == 0 || index < kCount) {
      ptx::cp_async<int(sizeof(Element))>(&to[index], from, inside ? int(sizeof(Element)) : 0);
    }
  }
}

}  // namespace mma
}  // namespace cupy_flash
