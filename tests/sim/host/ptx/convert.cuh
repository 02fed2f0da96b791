// Conversions between float and what tensor cores multiply.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

inline float fp16_to_float(u16 bits) {
  const u32 sign = u32(bits >> 15) << 31;
  const u32 exponent = (bits >> 10) & 31;
  const u32 mantissa = bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  const float magnitude = exponent == 0 ? std::ldexp(float(mantissa), -24)
                                        : std::ldexp(float(mantissa + 1024), int(exponent) - 25);
  return sign != 0 ? -magnitude : magnitude;
}

// Rounds to nearest, ties to even.
inline u16 float_to_fp16(float value) {
  const u32 bits = __float_as_uint(value);
  const u16 sign = u16((bits >> 16) & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (magnitude >= 65520.0f) return u16(sign | 0x7c00);
  if (magnitude == 0.0f) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 11, -24);
  const u32 mantissa = u32(std::nearbyint(std::ldexp(magnitude, -exponent)));
  // A mantissa that was rounded up to 2048 carries into the exponent.
  return u16(sign | (exponent == -24 ? mantissa : mantissa + (u32(exponent + 24) << 10)));
}

inline u16 float_to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  if (std::isnan(value)) return 0x7fff;
  return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline u32 floats_to_fp16x2(float low, float high) {
  return u32(float_to_fp16(low)) | u32(float_to_fp16(high)) << 16;
}

inline u32 floats_to_bf16x2(float low, float high) {
  return u32(float_to_bf16(low)) | u32(float_to_bf16(high)) << 16;
}

// Ties away from zero.
inline u32 float_to_tf32(float value) {
  const u32 bits = __float_as_uint(value);
  if (!std::isfinite(value)) return bits;
  return (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace ptx
}  // namespace cupy_flash
