// Barriers among block b of every rank (DESIGN P1 to P3).
//
// Both kinds keep a counter of their own per peer and store its value into the peer's memory; the waiter compares for
// equality. Two sets of words, chosen by the value's lowest bit, because a fast peer can reach barrier k+1 before a slow
// block has read k; it cannot reach k+2, for which it needs this block's k+1. Equality makes the wrap of u32 harmless.
#pragma once

#include "wait.h"

namespace signal_comm {

// What a publishing barrier tells the peers: where each of them finds this rank's input. An address is below 2^63.
struct Place {
  bool staged;                       // in this rank's scratch, from its start
  const uint64_t (&view)[kMaxGpus];  // else: where each peer sees it
  uint64_t offset;                   // bytes from there
};

constexpr uint64_t kStaged = uint64_t(1) << 63;  // instead of an address

// Shared by the threads of a block.
struct BlockShared {
  uint64_t source[kMaxGpus];  // where each rank's published data lies, as this device sees it
};

// The host image alone carries the test hook that holds a rank up behind a barrier.
SIGNAL_DEVICE void test_delay(const Member& m, uint32_t phase) {
  if constexpr (platform::kTestHooks) {
    if (m.group.delay_phase == phase) {
      const uint64_t began = platform::clock();
      while (platform::clock() - began < m.group.delay_ticks) platform::relax();
    }
  }
}

// The things in which the two kinds of barrier differ.

struct CounterBarrier {
  Member& m;

  // What was last read of a peer's word.
  struct Word {
    flag_t seen;
    SIGNAL_DEVICE flag_t value() const { return seen; }
    SIGNAL_DEVICE bool is(flag_t expected) const { return seen == expected; }
  };

  SIGNAL_DEVICE flag_t& own_count() const { return m.count; }
  SIGNAL_DEVICE flag_t* counter(uint32_t peer) const {
    return at<flag_t>(m.group.own, kSelfCounters + counter_offset(m.group.domain, platform::block_id(), peer));
  }
  SIGNAL_DEVICE flag_t* in_set(uint64_t even, flag_t value) const {
#ifdef SIGNAL_MUTANT_ONE_COUNTER_SET
    value = 0;
#endif
    return at<flag_t>(even, (value & 1) * kSetBytes);
  }
  SIGNAL_DEVICE flag_t* outbox(uint32_t peer, flag_t value) const {
    if (peer == platform::thread_id()) return in_set(m.count_out, value);
    const uint32_t offset = set_offset(m.group.domain, platform::block_id(), m.group.rank);
    return in_set(m.group.base[peer] + (kPeerCounters + offset), value);
  }
  SIGNAL_DEVICE flag_t* inbox(uint32_t peer, flag_t value) const {
    if (peer == platform::thread_id()) return in_set(m.count_in, value);
    return in_set(m.group.own + (kPeerCounters + set_offset(m.group.domain, platform::block_id(), peer)), value);
  }
  SIGNAL_DEVICE void send(uint32_t peer, flag_t value, bool ordered) const {
    flag_t* to = outbox(peer, value);
    if (ordered) {
      // Release: pairs with the peer's acquire in `arrived`. All stores of this block before the barrier (ordered behind
      // the block barrier) are visible to the peer's block once it has seen the value.
      platform::signal_release(to, value);
    } else {
      // Relaxed: for barriers over data that predates the kernel, or that was only read (P2).
      platform::signal_relaxed(to, value);
    }
  }
  SIGNAL_DEVICE Word look(uint32_t peer, flag_t value) const {
    return Word{platform::load_relaxed(inbox(peer, value))};
  }
  SIGNAL_DEVICE void arrived(uint32_t peer, const Word& found, bool ordered) const {
    // Acquire: pairs with the release in `send`. Polls are relaxed, since each acquire would invalidate the caches.
    if (ordered) platform::acquire(inbox(peer, found.seen));
  }
};

struct PublishingBarrier {
  Member& m;
  BlockShared& shared;
  Place place;

  struct Word {
    Line line;
    SIGNAL_DEVICE flag_t value() const { return flag_t(line.low >> 32); }
    SIGNAL_DEVICE bool is(flag_t expected) const { return value() == expected && flag_t(line.high >> 32) == expected; }
    SIGNAL_DEVICE uint64_t data() const { return line.high << 32 | uint32_t(line.low); }
  };

  SIGNAL_DEVICE flag_t& own_count() const { return m.line_count; }
  SIGNAL_DEVICE flag_t* counter(uint32_t peer) const {
    return at<flag_t>(m.group.own, kLineCounters + counter_offset(m.group.domain, platform::block_id(), peer));
  }
  SIGNAL_DEVICE Line* in_set(uint64_t even, flag_t epoch) const {
    return at<Line>(even, (epoch & 1) * (kLineRatio * kSetBytes));
  }
  SIGNAL_DEVICE Line* outbox(uint32_t peer, flag_t epoch) const {
    if (peer == platform::thread_id()) return in_set(m.line_out, epoch);
    const uint32_t offset = set_offset(m.group.domain, platform::block_id(), m.group.rank);
    return in_set(m.group.base[peer] + (kLines + kLineRatio * offset), epoch);
  }
  SIGNAL_DEVICE Line* inbox(uint32_t peer, flag_t epoch) const {
    if (peer == platform::thread_id()) return in_set(m.line_in, epoch);
    const uint32_t offset = set_offset(m.group.domain, platform::block_id(), peer);
    return in_set(m.group.own + (kLines + kLineRatio * offset), epoch);
  }
  SIGNAL_DEVICE void send(uint32_t peer, flag_t epoch, bool ordered) const {
    const uint64_t data = place.staged ? kStaged : place.view[peer] + place.offset;
    const uint64_t low = uint64_t(epoch) << 32 | uint32_t(data);
    const uint64_t high = uint64_t(epoch) << 32 | data >> 32;
    Line* to = outbox(peer, epoch);
    if (ordered) {
      platform::signal_release(to, low, high);  // pairs with the acquire in `arrived`, as in CounterBarrier
    } else {
      platform::signal_relaxed(to, low, high);
    }
  }
  SIGNAL_DEVICE Word look(uint32_t peer, flag_t epoch) const {
    return Word{platform::load_line(inbox(peer, epoch))};
  }
  SIGNAL_DEVICE void arrived(uint32_t peer, const Word& found, bool ordered) const {
    const uint64_t data = found.data();
    shared.source[peer] = data;
    // A peer that staged its input has released it, whatever this rank did; one that did not has published memory that
    // predates its kernel.
    if (ordered || data == kStaged) {
      platform::acquire(&inbox(peer, found.value())->low);
      if (data == kStaged) shared.source[peer] = m.group.base[peer] + m.group.scratch_offset;
    }
  }
};

// Which barrier of its kernel it is. The first heeds the abort word before it signals anything: a signal sent after a fault
// could be taken for another barrier's. Behind the last nothing is left to agree on, and a thread may leave by itself.
enum class Turn { kFirst, kBetween, kLast };

// Runs one barrier. Every thread of the block calls it and, unless it is the last, gets the same answer; false: the kernel
// must leave now.
template <class Kind>
SIGNAL_DEVICE bool run_barrier(const Kind& kind, uint32_t phase, bool ordered, Turn turn) {
  Member& m = kind.m;
  const GroupParams& g = m.group;
  const uint32_t thread = platform::thread_id();
  const uint32_t threads = platform::block_dim();
  const bool strong = ordered || platform::kAlwaysOrdered || (g.flags & kFlagOrdered) != 0;

  // The block's accesses come before thread t's signal. On gfx9 the block barrier alone does not wait for other waves'
  // stores, so each wave releases its own.
  if (strong) platform::release_wave();
  if (turn != Turn::kFirst || strong) platform::block_sync();

  uint32_t late = 0;
  bool failed = turn == Turn::kFirst && m.abort != 0;
  const auto send = [&](uint32_t peer, flag_t value) {
    kind.send(peer, value, strong);
    platform::store_relaxed(kind.counter(peer), value);
  };
  const auto wait = [&](uint32_t peer, flag_t value) {
    typename Kind::Word found;
    const auto here = [&] { return (found = kind.look(peer, value)).is(value); };
    // After one wait was given up the others get a single look, so that a thread with several peers costs one deadline.
    if (late != 0 ? here() : wait_until(m, here)) {
      kind.arrived(peer, found, strong);
    } else {
      late |= 1u << peer;
    }
  };
  // First all stores, then all waits: a wave has no independent progress on AMD, and one thread may stand for all. A
  // thread has the number of its first peer; the others are for blocks of fewer threads than there are ranks.
  const bool active = thread < g.world && !failed;
  const bool has_peer = active && thread != g.rank;
  const bool has_more = active && thread + threads < g.world;
  const flag_t value = kind.own_count() += 1;
  if (has_peer) send(thread, value);
  if (has_more) {
    for (uint32_t peer = thread + threads; peer < g.world; peer += threads) {
      if (peer != g.rank) send(peer, platform::load_relaxed(kind.counter(peer)) + 1);
    }
  }
  if (turn == Turn::kFirst && !failed) m.count_call();
  if (has_peer) wait(thread, value);
  if (has_more) {
    for (uint32_t peer = thread + threads; peer < g.world; peer += threads) {
      if (peer != g.rank) wait(peer, platform::load_relaxed(kind.counter(peer)));
    }
  }
  failed = failed || late != 0;
  if (failed) report_fault(kind, phase, late);
  if (turn != Turn::kLast && platform::block_any(failed)) return false;
  test_delay(m, phase);
  return true;
}

// A barrier without data.
SIGNAL_DEVICE bool barrier(Member& m, uint32_t phase, bool ordered, Turn turn) {
  return run_barrier(CounterBarrier{m}, phase, ordered, turn);
}

// A start barrier over symmetric or staged input: when it returns true, shared.source[r] is where peer r's input lies.
SIGNAL_DEVICE bool publish_input(Member& m, BlockShared& shared, const Place& place, bool ordered, Turn turn) {
  return run_barrier(PublishingBarrier{m, shared, place}, kPhaseStart, ordered, turn);
}

SIGNAL_DEVICE void barrier_kernel(const BarrierParams& params) {
  Member m(params.group, kOpBarrier);
  barrier(m, kPhaseStart, true, Turn::kFirst);
}

}  // namespace signal_comm
