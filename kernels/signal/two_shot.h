// All-reduce by pushing through the Lamport region, for messages of any size: no barrier that data waits for, the data tells that
// it is there (DESIGN P5 to P9, P12).
//
// Each rank reduces a shard: it gets the others' packs of it in their slots, and pushes the sums to a second slot of its own at
// every peer. With two ranks each reduces all instead, which takes as many bytes and a hop less. More than
// four ranks have a slot each, which shards and sums share.
//
// A message runs through the region in windows, each of which counts as a call and takes the next generation, and each in rounds,
// in which a thread has one pack of each shard. What a thread has read it clears at once, so a call leaves nothing to clear. Packs
// are sent a window before the round that reduces them. The places of a call's first window are clear because this rank has heard so
// in the call before; those of the second and third are once its peers have begun this one and cleared what the call before left;
// those of later ones are the window's three before. That peers have cleared what this same kernel writes again only a release can
// tell: block b of each rank tells block b of the others, by the counters of its barriers. Number 0 says that all from before the call
// is cleared, number k that all up to window k - 1 is, but for the sums that are gathered a round late, which number k + 1 vouches
// for: sums of a window are sent a window after its shards. A block awaits number 0 behind its first round and number k behind window
// k, when its peers have signalled it a window ago, so that nobody stands still for it, and signals number k + 1. The last two are
// for the next call's first window, which takes the places of this one's third-last: the shards' number, and that of the sums, over
// which a Lamport call may write at once.
#pragma once

#include "lamport.h"

namespace signal_comm {

// `by` windows later, as if each were a call.
SIGNAL_DEVICE flag_t flag_after(flag_t flag, uint64_t by) { return flag_t((uint64_t(flag) + by) % kNoFlag); }

// The wait for a peer's number that did not come at once. False: reported.
SIGNAL_COLD bool came_late(const GroupParams& g, uint32_t operation, uint32_t phase, uint32_t peer) {
  if (comes<CounterBarrier>(g, operation, peer)) return true;
  report_missing<CounterBarrier>(g, operation, phase, 1u << peer);
  return false;
}

// What the blocks of all ranks tell each other about the windows they have cleared: each number is signalled once it holds,
// and awaited later, so that nobody stands still for it. Barriers in two parts, by their counters.
struct Cleared {
  using Kind = CounterBarrier;
  const Member& m;
  Pair first = {};

  SIGNAL_DEVICE explicit Cleared(const Member& member) : m(member) {}

  SIGNAL_DEVICE void read() {
    if (platform::thread_id() < m.group.world) first = read_pair<Kind>(m.group, platform::thread_id());
  }

  template <class Visit>
  SIGNAL_DEVICE void for_each_pair(Visit visit) {
    const uint32_t thread = platform::thread_id();
    if constexpr (platform::kMinBlockThreads >= kMaxGpus) {
      if (thread < m.group.world && thread != m.group.rank) visit(thread, first);
    } else {
      for (uint32_t peer = thread; peer < m.group.world; peer += platform::block_dim()) {
        if (peer == m.group.rank) continue;
        Pair pair = read_pair<Kind>(m.group, peer);
        visit(peer, pair);
      }
    }
  }

  // Behind a block barrier that follows what all threads of the block have cleared.
  SIGNAL_DEVICE void signal() {
    for_each_pair([&](uint32_t, Pair& pair) {
      pair.count += 1;
      // Release: pairs with the acquire in `await`. The peer writes again, once it has seen the number, what this block cleared before.
#ifdef SIGNAL_MUTANT_TWO_SHOT_CLEARED_RELAXED
      Kind::send(pair, 0, false);
#else
      Kind::send(pair, 0, true);
#endif
      platform::store_relaxed(pair.counter, pair.count);
    });
  }

  // False: a peer did not come, which has been reported. The caller puts a block barrier between this and what it allows.
  SIGNAL_DEVICE bool await(uint32_t phase) {
    bool came = true;
    for_each_pair([&](uint32_t peer, Pair& pair) {
      bool seen = false;
      SIGNAL_NO_UNROLL
      for (uint32_t polls = 0; !seen && (!kBounded || polls < platform::kPollsPerCheck); polls++) {
        seen = Kind::look(pair).is(pair.count);
        if (!seen) platform::relax();
      }
      came = came && (seen || came_late(m.group, m.operation, phase, peer));
      if (came) Kind::acquire(pair);
    });
    return came;
  }
};

// A call, as one thread sees it, of N ranks; or of any number from 5 to N, where there is no code for each.
template <class T, uint32_t N, bool kExact>
struct TwoShot {
  static constexpr bool kTwoHops = N > 2;
  // Where a rank's sums are, from the start of its slot.
  static constexpr uint32_t kSumsAt = N <= kMaxGpus / 2 ? N * kSlotPacks : kSlotPacks / 2;

  const AllReduceParams& p;
  const uint32_t rank;
  const Stride stride;
  const bool aligned;
  flag_t flag;

  SIGNAL_DEVICE explicit TwoShot(const AllReduceParams& params)
      : p(params), rank(params.group.rank), stride(), aligned(is_aligned(params.input | params.output)), flag(0) {}

  SIGNAL_DEVICE uint32_t world() const { return kExact ? N : p.group.world; }
  template <class Visit>
  SIGNAL_DEVICE void each_peer(Visit visit) const {
    for_each_peer<N>(rank, [&](uint32_t peer) SIGNAL_INLINE {
      if (kExact || peer < world()) visit(peer);
    });
  }

  // A window, and where the shards in it are: of equal size, but that the first ones may have a pack more.
  struct Window {
    uint64_t first;  // pack of the message
    uint32_t packs;
    uint32_t generation;  // where its slots are, from a rank's base
  };
  SIGNAL_DEVICE uint32_t shard_first(const Window& w, uint32_t r) const {
    const uint32_t more = w.packs % world();
    return kTwoHops ? r * (w.packs / world()) + (r < more ? r : more) : 0;
  }
  SIGNAL_DEVICE uint32_t shard_packs(const Window& w, uint32_t r) const { return kTwoHops ? shard_first(w, r + 1) - shard_first(w, r) : w.packs; }

  // Goes through the rounds, window by window.
  struct Cursor {
    Window window;
    uint32_t number = 0;  // of the window
    uint32_t round = 0;   // in the window
    uint32_t i;           // this thread's pack of a shard
  };

  SIGNAL_DEVICE Window window_from(uint64_t first, uint32_t generation) const {
    const uint64_t left = p.packs - first;  // none behind the end
    return Window{first, uint32_t(left < p.window_packs ? left : p.window_packs), generation};
  }
  SIGNAL_DEVICE Cursor start() const { return Cursor{window_from(0, generation_at(flag % kGenerations)), 0, 0, stride.first}; }
  SIGNAL_DEVICE void advance(Cursor& c, uint32_t rounds) const {
    c.i += stride.step;
    if (++c.round != rounds) return;
    c.round = 0;
    c.i = stride.first;
    c.number += 1;
    const uint32_t next = c.window.generation + kGenerationBytes;
    c.window = window_from(c.window.first + c.window.packs, next == generation_at(kGenerations) ? generation_at(0) : next);
  }

  // Of this rank's memory, a pack of the message.
  SIGNAL_DEVICE Pack load(uint64_t pack) const {
    if (aligned && pack < p.whole_packs) return load_whole<From::kOwn>(p.input + pack * kPackBytes);
    return load_any<From::kOwn>(p.input, pack, p.bytes);
  }
  SIGNAL_DEVICE void store(uint64_t pack, const Pack& value) const {
    if (aligned && pack < p.whole_packs) return store_whole(p.output + pack * kPackBytes, value);
    store_any(p.output, pack, p.bytes, value);
  }

  // The place at rank `at` of a pack that a sender has for it, counted from its first slot.
  SIGNAL_DEVICE Pack* place(uint32_t at, const Window& w, uint32_t sender, uint32_t pack) const {
    return slot_pack(p.group.base[at], w.generation, sender, pack);
  }

  // Pushes to each peer this thread's pack of the shard that it reduces; `soon` is that pack, if it is one for all.
  SIGNAL_DEVICE void send(const Cursor& c, const Pack& soon) const {
    const Window& w = c.window;
    if constexpr (!kTwoHops) {
      if (c.i >= w.packs) return;
      const Pack pack = sendable(soon);
      each_peer([&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(place(peer, w, rank, in_slots<N>(c.i)), pack); });
    } else {
      for (uint32_t k = 1; k < world(); k++) {
        const uint32_t peer = rank_after(p.group, k);
        if (c.i < shard_packs(w, peer)) platform::send_pack(place(peer, w, rank, c.i), sendable(load(w.first + shard_first(w, peer) + c.i)));
      }
    }
  }

  // What `send` sends, asked for while something else is waited for.
  SIGNAL_DEVICE Pack fetch(const Cursor& c) const { return !kTwoHops && c.i < c.window.packs ? load(c.window.first + c.i) : Pack{}; }

  // Looks once for the peers' packs; this rank's own stands among them. Whether all are there.
  SIGNAL_DEVICE bool look(const Cursor& c, const Pack& own, Pack (&packs)[N]) const {
    bool all = true;
    if constexpr (N == 2) {
      packs[0] = own;  // of two summands the order is all the same
      packs[1] = platform::poll_pack(place(rank, c.window, 1 - rank, in_slots<N>(c.i)));
      all = is_ready(packs[1]);
    } else {
      SIGNAL_UNROLL
      for (uint32_t r = 0; r < N; r++) {
        if (!kExact && r >= world()) continue;
        packs[r] = r == rank ? own : platform::poll_pack(place(rank, c.window, r, in_slots<N>(c.i)));
        all = all && (r == rank || is_ready(packs[r]));
      }
    }
    return all;
  }

  SIGNAL_DEVICE Pack sum_of(const Pack (&packs)[N]) const {
    return sum_ranks<T, N, kExact>(p.op, world(), rank, [&](uint32_t r) { return packs[r]; });
  }

  // Reduces this thread's pack of the rank's shard and pushes the sum. False: a peer's pack did not come, which has been reported.
  SIGNAL_DEVICE bool reduce(const Cursor& c) const {
    const Window& w = c.window;
    if (c.i >= shard_packs(w, rank)) return true;
    const uint64_t pack = w.first + shard_first(w, rank) + c.i;
    const Pack own = load(pack);
    Pack arrived[N];
    bool all = false;
    SIGNAL_NO_UNROLL
    for (uint32_t polls = 0; !kBounded || polls < platform::kPollsPerCheck; polls++) {
      all = look(c, own, arrived);
      if (all) break;
      platform::relax();
    }
    if (!all) {
      if (!wait_for_packs(p.group, kOpAllReduceTwoShot, flag_after(flag, c.number), in_slots<N>(c.i), kEveryone)) return false;
      look(c, own, arrived);
    }
    Pack sum = sum_of(arrived);
    if constexpr (kTwoHops) {
      // Changes no bit: of these types no sum is -0.0, since it starts from +0.0 and none is so small that it rounds to nothing.
      sum = sendable(sum);
      each_peer([&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(place(peer, w, rank, kSumsAt + c.i), sum); });
    }
    store(pack, sum);
#ifndef SIGNAL_MUTANT_TWO_SHOT_LEAVES_SHARDS
    each_peer([&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(place(rank, w, peer, in_slots<N>(c.i)), not_ready()); });
#endif
    return true;
  }

  // Takes the sums of the peers' shards. False as in `reduce`.
  SIGNAL_DEVICE bool gather(const Cursor& c) const {
    for (uint32_t k = 1; k < world(); k++) {
      const uint32_t from = rank_after(p.group, k);
      if (c.i >= shard_packs(c.window, from)) continue;
      Pack* const at = place(rank, c.window, from, kSumsAt + c.i);
      Pack sum = platform::poll_pack(at);
      SIGNAL_NO_UNROLL
      for (uint32_t polls = 1; !is_ready(sum) && (!kBounded || polls < platform::kPollsPerCheck); polls++) {
        platform::relax();
        sum = platform::poll_pack(at);
      }
      if (!is_ready(sum)) {
        if (!wait_for_packs(p.group, kOpAllReduceTwoShot, flag_after(flag, c.number), kSumsAt + c.i, 1u << from)) return false;
        sum = platform::poll_pack(at);
      }
      store(c.window.first + shard_first(c.window, from) + c.i, sum);
#ifndef SIGNAL_MUTANT_TWO_SHOT_LEAVES_SUMS
      platform::send_pack(at, not_ready());
#endif
    }
    return true;
  }

  // What the call before left, in the generation of the third window.
  SIGNAL_DEVICE void clear_left(uint32_t left) const {
    const Window third = {0, 0, generation_at((flag % kGenerations + kGenerations - 1) % kGenerations)};
    for (uint32_t i = stride.first; i < left; i += stride.step) {
      each_peer([&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(place(rank, third, peer, i), not_ready()); });
    }
  }

  SIGNAL_DEVICE void run() {
    Member m(p.group, kOpAllReduceTwoShot);
    Cleared cleared(m);
    const uint64_t state_at = platform::opaque(p.group.own + kLamportState);
    const uint32_t windows = uint32_t((p.packs + p.window_packs - 1) / p.window_packs);
    const uint32_t shard = kTwoHops ? (uint32_t(p.window_packs) + world() - 1) / world() : uint32_t(p.window_packs);
    const uint32_t rounds = (shard + stride.step - 1) / stride.step;  // of each window
    begin_call(p.group);
    Cursor out = start();  // of the generation nothing is known yet, nor needed
    Pack soon = fetch(out);
    const Pack state = platform::poll_pack(reinterpret_cast<const Pack*>(state_at));
    m.read();
    if (windows > 1) cleared.read();
    flag = state.word[0];
    if (flag == kNoFlag) {
      if (platform::thread_id() == 0) report_stopped(p.group, kOpAllReduceTwoShot, flag, kNoFlag);
      return;
    }
    out = start();
    test_delay(m, kPhaseStart);

    // A call of one window sends at once, as a Lamport call does. Of more, number 0 comes first, so that its release has no stores to
    // wait for.
    const auto send_next = [&]() SIGNAL_INLINE {
      send(out, soon);
      advance(out, rounds);
      soon = fetch(out);
    };
    const auto send_window = [&]() SIGNAL_INLINE {
      while (out.number == 0) send_next();
    };
    if (windows == 1) send_window();
#ifdef SIGNAL_MUTANT_TWO_SHOT_FIRST_NUMBER_AT_ONCE
    if (windows > 1) cleared.signal();
#endif
#ifndef SIGNAL_MUTANT_TWO_SHOT_LEAVES_WHAT_IS_LEFT
    clear_left(state.word[1]);
#endif
    platform::release_wave();
    const bool stop = platform::block_any(m.abort != 0);  // behind it the whole block has read the state, and cleared
    uint32_t arrived_before = kNoFlag;
    if (platform::thread_id() == 0) {
      if (kArrivesAtOnce || windows == 1 || stop) arrived_before = arrive(stop);
      if (platform::block_id() == 0) m.count_call();
    }
    if (stop) {
      if (platform::thread_id() == 0) report_stopped(p.group, kOpAllReduceTwoShot, flag, arrived_before % kGaveUp);
      return;
    }
    if (windows > 1) {
#ifndef SIGNAL_MUTANT_TWO_SHOT_FIRST_NUMBER_AT_ONCE
      cleared.signal();
#endif
      send_window();
    }

#if defined(SIGNAL_MUTANT_TWO_SHOT_LAST_NUMBER_NOT_AWAITED)
    const uint32_t numbers = windows > 2 ? windows - 2 : windows - 1;
#elif defined(SIGNAL_MUTANT_TWO_SHOT_LAST_SUMS_NOT_AWAITED)
    const uint32_t numbers = windows - 1;
#else
    const uint32_t numbers = kTwoHops && windows > 2 ? windows : windows - 1;  // that are awaited
#endif
    bool alive = true;
    Cursor in = start(), sums = in;
    while (in.number < windows) {
      alive = alive && reduce(in);
      if constexpr (kTwoHops) {
        // The sums of the round before, which have had time to come.
        if (in.number + in.round != 0) {
          alive = alive && gather(sums);
          advance(sums, rounds);
        }
      }
      const bool ends = in.round + 1 == rounds;
      if (ends) test_delay(m, kPhaseMiddle);
#ifdef SIGNAL_MUTANT_TWO_SHOT_SECOND_WINDOW_UNHEARD
      const bool awaits = in.number < numbers && ends;
#else
      const bool awaits = in.number < numbers && (in.number == 0 ? in.round == 0 : ends);
#endif
      const bool signals = in.number + 1 < numbers && ends;
#ifdef SIGNAL_MUTANT_TWO_SHOT_SIGNALS_AT_ONCE
      if (signals) cleared.signal();
#endif
      if (awaits || signals) {
#ifndef SIGNAL_MUTANT_TWO_SHOT_NEVER_AWAITS
        if (awaits) alive = cleared.await(kPhaseMiddle) && alive;
#endif
        platform::release_wave();
        const bool gives_up = platform::block_any(!alive);
        const bool arrives = gives_up || (awaits && in.number + 1 == numbers);
        if (!kArrivesAtOnce && arrives && platform::thread_id() == 0) arrived_before = arrive(gives_up);
        if (gives_up) return leave(arrived_before, kNoFlag);
#ifndef SIGNAL_MUTANT_TWO_SHOT_SIGNALS_AT_ONCE
        if (signals) cleared.signal();
#endif
      }
      advance(in, rounds);
      // A window ahead, or two where a window is one round.
#ifdef SIGNAL_MUTANT_TWO_SHOT_SENDS_TOO_EARLY
      const uint32_t most = in.number + (rounds == 1 ? 3 : 2);
#else
      const uint32_t most = in.number + (rounds == 1 ? 2 : 1);
#endif
      while (out.number < windows && (out.number < most || (out.number == most && out.round < in.round))) send_next();
    }
    if constexpr (kTwoHops) alive = alive && gather(sums);
    test_delay(m, kPhaseExchange);
#if defined(SIGNAL_MUTANT_TWO_SHOT_FLAG_ADVANCES_BY_ONE)
    leave(arrived_before, alive ? flag_after(flag, 1) : kNoFlag);
#elif defined(SIGNAL_MUTANT_TWO_SHOT_ADVANCES_AFTER_A_FAULT)
    leave(arrived_before, flag_after(flag, windows));
#else
    leave(arrived_before, alive ? flag_after(flag, windows) : kNoFlag);
#endif
  }

  // A block of a call of windows arrives once it has the last number, or gives up before, which the count tells whoever arrives last:
  // what it gives up may be windows that a peer has all packs of and has yet to read, and the next call's first one would go there.
  static constexpr uint32_t kGaveUp = 1 << 16;
#ifdef SIGNAL_MUTANT_TWO_SHOT_ARRIVES_AT_ONCE
  static constexpr bool kArrivesAtOnce = true;
#else
  static constexpr bool kArrivesAtOnce = false;
#endif

  SIGNAL_DEVICE uint32_t arrive(bool gives_up) const {
    return platform::arrive(at<uint32_t>(p.group.own, kLamportState + offsetof(LamportState, arrival)), gives_up ? kGaveUp + 1 : 1);
  }
  SIGNAL_DEVICE void leave(uint32_t arrived_before, flag_t next) const {
    leave_state(p.group, arrived_before % kGaveUp, arrived_before < kGaveUp ? next : kNoFlag, 0);
  }
};

template <class T>
SIGNAL_DEVICE void all_reduce_two_shot(const AllReduceParams& p) {
  TwoShot<T, kMaxGpus, false>(p).run();
}

// For up to 4 ranks, with code for each number.
template <class T>
SIGNAL_DEVICE void all_reduce_two_shot_small(const AllReduceParams& p) {
  with_world<1, 4>(p.group.world, [&](auto world) SIGNAL_INLINE { TwoShot<T, decltype(world)::value, true>(p).run(); });
}

}  // namespace signal_comm
