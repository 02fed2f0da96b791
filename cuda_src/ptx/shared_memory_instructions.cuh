// Between global memory, shared memory and registers, one function for each instruction.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {
namespace ptx {

// What instructions take as an address in shared memory.
CUPY_FLASH_DEVICE u32 shared_address(const void* pointer) {
  return u32(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8i to 8i + 7 give the shared addresses of the rows
// of matrix i, 16 bytes each. Lane 4g + t gets columns 2t and 2t + 1 of row g of each.
CUPY_FLASH_DEVICE void ldmatrix(u32 (&matrix)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row)
               : "memory");
}

// The same of the transposed matrices: rows 2t and 2t + 1 of column g.
CUPY_FLASH_DEVICE void ldmatrix_transposed(u32 (&matrix)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row)
               : "memory");
}

// Writes four 8 x 8 matrices of 16-bit elements transposed; lanes 8i to 8i + 7 give the shared
// addresses of the rows that matrix i is written to, 16 bytes each. Lane 4g + t gives rows 2t and
// 2t + 1 of column g of each. Compute capability 9.0 and later.
CUPY_FLASH_DEVICE void stmatrix_transposed(u32 row, const u32 (&matrix)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(row), "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
               : "memory");
}

// --- Compute capability 8.0 and later -----------------------------------------------------------

// Begins to copy the first `bytes` of kBytes = 4, 8 or 16, and zeros after them; both addresses
// are multiples of kBytes. Nothing is read where `bytes` is 0.
template <int kBytes>
CUPY_FLASH_DEVICE void cp_async_shared_global(u32 to, const void* from, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(to), "l"(from), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

// Ends a group of copies.
CUPY_FLASH_DEVICE void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kLeft of this thread's latest groups are still being copied.
template <int kLeft>
CUPY_FLASH_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kLeft) : "memory");
}

}  // namespace ptx
}  // namespace cupy_flash
