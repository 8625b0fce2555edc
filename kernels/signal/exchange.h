// Collectives in which each rank has a piece of data for each rank, by pulling: they differ in which pieces there are, and in
// whether a rank keeps all that it reads or its reduction (DESIGN P3, P12, P14).
//
// Two ranks that have nothing for each other do not meet. So a broadcast's ranks meet its root alone, and two ranks may
// exchange data while the others do something else: all that a pair must share is its own two pieces and what follows from
// them, the windows and the blocks that move them.
#pragma once

#include "reduce.h"
#include "stage.h"

namespace signal_comm {

// What a piece of `bytes` has in the window that begins at `start`.
SIGNAL_DEVICE uint64_t bytes_in_window(const ExchangeParams& p, uint64_t bytes, uint64_t start) {
  const uint64_t left = bytes > start ? bytes - start : 0;
  return left < p.window_bytes ? left : p.window_bytes;
}

// With whom this block has anything to move in the window that begins at `start`.
SIGNAL_DEVICE Partners partners_in(const ExchangeParams& p, uint64_t start) {
  Partners partners;
  SIGNAL_NO_UNROLL
  for (uint32_t r = 0; r < p.group.world; r++) {
    const bool any = r != p.group.rank && platform::block_id() < p.blocks[r] && (p.send_bytes[r] > start || p.receive_bytes[r] > start);
    partners.mask |= any ? 1u << r : 0;
  }
  return partners;
}

// Where each peer finds its piece of a window, or puts this rank's: at its address there, or in this rank's scratch. With it goes the seal that both
// have made of what they think is between them, so that a peer that makes another call is found out before anything is read.
struct PiecePlace {
  const ExchangeParams& p;
  const uint64_t (&at)[kMaxGpus];
  uint64_t start;

  static constexpr bool kHasPlace = true;
  static constexpr uint32_t kSealBits = 11;
  static constexpr uint32_t kSealAt = 50;  // addresses are below

  SIGNAL_DEVICE uint64_t to(uint32_t peer) const {
    if (peer == p.group.rank) return at[peer] + start;
    const uint64_t to = signal_comm::is_staged(p.group) ? kStaged + peer * p.slot_bytes : at[peer] + start;
    return to | uint64_t(p.seal[peer]) << kSealAt;
  }
  SIGNAL_DEVICE uint64_t to_first() const { return to(platform::thread_id() % kMaxGpus); }
  SIGNAL_DEVICE static bool is_staged(uint64_t data) { return (data & kStaged) != 0; }
  SIGNAL_DEVICE uint64_t place(uint32_t peer, uint64_t data) const {
    if ((data & kNobody) != 0) return data;
#ifndef SIGNAL_MUTANT_SEAL_NOT_COMPARED
    if ((data >> kSealAt & ((1u << kSealBits) - 1)) != p.seal[peer]) return kNobody | kOther;
#endif
    const uint64_t found = data & ((uint64_t(1) << kSealAt) - 1);
    return is_staged(data) ? p.group.base[peer] + p.group.scratch_offset + found : found;
  }
};

// Copies the peers' pieces of a window to the scratch, each to its slot, or the one piece that is for all of them.
SIGNAL_DEVICE void stage_pieces(const ExchangeParams& p, Partners partners, uint64_t start) {
  SIGNAL_NO_UNROLL
  for (uint32_t r = 0; r < p.group.world; r++) {
    const uint64_t bytes = bytes_in_window(p, p.send_bytes[r], start);
    if (!partners.has(r) || bytes == 0) continue;
    copy<From::kOwn>(p.source[r] + start, scratch_of(p.group) + r * p.slot_bytes, bytes, Stride(p.blocks[r]));
    if (p.slot_bytes == 0) break;
  }
}

using PieceBarriers = Barriers<LineBarrier, Partners>;

// Runs through the windows, as many as the pieces of the partners take, and `least` bytes: `move(start, last)` for each, until it
// gives false.
template <class Move>
SIGNAL_DEVICE void for_each_window(const ExchangeParams& p, PieceBarriers& barriers, uint64_t least, Move move) {
  uint64_t start = 0;
  Partners next = partners_in(p, start);
  for (bool last = false; !last; start += p.window_bytes) {
    barriers.who = next;
    next = partners_in(p, start + p.window_bytes);
    last = next.mask == 0 && least <= start + p.window_bytes;
    if (!move(start, last)) return;
  }
}

// By pulling: `consume(shared, partners, start)` takes what the partners have published of a window. `turn` is that of the first
// barrier.
template <class Consume>
SIGNAL_DEVICE void exchange_windows(const ExchangeParams& p, Member& m, PieceBarriers& barriers, Turn turn, uint64_t least, Consume consume) {
  for_each_window(p, barriers, least, [&](uint64_t start, bool last) SIGNAL_INLINE {
    const Partners partners = barriers.who;
    if (may_stage(m)) stage_pieces(p, partners, start);
    barriers.publish(PiecePlace{p, p.source, start}, is_staged(p.group), start == 0 ? turn : Turn::kBetween);
    if (!barriers.complete()) return false;
    consume(barriers.shared, partners, start);
    return exit_barrier(barriers, last ? Turn::kLast : Turn::kBetween);
  });
}

template <class Consume>
SIGNAL_DEVICE void exchange(const ExchangeParams& p, uint64_t least, Consume consume) {
  SIGNAL_SHARED(BlockShared, shared);
  Member m(p.group, p.operation);
  PieceBarriers barriers(m, shared);
  begin(m, barriers);
  exchange_windows(p, m, barriers, Turn::kFirst, least, consume);
}

// This rank's own piece, which no window divides: nobody else reads it.
SIGNAL_DEVICE void keep_own(const ExchangeParams& p) {
  const uint32_t rank = p.group.rank;
  if (p.source[rank] != p.target[rank]) copy<From::kOwn>(p.source[rank], p.target[rank], p.receive_bytes[rank], Stride());
}

// Keeps what is for this rank in one window.
SIGNAL_DEVICE void keep_pieces(const ExchangeParams& p, const BlockShared& shared, Partners partners, uint64_t start) {
  SIGNAL_NO_UNROLL
  for (uint32_t k = 1; k < p.group.world; k++) {
    const uint32_t from = rank_after(p.group, k);
    if (!partners.has(from)) continue;
    copy<From::kPeer>(shared.source[from], p.target[from] + start, bytes_in_window(p, p.receive_bytes[from], start), Stride(p.blocks[from]));
  }
  if (start == 0) keep_own(p);
}

// The same by pushing: what is told is where pieces go, in the peer's memory or its scratch, and behind the second barrier they are
// there. `own()` keeps what this rank has for itself; `finish(partners, start)` does what is left to do with pieces in the scratch.
template <class Own, class Finish>
SIGNAL_DEVICE void push_windows(const ExchangeParams& p, BlockShared& shared, uint64_t least, Own own, Finish finish) {
  Member m(p.group, p.operation);
  PieceBarriers barriers(m, shared);
  begin(m, barriers);
  for_each_window(p, barriers, least, [&](uint64_t start, bool) SIGNAL_INLINE {
    // Relaxed: what this rank has read of its memory before, it has read.
#ifdef SIGNAL_MUTANT_PUSHES_WINDOWS_UNASKED
    if (start == 0)
#endif
    barriers.publish(PiecePlace{p, p.target, start}, false, start == 0 ? Turn::kFirst : Turn::kBetween);
    if (!barriers.complete()) return false;
    // Some blocks before they push and some behind it, so that the links and the own memory are busy at once.
    const bool own_first = platform::block_id() % 2 != 0;
    if (start == 0 && own_first) own();
    SIGNAL_NO_UNROLL
    for (uint32_t k = 1; k < p.group.world; k++) {
      const uint32_t to = rank_after(p.group, k);
      if (!barriers.who.has(to)) continue;
#ifdef SIGNAL_MUTANT_PUSHES_BY_ALL_BLOCKS
      const Stride stride;
#else
      const Stride stride(p.blocks[to]);
#endif
      copy<From::kOwn>(p.source[to] + start, shared.source[to], bytes_in_window(p, p.send_bytes[to], start), stride);
    }
    if (start == 0 && !own_first) own();
    // Peers write here again behind a start barrier only, so no other one follows.
    if (!await_pushes(barriers, kPhaseExit)) return false;
    finish(barriers.who, start);
    return true;
  });
}

// Where a peer's piece of a window lies in this rank's scratch.
SIGNAL_DEVICE uint64_t pushed_to(const ExchangeParams& p, uint32_t from) { return scratch_of(p.group) + from * p.slot_bytes; }

SIGNAL_COLD void push_data(const ExchangeParams& p) {
  SIGNAL_SHARED(BlockShared, shared);
  push_windows(p, shared, 0, [&]() SIGNAL_INLINE { keep_own(p); }, [&](Partners partners, uint64_t start) SIGNAL_INLINE {
    if (!is_staged(p.group)) return;
    SIGNAL_NO_UNROLL
    for (uint32_t from = 0; from < p.group.world; from++) {
      if (!partners.has(from)) continue;
      copy<From::kPeer>(pushed_to(p, from), p.target[from] + start, bytes_in_window(p, p.receive_bytes[from], start), Stride(p.blocks[from]));
    }
  });
}

template <class T>
SIGNAL_COLD void push_reduce_scatter(const ExchangeParams& p) {
  SIGNAL_SHARED(PushShared, shared);
  BlockShared& slots = shared.slots;
  const uint32_t rank = p.group.rank;
  push_windows(p, shared.places, p.receive_bytes[rank], [] {}, [&](Partners, uint64_t start) SIGNAL_INLINE {
    if (platform::thread_id() == 0) {
      for (uint32_t r = 0; r < p.group.world; r++) slots.source[r] = r == rank ? p.source[r] + start : pushed_to(p, r);
    }
#ifndef SIGNAL_MUTANT_NO_BLOCK_BARRIER_BEHIND_SLOTS
    platform::block_sync();
#endif
    const uint64_t bytes = bytes_in_window(p, p.receive_bytes[rank], start);
    if (bytes != 0) reduce<T>(p.group, p.op, p.dtype, slots, Range{0, p.target[rank] + start, nullptr, bytes});
  });
}

// Keeps every piece that is for this rank.
SIGNAL_DEVICE void move_data(const ExchangeParams& p) {
  if (is_pushed(p.group)) return push_data(p);
  exchange(p, 0, [&](const BlockShared& shared, Partners partners, uint64_t start) SIGNAL_INLINE { keep_pieces(p, shared, partners, start); });
}

// How many elements each peer gets, instead of a place: under the same seal.
struct PieceCount {
  const CountedParams& p;

  static constexpr bool kHasPlace = true;

  SIGNAL_DEVICE uint64_t of(uint32_t rank) const { return platform::load(reinterpret_cast<const uint32_t*>(p.counts) + rank); }
  SIGNAL_DEVICE uint64_t to(uint32_t peer) const {
    return of(peer) | (peer == p.exchange.group.rank ? 0 : uint64_t(p.exchange.seal[peer]) << PiecePlace::kSealAt);
  }
  SIGNAL_DEVICE uint64_t to_first() const {
    const uint32_t peer = platform::thread_id() % kMaxGpus;
    return peer < p.exchange.group.world ? to(peer) : 0;
  }
  SIGNAL_DEVICE static bool is_staged(uint64_t) { return false; }
  SIGNAL_DEVICE uint64_t place(uint32_t peer, uint64_t data) const {
    if ((data & kNobody) != 0) return data;
#ifdef SIGNAL_MUTANT_SEAL_NOT_COMPARED
    return uint32_t(data);
#endif
    return data >> PiecePlace::kSealAt == p.exchange.seal[peer] ? uint32_t(data) : kNobody | kOther;
  }
};

struct CountedShared {
  BlockShared places;
  ExchangeParams p;  // with the sizes that the counts give: indexed, so that a copy of each thread's would lie in its stack
};

// The same for pieces of which each rank has the sizes, as counts of elements, in the device's memory: ranks tell each other before
// they move anything. Where a count is more than there is room for, so much is moved as there is, and the count is delivered.
SIGNAL_DEVICE void move_counted(const CountedParams& counted) {
  SIGNAL_SHARED(CountedShared, shared);
  const GroupParams& g = counted.exchange.group;
  Member m(g, counted.exchange.operation);
  PieceBarriers barriers(m, shared.places);
  const PieceCount message{counted};
#ifdef SIGNAL_MUTANT_COUNTS_READ_EARLY
  (void)message.of(g.rank);
#endif
  begin(m, barriers);
  // The first barrier heeds the abort word, and staging comes behind it: all threads know here of what one has read, or a rank that
  // has nothing staged would tell its peers that it has.
  (void)may_stage(m);
  barriers.who.mask = peers_of(g);
  barriers.publish(message, false, Turn::kFirst);
  if (!barriers.complete()) return;
  ExchangeParams& p = shared.p;
  if (platform::thread_id() == 0) {
    p = counted.exchange;
    SIGNAL_NO_UNROLL
    for (uint32_t r = 0; r < g.world; r++) {
      const uint64_t sent = message.of(r) * counted.element_bytes, received = shared.places.source[r] * counted.element_bytes;
#ifdef SIGNAL_MUTANT_COUNTS_UNBOUNDED
      p.send_bytes[r] = sent, p.receive_bytes[r] = received;
#else
      p.send_bytes[r] = sent < p.send_bytes[r] ? sent : p.send_bytes[r];
      p.receive_bytes[r] = received < p.receive_bytes[r] ? received : p.receive_bytes[r];
#endif
      if (platform::block_id() == 0) {
        platform::store(reinterpret_cast<uint32_t*>(counted.received_counts) + r, uint32_t(shared.places.source[r]));
      }
    }
  }
  platform::block_sync();
  exchange_windows(p, m, barriers, Turn::kBetween, 0, [&](const BlockShared&, Partners partners, uint64_t start) SIGNAL_INLINE {
    keep_pieces(p, shared.places, partners, start);
  });
}

// Keeps the reduction of the pieces that are for this rank, which all ranks have, of one size.
template <class T>
SIGNAL_DEVICE void reduce_scatter(const ExchangeParams& p) {
  if (is_pushed(p.group)) return push_reduce_scatter<T>(p);
  exchange(p, p.receive_bytes[p.group.rank], [&](const BlockShared& shared, Partners, uint64_t start) SIGNAL_INLINE {
    const uint32_t rank = p.group.rank;
    const uint64_t bytes = bytes_in_window(p, p.receive_bytes[rank], start);
    if (bytes != 0) reduce<T>(p.group, p.op, p.dtype, shared, Range{0, p.target[rank] + start, nullptr, bytes});
  });
}

}  // namespace signal_comm
