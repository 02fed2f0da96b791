// A warpgroup that computes: for 64 queries, S = Q Kᵀ and O = P V tile by tile. While the tensor
// cores multiply the weights of one tile with V, the warps make those of the next, also from one
// piece of work to the next.
#pragma once

#include "mma/masking.cuh"
#include "wgmma/epilogue.cuh"
#include "wgmma/products.cuh"
#include "wgmma/softmax.cuh"
#include "wgmma/storage.cuh"

namespace cupy_flash {
namespace wgmma {

// Consumers issue their products in turn, so that one's exponentials fall into the time of
// another's products. A turn ends at the barrier of the consumer that is next.
template <int kConsumers, bool kUsed>
struct Turns {
  static constexpr int kThreads = 2 * kWarpgroup;  // of the one that waits and the one before it
  int group;

  CUPY_FLASH_DEVICE static int barrier(int group) { return 1 + kConsumers + group; }
  CUPY_FLASH_DEVICE explicit Turns(int group_) : group(group_) {
    if (group == kConsumers - 1) ptx::barrier_arrive(barrier(0), kThreads);
  }
  CUPY_FLASH_DEVICE void wait() const { ptx::named_barrier(barrier(group), kThreads); }
  CUPY_FLASH_DEVICE void pass_on() const {
    ptx::barrier_arrive(barrier(group == kConsumers - 1 ? 0 : group + 1), kThreads);
  }
};

template <int kConsumers>
struct Turns<kConsumers, false> {
  CUPY_FLASH_DEVICE explicit Turns(int) {}
  CUPY_FLASH_DEVICE void wait() const {}
  CUPY_FLASH_DEVICE void pass_on() const {}
};

// Turns the products of a tile of keys into logits, or hides those that aren't seen if the scale
// can wait.
template <class Traits>
CUPY_FLASH_DEVICE void finish_logits(const Params<Traits::kBatchAxes>& params,
                                     const Work<Traits>& work, const Range& clear, int warp_row,
                                     int tile, Sums<Traits::kColumns / 8>& s) {
  const bool all_clear = mma::contains(clear, tile);
  if (Logits<Traits>::kDeferScale && all_clear) return;
  const int key0 = tile * Traits::kColumns;
  const Mask<Traits> mask(params, work.batch, work.head, work.seqlen);
  const int row0 = work.row0 + warp_row;
  if constexpr (Logits<Traits>::kDeferScale) {
    mma::hide_rows(s, mask, row0, key0);
  } else {
    const Logits<Traits> logits(params, work.batch, work.head, work.seqlen);
    mma::make_logits(s, mask, logits, all_clear, row0, key0);
  }
}

template <class Traits>
CUPY_FLASH_DEVICE void consume(const Params<Traits::kBatchAxes>& params,
                               ForwardStorage<Traits>& shared, int group) {
  using Element = typename Traits::Element;
  constexpr int kDepth = Traits::kDepth;
  constexpr int kStages = Traits::kStages;
  constexpr int kQueryStages = Traits::kQueryStages;
  constexpr int kN = Traits::kColumns / 8;
  constexpr int kO = Traits::kDepthV / 8;
  const int group_row = group * kGroupRows;
  const int warp_row = group_row + threadIdx.x % kWarpgroup / kWarpSize * 16;

  const Turns<Traits::kConsumers, Traits::kPingPong> turns(group);
  Slot<kStages> slot;
  Slot<ForwardStorage<Traits>::Ends::kOutputStages> out_slot;

  // The piece of work, by its number; it stays in shared memory until it is closed.
  int piece = 0;
  const Work<Traits>* work;
  GroupWork own;
  int first;
  Range whole;
  const auto begin_work = [&]() {
    work = &shared.queue.wait(slot_of<WorkQueue<Traits>::kStages>(piece));
    own = work->group[group];
    own.last = uniform(own.last);
    own.skipped = uniform(own.skipped);
    first = uniform(work->tiles.begin);
    whole = work->whole;
    return uniform(work->row0) >= 0;
  };
  const auto q_slot = [&]() { return slot_of<kQueryStages>(piece); };
  const float to_exponent = Logits<Traits>::to_exponent(params);
  // Tiles that the block visits, but no row of this group sees.
  const auto skip = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      shared.k_pipeline.wait(slot);
      shared.v_pipeline.wait(slot);
      __syncwarp();  // all lanes have seen that the stages were full
      shared.k_pipeline.release(slot);
      shared.v_pipeline.release(slot);
      slot.advance();
    }
    slot.make_uniform();
  };
  Sums<kO> o = {};
  // The end of a piece of work: first its rows, when they are all summed, and then, when the next
  // may have begun already, its output.
  const auto close_work = [&](const Softmax<Element>& softmax, float (&factor)[2]) {
    close_rows(params, *work, warp_row, to_exponent, softmax, factor);
    __syncwarp();  // all lanes need the work no more
    shared.queue.release(slot_of<WorkQueue<Traits>::kStages>(piece));
    piece = uniform(piece + 1);
  };
  const auto finish_output = [&](const float (&factor)[2]) {
    if constexpr (Traits::kOutputApart) shared.out_pipeline.wait_empty(out_slot);
    write_output<Traits>(shared.ends.out(out_slot.stage), group, warp_row, o, factor);
    __syncwarp();  // all lanes have written
    shared.out_pipeline.publish(out_slot);
    out_slot.advance();
    clear_sums<kO>(o);
  };

  bool more = begin_work();
#pragma unroll 1
  while (more) {
    shared.q_pipeline.wait(q_slot());
    skip(own.skipped);
    Softmax<Element> softmax;
    float factor[2];
    if (own.last < first) {
      __syncwarp();  // all lanes have seen that the queries were there
      if constexpr (Traits::kOutputApart) shared.q_pipeline.release(q_slot());
      close_work(softmax, factor);
      finish_output(factor);
      more = begin_work();
      continue;
    }

    Weights<kN> p;
    int tile = own.last;
    {
      Sums<kN> s;
      shared.k_pipeline.wait(slot);
      ptx::hold(flat<kN>(s));
      ptx::wgmma_fence();
      begin_logits<Element, kDepth, kN>(s, shared.ends.q(q_slot().stage), group_row,
                                        shared.k[slot.stage]);
      ptx::wgmma_wait<0>();
      ptx::hold(flat<kN>(s));
      shared.k_pipeline.release(slot);
      if (Traits::kOutputApart && tile == first) shared.q_pipeline.release(q_slot());
      finish_logits(params, *work, own.clear, warp_row, tile, s);
      float unused[2];
      softmax.template update<kN>(s, to_exponent, unused);
      make_weights<Element, kN>(p, s);
    }

    // P of a tile is multiplied with V while S of the next is computed: the next of this work, or
    // after the last one, the first of the work that follows.
    Slot<kStages> v_slot;
#pragma unroll 1
    while (true) {
      // Weights are zeros for keys that no row of the block sees, but 0 * NaN isn't.
      if (!mma::contains(whole, tile)) {
        shared.v_pipeline.wait(slot);
        clear_rows<kWarpgroup, false>(shared.v[slot.stage], tile * Traits::kColumns, work->keys);
        ptx::async_proxy_fence();
        group_barrier(group);
      }
      v_slot = slot;
      slot.advance();
      const bool ends = tile == first;
      --tile;
      if (ends) {
        close_work(softmax, factor);
        softmax = {};
        more = begin_work();
        if (kQueryStages == 1 || !more || own.last < first || own.skipped >= kStages) break;
        skip(own.skipped);
        shared.q_pipeline.wait(q_slot());
        tile = own.last;
      }
      Sums<kN> s;
      shared.k_pipeline.wait(slot);
      turns.wait();
      ptx::hold(flat<kN>(s));
      ptx::hold(flat(p));
      ptx::hold(flat<kO>(o));
      ptx::wgmma_fence();
      begin_logits<Element, kDepth, kN>(s, shared.ends.q(q_slot().stage), group_row,
                                        shared.k[slot.stage]);
      shared.v_pipeline.wait(v_slot);
      begin_output<Element, kO>(o, p, shared.v[v_slot.stage]);
      turns.pass_on();

      ptx::wgmma_wait<1>();
      ptx::hold(flat<kN>(s));
      bool rescales;
      float rescale[2];
      bool assumes = softmax.is_settled();
#pragma unroll 1
      while (true) {
        finish_logits(params, *work, own.clear, warp_row, tile, s);
        if (!assumes) {
          rescales = softmax.template update<kN>(s, to_exponent, rescale);
          break;
        }
        if (softmax.template assume<kN>(s, to_exponent, rescales, rescale)) break;
        assumes = false;
        repeat_logits<Element, kDepth, kN>(s, shared.ends.q(q_slot().stage), warp_row,
                                           shared.k[slot.stage]);
      }
      shared.k_pipeline.release(slot);
      if (Traits::kOutputApart && tile == first) shared.q_pipeline.release(q_slot());

      ptx::wgmma_wait<0>();
      ptx::hold(flat<kO>(o));
      ptx::hold(flat(p));
      shared.v_pipeline.release(v_slot);
      if (ends) {
        finish_output(factor);
      } else if (rescales) {
        multiply_rows<kO>(o, rescale);
      }
      make_weights<Element, kN>(p, s);
      ptx::hold(flat(p));  // or they might be made behind the products that come next
    }
    shared.v_pipeline.wait(v_slot);
    ptx::hold(flat(p));
    ptx::hold(flat<kO>(o));
    ptx::wgmma_fence();
    begin_output<Element, kO>(o, p, shared.v[v_slot.stage]);
    ptx::wgmma_wait<0>();
    ptx::hold(flat<kO>(o));
    shared.v_pipeline.release(v_slot);
    finish_output(factor);
  }
}

}  // namespace wgmma
}  // namespace cupy_flash
