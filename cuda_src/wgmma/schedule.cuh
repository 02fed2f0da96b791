// Which rows a block computes next: queries, or keys in the backward pass. Blocks stay on their
// multiprocessor and take one piece of work after the other, so that its loads overlap the end of
// the one before.
#pragma once

#include "mma/masking.cuh"
#include "wgmma/panels.cuh"
#include "wgmma/pipeline.cuh"

namespace cupy_flash {
namespace wgmma {

// What a warpgroup computes of a piece of work: tiles of keys, from the last to the first.
struct GroupWork {
  int last;     // less than the block's first: no query sees a key
  int skipped;  // tiles after it, which the block visits for other groups
  Range clear;  // tiles all of whose keys all queries of the group see
};

// Queries of one head, and the keys that they see.
template <class Traits>
struct Work {
  static constexpr bool kLastFirst = true;

  int row0;  // negative: there is no more work
  int head;
  BatchIndex<Traits::kBatchAxes> batch;
  Seqlen seqlen;
  Range keys;
  Range tiles;  // of keys
  Range whole;  // those all of whose keys are seen by some query, or lie past the end
  GroupWork group[Traits::kConsumers];

  CUPY_FLASH_DEVICE static i64 heads(const Params<Traits::kBatchAxes>& params) {
    return params.heads_q;
  }
  CUPY_FLASH_DEVICE static i64 rows(const Params<Traits::kBatchAxes>& params) {
    return params.seqlen_q;
  }

  // Made in shared memory, piece by piece: the thread that does it has few registers.
  CUPY_FLASH_DEVICE void describe(const Params<Traits::kBatchAxes>& params, int row_tile,
                                  int flat_head) {
    row0 = row_tile * Traits::kRows;
    head = flat_head % int(params.heads_q);
    batch = BatchIndex<Traits::kBatchAxes>(params, flat_head / int(params.heads_q));
    seqlen = Seqlen(params, batch);
    const Mask<Traits> mask(params, batch, head, seqlen);
    keys = mask.band.keys_of(row0, row0 + Traits::kRows);
    tiles = tiles_of(keys);
    whole.begin = ceil_div(keys.begin, Traits::kColumns);
    whole.end = keys.end == int(params.seqlen_k) ? tiles.end : keys.end / Traits::kColumns;
#pragma unroll 1
    for (int g = 0; g < Traits::kConsumers; ++g) {
      const int group_row = row0 + g * kGroupRows;
      const Range own = tiles_of(mask.band.keys_of(group_row, group_row + kGroupRows));
      // Where groups take turns, they must come equally often.
      const int end = Traits::kPingPong ? tiles.end : max_of(own.end, tiles.begin);
      const Range clear = mma::clear_keys(mask, group_row, kGroupRows);
      group[g] = {end - 1,
                  tiles.end - end,
                  {ceil_div(clear.begin, Traits::kColumns), clear.end / Traits::kColumns}};
    }
  }

 private:
  CUPY_FLASH_DEVICE static Range tiles_of(const Range& keys) {
    if (keys.begin >= keys.end) return {0, 0};
    return {keys.begin / Traits::kColumns, ceil_div(keys.end, Traits::kColumns)};
  }
};

// The order of all tiles. Heads come in sections that the L2 cache has room for; in each, those
// tiles come first which under a causal mask take longest: the last queries, the first keys.
template <class Traits, class Item = Work<Traits>>
struct Schedule {
  const Params<Traits::kBatchAxes>& params;
  int heads;
  int row_tiles;

  CUPY_FLASH_DEVICE explicit Schedule(const Params<Traits::kBatchAxes>& p)
      : params(p),
        heads(int(batch_size(p) * Item::heads(p))),
        row_tiles(ceil_div(int(Item::rows(p)), Traits::kRows)) {}

  CUPY_FLASH_DEVICE int count() const { return heads * row_tiles; }

  CUPY_FLASH_DEVICE void describe(Item& work, int index) const {
    const int section = int(params.section);
    const int first = index / (section * row_tiles) * section;
    const int width = min_of(section, heads - first);
    const int rest = index - first * row_tiles;
    const int place = rest / width;
    work.describe(params, Item::kLastFirst ? row_tiles - 1 - place : place, first + rest % width);
  }

  // The tile that this block takes next: one that no other has claimed yet, if there are more tiles
  // than blocks.
  CUPY_FLASH_DEVICE int claim() const {
    if (params.claims == nullptr) return count();
    return int(gridDim.x) + int(claims_before());
  }

 private:
  // Claims, and returns how many claims there were before. The counter holds anything at first, so
  // that nothing has to run before the kernel to clear it: what it shows is a number of claims only
  // if it lies within their total from first_claim on. That is `count`, with the one of each block
  // that finds nothing left; so after the last of them it holds anything once more.
  CUPY_FLASH_DEVICE u64 claims_before() const {
    u64* const counter = static_cast<u64*>(params.claims);
    const u64 total = u64(count());
    const u64 before = atomicAdd(counter, u64(1)) - params.first_claim;
    if (before < total) return before;
    // Nobody had claimed. The first claim is that of the last block to add to what was there: it
    // alone finds its own sum. The others wait for it, and claim anew.
    const u64 own = params.first_claim + before + 1;
    u64 found;
    do {
      found = atomicCAS(counter, own, params.first_claim + 1);
      if (found == own) return 0;
    } while (found - params.first_claim >= total);
    return atomicAdd(counter, u64(1)) - params.first_claim;
  }
};

// From the thread that finds out what is to be done to all others.
template <class Traits, class Item = Work<Traits>>
struct WorkQueue {
  // While consumers are at one piece, the next may be loaded, and another be planned. A power of 2,
  // for slot_of.
  static constexpr int kStages = 4;
  using Place = Slot<kStages>;
  Pipeline<kStages> pipeline;
  Item work[kStages];
  ptx::Mbarrier wanted;  // a phase for each piece

  // One thread of the block does it.
  CUPY_FLASH_DEVICE void init(int readers) {
    pipeline.init(1, readers);
    ptx::mbarrier_init(wanted, 1);
  }

  CUPY_FLASH_DEVICE Item& acquire(const Place& slot) {
    pipeline.wait_empty(slot);
    return work[slot.stage];
  }

  CUPY_FLASH_DEVICE const Item& wait(const Place& slot) {
    pipeline.wait(slot);
    return work[slot.stage];
  }

  // A warp, or a thread that reads by itself, once it needs the piece no more.
  CUPY_FLASH_DEVICE void release(const Place& slot) { pipeline.release(slot); }
};

// The thread that finds out what is to be done. It claims a piece only when that is wanted, as late
// as can be, so that the blocks that are done first get the pieces that are left.
template <class Traits, class Item>
CUPY_FLASH_DEVICE void plan_work(const Params<Traits::kBatchAxes>& params,
                                 WorkQueue<Traits, Item>& queue) {
  typename WorkQueue<Traits, Item>::Place place;
  const Schedule<Traits, Item> schedule(params);
  const int count = schedule.count();
  int parity = 0;
#pragma unroll 1
  for (int index = blockIdx.x;; index = schedule.claim()) {
    Item& work = queue.acquire(place);
    const bool exists = index < count;
    if (exists) {
      schedule.describe(work, index);
    } else {
      work.row0 = -1;
    }
    queue.pipeline.publish(place);
    place.advance();
    if (!exists) break;
    ptx::mbarrier_wait(queue.wanted, parity);
    parity ^= 1;
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
