// The names of cuda_src/common/platform.cuh, and what CUDA C++ has beside C++, for the CPU.
#pragma once

#include "sim.h"

#define CUPY_FLASH_DEVICE inline
#define CUPY_FLASH_GRID_CONSTANT
#define __global__
#define __launch_bounds__(...)

namespace sim {

struct Dimension {
  unsigned x;
};
inline Dimension thread_index() { return {unsigned(self().index)}; }
inline Dimension block_index() { return {block().block_index}; }
inline Dimension grid_size() { return {block().grid}; }

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace sim

#define threadIdx (::sim::thread_index())
#define blockIdx (::sim::block_index())
#define gridDim (::sim::grid_size())

inline float __int_as_float(int x) { return sim::same_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return sim::same_bits<float>(x); }
inline int __float_as_int(float x) { return sim::same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return sim::same_bits<unsigned>(x); }
inline float __fdividef(float a, float b) {
  return std::isfinite(b) && std::fabs(b) > 0x1p126f ? 0 * a : a / b;
}
inline double __longlong_as_double(long long x) { return sim::same_bits<double>(x); }
inline long long __double_as_longlong(double x) { return sim::same_bits<long long>(x); }

inline void __syncthreads() {
  sim::with_block("__syncthreads", [] {});
}

inline int __syncthreads_and(int predicate) {
  sim::self().operand = &predicate;
  sim::with_block("__syncthreads_and", [] {
    int all = 1;
    for (sim::Thread& thread : sim::block().threads) {
      if (!thread.done) all = all && *static_cast<int*>(thread.operand) != 0;
    }
    for (sim::Thread& thread : sim::block().threads) {
      if (!thread.done) *static_cast<int*>(thread.operand) = all;
    }
  });
  return predicate;
}

inline void __syncwarp() {
  int nothing = 0;
  sim::with_warp("__syncwarp", nothing, [](int**, int) {});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  if (mask != 0xffffffffu) sim::fail("__shfl_xor_sync of a part of a warp");
  T result = value;
  struct Operand {
    T value;
    T* result;
    int bits;
  } operand{value, &result, bits};
  sim::with_warp("__shfl_xor_sync", operand, [](Operand** all, int lanes) {
    for (int i = 0; i < lanes; ++i) *all[i]->result = all[i ^ all[i]->bits]->value;
  });
  return result;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  if (mask != 0xffffffffu) sim::fail("__shfl_sync of a part of a warp");
  T result = value;
  struct Operand {
    T value;
    T* result;
    int lane;
  } operand{value, &result, lane};
  sim::with_warp("__shfl_sync", operand, [](Operand** all, int lanes) {
    for (int i = 0; i < lanes; ++i) *all[i]->result = all[all[i]->lane % lanes]->value;
  });
  return result;
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  if (mask != 0xffffffffu) sim::fail("__ballot_sync of a part of a warp");
  struct Operand {
    int predicate;
    unsigned votes;
  } operand{predicate, 0};
  sim::with_warp("__ballot_sync", operand, [](Operand** all, int lanes) {
    unsigned votes = 0;
    for (int i = 0; i < lanes; ++i) votes |= unsigned(all[i]->predicate != 0) << i;
    for (int i = 0; i < lanes; ++i) all[i]->votes = votes;
  });
  return operand.votes;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

template <class T>
T atomicAdd(T* to, T value) {
  sim::hesitate();
  const T before = *to;
  *to += value;
  return before;
}

template <class T>
T atomicCAS(T* to, T expected, T value) {
  sim::hesitate();
  const T before = *to;
  if (before == expected) *to = value;
  return before;
}

inline unsigned atomicOr(unsigned* to, unsigned bits) {
  sim::hesitate();
  const unsigned before = *to;
  *to |= bits;
  return before;
}

namespace cupy_flash {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int kComputeCapability = SIM_CAPABILITY;

constexpr int kWarpSize = 32;
constexpr u32 kAllLanes = 0xffffffffu;

inline unsigned char* dynamic_shared_memory() { return sim::block().shared; }

template <class Storage>
inline Storage& shared_storage() {
  return *reinterpret_cast<Storage*>(dynamic_shared_memory());
}

inline constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace cupy_flash
