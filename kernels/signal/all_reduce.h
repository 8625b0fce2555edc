// All-reduce by pulling: one stage for small messages, two for large ones (DESIGN P3, P12, P14).
//
// Both work through the message in windows, whose size depends only on what all ranks share, so that a rank that must
// stage its input runs as many barriers as one whose peers read it in place. All packs of a window are divided among the
// threads of the grid by one rule on every rank.
#pragma once

#include "reduce.h"
#include "stage.h"

namespace signal_comm {

// A part of the message.
struct Window {
  uint64_t first;  // pack of the message
  uint64_t bytes;
  uint64_t input;   // address of its first pack
  uint64_t output;  // likewise
  Turn start;       // of its start barrier
  Turn exit;
};

SIGNAL_DEVICE Window window_at(const AllReduceParams& p, uint64_t first) {
  const uint64_t left = p.bytes - first * kPackBytes;
  const bool last = left <= p.window_packs * kPackBytes;
  return Window{first,
                last ? left : p.window_packs * kPackBytes,
                p.input + first * kPackBytes,
                p.output + first * kPackBytes,
                first == 0 ? Turn::kFirst : Turn::kBetween,
                last ? Turn::kLast : Turn::kBetween};
}

// Tells the peers where this rank's window lies and learns where theirs do; false: the kernel must leave now.
SIGNAL_DEVICE bool publish_window(Barriers<LineBarrier>& barriers, const AllReduceParams& p, const Window& w) {
  const bool staged = is_staged(p.group);
  barriers.publish(InputPlace{p.group, staged, p.view, w.first * kPackBytes}, staged, w.start);
  return barriers.complete();
}

// The one-stage algorithm for a message that is one window of symmetric input: what it does is what `one_stage_windows`
// does, but in one piece, since every instruction and every jump costs a short call measurably.
template <class T, uint32_t N, uint32_t kAhead>
SIGNAL_DEVICE void one_stage_direct(Member& m, Barriers<LineBarrier>& barriers, const AllReduceParams& p) {
  const Stride stride;
  uint32_t i = stride.first;
  const InputPlace place(p.group, false, p.view, 0);
  begin(m, barriers);
  barriers.publish(place, false, Turn::kFirst);
  const BlockShared& shared = barriers.shared;
  const Sources<N> sources(shared);
  if (((sources.bits | p.output) & (kNobody | (kPackBytes - 1))) == 0) {  // all came, and all is aligned
    Pack* const output = reinterpret_cast<Pack*>(p.output);
    i = reduce_whole<T, N, kAhead>(p.group.rank, sources, output, nullptr, 0, i, uint32_t(p.whole_packs), stride.step);
  } else if ((sources.bits & kNobody) != 0) {
    return report_incomplete<LineBarrier>(p.group, kOpAllReduceOneStage, shared);
  }
  if (i < uint32_t(p.packs)) reduce_rest<T>(p.group, kReduceSum, shared, 0, p.output, nullptr, p.bytes, i, stride.step);
  exit_barrier(barriers, Turn::kLast);
}

template <class T>
SIGNAL_DEVICE void one_stage_windows(Member& m, Barriers<LineBarrier>& barriers, const AllReduceParams& p) {
  begin(m, barriers);
  for (uint64_t first = 0; first < p.packs; first += p.window_packs) {
    const Window w = window_at(p, first);
    if (may_stage(m)) copy<From::kOwn>(w.input, scratch_of(p.group), w.bytes, Stride());
    if (!publish_window(barriers, p, w)) break;
    reduce<T>(p.group, p.op, p.dtype, barriers.shared, Range{0, w.output, nullptr, w.bytes});
    if (!exit_barrier(barriers, w.exit)) break;
  }
}

// Every rank reads every peer's window and adds all of it.
template <class T>
SIGNAL_DEVICE void all_reduce_one_stage(const AllReduceParams& p) {
  SIGNAL_SHARED(BlockShared, shared);
  Member m(p.group, kOpAllReduceOneStage);
  Barriers<LineBarrier> barriers(m, shared);
  const uint32_t world = p.group.world;
  if constexpr (T::kIsAny) {
    one_stage_windows<T>(m, barriers, p);
  } else if (is_staged(p.group) || p.packs > p.window_packs || (world & (world - 1)) != 0 || world == 1) {
    // The commonest worlds alone: each adds to the kernel's code and to what it takes to compile.
    one_stage_windows<T>(m, barriers, p);
  } else if (world == 2) {
    one_stage_direct<T, 2, kMostAhead<2>>(m, barriers, p);
  } else if (world == 4) {
    one_stage_direct<T, 4, kMostAhead<4>>(m, barriers, p);
  } else {
    one_stage_direct<T, 8, kMostAhead<8>>(m, barriers, p);
  }
}

// The same for up to 4 ranks, a message that is one window of symmetric input with few packs for each thread, and barriers as
// the platform orders them. A kernel of its own: few registers and little code make a launch shorter, by 0.2 us on an H200.
template <class T>
SIGNAL_DEVICE void all_reduce_one_stage_small(const AllReduceParams& p) {
  SIGNAL_SHARED(BlockShared, shared);
  Member m(p.group, kOpAllReduceOneStage);
  Barriers<LineBarrier> barriers(m, shared, false);
  with_world<1, 4>(p.group.world, [&](auto world) SIGNAL_INLINE {
    one_stage_direct<T, decltype(world)::value, 1>(m, barriers, p);
  });
}

// The shards of a window: equal but for the last ones, which may be short or empty. Their size is the same in every window of a
// message, the short last one too: a block that has passed the exit barrier may overwrite in the scratch only what the peers'
// same block has read.
struct Shards {
  uint64_t each;
  uint64_t all;

  SIGNAL_DEVICE Shards(const AllReduceParams& p, const Window& w) : each(0), all(w.bytes) {
#ifdef SIGNAL_MUTANT_SHARDS_OF_EACH_WINDOW
    const uint64_t packs = packs_of(w.bytes);
#else
    const uint64_t packs = p.packs > p.window_packs ? p.window_packs : p.packs;
#endif
    each = (packs + p.group.world - 1) / p.group.world * kPackBytes;
  }
  SIGNAL_DEVICE uint64_t first(uint32_t r) const { return r * each < all ? r * each : all; }
  SIGNAL_DEVICE uint64_t bytes(uint32_t r) const { return first(r + 1) - first(r); }
};

// The two-stage algorithm by pushing: every rank pushes each shard of its window to the rank that adds it, which pushes the sums to
// all. Only its own rank reads an input, so none is staged; an output that peers cannot write is. The scratch holds the sums of a
// window, where they are staged, then the shards for this rank.
template <class T>
SIGNAL_COLD void all_reduce_two_stage_push(const AllReduceParams& p) {
  SIGNAL_SHARED(PushShared, shared);
  BlockShared& slots = shared.slots;
  Member m(p.group, kOpAllReduceTwoStage);
  Barriers<LineBarrier> barriers(m, shared.places);
  begin(m, barriers);
  const uint32_t rank = p.group.rank, world = p.group.world;
  for (uint64_t first = 0; first < p.packs; first += p.window_packs) {
    const Window w = window_at(p, first);
    const Shards shards(p, w);
    const uint64_t for_ranks = p.group.scratch_offset + world * shards.each;  // the shards, from each rank's base
    barriers.publish(InputPlace{p.group, is_staged(p.group), p.view, first * kPackBytes}, false, w.start);
    if (!barriers.complete()) break;
    for (uint32_t k = 1; k < world; k++) {
      const uint32_t to = rank_after(p.group, k);
      copy<From::kOwn>(w.input + shards.first(to), p.group.base[to] + for_ranks + rank * shards.each, shards.bytes(to), Stride());
    }
    if (platform::thread_id() == 0) {
      for (uint32_t r = 0; r < world; r++) slots.source[r] = r == rank ? w.input + shards.first(r) : p.group.own + for_ranks + r * shards.each;
    }
    // Behind it the peers' shards are here.
    if (!await_pushes(barriers, kPhaseMiddle)) break;
    const uint64_t own = shards.first(rank);
    reduce<T>(p.group, p.op, p.dtype, slots, Range{0, w.output + own, nullptr, shards.bytes(rank)});
    for (uint32_t k = 1; k < world; k++) {
      // What this thread has just stored.
      copy<From::kOwn>(w.output + own, shared.places.source[rank_after(p.group, k)] + own, shards.bytes(rank), Stride());
    }
    // And the peers' sums; what they were pushed from is free again.
    if (!await_pushes(barriers, kPhaseExit)) break;
    if (!is_staged(p.group)) continue;
    for (uint32_t from = 0; from < world; from++) {
      if (from == rank) continue;
      copy<From::kPeer>(scratch_of(p.group) + shards.first(from), w.output + shards.first(from), shards.bytes(from), Stride());
    }
  }
}

// Every rank reads and adds one shard of every peer's window, keeps the sums in its scratch, and gathers the others'.
//
// The scratch holds the staged window, then the sums of this rank's shard. In place needs no staging: block b overwrites
// in its second half only packs that the peers' block b has read before the middle barrier.
template <class T>
SIGNAL_DEVICE void all_reduce_two_stage(const AllReduceParams& p) {
  if (is_pushed(p.group)) return all_reduce_two_stage_push<T>(p);
  SIGNAL_SHARED(BlockShared, shared);
  Member m(p.group, kOpAllReduceTwoStage);
  Barriers<LineBarrier> barriers(m, shared);
  begin(m, barriers);
  const uint32_t rank = p.group.rank;
  const uint32_t world = p.group.world;
  const uint64_t sums = p.group.scratch_offset + p.window_packs * kPackBytes;  // from each rank's base
  for (uint64_t first = 0; first < p.packs; first += p.window_packs) {
    const Window w = window_at(p, first);
    const Shards shards(p, w);

    if (may_stage(m)) {
      // By shard, so that the peers' block b finds what this rank's block b has staged.
      for (uint32_t r = 0; r < world; r++) {
        const uint64_t start = shards.first(r);
        if (r != rank) copy<From::kOwn>(w.input + start, scratch_of(p.group) + start, shards.bytes(r), Stride());
      }
    }
    if (!publish_window(barriers, p, w)) break;
    Pack* const kept = reinterpret_cast<Pack*>(p.group.own + sums);
    const uint64_t own = shards.first(rank);
    reduce<T>(p.group, p.op, p.dtype, shared, Range{own, w.output + own, kept, shards.bytes(rank)});

#ifdef SIGNAL_MUTANT_RELAXED_MIDDLE_BARRIER
    if (!barriers.meet(kPhaseMiddle, false, Turn::kBetween)) break;
#else
    if (!barriers.meet(kPhaseMiddle, true, Turn::kBetween)) break;
#endif
    Stride stride;
#ifdef SIGNAL_MUTANT_READS_ANOTHER_BLOCKS_SUMS
    stride.first = stride.step - 1 - stride.first;
#endif
    for (uint32_t k = 1; k < world; k++) {
      const uint32_t from = rank_after(p.group, k);
      copy<From::kPeer>(p.group.base[from] + sums, w.output + shards.first(from), shards.bytes(from), stride);
    }
    // Peers have read this rank's sums: the next window, or the next call, may overwrite them.
    if (!exit_barrier(barriers, w.exit)) break;
  }
}

}  // namespace signal_comm
