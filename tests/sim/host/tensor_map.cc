#include "tensor_map.h"

#include "async.h"

namespace sim {

static constexpr int kLargestRank = 5;
static constexpr u64 kTensorMapMark = 0x70616d20726f736e;

// Mirrors tests/sim/tensor_map.py.
struct TensorMap {
  unsigned char* pointer;
  u64 mark;
  u64 strides[kLargestRank - 1];  // bytes, from the second axis on
  u64 shape[kLargestRank];        // innermost first
  u32 box[kLargestRank];
  u32 rank;
  u32 element;  // bytes
  u32 swizzle;

  size_t row_bytes() const { return size_t(box[0]) * element; }
  size_t box_bytes() const {
    size_t size = element;
    for (u32 n : box) size *= n;
    return size;
  }
};

// Checks a map, and where in shared memory its box lies.
static TensorMap read_tensor_map(const char* what, const void* map, u32 rank,
                                 const void* in_shared) {
  TensorMap m;
  std::memcpy(static_cast<void*>(&m), map, sizeof m);
  if (m.mark != kTensorMapMark) fail(std::string(what) + " with what isn't a tensor map");
  if (rank == 0) return m;
  if (m.rank != rank) {
    fail(std::string(what) + " with " + std::to_string(rank) + " coordinates and a map of " +
         std::to_string(m.rank) + " axes");
  }
  if (m.swizzle != 0 && (m.swizzle != 128 || m.row_bytes() != 128)) {
    fail(std::string(what) + ": only rows of 128 bytes, or without swizzle, are simulated");
  }
  const size_t alignment = m.swizzle != 0 ? 1024 : 128;
  const size_t offset = shared_offset(what, in_shared, m.box_bytes());
  if (offset % alignment != 0) {
    fail(std::string(what) + ": " + byte_of_shared(offset) + " isn't a multiple of " +
         std::to_string(alignment));
  }
  return m;
}

// Calls act for each row of the box: its number, where its first entry would be in global memory,
// and which of its bytes are inside the array, from `begin` to `end`.
template <class Act>
void for_each_row(const TensorMap& m, const std::vector<int>& coordinates, const Act& act) {
  const long first = coordinates[0];
  const long columns = long(m.box[0]);
  const long begin = std::clamp(-first, 0l, columns);
  const long end = std::clamp(long(m.shape[0]) - first, begin, columns);
  const size_t rows = m.box_bytes() / m.row_bytes();
  for (size_t row = 0; row < rows; ++row) {
    bool inside = begin < end;
    long offset = first * long(m.element);
    size_t rest = row;
    for (u32 axis = 1; axis < m.rank; ++axis) {
      const long at = coordinates[axis] + long(rest % m.box[axis]);
      rest /= m.box[axis];
      inside = inside && at >= 0 && at < long(m.shape[axis]);
      offset += at * long(m.strides[axis - 1]);
    }
    const size_t element = m.element;
    act(row, m.pointer + offset, inside ? size_t(begin) * element : 0,
        inside ? size_t(end) * element : 0);
  }
}

// Where 16 bytes of a box lie in shared memory, from its beginning, which is aligned.
static size_t place_in_box(const TensorMap& m, size_t row, size_t byte) {
  const size_t plain = row * m.row_bytes() + byte;
  return m.swizzle != 0 ? swizzled(u32(plain)) : plain;
}

// What the chip calls an illegal instruction, or does otherwise than one might think.
void check_coordinates(const char* what, const TensorMap& m, const std::vector<int>& coordinates,
                       bool may_be_negative) {
  if (coordinates[0] * long(m.element) % 16 != 0) {
    fail(std::string(what) + ": a row of the box begins off a multiple of 16 bytes");
  }
  for (const int c : coordinates) {
    if (c < 0 && !may_be_negative) fail(std::string(what) + ": a coordinate is negative");
  }
}

void tma_load(void* to, const void* map, const u64* barrier, const std::vector<int>& coordinates) {
  const TensorMap m = read_tensor_map("tma_load", map, u32(coordinates.size()), to);
  check_coordinates("tma_load", m, coordinates, true);
  auto* const box = static_cast<unsigned char*>(to);
  load_bulk("tma_load", barrier, box, m.box_bytes(), [=] {
    std::vector<unsigned char> bytes(m.row_bytes());
    for_each_row(m, coordinates,
                 [&](size_t row, const unsigned char* from, size_t begin, size_t end) {
                   std::fill(bytes.begin(), bytes.end(), 0);
                   if (begin < end) std::memcpy(&bytes[begin], from + begin, end - begin);
                   for (size_t i = 0; i < bytes.size(); i += 16) {
                     std::memcpy(box + place_in_box(m, row, i), &bytes[i], 16);
                   }
                 });
  });
}

void tma_store(const void* map, const void* from, const std::vector<int>& coordinates) {
  const TensorMap m = read_tensor_map("tma_store", map, u32(coordinates.size()), from);
  check_coordinates("tma_store", m, coordinates, false);
  // The chip stores the whole of the last 16 bytes, past the end of the array.
  if (m.shape[0] * m.element % 16 != 0) fail("tma_store: a row of the array ends inside 16 bytes");
  store_bulk("tma_store", static_cast<const unsigned char*>(from), m.box_bytes(),
             [=](const std::vector<unsigned char>& box) {
               std::vector<unsigned char> bytes(m.row_bytes());
               for_each_row(m, coordinates,
                            [&](size_t row, unsigned char* to, size_t begin, size_t end) {
                              for (size_t i = 0; i < bytes.size(); i += 16) {
                                std::memcpy(&bytes[i], &box[place_in_box(m, row, i)], 16);
                              }
                              if (begin < end) std::memcpy(to + begin, &bytes[begin], end - begin);
                            });
             });
}

void prefetch(const void* map) { read_tensor_map("prefetch", map, 0, nullptr); }

}  // namespace sim
