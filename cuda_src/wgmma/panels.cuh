// Tiles in shared memory, as tensor maps write them and wgmma reads them.
#pragma once

#include "common/pack.cuh"
#include "mma/masking.cuh"
#include "ptx/wgmma.cuh"

namespace cupy_flash {
namespace wgmma {

constexpr int kWarpgroup = 128;    // threads
constexpr int kGroupRows = 64;     // rows of one product
constexpr int kPanelColumns = 64;  // of 16 bits: the 128 bytes that are swizzled together
constexpr int kAtom = 1024;        // bytes of eight rows of a panel, after which swizzling repeats
constexpr int kUnit = 16;          // bytes that descriptors count in

// Rows of channels, 64 channels after the other.
template <class Element, int kRows_, int kColumns_>
struct alignas(kAtom) Panels {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kCount = ceil_div(kColumns, kPanelColumns);
  static constexpr int kPanelBytes = kRows * kPanelColumns * int(sizeof(Element));
  static constexpr int kBytes = kCount * kPanelBytes;
  static_assert(sizeof(Element) == 2 && kRows % 8 == 0, "whole atoms");

  Element data[kCount][kRows][kPanelColumns];

  // The 16 bytes that hold a column, which is a multiple of 8.
  CUPY_FLASH_DEVICE Element* pack_at(int row, int column) {
    const int pack = column % kPanelColumns / 8 ^ row % 8;
    return data[column / kPanelColumns][row] + 8 * pack;
  }

  // The same as instructions of a warp take it.
  CUPY_FLASH_DEVICE u32 address(int row, int column) {
    return ptx::shared_address(pack_at(row, column));
  }

  // As a factor whose channels run along the depth of the product, from a row on that is a multiple
  // of 8. `channel_step` leads to the 16 channels that follow.
  CUPY_FLASH_DEVICE u64 along_depth(int row) const {
    return ptx::wgmma_descriptor(data[0][row], kUnit, kAtom);
  }
  CUPY_FLASH_DEVICE static constexpr int channel_step(int channel) {
    return (channel / kPanelColumns * kPanelBytes +
            channel % kPanelColumns * int(sizeof(Element))) /
           kUnit;
  }

  // As a factor whose rows run along the depth. `row_step` leads to another 16 of them.
  CUPY_FLASH_DEVICE u64 across_depth() const {
    return ptx::wgmma_descriptor(data, kPanelBytes, kAtom);
  }
  CUPY_FLASH_DEVICE static constexpr int row_step(int row) {
    return row * kPanelColumns * int(sizeof(Element)) / kUnit;
  }
};

// Makes zeros of the rows of a tile that `kept` doesn't contain; `row0` is the place of its first
// row in the sequence. So many threads do it; others see it once each has done async_proxy_fence
// and they have met. kUnrolled: after a loop the compiler may no longer know that descriptors are
// uniform, but without one it may spill.
template <int kThreads, bool kUnrolled, class Element, int kRows, int kColumns>
CUPY_FLASH_DEVICE void clear_rows(Panels<Element, kRows, kColumns>& tile, int row0,
                                  const Range& kept) {
  constexpr int kPerRow = Panels<Element, kRows, kColumns>::kCount * kPanelColumns / 8;
  static_assert(kRows * kPerRow % kThreads == 0, "all lanes make the same rounds");
#pragma unroll(kUnrolled ? kRows * kPerRow / kThreads : 1)
  for (int first = 0; first < kRows * kPerRow; first += kThreads) {
    const int i = first + threadIdx.x % kThreads;
    const int row = i / kPerRow;
    if (!mma::contains(kept, row0 + row)) {
      write_pack<Element, 8>(tile.pack_at(row, i % kPerRow * 8), {});
    }
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
