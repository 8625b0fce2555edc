// All-reduce by pulling: one stage for small messages, two for large ones (DESIGN P3, P12, P14).
//
// Both work through the message in windows, whose size depends only on what all ranks share, so that a rank that must
// stage its input runs as many barriers as one whose peers read it in place. All packs of a window are divided among the
// threads of the grid by one rule on every rank.
#pragma once

#include "barrier.h"
#include "memory.h"

namespace signal_comm {

// A part of the message: packs [first, first + packs), with addresses relative to the message's start.
struct Window {
  uint64_t first;
  uint64_t packs;
  uint64_t count;  // elements from the window's start to the end of the message
};

template <class T>
SIGNAL_DEVICE uint64_t packs_of(uint64_t count) {
  return (count * T::kBytes + kPackBytes - 1) / kPackBytes;
}

template <class T>
SIGNAL_DEVICE Window window_at(const AllReduceParams& p, uint64_t first) {
  const uint64_t left = packs_of<T>(p.count) - first;
  return Window{first, left < p.window_packs ? left : p.window_packs, p.count - first * (kPackBytes / T::kBytes)};
}

// Where this rank's window lies for its peers: in the scratch, or in the symmetric buffer itself.
SIGNAL_DEVICE Place place_of(const AllReduceParams& p, const Window& w) {
  return Place{p.staged != 0, p.view, w.first * kPackBytes};
}

SIGNAL_DEVICE uint64_t scratch_of(const AllReduceParams& p, uint32_t rank) {
  return p.group.base[rank] + p.group.scratch_offset;
}

// Copies packs [first, first + packs) of the window at `input` to the same place in the scratch, for the peers.
template <class T>
SIGNAL_DEVICE void stage(const AllReduceParams& p, uint64_t input, const Window& w, uint64_t first, uint64_t packs) {
  Pack* const scratch = reinterpret_cast<Pack*>(scratch_of(p, p.group.rank));
  const Stride stride;
  for (uint64_t i = stride.first; i < packs; i += stride.step) {
    platform::store_pack(&scratch[first + i], load_any<T, From::kOwn>(input, first + i, w.count));
  }
}

// The sum of pack `pack` over all ranks, in rank order. `source[r]` is where rank r's window begins; N is the world size,
// or 0 when only `world` knows it.
template <class T, uint32_t N, bool kWhole>
SIGNAL_DEVICE Pack sum_pack(const uint64_t* source, uint32_t world, uint32_t rank, uint64_t pack, uint64_t count) {
  const auto load = [&](uint32_t r) {
    return kWhole ? load_whole<From::kPeer>(source[r] + pack * kPackBytes) : load_any<T, From::kPeer>(source[r], pack, count);
  };
  Sum<T> sum;
#ifdef SIGNAL_MUTANT_LOCAL_FIRST_ORDER
  for (uint32_t k = 0; k < world; k++) sum.add(load((rank + k) % world));
#else
  (void)rank;
  if constexpr (N != 0) {
    Pack packs[N];  // all loads are on their way before the first is needed
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) packs[r] = load(r);
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) sum.add(packs[r]);
  } else {
    for (uint32_t r = 0; r < world; r++) sum.add(load(r));
  }
#endif
  return sum.finish();
}

// The summation of packs that are whole and aligned on every rank: from pack `i` of the range while it is below `end`, by
// the grid's stride. Gives the first pack that it left.
template <class T, uint32_t N>
SIGNAL_DEVICE uint64_t reduce_whole(const AllReduceParams& p, const BlockShared& shared, uint64_t output, Pack* kept,
                                    uint64_t first, uint64_t i, uint64_t end, uint64_t step) {
  uint64_t held[N == 0 ? 1 : N];  // in registers, where the world size is known
  if constexpr (N != 0) {
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) held[r] = shared.source[r];
  }
  const uint64_t* const source = N == 0 ? shared.source : held;
  for (; i < end; i += step) {
    const Pack sum = sum_pack<T, N, true>(source, p.group.world, p.group.rank, first + i, 0);
    platform::store_pack(reinterpret_cast<Pack*>(output) + first + i, sum);
    if (kept != nullptr) platform::store_pack(&kept[i], sum);
  }
  return i;
}

// Sums packs [first, first + packs) of the window into `output` (addressed like the window) and, when `kept` is not
// null, into kept[0..packs) too.
template <class T>
SIGNAL_DEVICE void reduce(const AllReduceParams& p, const BlockShared& shared, const Window& w, uint64_t output, Pack* kept,
                          uint64_t first, uint64_t packs) {
  const uint32_t world = p.group.world;
  bool aligned = is_aligned(output);
  for (uint32_t r = 0; r < world; r++) aligned = aligned && is_aligned(shared.source[r]);
  const uint64_t whole_in_window = w.count * T::kBytes / kPackBytes;
  const uint64_t whole = aligned && whole_in_window > first ? whole_in_window - first : 0;
  const uint64_t end = whole < packs ? whole : packs;

  const Stride stride;
  uint64_t i = stride.first;
  switch (world) {  // the world sizes of whole machines get loops of their own
    case 2: i = reduce_whole<T, 2>(p, shared, output, kept, first, i, end, stride.step); break;
    case 4: i = reduce_whole<T, 4>(p, shared, output, kept, first, i, end, stride.step); break;
    case 8: i = reduce_whole<T, 8>(p, shared, output, kept, first, i, end, stride.step); break;
    default: i = reduce_whole<T, 0>(p, shared, output, kept, first, i, end, stride.step);
  }
  for (; i < packs; i += stride.step) {  // the ragged end, or all of it when some address is not aligned
    const Pack sum = sum_pack<T, 0, false>(shared.source, world, p.group.rank, first + i, w.count);
    store_any<T>(output, first + i, w.count, sum);
    if (kept != nullptr) platform::store_pack(&kept[i], sum);
  }
}

// Every rank reads every peer's window and adds all of it.
template <class T>
SIGNAL_DEVICE void all_reduce_one_stage(const AllReduceParams& p) {
  SIGNAL_SHARED(BlockShared, shared);
  Member m(p.group, kOpAllReduceOneStage);
  const uint64_t total = packs_of<T>(p.count);
  bool alive = true;
  for (uint64_t first = 0; alive && first < total; first += p.window_packs) {
    const Window w = window_at<T>(p, first);
    const uint64_t input = p.input + first * kPackBytes;
    if (p.staged) stage<T>(p, input, w, 0, w.packs);

    if (platform::thread_id() == 0) shared.source[p.group.rank] = input;
    alive = publish_input(m, shared, place_of(p, w), p.staged, first == 0);
    if (!alive) return;
    reduce<T>(p, shared, w, p.output + first * kPackBytes, nullptr, 0, w.packs);
#ifndef SIGNAL_MUTANT_NO_EXIT_BARRIER
    // Peers have read this rank's window: its owner may overwrite it. Nothing was published since the start.
    alive = barrier(m, shared, kPhaseExit, false, false);
#endif
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
  const uint64_t sums = p.window_packs * kPackBytes;  // from the start of the scratch
  const uint64_t total = packs_of<T>(p.count);
  bool alive = true;
  for (uint64_t first = 0; alive && first < total; first += p.window_packs) {
    const Window w = window_at<T>(p, first);
    const uint64_t input = p.input + first * kPackBytes;
    const uint64_t output = p.output + first * kPackBytes;
    // Shards are equal but for the last ones, which may be short or empty. Their size is the same in every window of a
    // message, the short last one too: a block that has passed the exit barrier may overwrite in the scratch only what the
    // peers' same block has read.
    const uint64_t shard = total > p.window_packs ? p.window_packs / world : (w.packs + world - 1) / world;
    const auto shard_first = [&](uint32_t r) { return r * shard < w.packs ? r * shard : w.packs; };
    const auto shard_packs = [&](uint32_t r) { return shard_first(r + 1) - shard_first(r); };

    if (p.staged) {
      // By shard, so that the peers' block b finds what this rank's block b has staged.
      for (uint32_t r = 0; r < world; r++) {
        if (r != rank) stage<T>(p, input, w, shard_first(r), shard_packs(r));
      }
    }
    if (platform::thread_id() == 0) shared.source[rank] = input;
    alive = publish_input(m, shared, place_of(p, w), p.staged, first == 0);
    if (!alive) return;
    Pack* const kept = reinterpret_cast<Pack*>(scratch_of(p, rank) + sums);
    reduce<T>(p, shared, w, output, kept, shard_first(rank), shard_packs(rank));

    if (!barrier(m, shared, kPhaseMiddle, true, false)) return;
    const Stride stride;
    for (uint32_t k = 1; k < world; k++) {
      const uint32_t from = (rank + k) % world;  // not all ranks at one peer at once
      const Pack* const theirs = reinterpret_cast<const Pack*>(scratch_of(p, from) + sums);
      const uint64_t start = shard_first(from);
      const uint64_t packs = shard_packs(from);
      for (uint64_t i = stride.first; i < packs; i += stride.step) {
        store_any<T>(output, start + i, w.count, platform::load_pack_peer(&theirs[i]));
      }
    }
#ifndef SIGNAL_MUTANT_NO_EXIT_BARRIER
    // Peers have read this rank's sums: the next window, or the next call, may overwrite them.
    alive = barrier(m, shared, kPhaseExit, false, false);
#endif
  }
}

}  // namespace signal_comm
