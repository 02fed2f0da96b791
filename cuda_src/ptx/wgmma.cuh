// Products of a warpgroup, four warps, on Hopper's tensor cores: d += a b, asynchronously.
//
// d: 64 x kN sums. Lane 4g + t of warp w holds d[4j] and d[4j + 1] in row 16w + g, columns 8j + 2t
// and 8j + 2t + 1, and d[4j + 2] and d[4j + 3] in row 16w + g + 8. a: 64 x 16, from registers with
// the fragments of mma_m16n8k16_fp16 for each warp, or from shared memory. b: 16 x kN, from there.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// Around the products: wgmma_fence after registers of d or a were written, and hold (opaque.cuh);
// then products; wgmma_commit; wgmma_wait and hold before d is read or d or a are written. Compute
// capability 9.0 only, compiled for sm_90a.
#pragma once

#include "common/platform.cuh"
#include "ptx/shared_memory_instructions.cuh"

namespace cupy_flash {

struct fp16;  // common/dtypes.cuh

namespace ptx {

// Describes a matrix in shared memory with 128-byte swizzle, as tensor maps write it: rows of 128
// bytes (64 elements of 16 bits) in atoms of eight rows, 1024 bytes. `stride_bytes` leads from one
// atom to the next along the rows.
//
// Where the rows run along the products' depth (K-major), `leading_bytes` isn't used, and the next
// 16 of the depth begin 32 bytes further, within the 64 of a row. Where they run across it
// (kTransposeB), `leading_bytes` leads from 64 columns to the next 64, and the next 16 of the depth
// are two atoms further.
//
// Fields: bits 0 to 13 are the address / 16, 16 to 29 leading_bytes / 16, 32 to 45 stride_bytes /
// 16, 62 and 63 the swizzle, 1 for 128 bytes. So to go on by some bytes, wgmma_advance by bytes
// / 16.
CUPY_FLASH_DEVICE u64 wgmma_descriptor(const void* tile, int leading_bytes, int stride_bytes) {
  return u64((shared_address(tile) & 0x3ffffu) >> 4) | u64(leading_bytes >> 4) << 16 |
         u64(stride_bytes >> 4) << 32 | u64(1) << 62;
}

// Goes on by so many times 16 bytes. The address has no carry, so half the descriptor stays.
CUPY_FLASH_DEVICE u64 wgmma_advance(u64 descriptor, int units) {
  return (descriptor & 0xffffffff00000000ull) | u64(u32(descriptor) + u32(units));
}

// Orders what was done to registers before the products that follow.
CUPY_FLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
CUPY_FLASH_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the latest groups are still being computed.
template <int kPending>
CUPY_FLASH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Elements are fp16, or else bf16.
// CUPY_FLASH_n(X) is X(1) to X(n - 1).
// clang-format off
#define CUPY_FLASH_8(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define CUPY_FLASH_16(X) CUPY_FLASH_8(X) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define CUPY_FLASH_24(X) CUPY_FLASH_16(X) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)
#define CUPY_FLASH_32(X) CUPY_FLASH_24(X) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31)
#define CUPY_FLASH_40(X) CUPY_FLASH_32(X) X(32) X(33) X(34) X(35) X(36) X(37) X(38) X(39)
#define CUPY_FLASH_48(X) CUPY_FLASH_40(X) X(40) X(41) X(42) X(43) X(44) X(45) X(46) X(47)
#define CUPY_FLASH_56(X) CUPY_FLASH_48(X) X(48) X(49) X(50) X(51) X(52) X(53) X(54) X(55)
#define CUPY_FLASH_64(X) CUPY_FLASH_56(X) X(56) X(57) X(58) X(59) X(60) X(61) X(62) X(63)
#define CUPY_FLASH_72(X) CUPY_FLASH_64(X) X(64) X(65) X(66) X(67) X(68) X(69) X(70) X(71)
#define CUPY_FLASH_80(X) CUPY_FLASH_72(X) X(72) X(73) X(74) X(75) X(76) X(77) X(78) X(79)
#define CUPY_FLASH_88(X) CUPY_FLASH_80(X) X(80) X(81) X(82) X(83) X(84) X(85) X(86) X(87)
#define CUPY_FLASH_96(X) CUPY_FLASH_88(X) X(88) X(89) X(90) X(91) X(92) X(93) X(94) X(95)
#define CUPY_FLASH_104(X) CUPY_FLASH_96(X) X(96) X(97) X(98) X(99) X(100) X(101) X(102) X(103)
#define CUPY_FLASH_112(X) CUPY_FLASH_104(X) X(104) X(105) X(106) X(107) X(108) X(109) X(110) X(111)
#define CUPY_FLASH_120(X) CUPY_FLASH_112(X) X(112) X(113) X(114) X(115) X(116) X(117) X(118) X(119)
#define CUPY_FLASH_128(X) CUPY_FLASH_120(X) X(120) X(121) X(122) X(123) X(124) X(125) X(126) X(127)
// clang-format on

// The shapes: kN; the number of sums, which is also that of the first operand after them; the
// numbers of the operands after that one.
#define CUPY_FLASH_WGMMA_SHAPES(X)          \
  X(16, 8, 9, 10, 11, 12, 13, 14)           \
  X(32, 16, 17, 18, 19, 20, 21, 22)         \
  X(48, 24, 25, 26, 27, 28, 29, 30)         \
  X(64, 32, 33, 34, 35, 36, 37, 38)         \
  X(80, 40, 41, 42, 43, 44, 45, 46)         \
  X(96, 48, 49, 50, 51, 52, 53, 54)         \
  X(112, 56, 57, 58, 59, 60, 61, 62)        \
  X(128, 64, 65, 66, 67, 68, 69, 70)        \
  X(144, 72, 73, 74, 75, 76, 77, 78)        \
  X(160, 80, 81, 82, 83, 84, 85, 86)        \
  X(176, 88, 89, 90, 91, 92, 93, 94)        \
  X(192, 96, 97, 98, 99, 100, 101, 102)     \
  X(208, 104, 105, 106, 107, 108, 109, 110) \
  X(224, 112, 113, 114, 115, 116, 117, 118) \
  X(240, 120, 121, 122, 123, 124, 125, 126) \
  X(256, 128, 129, 130, 131, 132, 133, 134)

#define CUPY_FLASH_REGISTER(i) ", %" #i
#define CUPY_FLASH_SUM(i) , "+f"(d[i])

// One instruction: its type and shape; how its text names the factors, whether it accumulates, and
// what is transposed; and these operands.
#define CUPY_FLASH_WGMMA(type, N, n, factors, scale, transposed, ...)                   \
  asm volatile(                                                                         \
      "{\n"                                                                             \
      ".reg .pred p;\n"                                                                 \
      "setp.ne.b32 p, " scale                                                           \
      ", 0;\n"                                                                          \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type                   \
      " {%0" CUPY_FLASH_##n(CUPY_FLASH_REGISTER) "}, " factors ", p, 1, 1, " transposed \
                                                 ";\n"                                  \
                                                 "}"                                    \
      : "+f"(d[0])CUPY_FLASH_##n(CUPY_FLASH_SUM)                                        \
      : __VA_ARGS__)

#define CUPY_FLASH_WGMMA_SS(type, N, n, n1, n2, n3)                                   \
  CUPY_FLASH_WGMMA(type, N, n, "%" #n ", %" #n1, "%" #n2, "0, %" #n3, "l"(a), "l"(b), \
                   "r"(int(accumulate)), "n"(int(kTransposeB)))

#define CUPY_FLASH_WGMMA_RS(type, N, n, n1, n2, n3, n4, n5, n6)                                    \
  CUPY_FLASH_WGMMA(type, N, n, "{%" #n ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4, "%" #n5, "%" #n6, \
                   "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),       \
                   "n"(int(kTransposeB)))

// Both factors from shared memory: `a` is K-major, as is `b` unless kTransposeB. Without
// `accumulate` the sums begin at zero.
template <class Element, int kN, bool kTransposeB>
CUPY_FLASH_DEVICE void wgmma_ss(float (&d)[kN / 2], u64 a, u64 b, bool accumulate) {
  static_assert(kN % 16 == 0 && kN >= 16 && kN <= 256, "a shape that there is");
#define CUPY_FLASH_CASE(N, n, n1, n2, n3, ...)                                             \
  if constexpr (kN == N && kIsFp16<Element>) CUPY_FLASH_WGMMA_SS("f16", N, n, n1, n2, n3); \
  if constexpr (kN == N && !kIsFp16<Element>) CUPY_FLASH_WGMMA_SS("bf16", N, n, n1, n2, n3);
  CUPY_FLASH_WGMMA_SHAPES(CUPY_FLASH_CASE)
#undef CUPY_FLASH_CASE
}

// `a` from registers.
template <class Element, int kN, bool kTransposeB>
CUPY_FLASH_DEVICE void wgmma_rs(float (&d)[kN / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  static_assert(kN % 16 == 0 && kN >= 16 && kN <= 256, "a shape that there is");
#define CUPY_FLASH_CASE(N, ...)                                                          \
  if constexpr (kN == N && kIsFp16<Element>) CUPY_FLASH_WGMMA_RS("f16", N, __VA_ARGS__); \
  if constexpr (kN == N && !kIsFp16<Element>) CUPY_FLASH_WGMMA_RS("bf16", N, __VA_ARGS__);
  CUPY_FLASH_WGMMA_SHAPES(CUPY_FLASH_CASE)
#undef CUPY_FLASH_CASE
}

#undef CUPY_FLASH_WGMMA_RS
#undef CUPY_FLASH_WGMMA_SS
#undef CUPY_FLASH_WGMMA
#undef CUPY_FLASH_SUM
#undef CUPY_FLASH_REGISTER
#undef CUPY_FLASH_WGMMA_SHAPES

}  // namespace ptx
}  // namespace cupy_flash
