#include "warpgroup.h"

#include "async.h"

namespace sim {

static constexpr int kWarpsOfGroup = 4;
static constexpr u32 kPendingSum = 0xffc0face;  // a NaN

static WarpProducts& my_products() { return block().products[self().index / 32]; }

// A warp's next step, which the others of its warpgroup must do too.
static void take_step(const Step& step) {
  Block& b = block();
  const size_t group = size_t(self().index) / 32 / kWarpsOfGroup;
  if (group >= b.warpgroups.size()) {
    fail(std::string(step.what) + " in less than four warps");
  }
  auto& steps = b.warpgroups[group].steps;
  const size_t at = my_products().steps++;
  if (at == steps.size()) {
    steps.push_back(step);
    return;
  }
  const Step& other = steps[at];
  if (std::strcmp(other.what, step.what) != 0 || other.number != step.number || other.a != step.a ||
      other.b != step.b || other.accumulate != step.accumulate) {
    const auto name = [](const Step& s) {
      return std::string(s.what) + " (" + std::to_string(s.number) + ")";
    };
    fail("warps of a warpgroup do different things: " + name(other) + " and " + name(step) +
         (name(other) == name(step) ? " with other descriptors" : ""));
  }
}

// What a warp does together as a part of its warpgroup.
template <class Act>
void with_warpgroup(const char* what, int number, const Act& act) {
  int nothing = 0;
  with_warp(what, nothing, [&](int**, int) {
    take_step({what, 0, 0, number, false});
    act();
  });
}

// --- Products ---------------------------------------------------------------------------------

static void compute(const Product& p) {
  for (int lane = 0; lane < 32; ++lane) {
    float* const sums = p.sums->values[lane].data();
    for (int i = 0; i < p.columns / 2; ++i) {
      const float* const row = &p.a[size_t(16 * (lane / 4 + 8 * (i / 2 % 2)))];
      const float* const column = &p.b[size_t(16 * (8 * (i / 4) + lane % 4 * 2 + i % 2))];
      // In double, then rounded: a GPU's sums may be off by its own rounding.
      double sum = p.accumulate ? double(sums[i]) : 0.0;
      for (int k = 0; k < 16; ++k) sum += double(row[k]) * double(column[k]);
      sums[i] = float(sum);
    }
  }
}

static void finish(Product& p) {
  for (const Chunk& chunk : p.chunks) {
    require_unchanged(p.what, chunk.address, sizeof chunk.bytes, chunk.bytes);
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (p.registers[lane] != nullptr &&
        first_difference(p.registers[lane], p.fragments[lane], 16) < 16) {
      fail(std::string(p.what) + ": registers of the factor were written before wgmma_wait");
    }
  }
  compute(p);
  Sums& sums = *p.sums;
  if (--sums.products > 0) return;
  const size_t size = size_t(sums.count) * sizeof(float);
  const std::vector<u32> pending(size_t(sums.count), kPendingSum);
  for (int lane = 0; lane < 32; ++lane) {
    if (!block().settings.early &&
        first_difference(sums.registers[lane], pending.data(), size) < size) {
      fail(std::string(p.what) + ": registers of sums were written before wgmma_wait");
    }
    allow(sums.registers[lane], size);
    copy_raw(sums.registers[lane], sums.values[lane].data(), size);
  }
  auto& all = my_products().sums;
  all.erase(std::find(all.begin(), all.end(), p.sums));
}

static void finish_group(std::vector<Product>& group) {
  for (Product& product : group) finish(product);
  group.clear();
}

// Whether registers are those of sums that are being computed.
static bool is_pending(const Sums& sums, int lane, const void* registers, size_t size) {
  const auto* const first = static_cast<const char*>(registers);
  const auto* const begin = reinterpret_cast<const char*>(sums.registers[lane]);
  return first < begin + size_t(sums.count) * sizeof(float) && begin < first + size;
}

void require_not_pending(const char* what, const void* registers, size_t size) {
  for (const auto& sums : my_products().sums) {
    if (is_pending(*sums, lane(), registers, size)) {
      fail(std::string(what) + " of sums that are still being computed");
    }
  }
}

// The sums that the lanes name, with their values put aside.
static std::shared_ptr<Sums> take_sums(const char* what, float* const (&registers)[32], int count) {
  auto& all = my_products().sums;
  const size_t size = size_t(count) * sizeof(float);
  for (const auto& sums : all) {
    if (sums->registers[0] == registers[0] && sums->count == count) return sums;
    if (is_pending(*sums, 0, registers[0], size)) {
      fail(std::string(what) + ": a part of its sums is still being computed by another product");
    }
  }
  auto sums = std::make_shared<Sums>();
  sums->count = count;
  for (int lane = 0; lane < 32; ++lane) {
    sums->registers[lane] = registers[lane];
    sums->values[lane].resize(size_t(count));
    copy_raw(sums->values[lane].data(), registers[lane], size);
    if (block().settings.early) continue;
    const std::vector<u32> pending(size_t(count), kPendingSum);
    copy_raw(registers[lane], pending.data(), size);
    forbid(registers[lane], size);
  }
  all.push_back(sums);
  return sums;
}

// A matrix in shared memory, as a descriptor says; see cuda_src/ptx/wgmma.cuh.
struct Matrix {
  u32 start, leading, stride;
  bool transposed;

  Matrix(const char* what, u64 descriptor, bool transposed_)
      : start(u32(descriptor & 0x3fff) << 4),
        leading(u32(descriptor >> 16 & 0x3fff) << 4),
        stride(u32(descriptor >> 32 & 0x3fff) << 4),
        transposed(transposed_) {
    if (descriptor >> 62 != 1) fail(std::string(what) + ": a swizzle other than 128 bytes");
    if ((descriptor & 0x3fffc000c000c000) != 0) {
      fail(std::string(what) + ": bits of a descriptor that mean nothing");
    }
    if (start % 1024 >= 128) fail(std::string(what) + ": a matrix amid eight swizzled rows");
    if (stride % 1024 != 0) fail(std::string(what) + ": a stride of half swizzled rows");
  }

  // Where eight elements lie, the first at depth k (of 16) and line i, before swizzling: one after
  // the other along the depth or, transposed, along the lines.
  u32 chunk(const char* what, int k, int i) const {
    const u32 byte = start % 128 + 2 * u32(transposed ? i % 64 : k);
    if (byte > 112) fail(std::string(what) + ": a matrix beyond the end of its rows");
    if (transposed && i >= 64 && leading % 1024 != 0) {
      fail(std::string(what) + ": columns that go on amid eight swizzled rows");
    }
    const u32 row = u32(transposed ? k : i);
    return start + 2 * u32(transposed ? i % 64 : k) + row / 8 * stride + row % 8 * 128 +
           (transposed ? u32(i) / 64 * leading : 0);
  }
};

// Reads lines first to first + count - 1 of a matrix of depth 16 into [line][16].
static std::vector<float> read_matrix(const char* what, const Matrix& matrix, int first, int count,
                                      Widen widen, std::vector<Chunk>& chunks) {
  std::vector<float> values(size_t(16 * count));
  const auto read = [&](int k, int i) {
    Chunk chunk;
    chunk.address = swizzled(matrix.chunk(what, k, i));
    if (chunk.address + sizeof chunk.bytes > block().shared_size) {
      fail(std::string(what) + ": a matrix beyond the end of shared memory");
    }
    read_shared(what, chunk.address, sizeof chunk.bytes, chunk.bytes);
    chunks.push_back(chunk);
    for (int e = 0; e < 8; ++e) {
      unsigned short bits;
      std::memcpy(&bits, chunk.bytes + 2 * e, sizeof bits);
      const int line = i - first + (matrix.transposed ? e : 0);
      values[size_t(16 * line + k + (matrix.transposed ? 0 : e))] = widen(bits);
    }
  };
  for (int i = first; i < first + count; i += matrix.transposed ? 8 : 1) {
    for (int k = 0; k < 16; k += matrix.transposed ? 1 : 8) read(k, i);
  }
  return values;
}

void begin_product(const char* what, ProductOperand operand, int columns, bool transposed,
                   Widen widen) {
  with_warp(what, operand, [&](ProductOperand** all, int lanes) {
    if (lanes != 32) fail(std::string(what) + " of a part of a warp");
    const ProductOperand& first = *all[0];
    for (int lane = 1; lane < 32; ++lane) {
      if (all[lane]->a != first.a || all[lane]->b != first.b ||
          all[lane]->accumulate != first.accumulate) {
        fail(std::string(what) + ": lanes of a warp give different descriptors");
      }
    }
    take_step({what, first.a, first.b, columns, first.accumulate});
    WarpProducts& mine = my_products();
    if (!mine.fenced) fail(std::string(what) + " without a wgmma_fence since the last wait");
    Product p;
    p.what = what;
    p.accumulate = first.accumulate;
    p.columns = columns;
    const int warp = self().index / 32 % kWarpsOfGroup;
    if (first.registers == nullptr) {
      p.a = read_matrix(what, Matrix(what, first.a, false), 16 * warp, 16, widen, p.chunks);
    } else {
      p.a.resize(16 * 16);
    }
    float* registers[32];
    for (int lane = 0; lane < 32; ++lane) {
      registers[lane] = all[lane]->sums;
      p.registers[lane] = all[lane]->registers;
      if (p.registers[lane] == nullptr) continue;
      std::memcpy(p.fragments[lane], p.registers[lane], sizeof p.fragments[lane]);
      for (int r = 0; r < 4; ++r) {
        for (int e = 0; e < 2; ++e) {
          const int row = lane / 4 + 8 * (r % 2);
          const int column = lane % 4 * 2 + e + 8 * (r / 2);
          p.a[size_t(16 * row + column)] =
              widen((unsigned short)(p.fragments[lane][r] >> (16 * e)));
        }
      }
    }
    p.b = read_matrix(what, Matrix(what, first.b, transposed), 0, columns, widen, p.chunks);
    p.sums = take_sums(what, registers, columns / 2);
    ++p.sums->products;
    mine.groups.back().push_back(std::move(p));
  });
}

void fence_products() {
  with_warpgroup("wgmma_fence", 0, [] { my_products().fenced = true; });
}

void end_product_group() {
  with_warpgroup("wgmma_commit", 0, [] {
    WarpProducts& mine = my_products();
    if (block().settings.early) finish_group(mine.groups.back());
    mine.groups.emplace_back();
  });
}

void wait_for_products(size_t left) {
  hesitate();  // what the products read must last until then
  with_warpgroup("wgmma_wait", int(left), [left] {
    WarpProducts& mine = my_products();
    while (mine.groups.size() > left + 1) {
      finish_group(mine.groups.front());
      mine.groups.pop_front();
    }
    mine.fenced = false;
  });
}

// --- Registers --------------------------------------------------------------------------------

static constexpr int kRegisters = 65536;  // of a multiprocessor
static constexpr int kMostRegisters = 256;

// The most that the threads of this block can begin with.
static int registers_at_launch() {
  return std::min(kMostRegisters, kRegisters / int(block().threads.size()) / 8 * 8);
}

void change_registers(const char* what, int count, bool increase) {
  with_warpgroup(what, count, [=] {
    Warpgroup& group = block().warpgroups[size_t(self().index) / 32 / kWarpsOfGroup];
    const int before = group.registers != 0 ? group.registers : registers_at_launch();
    // The second warp to come finds the new number.
    if (increase ? group.registers > count : before < count) {
      fail(std::string(what) + " to " + std::to_string(count) + " from at most " +
           std::to_string(before));
    }
    group.registers = count;
  });
}

// --- A block ----------------------------------------------------------------------------------

void begin_warpgroups() {
  Block& b = block();
  b.products.assign(b.warps.size(), {});
  b.warpgroups.assign(b.threads.size() / (32 * kWarpsOfGroup), {});
}

void end_warpgroups() {
  Block& b = block();
  int registers = 0;
  for (size_t w = 0; w < b.warps.size(); ++w) {
    const std::string warp = "warp " + std::to_string(w);
    if (!b.products[w].sums.empty()) fail(warp + " has ended without wgmma_wait for its products");
    const size_t group = w / kWarpsOfGroup;
    if (group < b.warpgroups.size()) {
      const auto& steps = b.warpgroups[group].steps;
      if (b.products[w].steps < steps.size()) {
        fail(warp + " has ended without " + steps[b.products[w].steps].what +
             ", which another of its warpgroup has done");
      }
    }
  }
  for (const Warpgroup& group : b.warpgroups) {
    registers +=
        32 * kWarpsOfGroup * (group.registers != 0 ? group.registers : registers_at_launch());
  }
  const bool exchanged = std::any_of(b.warpgroups.begin(), b.warpgroups.end(),
                                     [](const Warpgroup& g) { return g.registers != 0; });
  // They exchange what the block was given at its launch; a thread waits for ever for more.
  const int given = registers_at_launch() * int(b.threads.size());
  if (exchanged && registers > given) {
    fail("the warpgroups ask for " + std::to_string(registers) + " registers, of " +
         std::to_string(given));
  }
}

}  // namespace sim
