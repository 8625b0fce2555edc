// All-reduce by pulling: one stage for small messages, two for large ones (DESIGN P3, P12, P14).
//
// Both work through the message in windows, whose size depends only on what all ranks share, so that a rank that must
// stage its input runs as many barriers as one whose peers read it in place. All packs of a window are divided among the
// threads of the grid by one rule on every rank.
#pragma once

#include "barrier.h"
#include "memory.h"

namespace signal_comm {

// A part of the message.
struct Window {
  uint64_t first;  // pack of the message
  uint32_t packs;
  uint64_t input;  // addresses of its first pack
  uint64_t output;
  Turn start;  // of its start barrier
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

// A number that the compiler knows, as an argument.
template <uint32_t N>
struct Count {
  static constexpr uint32_t value = N;
};

// Tells the peers where this rank's window lies and learns where theirs do.
SIGNAL_DEVICE bool publish_window(Member& m, BlockShared& shared, const AllReduceParams& p, const Window& w, bool staged) {
  if (platform::thread_id() == 0) shared.source[p.group.rank] = w.input;
  return publish_input(m, shared, Place{staged, p.view, w.first * kPackBytes}, staged, w.start);
}

// Rank `rank`'s pack `pack` of the window that begins at `source`. One that is not whole has what is left of `count`
// elements.
template <class T, bool kWhole>
SIGNAL_DEVICE Pack load_pack_of(uint64_t source, uint32_t pack, uint64_t count) {
  return kWhole ? load_whole<From::kPeer>(source + uint64_t(pack) * kPackBytes) : load_any<T, From::kPeer>(source, pack, count);
}

// The sum of one pack over all ranks, in rank order. N is the world size, or 0 where only `world` tells.
template <class T, uint32_t N, class Load>
SIGNAL_DEVICE Pack sum_ranks(uint32_t world, uint32_t rank, Load load) {
  Sum<T> sum;
#ifdef SIGNAL_MUTANT_LOCAL_FIRST_ORDER
  for (uint32_t k = 0; k < world; k++) sum.add(load((rank + k) % world));
#else
  (void)rank;
  if constexpr (N != 0) {
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) sum.add(load(r));
  } else {
    for (uint32_t r = 0; r < world; r++) sum.add(load(r));
  }
#endif
  return sum.finish();
}

// The summation of packs that are whole and aligned on every rank: pack `i` of the range and every `step`th behind it,
// below `end`. Gives the first pack that it left: `i` itself when some address is not aligned. N is the world size.
template <class T, uint32_t N>
SIGNAL_DEVICE uint32_t reduce_whole(const AllReduceParams& p, const BlockShared& shared, const Window& w, Pack* kept,
                                    uint32_t first, uint32_t i, uint32_t end, uint32_t step) {
  // Packs of each rank that are on their way at once: as many as the registers hold.
  constexpr uint32_t kAhead = N == 2 ? 4 : N == 4 ? 2 : 1;
  uint64_t source[N];
  uint64_t bits = w.output;
  SIGNAL_UNROLL
  for (uint32_t r = 0; r < N; r++) bits |= source[r] = shared.source[r];
  if (!is_aligned(bits)) return i;

  Pack* const output = reinterpret_cast<Pack*>(w.output) + first;
  const auto reduce_some = [&](auto ahead) {
    constexpr uint32_t kSome = decltype(ahead)::value;
    Pack packs[kSome][N];  // all loads are on their way before the first is needed
    SIGNAL_UNROLL
    for (uint32_t k = 0; k < kSome; k++) {
      SIGNAL_UNROLL
      for (uint32_t r = 0; r < N; r++) packs[k][r] = load_pack_of<T, true>(source[r], first + i + k * step, 0);
    }
    SIGNAL_UNROLL
    for (uint32_t k = 0; k < kSome; k++) {
      const Pack sum = sum_ranks<T, N>(N, p.group.rank, [&](uint32_t r) { return packs[k][r]; });
      platform::store_pack(&output[i + k * step], sum);
      if (kept != nullptr) platform::store_pack(&kept[i + k * step], sum);
    }
    i += kSome * step;
  };
  if constexpr (kAhead > 1) {
    while (i + (kAhead - 1) * step < end) reduce_some(Count<kAhead>{});
  }
  while (i < end) reduce_some(Count<1>{});
  return i;
}

// Sums packs [first, first + packs) of the window into the output and, when `kept` is not null, into kept[0..packs) too.
template <class T>
SIGNAL_DEVICE void reduce(const AllReduceParams& p, const BlockShared& shared, const Window& w, Pack* kept, uint32_t first,
                          uint32_t packs) {
  const uint64_t start = w.first + first;  // in the message
  const uint64_t whole = p.whole_packs > start ? p.whole_packs - start : 0;
  const uint32_t end = whole < packs ? uint32_t(whole) : packs;

  const Stride stride;
  uint32_t i = stride.first;
  const auto whole_packs = [&](auto world) {
    i = reduce_whole<T, decltype(world)::value>(p, shared, w, kept, first, i, end, stride.step);
  };
  // Each world size has a loop of its own, so that its addresses and packs are registers. The commonest first, and no
  // switch: its jump table would be one more cold miss.
  const uint32_t world = p.group.world;
  if (world == 2) whole_packs(Count<2>{});
  else if (world == 4) whole_packs(Count<4>{});
  else if (world == 8) whole_packs(Count<8>{});
  else if (world == 3) whole_packs(Count<3>{});
  else if (world == 5) whole_packs(Count<5>{});
  else if (world == 6) whole_packs(Count<6>{});
  else if (world == 7) whole_packs(Count<7>{});
  else whole_packs(Count<1>{});
  for (; i < packs; i += stride.step) {  // the ragged end, or all of it when some address is not aligned
    const uint64_t count = elements_from<T>(p, w.first);
    const Pack sum = sum_ranks<T, 0>(world, p.group.rank, [&](uint32_t r) {
      return load_pack_of<T, false>(shared.source[r], first + i, count);
    });
    store_any<T>(w.output, first + i, count, sum);
    if (kept != nullptr) platform::store_pack(&kept[i], sum);
  }
}

// One window of the one-stage algorithm.
template <class T>
SIGNAL_DEVICE bool one_stage_window(Member& m, BlockShared& shared, const AllReduceParams& p, const Window& w, bool staged) {
  if (staged) stage<T>(p, w, 0, w.packs);
  if (!publish_window(m, shared, p, w, staged)) return false;
  reduce<T>(p, shared, w, nullptr, 0, w.packs);
#ifdef SIGNAL_MUTANT_NO_EXIT_BARRIER
  return true;
#else
  // Peers have read this rank's window: its owner may overwrite it. Nothing was published since the start.
  return barrier(m, kPhaseExit, false, w.exit);
#endif
}

// Every rank reads every peer's window and adds all of it.
template <class T>
SIGNAL_DEVICE void all_reduce_one_stage(const AllReduceParams& p) {
  SIGNAL_SHARED(BlockShared, shared);
  Member m(p.group, kOpAllReduceOneStage);
  if (!is_staged(p) && p.packs <= p.window_packs) {
    // The short path: what is known here takes no instructions below.
    const Window w = {0, uint32_t(p.packs), p.input, p.output, Turn::kFirst, Turn::kLast};
    one_stage_window<T>(m, shared, p, w, false);
    return;
  }
  for (uint64_t first = 0; first < p.packs; first += p.window_packs) {
    if (!one_stage_window<T>(m, shared, p, window_at(p, first), is_staged(p))) return;
  }
}

// Every rank reads and adds one shard of every peer's window, keeps the sums in its scratch, and gathers the others'.
//
// The scratch holds the staged window, then the sums of this rank's shard. In place needs no staging: block b overwrites
// in its second half only packs that the peers' block b has read before the middle barrier.
template <class T>
SIGNAL_DEVICE void all_reduce_two_stage(const AllReduceParams& p) {
  SIGNAL_SHARED(BlockShared, shared);
  Member m(p.group, kOpAllReduceTwoStage);
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

    if (is_staged(p)) {
      // By shard, so that the peers' block b finds what this rank's block b has staged.
      for (uint32_t r = 0; r < world; r++) {
        if (r != rank) stage<T>(p, w, shard_first(r), shard_packs(r));
      }
    }
    if (!publish_window(m, shared, p, w, is_staged(p))) return;
    Pack* const kept = reinterpret_cast<Pack*>(p.group.own + sums);
    reduce<T>(p, shared, w, kept, shard_first(rank), shard_packs(rank));

    if (!barrier(m, kPhaseMiddle, true, Turn::kBetween)) return;
    const uint64_t count = elements_from<T>(p, w.first);
    const Stride stride;
    for (uint32_t k = 1; k < world; k++) {
      const uint32_t from = rank + k < world ? rank + k : rank + k - world;  // not all ranks at one peer at once
      const Pack* const theirs = reinterpret_cast<const Pack*>(p.group.base[from] + sums);
      const uint32_t start = shard_first(from);
      const uint32_t packs = shard_packs(from);
      for (uint32_t i = stride.first; i < packs; i += stride.step) {
        store_any<T>(w.output, start + i, count, platform::load_pack_peer(&theirs[i]));
      }
    }
#ifndef SIGNAL_MUTANT_NO_EXIT_BARRIER
    // Peers have read this rank's sums: the next window, or the next call, may overwrite them.
    if (!barrier(m, kPhaseExit, false, w.exit)) return;
#endif
  }
}

}  // namespace signal_comm
