#include "sim.h"

namespace sim {

Block* the_block = nullptr;

std::string describe(const Mbarrier& b) {
  long coming = 0;
  for (const BulkLoad& load : b.loads) coming += long(load.size);
  const long missing = b.bytes_left - coming;
  return "the mbarrier at byte " + std::to_string(b.byte) + ", in phase " +
         std::to_string(b.phase) + ": of " + std::to_string(b.count) + " arrivals " +
         std::to_string(b.arrivals_left) + " are missing, " + std::to_string(std::labs(missing)) +
         " bytes are " + (missing < 0 ? "too many" : "missing");
}

static std::string place(const Thread& thread) {
  if (thread.done) return "has ended";
  if (thread.mbarrier == nullptr) return thread.where;
  return "waits for parity " + std::to_string(thread.parity) + " of " + describe(*thread.mbarrier);
}

static std::string places() {
  std::string text;
  Block& b = block();
  for (size_t w = 0; w * 32 < b.threads.size(); ++w) {
    std::map<std::string, int> counts;
    for (size_t i = 32 * w; i < std::min(b.threads.size(), 32 * (w + 1)); ++i) {
      ++counts[place(b.threads[i])];
    }
    text += "\n  warp " + std::to_string(w) + ":";
    for (const auto& [where, count] : counts) {
      text += " " + std::to_string(count) + " x " + where + ";";
    }
  }
  return text;
}

void fail(const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "sim: %s, block %u of %u: %s%s\n", block().kernel, block().block_index,
               block().grid, message.c_str(), places().c_str());
  std::fflush(stderr);
  _exit(3);
}

// --- Fibers ---------------------------------------------------------------------------------

static void switch_to_scheduler(bool last_time) {
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

void thread_main() {
#if SIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &block().scheduler_stack, &block().scheduler_stack_size);
#endif
  self().where = "runs";
  (*block().body)();
  self().done = true;
  switch_to_scheduler(true);
}

void wait(const char* where) {
  Thread& me = self();
  me.where = where;
  me.waits = true;
  while (me.waits) switch_to_scheduler(false);
  me.where = "runs";
}

void hesitate() {
  Block& b = block();
  while (b.settings.order == Order::kRandom && b.random() % 2 == 0) switch_to_scheduler(false);
}

void resume(Thread& thread) {
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

bool comes_last(Meeting& meeting, size_t size, const char* what) {
  if (meeting.present.empty()) {
    meeting.what = what;
  } else if (std::strcmp(meeting.what, what) != 0) {
    fail(std::string("threads that must do the same do different things: ") + meeting.what +
         " and " + what);
  }
  meeting.present.push_back(&self());
  if (meeting.present.size() == size) return true;
  wait(what);
  return false;
}

void let_go(Meeting& meeting) {
  std::vector<Thread*> present;
  present.swap(meeting.present);
  for (Thread* thread : present) thread->waits = false;
}

size_t alive() {
  return std::count_if(block().threads.begin(), block().threads.end(),
                       [](const Thread& t) { return !t.done; });
}

// --- Asynchronous copies ------------------------------------------------------------------------

static void perform(const Copy& copy) {
  std::memset(copy.to, 0, copy.size);
  std::memcpy(copy.to, copy.from, copy.bytes);
}

void copy_later(const Copy& copy) {
  if (block().settings.early) {
    perform(copy);
  } else {
    self().groups.back().push_back(copy);
  }
}

void end_group() { self().groups.emplace_back(); }

void wait_for_groups(size_t left) {
  auto& groups = self().groups;
  while (groups.size() > left + 1) {
    for (const Copy& copy : groups.front()) perform(copy);
    groups.pop_front();
  }
}

}  // namespace sim
