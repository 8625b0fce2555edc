// All-reduce by pushing into the Lamport region: no barrier, the data tells that it is there (DESIGN P5 to P9, P12).
//
// A rank stores its packs into its slot at every peer and polls its own slots for theirs. A word that holds kNotReady has
// not arrived, so nobody sends it: on its way +0 stands for it, which counts the same in a sum (P12).
//
// Three generations take turns: this call writes one, and this rank clears the one of the call before it. That is safe
// because a peer that writes a place again, three calls later, has heard from this rank in the call between, whose data
// left this rank after the kernel that cleared the place had ended. So every rank hears from every peer in every call.
#pragma once

#include "memory.h"
#include "wait.h"
#include "world.h"

namespace signal_comm {

constexpr uint32_t kNotReady = 0x80000000u;
constexpr flag_t kNoFlag = 0xffffffffu;  // 2^32 - 1 is divisible by 3 and 2^32 is not: the count skips this value
constexpr uint32_t kLamportState = offsetof(Signal, lamport_state);
constexpr uint32_t kLamportRegion = offsetof(Signal, lamport_region);
// A call of more packs clears those above by itself, right after reading them, so that a small call behind a large one has
// little to clear.
constexpr uint32_t kMostLeftToClear = 1024;

SIGNAL_DEVICE flag_t next_flag(flag_t flag) {
#ifdef SIGNAL_MUTANT_LAMPORT_FLAG_WRAPS_LATE
  return flag + 1;
#else
  return flag + 1 == kNoFlag ? 0 : flag + 1;
#endif
}

// Offset of a generation from a rank's base.
SIGNAL_DEVICE uint32_t generation_at(uint32_t generation) { return kLamportRegion + generation * kMaxGpus * kLamportSlotBytes; }

SIGNAL_DEVICE Pack* slot_pack(uint64_t base, uint32_t generation_offset, uint32_t sender, uint32_t pack) {
  return at<Pack>(base, generation_offset + sender * kLamportSlotBytes + pack * kPackBytes);
}

SIGNAL_DEVICE bool is_ready(const Pack& pack) {
  return pack.word[0] != kNotReady && pack.word[1] != kNotReady && pack.word[2] != kNotReady && pack.word[3] != kNotReady;
}

SIGNAL_DEVICE Pack sendable(Pack pack) {
#ifdef SIGNAL_MUTANT_LAMPORT_SENDS_ANY_WORD
  return pack;
#endif
  SIGNAL_UNROLL
  for (uint32_t w = 0; w < 4; w++) pack.word[w] = pack.word[w] == kNotReady ? 0 : pack.word[w];
  return pack;
}

SIGNAL_DEVICE Pack not_ready() { return Pack{{kNotReady, kNotReady, kNotReady, kNotReady}}; }

// The wait for packs that did not come at once: pack `pack` of every peer. True when all came; else the fault has been
// reported and the thread ends, where the platform lets it.
SIGNAL_COLD bool wait_for_packs(const GroupParams& g, flag_t flag, uint32_t generation_offset, uint32_t pack) {
  const Member m(g, kOpAllReduceLamport);
  const auto came = [&](uint32_t peer) { return is_ready(platform::poll_pack(slot_pack(g.own, generation_offset, peer, pack))); };
  const auto late = [&] {
    uint32_t mask = 0;
    for (uint32_t peer = 0; peer < g.world; peer++) {
      if (peer != g.rank && !came(peer)) mask |= 1u << peer;
    }
    return mask;
  };
  if (wait_until(m, [&] { return late() == 0; })) return true;
  // The counts of calls stand for the values of a barrier.
  report_fault(m, kPhaseExchange, late(), [&](uint32_t peer) { return Seen{flag + 1, came(peer) ? flag + 1 : flag}; });
  platform::end_thread();
  return false;
}

// The fault of a call that has not begun: an abort word raised before.
SIGNAL_COLD void report_stopped(const GroupParams& g, flag_t flag) {
  report_fault(Member(g, kOpAllReduceLamport), kPhaseExchange, 0, [&](uint32_t) { return Seen{flag + 1, flag}; });
}

// Makes the state the next call's, once all blocks have read this one's, which they say early (P8). One thread of a rank.
SIGNAL_COLD void advance(const GroupParams& g, flag_t flag, uint32_t left_to_clear) {
  const uint32_t* const arrival = at<uint32_t>(g.own, kLamportState + offsetof(LamportState, arrival));
  const auto all_arrived = [&] {
#ifdef SIGNAL_MUTANT_LAMPORT_ADVANCES_AT_ONCE
    return arrival != nullptr;
#else
    return platform::arrivals(arrival) == platform::grid_dim();
#endif
  };
  if (!all_arrived() && !wait_until(Member(g, kOpAllReduceLamport), all_arrived)) return;
  platform::send_pack(at<Pack>(g.own, kLamportState), Pack{{next_flag(flag), left_to_clear, 0, 0}});
}

template <uint32_t N, class Visit>
SIGNAL_DEVICE void for_each_peer(uint32_t rank, Visit visit) {
  if constexpr (N == 2) {
    visit(1 - rank);  // nothing to choose
  } else {
    SIGNAL_UNROLL
    for (uint32_t peer = 0; peer < N; peer++) {
      if (peer != rank) visit(peer);
    }
  }
}

// One call of one thread.
template <class T>
struct LamportCall {
  const AllReduceParams& p;
  flag_t flag;
  uint32_t now;  // offset of the generation that this call writes

  SIGNAL_DEVICE Pack* outbox(uint32_t peer, uint32_t pack) const {
    return slot_pack(p.group.base[peer], now, p.group.rank, pack);
  }
  SIGNAL_DEVICE Pack* inbox(uint32_t peer, uint32_t pack) const { return slot_pack(p.group.own, now, peer, pack); }

  template <uint32_t N>
  SIGNAL_DEVICE void send(uint32_t i, const Pack& pack) const {
    const Pack clean = sendable(pack);
    for_each_peer<N>(p.group.rank, [&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(outbox(peer, i), clean); });
  }

  // The sum of pack `i` over all ranks, this one's being `own`; false when a peer's did not come.
  template <uint32_t N>
  SIGNAL_DEVICE bool receive(uint32_t i, const Pack& own, Pack& sum) const {
    const uint32_t rank = p.group.rank;
    Pack packs[N];
    const auto look = [&]() SIGNAL_INLINE {
      bool all = true;
      if constexpr (N == 2) {
        // This rank's own comes first on both: of two summands the order is all the same.
        packs[0] = own;
        packs[1] = platform::poll_pack(inbox(1 - rank, i));
        all = is_ready(packs[1]);
      } else {
        SIGNAL_UNROLL
        for (uint32_t r = 0; r < N; r++) {
          packs[r] = r == rank ? own : platform::poll_pack(inbox(r, i));
          all = all && (r == rank || is_ready(packs[r]));
        }
      }
      return all;
    };
    bool all = false;
    SIGNAL_NO_UNROLL
    for (uint32_t polls = 0; polls < platform::kPollsPerCheck; polls++) {  // nothing but the polls, as in a barrier
      all = look();
      if (all) break;
      platform::relax();
    }
    if (!all) {
      if (!wait_for_packs(p.group, flag, now, i)) return false;
      look();
    }
    if (i >= kMostLeftToClear) {
      for_each_peer<N>(rank, [&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(inbox(peer, i), not_ready()); });
    }
    sum = sum_ranks<T, N>(N, rank, [&](uint32_t r) { return packs[r]; });
    return true;
  }
};

// Packs that are not whole, or whose address is not aligned on this rank: moved element by element.

template <class T, uint32_t N>
SIGNAL_COLD void lamport_send_rest(const AllReduceParams& p, flag_t flag, uint32_t now, uint32_t i, uint32_t step) {
  const LamportCall<T> call{p, flag, now};
  for (; i < uint32_t(p.packs); i += step) call.template send<N>(i, load_any<T, From::kOwn>(p.input, i, p.count));
}

template <class T, uint32_t N>
SIGNAL_COLD bool lamport_receive_rest(const AllReduceParams& p, flag_t flag, uint32_t now, uint32_t i, uint32_t step) {
  const LamportCall<T> call{p, flag, now};
  for (; i < uint32_t(p.packs); i += step) {
    Pack sum;
    if (!call.template receive<N>(i, load_any<T, From::kOwn>(p.input, i, p.count), sum)) return false;
    store_any<T>(p.output, i, p.count, sum);
  }
  return true;
}

template <class T, uint32_t N>
SIGNAL_DEVICE void lamport_body(const Member& m, const AllReduceParams& p, const Pack& own, const Pack& state, uint32_t whole) {
  const Stride stride;
  const LamportCall<T> call{p, state.word[0], generation_at(state.word[0] % kLamportGenerations)};
  const auto input = [&](uint32_t i) {
    return i == stride.first ? own : platform::load_pack(reinterpret_cast<const Pack*>(p.input) + i);
  };
  const uint32_t packs = uint32_t(p.packs);
  test_delay(m, kPhaseStart);

  uint32_t rest = stride.first;
  for (; rest < whole; rest += stride.step) call.template send<N>(rest, input(rest));
  if (rest < packs) lamport_send_rest<T, N>(p, call.flag, call.now, rest, stride.step);

  // The generation of the call before this one; from the present one and not from the flag, which wraps.
#if defined(SIGNAL_MUTANT_LAMPORT_CLEARS_BY_FLAG)
  const uint32_t old = generation_at((call.flag + 2) % kLamportGenerations);
#elif defined(SIGNAL_MUTANT_LAMPORT_CLEARS_NEXT)
  const uint32_t old = generation_at((call.flag % kLamportGenerations + 1) % kLamportGenerations);
#else
  const uint32_t old = generation_at((call.flag % kLamportGenerations + 2) % kLamportGenerations);
#endif
  for (uint32_t i = stride.first; i < state.word[1]; i += stride.step) {
    // The way that the peers' packs come, so that the order of both is one.
    for_each_peer<N>(p.group.rank, [&](uint32_t peer) SIGNAL_INLINE {
      platform::send_pack(slot_pack(p.group.own, old, peer, i), not_ready());
    });
  }

  for (uint32_t i = stride.first; i < whole; i += stride.step) {
    Pack sum;
    if (!call.template receive<N>(i, input(i), sum)) return;
    platform::store_pack(reinterpret_cast<Pack*>(p.output) + i, sum);
  }
  if (rest < packs && !lamport_receive_rest<T, N>(p, call.flag, call.now, rest, stride.step)) return;
  test_delay(m, kPhaseExchange);

  if ((platform::block_id() | platform::thread_id()) == 0) {
    advance(p.group, call.flag, packs < kMostLeftToClear ? packs : kMostLeftToClear);
  }
}

// For kLeast to kMost ranks: a kernel for few takes fewer registers, which makes its launch shorter.
template <class T, uint32_t kLeast, uint32_t kMost>
SIGNAL_DEVICE void all_reduce_lamport(const AllReduceParams& p) {
  // Addresses first: parameters come from memory too, and until the stream's earlier kernels have ended there is time.
  const Stride stride;
  const uint32_t whole = is_aligned(p.input | p.output) ? uint32_t(p.whole_packs) : 0;
  const Pack* const own_at = reinterpret_cast<const Pack*>(platform::opaque(p.input + uint64_t(stride.first) * kPackBytes));
  const Pack* const state_at = reinterpret_cast<const Pack*>(platform::opaque(p.group.own + kLamportState));
  const bool has_own = platform::opaque(uint32_t(stride.first < whole)) != 0;

  // Nothing of the call's memory is touched before (P9). The next kernel may come from here on: it waits likewise.
  platform::wait_for_earlier();
  platform::allow_next();
  Pack own = {};  // before the state: its way is as long, and nothing else of this rank waits for it
  if (has_own) own = platform::load_pack(own_at);
  const Pack state = platform::poll_pack(state_at);
  const Member m(p.group, kOpAllReduceLamport);
  // The vote needs the state of every thread, so that behind it all have read it.
  if (platform::block_any(m.abort != 0 || state.word[0] == kNoFlag)) {
    if (platform::thread_id() == 0) report_stopped(p.group, state.word[0]);
    return;
  }
  if (platform::thread_id() == 0) {
    platform::arrive(at<uint32_t>(p.group.own, kLamportState + offsetof(LamportState, arrival)));
    if (platform::block_id() == 0) m.count_call();
  }
  with_world<kLeast, kMost>(p.group.world, [&](auto world) SIGNAL_INLINE {
    lamport_body<T, decltype(world)::value>(m, p, own, state, whole);
  });
}

}  // namespace signal_comm
