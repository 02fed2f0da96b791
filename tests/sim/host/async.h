// Hopper's copies between global and shared memory, and the barriers that count their bytes.
//
// Copies happen as late as waits allow, or at once. What is being loaded can't be touched until
// then; what is being stored mustn't be written until it was waited for; global memory changes
// when the block ends. Copies and products see what a thread wrote to shared memory once a thread
// has done async_proxy_fence; what they read before is reported. Only which thread that was goes
// unnoticed: any thread's fence shows all that has been written.
#pragma once

#include "sim.h"

namespace sim {

// --- Memory without the sanitizer's eyes ------------------------------------------------------

void copy_raw(void* to, const void* from, size_t size);

// The first byte in which two pieces of memory differ; `size` if none.
size_t first_difference(const void* a, const void* b, size_t size);

// Lets the sanitizer report whoever touches memory, and no longer.
void forbid(const void* memory, size_t size);
void allow(const void* memory, size_t size);

// --- Shared memory ----------------------------------------------------------------------------

std::string byte_of_shared(size_t byte);

// The offset of an address, all of whose bytes are there.
size_t shared_offset(const char* what, const void* pointer, size_t size);

// The address to which swizzling of 128 bytes moves what was meant for this one.
inline u32 swizzled(u32 address) { return address ^ (address >> 3 & 0x70); }

// What an asynchronous reader finds in shared memory, which must be complete and shown.
void read_shared(const char* what, size_t offset, size_t size, unsigned char* to);

// Reports if what was read isn't the same any more.
void require_unchanged(const char* what, size_t offset, size_t size, const unsigned char* bytes);

void show_shared_memory();

// --- Barriers ---------------------------------------------------------------------------------

void make_mbarrier(u64* state, int count);
void show_mbarriers();
void arrive_at(const char* what, const u64* state, long bytes);
void wait_for_phase(const u64* state, int parity);

// --- Copies -----------------------------------------------------------------------------------

// `perform` writes all bytes of the destination.
void load_bulk(const char* what, const u64* state, unsigned char* to, size_t size,
               const std::function<void()>& perform);

// Copies bytes that lie side by side.
void copy_bulk(void* to, const void* from, int bytes, const u64* state);

// `perform` gets the bytes of shared memory.
void store_bulk(const char* what, const unsigned char* from, size_t size,
                const std::function<void(const std::vector<unsigned char>&)>& perform);
void end_bulk_group();
void wait_for_bulk_groups(size_t left);
void reduce_bulk(float* to, const void* from, int bytes);

// --- A block ----------------------------------------------------------------------------------

void begin_async();
void end_async();

}  // namespace sim
