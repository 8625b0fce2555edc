// All-reduce by pulling: one stage for small messages, two for large ones (DESIGN P3, P12, P14).
//
// Both work through the message in windows, whose size depends only on what all ranks share, so that a rank that must
// stage its input runs as many barriers as one whose peers read it in place. All packs of a window are divided among the
// threads of the grid by one rule on every rank.
#pragma once

#include "barrier.h"
#include "memory.h"
#include "world.h"

namespace signal_comm {

// A part of the message.
struct Window {
  uint64_t first;  // pack of the message
  uint32_t packs;
  uint64_t input;   // address of its first pack
  uint64_t output;  // likewise
  Turn start;       // of its start barrier
  Turn exit;
};

SIGNAL_DEVICE Window window_at(const AllReduceParams& p, uint64_t first) {
  const uint64_t left = p.packs - first;
  const bool last = left <= p.window_packs;
  return Window{first,
                uint32_t(last ? left : p.window_packs),
                p.input + first * kPackBytes,
                p.output + first * kPackBytes,
                first == 0 ? Turn::kFirst : Turn::kBetween,
                last ? Turn::kLast : Turn::kBetween};
}

SIGNAL_DEVICE bool is_staged(const AllReduceParams& p) { return (p.group.flags & kFlagStaged) != 0; }

// Whether to copy the input to the scratch. Not once a fault is known: a call that gave up waiting for a peer left the scratch to
// it, and a peer that is merely slow reads it yet, and would take what is staged now for that call's. Every thread of the block
// asks, since only the first ones have read the abort word.
SIGNAL_DEVICE bool may_stage(const Member& m, const AllReduceParams& p) {
#ifdef SIGNAL_MUTANT_STAGES_AFTER_A_FAULT
  return (void)m, is_staged(p);
#else
  return is_staged(p) && !platform::block_any(m.abort != 0);
#endif
}

// Elements of the message from pack `pack` on.
template <class T>
SIGNAL_DEVICE uint64_t elements_from(const AllReduceParams& p, uint64_t pack) {
  return p.count - pack * (kPackBytes / T::kBytes);
}

// Copies packs [first, first + packs) of the window to the same place in the scratch, for the peers.
template <class T>
SIGNAL_DEVICE void stage(const AllReduceParams& p, const Window& w, uint32_t first, uint32_t packs) {
  Pack* const scratch = reinterpret_cast<Pack*>(p.group.own + p.group.scratch_offset);
  const uint64_t count = elements_from<T>(p, w.first);
  const Stride stride;
  for (uint32_t i = stride.first; i < packs; i += stride.step) {
    platform::store_pack(&scratch[first + i], load_any<T, From::kOwn>(w.input, first + i, count));
  }
}

// Tells the peers where this rank's window lies and learns where theirs do; false: the kernel must leave now.
SIGNAL_DEVICE bool publish_window(Barriers<LineBarrier>& barriers, const AllReduceParams& p, const Window& w) {
  barriers.publish(InputPlace{p.group, is_staged(p), p.view, w.first * kPackBytes}, is_staged(p), w.start);
  return barriers.complete();
}

// Sums packs i, i + step, ... that are left over below `packs` of the window whose first pack is `window`: the ragged end, or
// all of them where some address is not aligned. Arguments as of `reduce`.
template <class T>
SIGNAL_COLD void reduce_rest(const AllReduceParams& p, const BlockShared& shared, uint64_t window, Pack* kept, uint32_t first,
                             uint32_t packs, uint32_t i) {
  const uint64_t count = elements_from<T>(p, window);
  const uint64_t output = p.output + window * kPackBytes;
  const uint32_t step = Stride().step;
  for (; i < packs; i += step) {
    const Pack sum = sum_ranks<T, 0>(p.op, p.group.world, p.group.rank, [&](uint32_t r) {
      return load_any<T, From::kPeer>(shared.source[r], first + i, count);
    });
    store_any<T>(output, first + i, count, sum);
    if (kept != nullptr) platform::store_pack(&kept[i], sum);
  }
}

// Where each rank's input lies, in registers.
template <uint32_t N>
struct Sources {
  uint64_t at[N];
  uint64_t bits;  // of all of them

  SIGNAL_DEVICE explicit Sources(const BlockShared& shared) : bits(0) {
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) bits |= at[r] = shared.source[r];
  }
};

// Packs of each rank that a thread has on their way at once: as many as the registers hold.
template <uint32_t N>
constexpr uint32_t kMostAhead = N == 2 ? 4 : N == 4 ? 2 : 1;

// The summation of packs that are whole and aligned on every rank: pack `i` of the range and every `step`th behind it,
// below `end`, kAhead at a time. The range begins at pack `first` of the sources. Gives the first pack that it left.
template <class T, uint32_t N, uint32_t kAhead>
SIGNAL_DEVICE uint32_t reduce_whole(uint32_t rank, const Sources<N>& sources, Pack* output, Pack* kept, uint32_t first,
                                    uint32_t i, uint32_t end, uint32_t step) {
  const auto reduce_some = [&](auto ahead) SIGNAL_INLINE {
    constexpr uint32_t kSome = decltype(ahead)::value;
    Pack packs[kSome][N];  // all loads are on their way before the first is needed
    SIGNAL_UNROLL
    for (uint32_t k = 0; k < kSome; k++) {
      SIGNAL_UNROLL
      for (uint32_t r = 0; r < N; r++) {
        packs[k][r] = load_whole<From::kPeer>(sources.at[r] + uint64_t(first + i + k * step) * kPackBytes);
      }
    }
    SIGNAL_UNROLL
    for (uint32_t k = 0; k < kSome; k++) {
      const Pack sum = sum_ranks<T, N>(kReduceSum, N, rank, [&](uint32_t r) { return packs[k][r]; });
      platform::store_pack(&output[i + k * step], sum);
      if (kept != nullptr) platform::store_pack(&kept[i + k * step], sum);
    }
    i += kSome * step;
  };
  if constexpr (kAhead > 1) {
    while (i + (kAhead - 1) * step < end) reduce_some(Count<kAhead>{});
  }
  SIGNAL_NO_UNROLL
  while (i < end) reduce_some(Count<1>{});
  return i;
}

// Sums packs [first, first + packs) of the window into the output and, when `kept` is not null, into kept[0..packs) too.
template <class T>
SIGNAL_DEVICE void reduce(const AllReduceParams& p, const BlockShared& shared, const Window& w, Pack* kept, uint32_t first,
                          uint32_t packs) {
  if constexpr (!T::kSpecialised) return reduce_rest<T>(p, shared, w.first, kept, first, packs, Stride().first);
  const uint64_t start = w.first + first;  // in the message
  const uint64_t whole = p.whole_packs > start ? p.whole_packs - start : 0;
  const uint32_t end = whole < packs ? uint32_t(whole) : packs;

  const Stride stride;
  uint32_t i = stride.first;
  with_world(p.group.world, [&](auto world) SIGNAL_INLINE {
    constexpr uint32_t N = decltype(world)::value;
    const Sources<N> sources(shared);
    Pack* const output = reinterpret_cast<Pack*>(w.output) + first;
    if (!is_aligned(sources.bits | w.output)) return;
    i = reduce_whole<T, N, kMostAhead<N>>(p.group.rank, sources, output, kept, first, i, end, stride.step);
  });
  if (i < packs) reduce_rest<T>(p, shared, w.first, kept, first, packs, i);
}

// Peers have read this rank's memory: its owner may overwrite it. Nothing was published since the last barrier.
SIGNAL_DEVICE bool exit_barrier(Barriers<LineBarrier>& barriers, Turn turn) {
#ifdef SIGNAL_MUTANT_NO_EXIT_BARRIER
  return (void)barriers, (void)turn, true;
#else
  return barriers.meet(kPhaseExit, false, turn);
#endif
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
  if (i < uint32_t(p.packs)) reduce_rest<T>(p, shared, 0, nullptr, 0, uint32_t(p.packs), i);
  exit_barrier(barriers, Turn::kLast);
}

template <class T>
SIGNAL_DEVICE void one_stage_windows(Member& m, Barriers<LineBarrier>& barriers, const AllReduceParams& p) {
  begin(m, barriers);
  for (uint64_t first = 0; first < p.packs; first += p.window_packs) {
    const Window w = window_at(p, first);
    if (may_stage(m, p)) stage<T>(p, w, 0, w.packs);
    if (!publish_window(barriers, p, w)) break;
    reduce<T>(p, barriers.shared, w, nullptr, 0, w.packs);
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
  if constexpr (!T::kSpecialised) return one_stage_windows<T>(m, barriers, p);
  // The commonest worlds alone: each adds to the kernel's code and to what it takes to compile.
  if (is_staged(p) || p.packs > p.window_packs || (world & (world - 1)) != 0 || world == 1) {
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

// Every rank reads and adds one shard of every peer's window, keeps the sums in its scratch, and gathers the others'.
//
// The scratch holds the staged window, then the sums of this rank's shard. In place needs no staging: block b overwrites
// in its second half only packs that the peers' block b has read before the middle barrier.
template <class T>
SIGNAL_DEVICE void all_reduce_two_stage(const AllReduceParams& p) {
  SIGNAL_SHARED(BlockShared, shared);
  Member m(p.group, kOpAllReduceTwoStage);
  Barriers<LineBarrier> barriers(m, shared);
  begin(m, barriers);
  const uint32_t rank = p.group.rank;
  const uint32_t world = p.group.world;
  const uint64_t sums = p.group.scratch_offset + p.window_packs * kPackBytes;  // from each rank's base
  for (uint64_t first = 0; first < p.packs; first += p.window_packs) {
    const Window w = window_at(p, first);
    // Shards are equal but for the last ones, which may be short or empty. Their size is the same in every window of a
    // message, the short last one too: a block that has passed the exit barrier may overwrite in the scratch only what the
    // peers' same block has read.
    const uint32_t all = p.packs > p.window_packs ? uint32_t(p.window_packs) : w.packs;
    const uint32_t shard = (all + world - 1) / world;
    const auto shard_first = [&](uint32_t r) { return r * shard < w.packs ? r * shard : w.packs; };
    const auto shard_packs = [&](uint32_t r) { return shard_first(r + 1) - shard_first(r); };

    if (may_stage(m, p)) {
      // By shard, so that the peers' block b finds what this rank's block b has staged.
      for (uint32_t r = 0; r < world; r++) {
        if (r != rank) stage<T>(p, w, shard_first(r), shard_packs(r));
      }
    }
    if (!publish_window(barriers, p, w)) break;
    Pack* const kept = reinterpret_cast<Pack*>(p.group.own + sums);
    reduce<T>(p, shared, w, kept, shard_first(rank), shard_packs(rank));

#ifdef SIGNAL_MUTANT_RELAXED_MIDDLE_BARRIER
    if (!barriers.meet(kPhaseMiddle, false, Turn::kBetween)) break;
#else
    if (!barriers.meet(kPhaseMiddle, true, Turn::kBetween)) break;
#endif
    const uint64_t count = elements_from<T>(p, w.first);
    const Stride stride;
    for (uint32_t k = 1; k < world; k++) {
      const uint32_t from = rank + k < world ? rank + k : rank + k - world;  // not all ranks at one peer at once
      const Pack* const theirs = reinterpret_cast<const Pack*>(p.group.base[from] + sums);
      const uint32_t start = shard_first(from);
      const uint32_t packs = shard_packs(from);
#ifdef SIGNAL_MUTANT_READS_ANOTHER_BLOCKS_SUMS
      for (uint32_t i = stride.step - 1 - stride.first; i < packs; i += stride.step) {
#else
      for (uint32_t i = stride.first; i < packs; i += stride.step) {
#endif
        store_any<T>(w.output, start + i, count, platform::load_pack_peer(&theirs[i]));
      }
    }
    // Peers have read this rank's sums: the next window, or the next call, may overwrite them.
    if (!exit_barrier(barriers, w.exit)) break;
  }
}

}  // namespace signal_comm
