// Runs a kernel on the CPU: one block after the other, its threads as fibers.
//
// A thread runs until it has to wait for others; then the next one that can run goes on. What a
// warp does together (shuffles, votes, ldmatrix, mma) is done by its last lane to arrive, for all.
// If nobody can go on, a report says where each warp stands.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SIM_ASAN 1
#else
#define SIM_ASAN 0
#endif

namespace sim {

enum class Order { kAscending, kDescending, kRandom };

// How a run is done. Asynchronous copies happen as late as waits allow, or at once.
struct Settings {
  Order order = Order::kAscending;
  bool early = false;
  unsigned seed = 0;
};

[[noreturn]] inline void fail(const std::string& message);

// --- Threads --------------------------------------------------------------------------------

struct Copy {
  void* to;
  const void* from;
  int bytes;
  int size;
};

struct Thread {
  int index = 0;
  ucontext_t context{};
  char* stack = nullptr;
  void* fake_stack = nullptr;
  bool waits = false;
  bool done = false;
  const char* where = "has not begun";
  void* operand = nullptr;
  // Groups of asynchronous copies, the one that is still open last.
  std::deque<std::vector<Copy>> groups{1};
};

// Threads that have come to a common point.
struct Meeting {
  const char* what = nullptr;
  std::vector<Thread*> present;
};

constexpr size_t kStackSize = 1 << 18;
constexpr size_t kGuard = 1 << 12;

struct Block {
  Settings settings;
  unsigned block_index = 0;
  unsigned grid = 0;
  const char* kernel = "";
  std::vector<Thread> threads;
  std::vector<Meeting> warps;
  Meeting whole;
  std::map<int, Meeting> named;
  Thread* current = nullptr;
  ucontext_t scheduler{};
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_size = 0;
  const std::function<void()>* body = nullptr;
  unsigned char* shared = nullptr;
  size_t shared_size = 0;
  std::mt19937 random;
};

inline Block* the_block = nullptr;

inline Block& block() { return *the_block; }
inline Thread& self() { return *block().current; }
inline int lane() { return self().index % 32; }

inline std::string places() {
  std::string text;
  Block& b = block();
  for (size_t w = 0; w * 32 < b.threads.size(); ++w) {
    std::map<std::string, int> counts;
    for (size_t i = 32 * w; i < std::min(b.threads.size(), 32 * (w + 1)); ++i) {
      ++counts[b.threads[i].done ? "has ended" : b.threads[i].where];
    }
    text += "\n  warp " + std::to_string(w) + ":";
    for (const auto& [where, count] : counts) {
      text += " " + std::to_string(count) + " x " + where + ";";
    }
  }
  return text;
}

[[noreturn]] inline void fail(const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "sim: %s, block %u of %u: %s%s\n", block().kernel, block().block_index,
               block().grid, message.c_str(), places().c_str());
  std::fflush(stderr);
  _exit(3);
}

// --- Fibers ---------------------------------------------------------------------------------

inline void switch_to_scheduler(bool last_time) {
  Thread& me = self();
#if SIM_ASAN
  __sanitizer_start_switch_fiber(last_time ? nullptr : &me.fake_stack, block().scheduler_stack,
                                 block().scheduler_stack_size);
#endif
  swapcontext(&me.context, &block().scheduler);
#if SIM_ASAN
  __sanitizer_finish_switch_fiber(me.fake_stack, nullptr, nullptr);
#endif
}

inline void thread_main() {
#if SIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &block().scheduler_stack, &block().scheduler_stack_size);
#endif
  self().where = "runs";
  (*block().body)();
  self().done = true;
  switch_to_scheduler(true);
}

// Lets others run until somebody takes the wait away.
inline void wait(const char* where) {
  Thread& me = self();
  me.where = where;
  me.waits = true;
  while (me.waits) switch_to_scheduler(false);
  me.where = "runs";
}

inline void resume(Thread& thread) {
  Block& b = block();
  b.current = &thread;
#if SIM_ASAN
  __sanitizer_start_switch_fiber(&b.scheduler_fake_stack, thread.stack + kGuard, kStackSize);
#endif
  swapcontext(&b.scheduler, &thread.context);
#if SIM_ASAN
  __sanitizer_finish_switch_fiber(b.scheduler_fake_stack, nullptr, nullptr);
#endif
  b.current = nullptr;
}

// Comes to a meeting of `size` threads; the last one calls `act` and lets the others go.
template <class Act>
void meet(Meeting& meeting, size_t size, const char* what, const Act& act) {
  if (meeting.present.empty()) {
    meeting.what = what;
  } else if (std::strcmp(meeting.what, what) != 0) {
    fail(std::string("threads that must do the same do different things: ") + meeting.what +
         " and " + what);
  }
  meeting.present.push_back(&self());
  if (meeting.present.size() < size) {
    wait(what);
    return;
  }
  act();
  std::vector<Thread*> present;
  present.swap(meeting.present);
  for (Thread* thread : present) thread->waits = false;
}

// What the lanes of a warp do together: act gets the operand of each lane.
template <class Operand, class Act>
void with_warp(const char* what, Operand& operand, const Act& act) {
  Block& b = block();
  const int warp = self().index / 32;
  const size_t lanes = std::min<size_t>(32, b.threads.size() - 32 * warp);
  self().operand = &operand;
  meet(b.warps[warp], lanes, what, [&] {
    Operand* operands[32] = {};
    for (size_t i = 0; i < lanes; ++i) {
      operands[i] = static_cast<Operand*>(b.threads[32 * warp + i].operand);
    }
    act(operands, int(lanes));
  });
}

inline size_t alive() {
  return std::count_if(block().threads.begin(), block().threads.end(),
                       [](const Thread& t) { return !t.done; });
}

template <class Act>
void with_block(const char* what, const Act& act) {
  meet(block().whole, alive(), what, act);
}

// --- Asynchronous copies ------------------------------------------------------------------------

inline void perform(const Copy& copy) {
  std::memset(copy.to, 0, copy.size);
  std::memcpy(copy.to, copy.from, copy.bytes);
}

inline void copy_later(const Copy& copy) {
  if (block().settings.early) {
    perform(copy);
  } else {
    self().groups.back().push_back(copy);
  }
}

inline void end_group() { self().groups.emplace_back(); }

inline void wait_for_groups(size_t left) {
  auto& groups = self().groups;
  while (groups.size() > left + 1) {
    for (const Copy& copy : groups.front()) perform(copy);
    groups.pop_front();
  }
}

// --- Running ------------------------------------------------------------------------------------

inline bool can_run(const Thread& thread) { return !thread.done && !thread.waits; }

// The warp that goes on, -1 if all have ended. The first one that can goes as far as it can, so
// that others are far behind; or the last one; or any.
inline int next_warp(Block& b) {
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

inline void run_block(Block& b) {
  the_block = &b;
  // What a kernel doesn't write must not look like a number.
  std::memset(b.shared, 0xFF, b.shared_size);
  for (Thread& thread : b.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack + kGuard;
    thread.context.uc_stack.ss_size = kStackSize;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, thread_main, 0);
    thread.done = thread.waits = false;
    thread.where = "has not begun";
    thread.groups.assign(1, {});
  }
  for (;;) {
    const int warp = next_warp(b);
    if (warp < 0) return;
    std::vector<int> order;
    for (size_t i = 32 * warp; i < std::min(b.threads.size(), size_t(32 * (warp + 1))); ++i) {
      if (can_run(b.threads[i])) order.push_back(int(i));
    }
    if (b.settings.order == Order::kDescending) std::reverse(order.begin(), order.end());
    if (b.settings.order == Order::kRandom) std::shuffle(order.begin(), order.end(), b.random);
    for (int index : order) resume(b.threads[index]);
  }
}

inline void run_grid(const char* kernel, unsigned grid, unsigned threads, size_t shared_size,
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

}  // namespace sim
