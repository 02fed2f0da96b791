#include "async.h"

namespace sim {

// --- Memory without the sanitizer's eyes ------------------------------------------------------

#define SIM_RAW __attribute__((no_sanitize("address"), noinline))

// Volatile, so that they don't become calls of functions that the sanitizer replaces.
SIM_RAW void copy_raw(void* to, const void* from, size_t size) {
  auto* const out = static_cast<volatile unsigned char*>(to);
  const auto* const in = static_cast<const volatile unsigned char*>(from);
  size_t i = 0;
  if ((size_t(to) | size_t(from)) % sizeof(u64) == 0) {
    for (; i + sizeof(u64) <= size; i += sizeof(u64)) {
      *reinterpret_cast<volatile u64*>(out + i) = *reinterpret_cast<const volatile u64*>(in + i);
    }
  }
  for (; i < size; ++i) out[i] = in[i];
}

SIM_RAW void fill_raw(void* to, unsigned char value, size_t size) {
  auto* const out = static_cast<volatile unsigned char*>(to);
  for (size_t i = 0; i < size; ++i) out[i] = value;
}

// The first byte in which two pieces of memory differ; `size` if none.
SIM_RAW size_t first_difference(const void* a, const void* b, size_t size) {
  const auto* const x = static_cast<const volatile unsigned char*>(a);
  const auto* const y = static_cast<const volatile unsigned char*>(b);
  for (size_t i = 0; i < size; ++i) {
    if (x[i] != y[i]) return i;
  }
  return size;
}

void forbid(const void* memory, size_t size) {
#if SIM_ASAN
  ASAN_POISON_MEMORY_REGION(memory, size);
#else
  (void)memory, (void)size;
#endif
}

void allow(const void* memory, size_t size) {
#if SIM_ASAN
  ASAN_UNPOISON_MEMORY_REGION(memory, size);
#else
  (void)memory, (void)size;
#endif
}

// --- Shared memory ----------------------------------------------------------------------------

std::string byte_of_shared(size_t byte) {
  return "byte " + std::to_string(byte) + " of shared memory";
}

// The offset of an address, all of whose bytes are there.
size_t shared_offset(const char* what, const void* pointer, size_t size) {
  const auto* const byte = static_cast<const unsigned char*>(pointer);
  const Block& b = block();
  if (byte < b.shared || size > b.shared_size || byte > b.shared + (b.shared_size - size)) {
    fail(std::string(what) + " of " + std::to_string(size) +
         " bytes that aren't all in shared memory");
  }
  return size_t(byte - b.shared);
}

// The copy that brings some of these bytes and that nobody has waited for; null if none does.
static const char* load_of(const unsigned char* from, size_t size) {
  for (const auto& [address, barrier] : block().mbarriers) {
    for (const BulkLoad& load : barrier.loads) {
      if (from < load.to + load.size && load.to < from + size) return load.what;
    }
  }
  return nullptr;
}

// What an asynchronous reader finds in shared memory, which must be complete and shown.
void read_shared(const char* what, size_t offset, size_t size, unsigned char* to) {
  Block& b = block();
  if (const char* const load = load_of(b.shared + offset, size)) {
    fail(std::string(what) + " reads " + byte_of_shared(offset) + ", which a " + load +
         " that nobody has waited for brings");
  }
  const size_t at = first_difference(b.shared + offset, &b.shown[offset], size);
  if (at < size) {
    fail(std::string(what) + " reads " + byte_of_shared(offset + at) +
         ", which was written without an async_proxy_fence since");
  }
  copy_raw(to, b.shared + offset, size);
}

// Whether what was read is still the same.
void require_unchanged(const char* what, size_t offset, size_t size, const unsigned char* bytes) {
  const unsigned char* const now = block().shared + offset;
  const size_t at = first_difference(now, bytes, size);
  if (at < size || load_of(now, size) != nullptr) {
    fail(byte_of_shared(offset + at % size) + " was written while " + what +
         ", which wasn't waited for, reads it");
  }
}

void show_shared_memory() {
  Block& b = block();
  copy_raw(b.shown.data(), b.shared, b.shared_size);
}

// --- Barriers ---------------------------------------------------------------------------------

static constexpr u64 kMbarrierMark = 0x6d62617272696572;

static Mbarrier& find_mbarrier(const char* what, const u64* state) {
  auto& all = block().mbarriers;
  const auto found = all.find(state);
  const std::string at = byte_of_shared(shared_offset(what, state, sizeof *state));
  if (found == all.end()) fail(std::string(what) + ": no mbarrier_init of " + at);
  if (*state != kMbarrierMark) fail(std::string(what) + ": the mbarrier is overwritten at " + at);
  return found->second;
}

void make_mbarrier(u64* state, int count) {
  const size_t byte = shared_offset("mbarrier_init", state, sizeof *state);
  if (byte % sizeof *state != 0) fail("mbarrier_init of a misaligned " + byte_of_shared(byte));
  if (count < 1 || count >= 1 << 20) fail("mbarrier_init with " + std::to_string(count));
  Mbarrier& b = block().mbarriers[state];
  if (!b.loads.empty() || !b.waiting.empty()) {
    fail("mbarrier_init of a barrier in use: " + byte_of_shared(byte));
  }
  b = {};
  b.byte = byte;
  b.count = b.arrivals_left = count;
  b.maker = &self();
  *state = kMbarrierMark;
}

static bool can_finish(const Mbarrier& b) {
  long coming = 0;
  for (const BulkLoad& load : b.loads) coming += long(load.size);
  return b.arrivals_left == 0 && b.bytes_left == coming;
}

static void wake(std::vector<Thread*>& waiting) {
  std::vector<Thread*> threads;
  threads.swap(waiting);
  for (Thread* thread : threads) thread->waits = false;
}

static void finish_phase(Mbarrier& b) {
  std::vector<BulkLoad> loads;
  loads.swap(b.loads);
  for (const BulkLoad& load : loads) load.perform();
  b.bytes_left = 0;
  b.arrivals_left = b.count;
  ++b.phase;
  wake(b.waiting);
}

// A phase without copies ends at once; one with copies when somebody comes to see it.
static void look_at(Mbarrier& b) {
  if (!can_finish(b)) return;
  if (b.loads.empty()) {
    finish_phase(b);
  } else {
    wake(b.waiting);
  }
}

void arrive_at(const char* what, const u64* state, long bytes) {
  Mbarrier& b = find_mbarrier(what, state);
  if (b.arrivals_left == 0) {
    if (!can_finish(b)) fail(std::string(what) + ": one arrival too many at " + describe(b));
    finish_phase(b);
  }
  b.bytes_left += bytes;
  --b.arrivals_left;
  look_at(b);
}

void wait_for_phase(const u64* state, int parity) {
  if (parity != 0 && parity != 1) fail("mbarrier_wait for parity " + std::to_string(parity));
  Mbarrier& b = find_mbarrier("mbarrier_wait", state);
  Thread& me = self();
  while (int(b.phase % 2) == parity) {
    if (can_finish(b)) {
      finish_phase(b);
      break;
    }
    b.waiting.push_back(&me);
    me.mbarrier = &b;
    me.parity = parity;
    wait("mbarrier_wait");
    me.mbarrier = nullptr;
  }
}

void show_mbarriers() {
  for (auto& [address, barrier] : block().mbarriers) {
    if (barrier.maker == &self()) barrier.shown = true;
  }
}

// --- Loads ------------------------------------------------------------------------------------

// `perform` writes all bytes of the destination.
void load_bulk(const char* what, const u64* state, unsigned char* to, size_t size,
               const std::function<void()>& perform) {
  Block& block_ = block();
  const size_t offset = shared_offset(what, to, size);
  Mbarrier& b = find_mbarrier(what, state);
  if (!b.shown) {
    fail(std::string(what) + ": no mbarrier_init_fence after mbarrier_init of " +
         byte_of_shared(b.byte));
  }
  if (load_of(to, size) != nullptr) {
    fail(std::string(what) + " to " + byte_of_shared(offset) +
         ", to which another one is still under way");
  }
  const auto perform_and_show = [=, &block_] {
    allow(to, size);
    perform();
    copy_raw(&block_.shown[offset], to, size);
  };
  if (block_.settings.early) {
    perform_and_show();
    b.bytes_left -= long(size);
  } else {
    fill_raw(to, 0xFF, size);
    forbid(to, size);
    b.loads.push_back({what, to, size, perform_and_show});
  }
  look_at(b);
}

void copy_bulk(void* to, const void* from, int bytes, const u64* state) {
  if ((size_t(to) | size_t(from) | size_t(bytes)) % 16 != 0 || bytes <= 0) {
    fail("bulk_load of what isn't a multiple of 16");
  }
  load_bulk("bulk_load", state, static_cast<unsigned char*>(to), size_t(bytes),
            [=] { std::memcpy(to, from, size_t(bytes)); });
}

// --- Stores -----------------------------------------------------------------------------------

// `perform` gets the bytes of shared memory.
void store_bulk(const char* what, const unsigned char* from, size_t size,
                const std::function<void(const std::vector<unsigned char>&)>& perform) {
  BulkStore store{from, std::vector<unsigned char>(size), perform};
  read_shared(what, shared_offset(what, from, size), size, store.bytes.data());
  if (block().settings.early) perform(store.bytes);
  self().bulk_groups.back().push_back(std::move(store));
}

void end_bulk_group() { self().bulk_groups.emplace_back(); }

void wait_for_bulk_groups(size_t left) {
  auto& groups = self().bulk_groups;
  while (groups.size() > left + 1) {
    for (BulkStore& store : groups.front()) {
      require_unchanged("a bulk store", size_t(store.from - block().shared), store.bytes.size(),
                        store.bytes.data());
      if (!block().settings.early) block().stores.push_back(std::move(store));
    }
    groups.pop_front();
  }
}

void reduce_bulk(float* to, const void* from, int bytes) {
  if ((size_t(to) | size_t(from) | size_t(bytes)) % 16 != 0 || bytes <= 0) {
    fail("bulk_reduce_add of what isn't a multiple of 16");
  }
  store_bulk("bulk_reduce_add", static_cast<const unsigned char*>(from), size_t(bytes),
             [to](const std::vector<unsigned char>& values) {
               for (size_t i = 0; i < values.size() / sizeof(float); ++i) {
                 float value;
                 std::memcpy(&value, &values[i * sizeof value], sizeof value);
                 to[i] += value;
               }
             });
}

// --- A block ----------------------------------------------------------------------------------

void begin_async() {
  Block& b = block();
  b.mbarriers.clear();
  b.named.clear();
  b.stores.clear();
  b.shown.assign(b.shared_size, 0xFF);
  for (Thread& thread : b.threads) {
    thread.bulk_groups.assign(1, {});
    thread.mbarrier = nullptr;
  }
}

void end_async() {
  Block& b = block();
  for (const Thread& thread : b.threads) {
    for (const auto& group : thread.bulk_groups) {
      if (!group.empty()) {
        fail("thread " + std::to_string(thread.index) +
             " has ended without bulk_wait_read for its stores");
      }
    }
  }
  for (const auto& [address, barrier] : b.mbarriers) {
    if (!barrier.loads.empty()) fail("nobody has waited for the loads of " + describe(barrier));
  }
  for (const BulkStore& store : b.stores) store.perform(store.bytes);
}

}  // namespace sim
