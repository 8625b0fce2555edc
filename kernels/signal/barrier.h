// Barriers among block b of every rank (DESIGN P1 to P3).
//
// Both kinds keep a counter of their own per peer and store its value into the peer's memory; the waiter compares for
// equality. Two sets of words, chosen by the value's lowest bit, because a fast peer can reach barrier k+1 before a slow
// block has read k; it cannot reach k+2, for which it needs this block's k+1. Equality makes the wrap of u32 harmless.
//
// The counters of the two kinds are apart: with one for both, a word of one kind could match after 2^32 barriers of the
// other.
#pragma once

#include "wait.h"

namespace signal_comm {

// Shared by the threads of a block.
struct BlockShared {
  uint64_t source[kMaxGpus];  // where each rank's published data lies, as this device sees it; kNobody: it did not come
};

// Places are below it. A barrier without places sends it too, so that a peer that expects a place, because it makes another
// call, finds none.
constexpr uint64_t kNobody = uint64_t(1) << 62;
// With kNobody: the peer came, with another call.
constexpr uint64_t kOther = uint64_t(1) << 61;

// What one block of this rank shares with the same block of one peer.
struct Pair {
  flag_t count;  // barriers begun with the peer
  flag_t* counter;
  uint64_t out, in;  // this block's words, or lines, for even values: at the peer, and here
};

// A kind of barrier knows where the words of a pair are: this rank and one peer.
template <class Kind>
SIGNAL_DEVICE Pair read_pair(const GroupParams& g, uint32_t peer) {
  Pair pair = Kind::place(g, peer);
  pair.count = platform::load_relaxed(pair.counter);
  return pair;
}

// Barriers by the counters of the Signal structure.
struct CounterBarrier {
  SIGNAL_DEVICE static Pair place(const GroupParams& g, uint32_t peer) {
    const uint32_t block = platform::block_id();
    return Pair{0, at<flag_t>(g.own, kSelfCounters + counter_offset(g.domain, block, peer)),
                g.base[peer] + (kPeerCounters + set_offset(g.domain, block, g.rank)),
                g.own + (kPeerCounters + set_offset(g.domain, block, peer))};
  }

  // What was last read of a peer's word.
  struct Word {
    flag_t seen;
    SIGNAL_DEVICE flag_t value() const { return seen; }
    SIGNAL_DEVICE bool is(flag_t expected) const { return seen == expected; }
    SIGNAL_DEVICE uint64_t data() const { return 0; }
  };

  SIGNAL_DEVICE static flag_t* in_set(uint64_t even, flag_t value) {
#ifdef SIGNAL_MUTANT_ONE_COUNTER_SET
    value = 0;
#endif
    return reinterpret_cast<flag_t*>(even + uint64_t(value & 1) * kSetBytes);
  }
  SIGNAL_DEVICE static void send(const Pair& pair, uint64_t, bool ordered) {
    flag_t* const to = in_set(pair.out, pair.count);
    if (ordered) {
      // Release: pairs with the peer's acquire. All stores of this block before the barrier (ordered behind the block
      // barrier) are visible to the peer's block once it has seen the value.
      platform::signal_release(to, pair.count);
    } else {
      // Relaxed: for barriers over data that predates the kernel, or that was only read (P2).
      platform::signal_relaxed(to, pair.count);
    }
  }
  SIGNAL_DEVICE static Word look(const Pair& pair) { return Word{platform::load_relaxed(in_set(pair.in, pair.count))}; }
  // Acquire: pairs with the release in `send`. Polls are relaxed, since each acquire would invalidate the caches.
  SIGNAL_DEVICE static void acquire(const Pair& pair) { platform::acquire(in_set(pair.in, pair.count)); }
};

// What is in a line: 64 bits of data, and beside each half the value of its barrier, or the epoch of its call.
struct LineWord {
  Line line;

  SIGNAL_DEVICE flag_t value() const { return flag_t(line.low >> 32); }
#ifdef SIGNAL_MUTANT_LINE_CHECKED_IN_ONE_HALF
  SIGNAL_DEVICE bool is(flag_t expected) const { return value() == expected; }
#else
  SIGNAL_DEVICE bool is(flag_t expected) const { return value() == expected && flag_t(line.high >> 32) == expected; }
#endif
  SIGNAL_DEVICE uint64_t data() const { return line.high << 32 | uint32_t(line.low); }

  SIGNAL_DEVICE static void send(Line* to, flag_t value, uint64_t data, bool ordered) {
    const uint64_t low = uint64_t(value) << 32 | uint32_t(data);
    const uint64_t high = uint64_t(value) << 32 | data >> 32;
    if (ordered) {
      platform::signal_release(to, low, high);
    } else {
      platform::signal_relaxed(to, low, high);
    }
  }
};

// Barriers by lines, which carry 64 bits of data beside the value. A kernel that publishes its input runs all its barriers
// by these.
struct LineBarrier {
  SIGNAL_DEVICE static Pair place(const GroupParams& g, uint32_t peer) {
    const uint32_t slot = platform::block_id() * kMaxGpus + peer;
    return Pair{0, reinterpret_cast<flag_t*>(g.line_counters + uint64_t(slot) * sizeof(flag_t)),
                g.base[peer] + (platform::block_id() * uint32_t(kMaxGpus * sizeof(Line)) + g.line_out),
                g.lines + uint64_t(slot) * sizeof(Line)};
  }

  using Word = LineWord;

  SIGNAL_DEVICE static Line* in_set(uint64_t even, flag_t value) {
#ifdef SIGNAL_MUTANT_ONE_LINE_SET
    value = 0;
#endif
    return reinterpret_cast<Line*>(even + uint64_t(value & 1) * kLineSetBytes);
  }
  SIGNAL_DEVICE static void send(const Pair& pair, uint64_t data, bool ordered) {
    // Release: pairs with `acquire`, as in CounterBarrier.
    LineWord::send(in_set(pair.out, pair.count), pair.count, data, ordered);
  }
  SIGNAL_DEVICE static Word look(const Pair& pair) { return Word{platform::load_line(in_set(pair.in, pair.count))}; }
  SIGNAL_DEVICE static void acquire(const Pair& pair) { platform::acquire(&in_set(pair.in, pair.count)->low); }
};

// Reports a fault of a barrier, as `report_fault` does.
template <class Kind>
SIGNAL_DEVICE void report_missing(const GroupParams& g, uint32_t operation, uint32_t phase, uint32_t late) {
  report_fault(Member(g, operation), phase, late, [&](uint32_t peer) {
    // Relaxed: the block's other threads have stored their counters long ago, or are about to see the abort word too.
    const Pair pair = read_pair<Kind>(g, peer);
    return Seen{pair.count, Kind::look(pair).value()};
  });
}

// The same, and ends the thread where the platform lets it. A function of its own: what a fault needs takes no place among what
// every call needs.
template <class Kind>
SIGNAL_COLD void report_absent(const GroupParams& g, uint32_t operation, uint32_t phase, uint32_t late) {
  report_missing<Kind>(g, operation, phase, late);
  platform::end_thread();
}

// A start barrier behind which some rank has no place: it gave up, which has been reported, or makes a call without one, or
// one of other sizes.
template <class Kind>
SIGNAL_COLD void report_incomplete(const GroupParams& g, uint32_t operation, const BlockShared& shared) {
  if (platform::thread_id() != 0) return;
  uint32_t late = 0, other = 0;
  for (uint32_t r = 0; r < g.world; r++) {
    if (r == g.rank || (shared.source[r] & kNobody) == 0) continue;
    late |= 1u << r;
    other |= (shared.source[r] & kOther) != 0 ? 1u << r : 0;
  }
  if (other != 0) return report_other(g, operation, other);
  if (late != 0) report_absent<Kind>(g, operation, kPhaseStart, late);
}

// Whether a peer that did not come at once comes in time.
template <class Kind>
SIGNAL_DEVICE bool comes(const GroupParams& g, uint32_t operation, uint32_t peer) {
  const Pair pair = read_pair<Kind>(g, peer);  // its counter is stored: this barrier's value
  return wait_until(Member(g, operation), [&] { return Kind::look(pair).is(pair.count); });
}

// The wait for a peer that did not come at once. True when it came; else the fault has been reported.
template <class Kind>
SIGNAL_COLD bool wait_on(const GroupParams& g, uint32_t operation, uint32_t phase, uint32_t peer) {
  if (comes<Kind>(g, operation, peer)) return true;
  report_absent<Kind>(g, operation, phase, 1u << peer);
  return false;
}

// What travels with a barrier: the word that each peer gets.

struct NoMessage {
  static constexpr bool kHasPlace = false;

  SIGNAL_DEVICE uint64_t to(uint32_t) const { return kNobody; }
  SIGNAL_DEVICE uint64_t to_first() const { return kNobody; }
  SIGNAL_DEVICE static bool is_staged(uint64_t) { return false; }
  SIGNAL_DEVICE uint64_t place(uint32_t, uint64_t data) const { return data; }
};

// With a place in the scratch of whoever sends it, from the start of the domain's share.
constexpr uint64_t kStaged = uint64_t(1) << 63;

// Where the peers find this rank's input, or put its output: the address there, or that it is staged. Behind the barrier
// shared.source tells where each rank's lies.
struct InputPlace {
  const GroupParams& group;
  bool staged;                       // in this rank's scratch, from its start
  const uint64_t (&view)[kMaxGpus];  // else: where each rank sees it
  uint64_t offset;                   // bytes from there
  uint64_t first;                    // what the thread's first peer is sent: asked for before anything waits for memory

  SIGNAL_DEVICE InputPlace(const GroupParams& g, bool in_scratch, const uint64_t (&seen_at)[kMaxGpus], uint64_t bytes)
      : group(g), staged(in_scratch), view(seen_at), offset(bytes), first(0) {
    first = platform::opaque(to(platform::thread_id() % kMaxGpus));
  }

  static constexpr bool kHasPlace = true;

  // To this rank itself: where it reads its input, staged or not.
  SIGNAL_DEVICE uint64_t to(uint32_t peer) const { return staged && peer != group.rank ? kStaged : view[peer] + offset; }
  SIGNAL_DEVICE uint64_t to_first() const { return first; }
  SIGNAL_DEVICE static bool is_staged(uint64_t data) { return (data & kStaged) != 0; }
  // Where that is which a peer has sent.
  SIGNAL_DEVICE uint64_t place(uint32_t peer, uint64_t data) const {
    return is_staged(data) ? group.base[peer] + group.scratch_offset : data;
  }
};

// Which barrier of its kernel it is. The first heeds the abort word before it signals anything: a signal sent after a fault
// could be taken for another barrier's. Behind the last nothing is left to agree on, and a thread may leave by itself.
enum class Turn { kFirst, kBetween, kLast };

// With whom a block of this rank meets: all ranks...
struct Everyone {
  SIGNAL_DEVICE static constexpr bool has(uint32_t) { return true; }
};

// ...or those alone with whom it has business, and who have it with it: bit r for rank r.
struct Partners {
  uint32_t mask = 0;

  SIGNAL_DEVICE bool has(uint32_t peer) const { return (mask >> peer & 1) != 0; }
};

// All barriers of one kind in a kernel.
//
// A thread looks up its first pair, with the peer of its own number, when the kernel begins: its addresses before the wait for
// earlier work, its counter together with the abort word. On a GPU a block has at least as many threads as there are ranks, so
// that a thread has one peer at most: a loop over peers costs 0.35 us on an H200, even if it never goes around again. On the
// host one thread may stand for all.
template <class Kind, class Who = Everyone, class Held = const Member&>
struct Barriers {
  Held m;
  BlockShared& shared;
  Who who = {};
  bool always_ordered;  // all barriers release and acquire, whatever each asks for
  Pair first = {};

  SIGNAL_DEVICE Barriers(const Member& member, BlockShared& block)
      : Barriers(member, block, (member.group.flags & kFlagOrdered) != 0) {}
  SIGNAL_DEVICE Barriers(const Member& member, BlockShared& block, bool always)
      : m(member), shared(block), always_ordered(platform::kAlwaysOrdered || always) {
    if (platform::thread_id() < kMaxGpus) {
      first = Kind::place(m.group, platform::thread_id());
      first.out = platform::opaque(first.out);  // here, while there is time
      first.in = platform::opaque(first.in);
    }
  }

  // Before the first barrier, behind `begin_call`.
  SIGNAL_DEVICE void read() {
    if (platform::thread_id() < kMaxGpus) first.count = platform::load_relaxed(first.counter);
  }

  SIGNAL_DEVICE Pair with(uint32_t peer) const {
    if constexpr (platform::kMinBlockThreads >= kMaxGpus) return first;
    return peer == platform::thread_id() ? first : read_pair<Kind>(m.group, peer);
  }

  // The ranks that this thread stands for.
  template <class Visit>
  SIGNAL_DEVICE void for_each_rank(Visit visit) const {
    const uint32_t thread = platform::thread_id();
    if constexpr (platform::kMinBlockThreads >= kMaxGpus) {
      if (thread < m.group.world) visit(thread);
    } else {
      for (uint32_t rank = thread; rank < m.group.world; rank += platform::block_dim()) visit(rank);
    }
  }

  // Runs one barrier. Every thread of the block calls it; `complete` tells whether the kernel may go on.
  template <class Message>
  SIGNAL_DEVICE void run(uint32_t phase, bool ordered, Turn turn, const Message& message) {
    const uint32_t own = m.group.rank;
    const uint32_t thread = platform::thread_id();
    const bool strong = ordered || always_ordered;
    const uint64_t to_first = message.to_first();

    // The block's accesses come before thread t's signal. On gfx9 the block barrier alone does not wait for other waves'
    // stores, so each wave releases its own.
    if (strong) platform::release_wave();
    if (turn != Turn::kFirst || strong) platform::block_sync();

    const bool stop = turn == Turn::kFirst && m.abort != 0;
    if (Message::kHasPlace || turn == Turn::kFirst) {
      // This rank's own place, and a first mark for the others.
      for_each_rank([&](uint32_t rank) {
        const bool place = Message::kHasPlace && (rank == own || who.has(rank));
        shared.source[rank] = stop ? kNobody : !place ? 0 : rank == thread ? to_first : message.to(rank);
      });
    }
    // First all stores, then all waits: a wave has no independent progress on AMD, and one thread may stand for all.
    if (!stop) {
      for_each_rank([&](uint32_t peer) {
        if (peer != own) {
          if (!who.has(peer)) return;
          Pair pair = with(peer);
          pair.count += 1;
          Kind::send(pair, peer == thread ? to_first : message.to(peer), strong);
#ifndef SIGNAL_MUTANT_SELF_COUNTER_BUMPED_LATE
          platform::store_relaxed(pair.counter, pair.count);
#endif
        } else if (turn == Turn::kFirst && platform::block_id() == 0) {
          m.count_call();
        }
      });
      if (who.has(thread % kMaxGpus)) first.count += 1;
      bool patient = true;
      for_each_rank([&](uint32_t peer) {
        if (peer == own || !who.has(peer)) return;
        const Pair pair = with(peer);
        // Nothing but the polls: a wait that succeeds soon has no jump over anything else in its way.
        typename Kind::Word found;
        SIGNAL_NO_UNROLL
        for (uint32_t polls = 0; !kBounded || polls < platform::kPollsPerCheck; polls++) {
          found = Kind::look(pair);
          if (found.is(pair.count)) break;
          platform::relax();
        }
        if (!found.is(pair.count)) {
          const uint64_t place = shared.source[peer];
          shared.source[peer] = kNobody;  // for the others of the block, unless it comes after all
          // After one wait was given up the others are looked at shortly: a thread with several peers costs one deadline.
          patient = patient && wait_on<Kind>(m.group, m.operation, phase, peer);
          if (!patient) return;
          shared.source[peer] = place;
          found = Kind::look(pair);
        }
        const uint64_t data = found.data();
        const bool staged = Message::is_staged(data);
        // A peer that staged its input has released it, whatever this rank did; one that did not has published memory that
        // predates its kernel.
#ifdef SIGNAL_MUTANT_START_BARRIER_UNACQUIRED
        if ((strong && phase != kPhaseStart) || staged) Kind::acquire(pair);
#else
        if (strong || staged) Kind::acquire(pair);
#endif
#ifdef SIGNAL_MUTANT_SELF_COUNTER_BUMPED_LATE
        platform::store_relaxed(pair.counter, pair.count);
#endif
        if (Message::kHasPlace) shared.source[peer] = message.place(peer, data);
      });
    } else if (thread < m.group.world) {
      report_absent<Kind>(m.group, m.operation, phase, 0);
    }
  }

  // A barrier without data; false: the kernel must leave now. Behind the last barrier every thread goes its own way.
  SIGNAL_DEVICE bool meet(uint32_t phase, bool ordered, Turn turn) {
    run(phase, ordered, turn, NoMessage{});
    if (turn != Turn::kLast) platform::block_sync();
    test_delay(m, phase);
    return turn == Turn::kLast || complete();
  }

  // A start barrier over symmetric or staged input. Behind it the caller must ask for `complete`.
  template <class Place>
  SIGNAL_DEVICE void publish(const Place& place, bool ordered, Turn turn) {
    run(kPhaseStart, ordered, turn, place);
#ifndef SIGNAL_MUTANT_NO_BLOCK_BARRIER_BEHIND_PLACES
    platform::block_sync();
#endif
    test_delay(m, kPhaseStart);
  }

  // Whether all ranks came, as every thread of the block sees it behind the block barrier. If not, a fault is reported now, unless
  // one has been.
  SIGNAL_DEVICE bool complete() const {
    uint64_t all = 0;
    for (uint32_t r = 0; r < m.group.world; r++) all |= shared.source[r];
    if ((all & kNobody) == 0) return true;
    report_incomplete<Kind>(m.group, m.operation, shared);
    return false;
  }
};

// Where a kernel touches memory for the first time.
template <class... Barriers>
SIGNAL_DEVICE void begin(Member& m, Barriers&... barriers) {
  begin_call(m.group);
  m.read();
  (barriers.read(), ...);
}

SIGNAL_DEVICE void barrier_kernel(const BarrierParams& params) {
  SIGNAL_SHARED(BlockShared, shared);
  Member m(params.group, kOpBarrier);
  Barriers<CounterBarrier> barriers(m, shared);
  begin(m, barriers);
  barriers.meet(kPhaseStart, true, Turn::kFirst);
}

}  // namespace signal_comm
