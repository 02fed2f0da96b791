// Neighbouring elements that are read or written at once.
#pragma once

#include "common/platform.cuh"

namespace cupy_flash {

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element element[kCount];
};

template <class Element, int kCount>
CUPY_FLASH_DEVICE Pack<Element, kCount> read_pack(const Element* from) {
  return *reinterpret_cast<const Pack<Element, kCount>*>(from);
}

template <class Element, int kCount>
CUPY_FLASH_DEVICE void write_pack(Element* to, const Pack<Element, kCount>& values) {
  *reinterpret_cast<Pack<Element, kCount>*>(to) = values;
}

}  // namespace cupy_flash
