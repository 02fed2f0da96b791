// Reads a launch from a file, runs it, writes its arrays back.
//
// The file: a Header, the kernel's argument, then for each array its size, its misalignment, its
// bytes. Pointers in the argument are replaced as the fixups say, which follow the header.
#pragma once

#include "sim.h"

namespace sim {

struct Header {
  unsigned long long grid, threads, shared_size, order, early, seed, params_size, fixups, arrays;
};

struct Fixup {
  unsigned long long at, array, offset;  // in the argument; which array; from its first byte
};

struct Array {
  unsigned long long size, misalignment;
};

inline void read_all(FILE* file, void* to, size_t size) {
  if (size > 0 && std::fread(to, 1, size, file) != size) {
    std::fprintf(stderr, "sim: the launch file is too short\n");
    _exit(4);
  }
}

template <class Params, class Kernel>
int main_of(const char* name, int argc, char** argv, const Kernel& kernel) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s LAUNCH_FILE\n", argv[0]);
    return 2;
  }
  FILE* file = std::fopen(argv[1], "r+b");
  if (file == nullptr) {
    std::perror(argv[1]);
    return 2;
  }
  Header header;
  read_all(file, &header, sizeof header);
  if (header.params_size != sizeof(Params)) {
    std::fprintf(stderr, "sim: the argument has another size\n");
    return 4;
  }
  std::vector<Fixup> fixups(header.fixups);
  read_all(file, fixups.data(), fixups.size() * sizeof(Fixup));
  Params params;
  read_all(file, static_cast<void*>(&params), sizeof params);
  std::vector<Array> arrays(header.arrays);
  std::vector<unsigned char*> memory;
  read_all(file, arrays.data(), arrays.size() * sizeof(Array));
  const long data = std::ftell(file);
  for (const Array& array : arrays) {
    // Each has its own guard zones around it.
    void* raw = nullptr;
    if (posix_memalign(&raw, 256, array.misalignment + array.size + 1) != 0) return 5;
    memory.push_back(static_cast<unsigned char*>(raw) + array.misalignment);
    read_all(file, memory.back(), array.size);
#if SIM_ASAN
    ASAN_POISON_MEMORY_REGION(raw, array.misalignment);
    ASAN_POISON_MEMORY_REGION(memory.back() + array.size, 1);
#endif
  }
  for (const Fixup& fixup : fixups) {
    unsigned char* const to = memory.at(fixup.array) + fixup.offset;
    std::memcpy(reinterpret_cast<unsigned char*>(&params) + fixup.at, &to, sizeof to);
  }
  Settings settings;
  settings.order = Order(header.order);
  settings.early = header.early != 0;
  settings.seed = unsigned(header.seed);
  run_grid(name, unsigned(header.grid), unsigned(header.threads), header.shared_size, settings,
           [&] { kernel(params); });
  std::fseek(file, data, SEEK_SET);
  for (size_t i = 0; i < arrays.size(); ++i) std::fwrite(memory[i], 1, arrays[i].size, file);
  return std::fclose(file) == 0 ? 0 : 5;
}

}  // namespace sim
