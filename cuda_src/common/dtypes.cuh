// Element types: 16-bit storage, what sums are kept in, and conversion between the two.
#pragma once

#include "common/platform.cuh"
#include "ptx/convert.cuh"

namespace cupy_flash {

struct fp16 {
  u16 bits;
};

struct bf16 {
  u16 bits;
};

template <class Element>
struct AccumulatorOf {
  using Type = float;
};

template <>
struct AccumulatorOf<double> {
  using Type = double;
};

template <class Element>
using Accumulator = typename AccumulatorOf<Element>::Type;

template <class Element>
constexpr bool kIsFp16 = false;
template <>
constexpr bool kIsFp16<fp16> = true;

template <class Real>
struct Constants;

template <>
struct Constants<float> {
  static constexpr float kLog2E = 1.44269504088896340736f;
  static CUPY_FLASH_DEVICE float infinity() { return __int_as_float(0x7f800000); }
  static CUPY_FLASH_DEVICE float lowest() { return __int_as_float(0xff7fffff); }
};

template <>
struct Constants<double> {
  static constexpr double kLog2E = 1.44269504088896340736;
  static CUPY_FLASH_DEVICE double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
  static CUPY_FLASH_DEVICE double lowest() { return __longlong_as_double(0xffefffffffffffffll); }
};

CUPY_FLASH_DEVICE float widen(fp16 x) { return ptx::fp16_to_float(x.bits); }
CUPY_FLASH_DEVICE float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
CUPY_FLASH_DEVICE float widen(float x) { return x; }
CUPY_FLASH_DEVICE double widen(double x) { return x; }

// To the accumulator's type. A finite double beyond float stays finite: a bias of the lowest double
// means a very low logit, not a hidden key.
template <class Acc, class Element>
CUPY_FLASH_DEVICE Acc widen_to(Element x) {
  const auto wide = widen(x);
  const Acc value = Acc(wide);
  if constexpr (sizeof(wide) > sizeof(Acc)) {
    const bool overflowed = wide - wide == 0 && !(value - value == 0);
    if (overflowed) return wide < 0 ? Constants<Acc>::lowest() : -Constants<Acc>::lowest();
  }
  return value;
}

// Rounds to nearest, ties to even.
CUPY_FLASH_DEVICE void narrow(double x, double& y) { y = x; }
CUPY_FLASH_DEVICE void narrow(double x, float& y) { y = float(x); }
CUPY_FLASH_DEVICE void narrow(float x, double& y) { y = x; }
CUPY_FLASH_DEVICE void narrow(float x, float& y) { y = x; }
CUPY_FLASH_DEVICE void narrow(float x, fp16& y) { y.bits = ptx::float_to_fp16(x); }
CUPY_FLASH_DEVICE void narrow(double x, fp16& y) { narrow(float(x), y); }

CUPY_FLASH_DEVICE void narrow(float x, bf16& y) {
  // Integer arithmetic, because the instruction needs compute capability 8.0.
  const u32 bits = __float_as_uint(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  y.bits = is_nan ? u16(0x7fff) : u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

CUPY_FLASH_DEVICE void narrow(double x, bf16& y) { narrow(float(x), y); }

// A NaN that no arithmetic produces. It stands in a tile of P or dS for a pair of query and key
// that the mask hides, where zero won't do: see multiply_rows in simt/tile.cuh.
CUPY_FLASH_DEVICE float hidden_mark(float) { return __int_as_float(0x7fc0dead); }
CUPY_FLASH_DEVICE double hidden_mark(double) { return __longlong_as_double(0x7ff8deaddeaddeadll); }
CUPY_FLASH_DEVICE bool is_hidden_mark(float x) { return __float_as_int(x) == 0x7fc0dead; }
CUPY_FLASH_DEVICE bool is_hidden_mark(double x) {
  return __double_as_longlong(x) == 0x7ff8deaddeaddeadll;
}

// The functions of the C library by argument type.
CUPY_FLASH_DEVICE float exp2_of(float x) { return exp2f(x); }
CUPY_FLASH_DEVICE double exp2_of(double x) { return exp2(x); }
CUPY_FLASH_DEVICE float log_of(float x) { return logf(x); }
CUPY_FLASH_DEVICE double log_of(double x) { return log(x); }
CUPY_FLASH_DEVICE float tanh_of(float x) { return tanhf(x); }
CUPY_FLASH_DEVICE double tanh_of(double x) { return tanh(x); }
// Without a branch and almost exact; 0 where the divisor is beyond 2^126.
CUPY_FLASH_DEVICE float quotient_of(float a, float b) { return __fdividef(a, b); }
CUPY_FLASH_DEVICE float abs_of(float x) { return fabsf(x); }
CUPY_FLASH_DEVICE double abs_of(double x) { return fabs(x); }
CUPY_FLASH_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
CUPY_FLASH_DEVICE double max_of(double a, double b) { return fmax(a, b); }
CUPY_FLASH_DEVICE float min_of(float a, float b) { return fminf(a, b); }
CUPY_FLASH_DEVICE double min_of(double a, double b) { return fmin(a, b); }
CUPY_FLASH_DEVICE float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
CUPY_FLASH_DEVICE double fma_of(double a, double b, double c) { return fma(a, b, c); }

CUPY_FLASH_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
CUPY_FLASH_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }
CUPY_FLASH_DEVICE i64 min_of(i64 a, i64 b) { return a < b ? a : b; }
CUPY_FLASH_DEVICE i64 max_of(i64 a, i64 b) { return a > b ? a : b; }

}  // namespace cupy_flash
