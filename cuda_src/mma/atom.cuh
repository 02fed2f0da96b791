// How a warp reads the factors of a product from shared memory and multiplies them on tensor
// cores, for each element type.
//
// All products have sums in fragments of 16 x 8, four per lane: lane 4g + t holds columns 2t and
// 2t + 1 of rows g and g + 8. Two kinds of product occur, and an Atom describes both:
//
//   A Bᵀ, over channels. Both factors are tiles with the channels as columns. One read brings
//   kReadDepth channels, of 16 rows of A or of 8 kReadTiles rows of B.
//
//   W B, over rows of a tile. W are weights, P or dS: a fragment of sums is turned into one left
//   factor as it is, without a shuffle (kStepDepth of its columns at a time), or it is read from a
//   tile. One read of B brings kStepDepth rows and 8 kGroup columns.
//
// The order in which a product is summed is free, and so is the order of its columns. The atoms of
// 4- and 8-byte elements use that to read 16 bytes at a time: a lane's share of a row is
// contiguous.
#pragma once

#include "common/dtypes.cuh"
#include "mma/tile.cuh"
#include "ptx/mma.cuh"

namespace cupy_flash {
namespace mma {

struct Lane {
  int index;
  int g;  // row of a fragment, and of that 8 further down
  int t;  // pair of columns of a fragment

  CUPY_FLASH_DEVICE Lane() : index(threadIdx.x % kWarpSize), g(index / 4), t(index % 4) {}
};

// --- 16-bit elements --------------------------------------------------------------------------

CUPY_FLASH_DEVICE u32 narrow_pair(float low, float high, fp16) {
  return ptx::floats_to_fp16x2(low, high);
}
CUPY_FLASH_DEVICE u32 narrow_pair(float low, float high, bf16) {
  return ptx::floats_to_bf16x2(low, high);
}
CUPY_FLASH_DEVICE void widen_pair(u32 pair, float& low, float& high, fp16) {
  low = ptx::fp16_to_float(u16(pair));
  high = ptx::fp16_to_float(u16(pair >> 16));
}
CUPY_FLASH_DEVICE void widen_pair(u32 pair, float& low, float& high, bf16) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}
CUPY_FLASH_DEVICE void multiply_fragments(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                          fp16) {
  ptx::mma_fp16(d, a, b);
}
CUPY_FLASH_DEVICE void multiply_fragments(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                          bf16) {
  ptx::mma_bf16(d, a, b);
}

template <class Element>
struct HalfAtom {
  using Acc = float;
  static constexpr int kReadDepth = 16;
  static constexpr int kReadTiles = 2;
  static constexpr int kStepDepth = 16;
  static constexpr int kGroup = 2;
  static constexpr bool kFlush = false;

  struct Left {  // 16 x 16
    u32 bits[4];
  };
  using Weights = Left;
  struct Right {  // 16 x 8
    u32 bits[2];
  };
  using Rows = Right;

  // Rows [row, row + 16) of A, channels [column, column + 16).
  template <class TileA>
  CUPY_FLASH_DEVICE static void read_left(Left& left, TileA& tile, int row, int column) {
    const int lane = threadIdx.x % kWarpSize;
    ptx::ldmatrix(left.bits, tile.address(row + lane % 16, column + lane / 16 * 8));
  }

  // Rows [row, row + 16) of B, channels [column, column + 16).
  template <class TileB>
  CUPY_FLASH_DEVICE static void read_right(Right (&right)[2], TileB& tile, int row, int column) {
    const int lane = threadIdx.x % kWarpSize;
    u32 bits[4];
    ptx::ldmatrix(bits, tile.address(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8));
    right[0] = {{bits[0], bits[1]}};
    right[1] = {{bits[2], bits[3]}};
  }

  // 16 columns of sums.
  CUPY_FLASH_DEVICE static void make_weights(Weights& weights, const Acc (*sums)[4]) {
    weights.bits[0] = narrow_pair(sums[0][0], sums[0][1], Element{});
    weights.bits[1] = narrow_pair(sums[0][2], sums[0][3], Element{});
    weights.bits[2] = narrow_pair(sums[1][0], sums[1][1], Element{});
    weights.bits[3] = narrow_pair(sums[1][2], sums[1][3], Element{});
  }

  // W is rows [row, row + 16) and columns [column, column + 16) of a tile.
  template <class TileW>
  CUPY_FLASH_DEVICE static void read_weights(Weights& weights, TileW& tile, int row, int column) {
    read_left(weights, tile, row, column);
  }

  // W is the transpose of rows [row, row + 16) and columns [column, column + 16) of a tile.
  template <class TileW>
  CUPY_FLASH_DEVICE static void read_weights_transposed(Weights& weights, TileW& tile, int row,
                                                        int column) {
    const int lane = threadIdx.x % kWarpSize;
    ptx::ldmatrix_transposed(
        weights.bits, tile.address(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8));
  }

  // Rows [row, row + 16) of B, columns [column, column + 16).
  template <class TileB>
  CUPY_FLASH_DEVICE static void read_rows(Rows (&rows)[2], TileB& tile, int row, int column) {
    const int lane = threadIdx.x % kWarpSize;
    u32 bits[4];
    ptx::ldmatrix_transposed(bits, tile.address(row + lane % 16, column + lane / 16 * 8));
    rows[0] = {{bits[0], bits[1]}};
    rows[1] = {{bits[2], bits[3]}};
  }

  CUPY_FLASH_DEVICE static void multiply(Acc (&sums)[4], const Left& left, const Right& right) {
    multiply_fragments(sums, left.bits, right.bits, Element{});
  }

  // Two neighbouring sums of a row.
  CUPY_FLASH_DEVICE static void write_pair(Element* to, Acc low, Acc high) {
    *reinterpret_cast<u32*>(to) = narrow_pair(low, high, Element{});
  }

  // A row of a group of results, as read_rows orders the columns.
  template <class TileOut>
  CUPY_FLASH_DEVICE static void write_results(TileOut& tile, int row, int column,
                                              const Acc (&low)[kGroup], const Acc (&high)[kGroup]) {
    const Lane lane;
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      write_pair(tile.at(row, column + 8 * e + 2 * lane.t), low[e], high[e]);
    }
  }
};

// --- float and double -------------------------------------------------------------------------

// A float as tf32 numbers, which have 11 significant bits: one, or two whose sum has 23.
template <int kProducts>
struct Tf32;

template <>
struct Tf32<1> {
  u32 high;

  Tf32() = default;
  CUPY_FLASH_DEVICE explicit Tf32(float x) : high(ptx::float_to_tf32(x)) {}
};

template <>
struct Tf32<3> {
  u32 high;
  u32 low;

  Tf32() = default;
  CUPY_FLASH_DEVICE explicit Tf32(float x) {
    // Rounded by integer arithmetic. That makes -0 of some NaN, but `low` is NaN then; and infinity
    // of the last 2^12 numbers before it, which is the price of two instructions instead of five.
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    // The tensor core ignores the last bit of `low`, which is beyond tf32.
    low = __float_as_uint(x - __uint_as_float(high));
  }
};

CUPY_FLASH_DEVICE void multiply_fragments(float (&d)[4], const Tf32<1> (&a)[4],
                                          const Tf32<1> (&b)[2]) {
  ptx::mma_tf32(d, {a[0].high, a[1].high, a[2].high, a[3].high}, {b[0].high, b[1].high});
}

// Without the product of the low parts, which lies below float's precision.
CUPY_FLASH_DEVICE void multiply_fragments(float (&d)[4], const Tf32<3> (&a)[4],
                                          const Tf32<3> (&b)[2]) {
  ptx::mma_tf32(d, {a[0].low, a[1].low, a[2].low, a[3].low}, {b[0].high, b[1].high});
  ptx::mma_tf32(d, {a[0].high, a[1].high, a[2].high, a[3].high}, {b[0].low, b[1].low});
  ptx::mma_tf32(d, {a[0].high, a[1].high, a[2].high, a[3].high}, {b[0].high, b[1].high});
}

CUPY_FLASH_DEVICE void multiply_fragments(double (&d)[4], const double (&a)[4],
                                          const double (&b)[2]) {
  ptx::mma_fp64(d, a, b);
}

template <class Element, class Operand>
struct WideAtom {
  using Acc = Element;
  static constexpr int kPack = 16 / int(sizeof(Element));
  static constexpr int kReadDepth = 8 * kPack;
  static constexpr int kReadTiles = 1;
  static constexpr int kStepDepth = 8;
  static constexpr int kGroup = kPack;
  // Tensor cores round sums toward zero: a float is summed over one tile at most, and added to the
  // result by ordinary arithmetic.
  static constexpr bool kFlush = sizeof(Element) == 4;

  struct Left {  // rows g and g + 8, 2 kPack channels
    Operand value[2][2 * kPack];
  };
  struct Right {
    Operand value[2 * kPack];
  };
  struct Weights {  // 16 x 8: columns 2t of rows g and g + 8, then columns 2t + 1
    Operand value[4];
  };
  struct Rows {  // 8 x 8: rows 2t and 2t + 1
    Operand value[2];
  };

  template <class TileA>
  CUPY_FLASH_DEVICE static void read_left(Left& left, TileA& tile, int row, int column) {
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      read_share(left.value[half], tile.at(row + lane.g + 8 * half, column + 2 * kPack * lane.t));
    }
  }

  template <class TileB>
  CUPY_FLASH_DEVICE static void read_right(Right (&right)[1], TileB& tile, int row, int column) {
    const Lane lane;
    read_share(right[0].value, tile.at(row + lane.g, column + 2 * kPack * lane.t));
  }

  CUPY_FLASH_DEVICE static void multiply(Acc (&sums)[4], const Left& left, const Right& right) {
#pragma unroll
    for (int e = 0; e < 2 * kPack; e += 2) {
      const Operand a[4] = {left.value[0][e], left.value[1][e], left.value[0][e + 1],
                            left.value[1][e + 1]};
      const Operand b[2] = {right.value[e], right.value[e + 1]};
      multiply_fragments(sums, a, b);
    }
  }

  CUPY_FLASH_DEVICE static void make_weights(Weights& weights, const Acc (*sums)[4]) {
    weights.value[0] = Operand(sums[0][0]);
    weights.value[1] = Operand(sums[0][2]);
    weights.value[2] = Operand(sums[0][1]);
    weights.value[3] = Operand(sums[0][3]);
  }

  template <class TileW>
  CUPY_FLASH_DEVICE static void read_weights(Weights& weights, TileW& tile, int row, int column) {
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pair =
          read_pack<Element, 2>(tile.at(row + lane.g + 8 * half, column + 2 * lane.t));
      weights.value[half] = Operand(pair.element[0]);
      weights.value[2 + half] = Operand(pair.element[1]);
    }
  }

  template <class TileW>
  CUPY_FLASH_DEVICE static void read_weights_transposed(Weights& weights, TileW& tile, int row,
                                                        int column) {
    const Lane lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights.value[i] = Operand(*tile.at(row + 2 * lane.t + i / 2, column + lane.g + 8 * (i % 2)));
    }
  }

  template <class TileB>
  CUPY_FLASH_DEVICE static void read_rows(Rows (&rows)[kPack], TileB& tile, int row, int column) {
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pack =
          read_pack<Element, kPack>(tile.at(row + 2 * lane.t + half, column + kPack * lane.g));
#pragma unroll
      for (int e = 0; e < kPack; ++e) rows[e].value[half] = Operand(pack.element[e]);
    }
  }

  CUPY_FLASH_DEVICE static void multiply(Acc (&sums)[4], const Weights& weights, const Rows& rows) {
    multiply_fragments(sums, weights.value, rows.value);
  }

  CUPY_FLASH_DEVICE static void write_pair(Element* to, Acc low, Acc high) {
    write_pack<Element, 2>(to, {{low, high}});
  }

  template <class TileOut>
  CUPY_FLASH_DEVICE static void write_results(TileOut& tile, int row, int column,
                                              const Acc (&low)[kGroup], const Acc (&high)[kGroup]) {
    const Lane lane;
    Element* const to = tile.at(row, column + 2 * kPack * lane.t);
    Pack<Element, kPack> packs[2];
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      packs[0].element[e] = low[e];
      packs[1].element[e] = high[e];
    }
    write_pack<Element, kPack>(to, packs[0]);
    write_pack<Element, kPack>(to + kPack, packs[1]);
  }

 private:
  CUPY_FLASH_DEVICE static void read_share(Operand (&share)[2 * kPack], const Element* from) {
#pragma unroll
    for (int first = 0; first < 2 * kPack; first += kPack) {
      const auto pack = read_pack<Element, kPack>(from + first);
#pragma unroll
      for (int e = 0; e < kPack; ++e) share[first + e] = Operand(pack.element[e]);
    }
  }
};

// kProducts: of tf32 numbers for one product of floats, 3 or, with less precision, 1.
template <class Element, int kProducts>
struct AtomOf {
  using Type = HalfAtom<Element>;
};
template <int kProducts>
struct AtomOf<float, kProducts> {
  using Type = WideAtom<float, Tf32<kProducts>>;
};
template <int kProducts>
struct AtomOf<double, kProducts> {
  using Type = WideAtom<double, double>;
};

template <class Traits>
using Atom = typename AtomOf<typename Traits::Element, Traits::kProducts>::Type;

}  // namespace mma
}  // namespace cupy_flash
