// Runs a kernel on the CPU: one block after the other, its threads as fibers.
//
// A thread runs until it has to wait for others; then the next one that can run goes on. What a
// warp does together (shuffles, votes, ldmatrix, mma) is done by its last lane to arrive, for all.
// If nobody can go on, a report says where each warp stands.
//
// async.h has what Hopper's copies do beside the threads, warpgroup.h its products.
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
#include <memory>
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

using u32 = unsigned int;
using u64 = unsigned long long;

enum class Order { kAscending, kDescending, kRandom };

// How a run is done. Asynchronous work happens as late as waits allow, or at once.
struct Settings {
  Order order = Order::kAscending;
  bool early = false;
  unsigned seed = 0;
};

// --- Threads --------------------------------------------------------------------------------

struct Copy {
  void* to;
  const void* from;
  int bytes;
  int size;
};

// A store to global memory, or an addition to it, from shared memory; see async.h.
struct BulkStore {
  const unsigned char* from;
  std::vector<unsigned char> bytes;  // as they were when it was begun
  std::function<void(const std::vector<unsigned char>&)> perform;
};

struct Mbarrier;

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
  std::deque<std::vector<BulkStore>> bulk_groups{1};
  // What it waits for, and the parity of the phase.
  const Mbarrier* mbarrier = nullptr;
  int parity = 0;
};

// Threads that have come to a common point.
struct Meeting {
  const char* what = nullptr;
  std::vector<Thread*> present;
};

// Threads at a barrier that also counts some that don't wait.
struct NamedBarrier {
  size_t size = 0;
  size_t arrived = 0;
  std::vector<Thread*> waiting;
};

// A copy from global to shared memory that an mbarrier counts.
struct BulkLoad {
  const char* what;
  unsigned char* to;
  size_t size;
  std::function<void()> perform;
};

struct Mbarrier {
  size_t byte = 0;  // of shared memory
  int count = 0;
  int arrivals_left = 0;
  long bytes_left = 0;
  unsigned phase = 0;
  bool shown = false;  // to copies
  const Thread* maker = nullptr;
  std::vector<BulkLoad> loads;
  std::vector<Thread*> waiting;
};

// The sums of a warp while wgmma computes them: registers of each lane, and their values, which
// the registers don't show yet.
struct Sums {
  float* registers[32];
  int count;
  std::vector<float> values[32];
  int products = 0;  // that are still to come
};

// 16 bytes of shared memory that a product reads.
struct Chunk {
  u32 address;
  unsigned char bytes[16];
};

// One wgmma, as far as a warp takes part: 16 x 16 by 16 x columns.
struct Product {
  const char* what;
  std::shared_ptr<Sums> sums;
  bool accumulate;
  int columns;
  std::vector<float> a;  // by rows
  std::vector<float> b;  // by columns
  std::vector<Chunk> chunks;
  const u32* registers[32];  // of a, if it comes from there
  u32 fragments[32][4];
};

// What the warps of a warpgroup must all do, in the same order.
struct Step {
  const char* what;
  u64 a, b;
  int number;
  bool accumulate;
};

struct WarpProducts {
  // Groups of products, the one that is still open last.
  std::deque<std::vector<Product>> groups{1};
  std::vector<std::shared_ptr<Sums>> sums;
  bool fenced = false;
  size_t steps = 0;
};

struct Warpgroup {
  std::vector<Step> steps;  // of the warp that has done most
  int registers = 0;        // of a thread, if it has asked for some
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
  std::map<int, NamedBarrier> named;
  std::map<const void*, Mbarrier> mbarriers;
  std::vector<WarpProducts> products;  // of each warp
  std::vector<Warpgroup> warpgroups;
  // Shared memory as asynchronous copies and products see it.
  std::vector<unsigned char> shown;
  // Stores that have been read from shared memory; the last that happens to a block.
  std::vector<BulkStore> stores;
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

extern Block* the_block;

inline Block& block() { return *the_block; }
inline Thread& self() { return *block().current; }
inline int lane() { return self().index % 32; }

// What an mbarrier waits for.
std::string describe(const Mbarrier& b);

// Ends the run with a message and where each warp stands.
[[noreturn]] void fail(const std::string& message);

// --- Fibers ---------------------------------------------------------------------------------

// What a fiber runs.
void thread_main();

// Lets others run until somebody takes the wait away.
void wait(const char* where);

// Now and then lets others run first, where the order is random: before what other threads may see.
void hesitate();

// Goes on with a thread until it waits or has ended.
void resume(Thread& thread);

// The number of threads that haven't ended.
size_t alive();

// Comes to a meeting of `size` threads. The last one to come gets true, and calls let_go when it
// has done what is to be done; the others wait for that.
bool comes_last(Meeting& meeting, size_t size, const char* what);
void let_go(Meeting& meeting);

template <class Act>
void meet(Meeting& meeting, size_t size, const char* what, const Act& act) {
  if (!comes_last(meeting, size, what)) return;
  act();
  let_go(meeting);
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

template <class Act>
void with_block(const char* what, const Act& act) {
  meet(block().whole, alive(), what, act);
}

// --- Asynchronous copies by threads (cp.async) -------------------------------------------------

void copy_later(const Copy& copy);
void end_group();
void wait_for_groups(size_t left);

}  // namespace sim
