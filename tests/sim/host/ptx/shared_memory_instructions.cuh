// Between global memory, shared memory and registers, one function for each instruction.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

inline u32 shared_address(const void* pointer) {
  const auto* const byte = static_cast<const unsigned char*>(pointer);
  const auto& block = sim::block();
  if (byte < block.shared || byte > block.shared + block.shared_size) {
    sim::fail("an address in shared memory that isn't there");
  }
  return u32(byte - block.shared);
}

// Lanes 8i to 8i + 7 point to the rows of matrix i.
template <bool kTransposed>
inline void load_matrices(const char* what, u32 (&matrix)[4], u32 row) {
  struct Operand {
    u32* matrix;
    u32 row;
  } operand{matrix, row};
  sim::with_warp(what, operand, [](Operand** all, int) {
    for (int i = 0; i < 4; ++i) {
      u16 element[8][8];
      for (int r = 0; r < 8; ++r) {
        const u32 address = all[8 * i + r]->row;
        if (address % 16 != 0) sim::fail("ldmatrix of a misaligned row");
        std::memcpy(element[r], sim::block().shared + address, 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4;
        const int c = lane % 4 * 2;
        const u16 low = kTransposed ? element[c][g] : element[g][c];
        const u16 high = kTransposed ? element[c + 1][g] : element[g][c + 1];
        all[lane]->matrix[i] = u32(low) | u32(high) << 16;
      }
    }
  });
}

inline void ldmatrix(u32 (&matrix)[4], u32 row) { load_matrices<false>("ldmatrix", matrix, row); }
inline void ldmatrix_transposed(u32 (&matrix)[4], u32 row) {
  load_matrices<true>("ldmatrix_transposed", matrix, row);
}

// Lanes 8i to 8i + 7 point to the rows that matrix i is written to.
inline void stmatrix_transposed(u32 row, const u32 (&matrix)[4]) {
  if (kComputeCapability < 90) sim::fail("stmatrix is for later GPUs");
  struct Operand {
    u32 row;
    const u32* matrix;
  } operand{row, matrix};
  sim::with_warp("stmatrix_transposed", operand, [](Operand** all, int lanes) {
    if (lanes != 32) sim::fail("stmatrix of a part of a warp");
    for (int i = 0; i < 4; ++i) {
      u16 element[8][8];
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4;
        const int c = lane % 4 * 2;
        element[c][g] = u16(all[lane]->matrix[i]);
        element[c + 1][g] = u16(all[lane]->matrix[i] >> 16);
      }
      for (int r = 0; r < 8; ++r) {
        const u32 address = all[8 * i + r]->row;
        if (address % 16 != 0) sim::fail("stmatrix of a misaligned row");
        std::memcpy(sim::block().shared + address, element[r], 16);
      }
    }
  });
}

inline void needs_async_copies() {
  if (kComputeCapability < 80) sim::fail("cp.async is for later GPUs");
}

template <int kBytes>
inline void cp_async_shared_global(u32 to, const void* from, int bytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what the instruction can copy");
  needs_async_copies();
  if (bytes < 0 || bytes > kBytes) sim::fail("cp_async of more than it can copy");
  if (to % kBytes != 0) sim::fail("cp_async to a misaligned address");
  if (bytes > 0 && reinterpret_cast<size_t>(from) % kBytes != 0) {
    sim::fail("cp_async from a misaligned address");
  }
  sim::copy_later({sim::block().shared + to, from, bytes, kBytes});
}

inline void cp_async_commit_group() {
  needs_async_copies();
  sim::end_group();
}

template <int kLeft>
inline void cp_async_wait_group() {
  needs_async_copies();
  sim::wait_for_groups(kLeft);
}

}  // namespace ptx
}  // namespace cupy_flash
