// The batch axes of a problem, walked by one flat index.
#pragma once

#include "common/params.cuh"

namespace cupy_flash {

template <int kBatchAxes>
struct BatchIndex {
  i64 flat;
  i64 coordinate[kBatchAxes];

  CUPY_FLASH_DEVICE BatchIndex(const Params<kBatchAxes>& params, i64 index) : flat(index) {
#pragma unroll
    for (int a = kBatchAxes - 1; a > 0; --a) {
      coordinate[a] = index % params.batch_shape[a];
      index /= params.batch_shape[a];
    }
    coordinate[0] = index;
  }

  CUPY_FLASH_DEVICE i64 offset(const i64 (&strides)[kBatchAxes]) const {
    i64 sum = 0;
#pragma unroll
    for (int a = 0; a < kBatchAxes; ++a) sum += coordinate[a] * strides[a];
    return sum;
  }
};

template <int kBatchAxes>
CUPY_FLASH_DEVICE i64 batch_size(const Params<kBatchAxes>& params) {
  i64 product = 1;
#pragma unroll
  for (int a = 0; a < kBatchAxes; ++a) product *= params.batch_shape[a];
  return product;
}

// One head of q, k, v or an array like them: rows are tokens, columns are channels.
template <class Element>
struct Matrix {
  Element* data;
  i64 row_stride;
  i64 column_stride;

  CUPY_FLASH_DEVICE Element* at(int row, int column) const {
    return data + row * row_stride + column * column_stride;
  }
};

template <class Element, int kBatchAxes, class Pointer>
CUPY_FLASH_DEVICE Matrix<Element> head_matrix(Pointer pointer,
                                              const SequenceStrides<kBatchAxes>& strides,
                                              const BatchIndex<kBatchAxes>& batch, int head) {
  Element* base = static_cast<Element*>(pointer) + batch.offset(strides.batch);
  return {base + head * strides.axis[1], strides.axis[0], strides.axis[2]};
}

// One head of lse or dlse: element i is data[i * stride].
template <class Element>
struct Vector {
  Element* data;
  i64 stride;
};

template <class Element, int kBatchAxes, class Pointer>
CUPY_FLASH_DEVICE Vector<Element> head_vector(Pointer pointer,
                                              const RowStrides<kBatchAxes>& strides,
                                              const BatchIndex<kBatchAxes>& batch, int head) {
  Element* base = static_cast<Element*>(pointer) + batch.offset(strides.batch);
  return {base + head * strides.axis[0], strides.axis[1]};
}

}  // namespace cupy_flash
