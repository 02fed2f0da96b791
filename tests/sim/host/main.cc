#include "main.h"

#include "async.h"
#include "warpgroup.h"

namespace sim {

// --- A grid -----------------------------------------------------------------------------------

static bool can_run(const Thread& thread) { return !thread.done && !thread.waits; }

// The warp that goes on, -1 if all have ended. The first one that can goes as far as it can, so
// that others are far behind; or the last one; or any.
static int next_warp(Block& b) {
  std::vector<int> able;
  for (size_t w = 0; w < b.warps.size(); ++w) {
    const auto begin = b.threads.begin() + long(32 * w);
    const auto end = b.threads.begin() + long(std::min(b.threads.size(), 32 * (w + 1)));
    if (std::any_of(begin, end, can_run)) able.push_back(int(w));
  }
  if (able.empty()) {
    if (alive() > 0) fail("no thread can go on");
    return -1;
  }
  if (b.settings.order == Order::kAscending) return able.front();
  if (b.settings.order == Order::kDescending) return able.back();
  return able[b.random() % able.size()];
}

static void run_block(Block& b) {
  the_block = &b;
  // What a kernel doesn't write must not look like a number.
  std::memset(b.shared, 0xFF, b.shared_size);
  for (Thread& thread : b.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack + kGuard;
    thread.context.uc_stack.ss_size = kStackSize;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, thread_main, 0);
    // Else the sanitizer forgets at each switch what may not be touched in it.
    thread.context.uc_stack.ss_size = 0;
    allow(thread.stack + kGuard, kStackSize);
    thread.done = thread.waits = false;
    thread.where = "has not begun";
    thread.groups.assign(1, {});
  }
  begin_async();
  begin_warpgroups();
  for (;;) {
    const int warp = next_warp(b);
    if (warp < 0) break;
    std::vector<int> order;
    for (size_t i = 32 * warp; i < std::min(b.threads.size(), size_t(32 * (warp + 1))); ++i) {
      if (can_run(b.threads[i])) order.push_back(int(i));
    }
    if (b.settings.order == Order::kDescending) std::reverse(order.begin(), order.end());
    if (b.settings.order == Order::kRandom) std::shuffle(order.begin(), order.end(), b.random);
    for (int index : order) resume(b.threads[index]);
  }
  end_warpgroups();
  end_async();
}

static void run_grid(const char* kernel, unsigned grid, unsigned threads, size_t shared_size,
                     const Settings& settings, const std::function<void()>& body) {
  Block b;
  b.kernel = kernel;
  b.grid = grid;
  b.settings = settings;
  b.random.seed(settings.seed);
  b.body = &body;
  b.shared_size = shared_size;
  // Of exactly that size, so that one byte past the end is found.
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, std::max<size_t>(shared_size, 1)) != 0) std::abort();
  b.shared = static_cast<unsigned char*>(memory);
  b.threads.resize(threads);
  b.warps.resize((threads + 31) / 32);
  for (unsigned i = 0; i < threads; ++i) {
    b.threads[i].index = int(i);
    void* stack = mmap(nullptr, kStackSize + kGuard, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, kGuard, PROT_NONE) != 0) std::abort();
    b.threads[i].stack = static_cast<char*>(stack);
  }
  for (unsigned index = 0; index < grid; ++index) {
    b.block_index = index;
    run_block(b);
  }
  for (Thread& thread : b.threads) munmap(thread.stack, kStackSize + kGuard);
  std::free(memory);
}

// --- The file ---------------------------------------------------------------------------------

struct Header {
  unsigned long long grid, threads, shared_size, order, early, seed, arguments_size, fixups, arrays;
};

struct Fixup {
  unsigned long long at, array, offset;  // in the arguments; which array; from its first byte
};

struct Array {
  unsigned long long size, misalignment;
};

static void read_all(FILE* file, void* to, size_t size) {
  if (size > 0 && std::fread(to, 1, size, file) != size) {
    std::fprintf(stderr, "sim: the launch file is too short\n");
    _exit(4);
  }
}

int run_launch(const char* name, int argc, char** argv, size_t arguments_size, const Bind& bind) {
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
  if (header.arguments_size != arguments_size) {
    std::fprintf(stderr, "sim: the arguments have another size\n");
    return 4;
  }
  std::vector<Fixup> fixups(header.fixups);
  read_all(file, fixups.data(), fixups.size() * sizeof(Fixup));
  std::vector<unsigned char> bytes(header.arguments_size);
  read_all(file, bytes.data(), bytes.size());
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
    std::memcpy(&bytes.at(fixup.at), &to, sizeof to);
  }
  Settings settings;
  settings.order = Order(header.order);
  settings.early = header.early != 0;
  settings.seed = unsigned(header.seed);
  run_grid(name, unsigned(header.grid), unsigned(header.threads), header.shared_size, settings,
           bind(bytes.data()));
  std::fseek(file, data, SEEK_SET);
  for (size_t i = 0; i < arrays.size(); ++i) std::fwrite(memory[i], 1, arrays[i].size, file);
  return std::fclose(file) == 0 ? 0 : 5;
}

}  // namespace sim
