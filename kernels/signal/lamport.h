// All-reduce by pushing into the Lamport region: no barrier, the data tells that it is there (DESIGN P5 to P9, P12).
//
// A rank stores its packs into its slot at every peer and polls its own slots for theirs. A word that holds kNotReady has
// not arrived, so nobody sends it: on its way +0 stands for it, which counts the same in a sum (P12).
//
// Three generations take turns: this call writes one, and this rank clears the one of the call before it. That is safe
// because a peer that writes a place again, three calls later, has heard from this rank in the call between, whose data
// left this rank after the kernel that cleared the place had ended. So every rank hears from every peer in every call.
#pragma once

#include "wait.h"
#include "world.h"

namespace signal_comm {

constexpr uint32_t kNotReady = 0x80000000u;
constexpr flag_t kNoFlag = 0xffffffffu;  // 2^32 - 1 is divisible by 3 and 2^32 is not: the count skips this value
constexpr uint32_t kLamportState = offsetof(Signal, lamport_state);
constexpr uint32_t kLamportRegion = offsetof(Signal, lamport_region);
// A call of more packs clears those above by itself, right after reading them, so that a small call behind a large one has
// little to clear.
#ifdef SIGNAL_MODEL_LEFT_TO_CLEAR  // the model checker has no room for as many
constexpr uint32_t kMostLeftToClear = SIGNAL_MODEL_LEFT_TO_CLEAR;
#else
constexpr uint32_t kMostLeftToClear = 256;
#endif
#ifdef SIGNAL_MUTANT_LAMPORT_TWO_GENERATIONS
constexpr uint32_t kGenerations = 2;
#else
constexpr uint32_t kGenerations = kLamportGenerations;
#endif

SIGNAL_DEVICE flag_t next_flag(flag_t flag) {
#ifdef SIGNAL_MUTANT_LAMPORT_FLAG_WRAPS_LATE
  return flag + 1;
#else
  return flag + 1 == kNoFlag ? 0 : flag + 1;
#endif
}

constexpr uint32_t kGenerationBytes = kMaxGpus * kLamportSlotBytes;

// Offset of a generation from a rank's base.
SIGNAL_DEVICE uint32_t generation_at(uint32_t generation) { return kLamportRegion + generation * kGenerationBytes; }

SIGNAL_DEVICE Pack* slot_pack(uint64_t base, uint32_t generation_offset, uint32_t sender, uint32_t pack) {
  return at<Pack>(base, generation_offset + sender * kLamportSlotBytes + pack * kPackBytes);
}

#ifdef SIGNAL_MODEL_SLOT_PACKS  // likewise
constexpr uint32_t kSlotPacks = SIGNAL_MODEL_SLOT_PACKS;
#else
constexpr uint32_t kSlotPacks = kLamportSlotBytes / kPackBytes;
#endif

// Pack `i` of what a sender has for a rank, from the start of its first slot. The region has slots for 8 ranks: fewer ranks have
// several each, sender s those of s, s + n, s + 2 n.
template <uint32_t N>
SIGNAL_DEVICE uint32_t in_slots(uint32_t i, uint32_t world = N) {
  return N <= kMaxGpus / 2 ? i + i / kSlotPacks * ((world - 1) * kSlotPacks) : i;
}

SIGNAL_DEVICE bool is_ready(const Pack& pack) {
#ifdef SIGNAL_MUTANT_LAMPORT_POLLS_ONE_WORD
  return pack.word[0] != kNotReady;
#endif
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

constexpr uint32_t kEveryone = (1u << kMaxGpus) - 1;  // as a mask of peers

SIGNAL_DEVICE Pack not_ready() { return Pack{{kNotReady, kNotReady, kNotReady, kNotReady}}; }

// What a block's first thread does with the state, once all blocks have read it: its block was the last to say so (P8). The
// others have nothing to do here.
SIGNAL_DEVICE void leave_state(const GroupParams& g, uint32_t arrived_before, flag_t flag, uint32_t left_to_clear) {
#ifdef SIGNAL_MUTANT_LAMPORT_ADVANCES_AT_ONCE
  const uint32_t last = 0;
#else
  const uint32_t last = platform::grid_dim() - 1;
#endif
  if (platform::thread_id() == 0 && arrived_before == last) {
    platform::send_pack(at<Pack>(g.own, kLamportState), Pack{{flag, left_to_clear, 0, 0}});
  }
}

// A call that leaves its state as it was would write the same generation again in the next one, over what slow peers have
// yet to read: so a thread that gives up leaves kNoFlag instead, with which no call sends anything.
SIGNAL_DEVICE void give_up(const GroupParams& g, uint32_t arrived_before) {
#ifndef SIGNAL_MUTANT_LAMPORT_GIVES_UP_AS_IS
  leave_state(g, arrived_before, kNoFlag, 0);
#else
  leave_state(g, arrived_before, platform::load_relaxed(at<flag_t>(g.own, kLamportState)), 0);
#endif
  platform::end_thread();
}

// The wait for packs that did not come at once: pack `pack` of the peers in the mask. True when all came; else the fault has
// been reported.
SIGNAL_COLD bool wait_for_packs(const GroupParams& g, uint32_t operation, flag_t flag, uint32_t pack, uint32_t peers) {
  const Member m(g, operation);
  const uint32_t generation = generation_at(flag % kGenerations);
  const auto came = [&](uint32_t peer) { return is_ready(platform::poll_pack(slot_pack(g.own, generation, peer, pack))); };
  const auto late = [&] {
    uint32_t mask = 0;
    for (uint32_t peer = 0; peer < g.world; peer++) {
      if (peer != g.rank && (peers >> peer & 1) != 0 && !came(peer)) mask |= 1u << peer;
    }
    return mask;
  };
  if (wait_until(m, [&] { return late() == 0; })) return true;
  // The counts of calls stand for the values of a barrier.
  const uint32_t missing = late();
  report_fault(m, kPhaseExchange, missing, [&](uint32_t peer) { return Seen{flag + 1, (missing >> peer & 1) == 0 ? flag + 1 : flag}; });
  return false;
}

// The fault of a call that found an abort word raised.
SIGNAL_COLD void report_stopped(const GroupParams& g, uint32_t operation, flag_t flag, uint32_t arrived_before) {
  report_fault(Member(g, operation), kPhaseExchange, 0, [&](uint32_t) { return Seen{flag + 1, flag}; });
  give_up(g, arrived_before);
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

// The generation of the call before one; from the present one and not from the flag, which wraps.
SIGNAL_DEVICE uint32_t generation_before(flag_t flag) {
#if defined(SIGNAL_MUTANT_LAMPORT_CLEARS_BY_FLAG)
  return (flag + 2) % kGenerations;
#elif defined(SIGNAL_MUTANT_LAMPORT_CLEARS_NEXT)
  return (flag % kGenerations + 1) % kGenerations;
#else
  const uint32_t generation = flag % kGenerations;
  return generation == 0 ? kGenerations - 1 : generation - 1;
#endif
}

// How far that one lies behind the present one, in bytes.
SIGNAL_DEVICE uint64_t bytes_to_generation_before(flag_t flag) {
  return uint64_t(int64_t(int32_t(generation_before(flag)) - int32_t(flag % kGenerations)) * int64_t(kGenerationBytes));
}

// Where packs go and where they arrive, from one pack of the message on, among N ranks, or at most N: of 4 at most, or of 5 to
// 8, since the slots of the region are shared out differently. `bytes` count from that pack. Of the parameters it takes `group` and `op`.
template <class T, uint32_t N, bool kExact = true, class Params = const AllReduceParams&>
struct Mail {
  Params p;
  uint64_t in;   // with two ranks the peer's slot here, else the first slot
  uint64_t out;  // with two ranks this rank's slot at the peer, else from each rank's base

  SIGNAL_DEVICE Mail(Params params, uint32_t pack) : p(params), in(0), out(0) {
    const uint32_t rank = p.group.rank;
    const uint64_t start = kLamportRegion + uint64_t(pack) * kPackBytes;
    in = p.group.own + start + (N == 2 ? (1 - rank) * kLamportSlotBytes : 0);
    out = (N == 2 ? p.group.base[1 - rank] : 0) + start + rank * kLamportSlotBytes;
  }

  SIGNAL_DEVICE uint32_t world() const { return kExact ? N : p.group.world; }
  template <class Visit>
  SIGNAL_DEVICE void each_peer(Visit visit) const {
    for_each_peer<N>(p.group.rank, [&](uint32_t peer) SIGNAL_INLINE {
      if (kExact || peer < world()) visit(peer);
    });
  }

  SIGNAL_DEVICE void use(uint32_t generation) {
    const uint32_t offset = generation * kGenerationBytes;
    in += offset;
    out += offset;
  }

  SIGNAL_DEVICE Pack* inbox(uint32_t peer, uint64_t bytes) const {
    return reinterpret_cast<Pack*>(in + bytes + (N == 2 ? 0 : peer * kLamportSlotBytes));
  }
  SIGNAL_DEVICE Pack* outbox(uint32_t peer, uint64_t bytes) const {
    return reinterpret_cast<Pack*>(out + bytes + (N == 2 ? 0 : p.group.base[peer]));
  }

  SIGNAL_DEVICE void send(uint64_t bytes, const Pack& pack) const {
    const Pack clean = sendable(pack);
    each_peer([&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(outbox(peer, bytes), clean); });
  }

  SIGNAL_DEVICE void clear(uint64_t bytes) const {
    // The way that the peers' packs come, so that the order of both is one.
    each_peer([&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(inbox(peer, bytes), not_ready()); });
  }

  // Looks once for the peers' packs at `bytes`; this rank's own stands among them. Whether all are there.
  SIGNAL_DEVICE bool look(uint64_t bytes, const Pack& own, Pack (&packs)[N]) const {
    bool all = true;
    if constexpr (N == 2) {
      // This rank's own comes first on both: of two summands the order is all the same.
      packs[0] = own;
      packs[1] = platform::poll_pack(inbox(1 - p.group.rank, bytes));
      all = is_ready(packs[1]);
    } else {
      SIGNAL_UNROLL
      for (uint32_t r = 0; r < N; r++) {
        if (!kExact && r >= world()) continue;
        packs[r] = r == p.group.rank ? own : platform::poll_pack(inbox(r, bytes));
        all = all && (r == p.group.rank || is_ready(packs[r]));
      }
    }
    return all;
  }

  // Not yet rounded.
  SIGNAL_DEVICE typename T::Fold fold(const Pack (&packs)[N]) const {
    return fold_ranks<T, N, kExact>(p.op, world(), p.group.rank, [&](uint32_t r) { return packs[r]; });
  }
  SIGNAL_DEVICE Pack sum(const Pack (&packs)[N]) const { return canonical<T>(raw_sum(packs)); }
  // With NaNs as the platform has them.
  SIGNAL_DEVICE Pack raw_sum(const Pack (&packs)[N]) const {
    if constexpr (N == 2 && kExact) return add_packs<T>(add_packs<T>(packs[0], Pack{}), packs[1]);  // from +0 on, as any sum
    return fold(packs).narrow();
  }
};

template <class T, class Call>
SIGNAL_DEVICE uint32_t left_to_clear(const Call& p) {
#ifdef SIGNAL_MUTANT_LAMPORT_CLEARS_ELEMENTS
  return uint32_t(p.packs) * 4 * T::kPerWord;
#endif
  return p.packs < kMostLeftToClear ? uint32_t(p.packs) : kMostLeftToClear;
}

// The rest of a call for a thread whose packs did not come at once, or are not all whole and aligned: from its pack `i` on.
// Nothing follows it, so that what it needs takes no registers from the path of most calls.
template <class T, uint32_t N>
SIGNAL_COLD void lamport_finish(const AllReduceParams& p, flag_t flag, uint32_t i, uint32_t arrived_before) {
  Mail<T, N> mail(p, 0);
  mail.use(flag % kGenerations);
  const uint32_t step = Stride().step;
  for (; i < uint32_t(p.packs); i += step) {
    const Pack own = load_any<From::kOwn>(p.input, i, p.bytes);
    const uint64_t bytes = uint64_t(in_slots<N>(i)) * kPackBytes;
    Pack packs[N];
    if (!mail.look(bytes, own, packs)) {
      if (!wait_for_packs(p.group, kOpAllReduceLamport, flag, in_slots<N>(i), kEveryone)) return give_up(p.group, arrived_before);
      mail.look(bytes, own, packs);
    }
    store_any(p.output, i, p.bytes, mail.sum(packs));
    if (i >= kMostLeftToClear) mail.clear(bytes);
  }
  test_delay(Member(p.group, kOpAllReduceLamport), kPhaseExchange);
  leave_state(p.group, arrived_before, next_flag(flag), left_to_clear<T>(p));
}

// A call. kWhole: all packs are whole, and aligned on this rank; else they are moved element by element where need be.
template <class T, uint32_t N, bool kWhole>
SIGNAL_DEVICE void lamport_call(const AllReduceParams& p) {
  // Addresses first: parameters come from memory too, and until the stream's earlier kernels have ended there is time.
  const Stride stride;
  const uint32_t packs = platform::opaque(uint32_t(p.packs));
  const uint64_t input = platform::opaque(p.input + uint64_t(stride.first) * kPackBytes);
  const uint64_t output = platform::opaque(p.output + uint64_t(stride.first) * kPackBytes);
  const uint64_t state_at = platform::opaque(p.group.own + kLamportState);
  Mail<T, N> mail(p, in_slots<N>(stride.first));
  mail.in = platform::opaque(mail.in);
  mail.out = platform::opaque(mail.out);
  Member m(p.group, kOpAllReduceLamport);
  // The pack of this rank's input that lies `bytes` behind the thread's first.
  const auto load_own = [&](uint32_t i, uint64_t bytes) SIGNAL_INLINE {
    if constexpr (!kWhole) return load_any<From::kOwn>(p.input, i, p.bytes);
    return platform::load_pack(reinterpret_cast<const Pack*>(input + bytes));
  };

#ifdef SIGNAL_MUTANT_LAMPORT_READS_INPUT_FIRST
  const Pack soon = stride.first < packs ? load_own(stride.first, 0) : Pack{};
#endif
  begin_call(p.group);
  Pack own = {};  // before the state: its way is as long, and nothing else of this rank waits for it
#ifdef SIGNAL_MUTANT_LAMPORT_READS_INPUT_FIRST
  own = soon;
#else
  if (stride.first < packs) own = load_own(stride.first, 0);
#endif
  const Pack state = platform::poll_pack(reinterpret_cast<const Pack*>(state_at));
  m.read();
  const flag_t flag = state.word[0];
  if (flag == kNoFlag) {
    if (platform::thread_id() == 0) report_stopped(p.group, kOpAllReduceLamport, flag, kNoFlag);
    return;
  }
  mail.use(flag % kGenerations);
  const uint64_t step_bytes = uint64_t(stride.step) * kPackBytes;
  test_delay(m, kPhaseStart);

  // How far pack `i` is in the mail behind the thread's first.
  const auto in_mail = [&](uint32_t i) SIGNAL_INLINE { return uint64_t(in_slots<N>(i) - in_slots<N>(stride.first)) * kPackBytes; };

  // Sent also if an abort word is raised: what is sent belongs to a call that the peers may be in.
  if (stride.first < packs) mail.send(0, own);
  uint64_t bytes = step_bytes;
  for (uint32_t i = stride.first + stride.step; i < packs; i += stride.step, bytes += step_bytes) {
    mail.send(in_mail(i), load_own(i, bytes));
  }

  platform::block_sync();  // the whole block has read the state
  uint32_t arrived_before = kNoFlag;
  if (platform::thread_id() == 0) {
    arrived_before = platform::arrive(at<uint32_t>(p.group.own, kLamportState + offsetof(LamportState, arrival)));
    if (platform::block_id() == 0) m.count_call();
  }

  bytes = bytes_to_generation_before(flag);
#ifdef SIGNAL_MUTANT_LAMPORT_CLEARS_ELEMENTS
  const uint32_t left = state.word[1] / (4 * T::kPerWord);
#else
  const uint32_t left = state.word[1];
#endif
  for (uint32_t i = stride.first; i < left; i += stride.step, bytes += step_bytes) mail.clear(bytes);

  if (m.abort != 0) return report_stopped(p.group, kOpAllReduceLamport, flag, arrived_before);
  if constexpr (!kWhole) return lamport_finish<T, N>(p, flag, stride.first, arrived_before);
  bytes = 0;
  for (uint32_t i = stride.first; i < packs; i += stride.step, bytes += step_bytes) {
    const uint64_t mailed = in_mail(i);
    if (i != stride.first) own = load_own(i, bytes);
    Pack arrived[N];
    bool all = false;
    SIGNAL_NO_UNROLL
    for (uint32_t polls = 0; !kBounded || polls < platform::kPollsPerCheck; polls++) {  // nothing but the polls, as in a barrier
      all = mail.look(mailed, own, arrived);
      if (all) break;
      platform::relax();
    }
    if (!all) return lamport_finish<T, N>(p, flag, i, arrived_before);
    platform::store_pack(reinterpret_cast<Pack*>(output + bytes), mail.sum(arrived));
    if (i >= kMostLeftToClear) mail.clear(mailed);
  }
  test_delay(m, kPhaseExchange);
  leave_state(p.group, arrived_before, next_flag(flag), left_to_clear<T>(p));
}

template <class T, uint32_t N>
SIGNAL_COLD void lamport_ragged_call(const AllReduceParams& p) {
  lamport_call<T, N, false>(p);
}

// For kLeast to kMost ranks: a kernel for few takes fewer registers, which makes its launch shorter.
template <class T, uint32_t kLeast, uint32_t kMost>
SIGNAL_DEVICE void all_reduce_lamport(const AllReduceParams& p) {
  with_world<kLeast, kMost>(p.group.world, [&](auto world) SIGNAL_INLINE {
    constexpr uint32_t N = decltype(world)::value;
    if (p.packs != p.whole_packs || !is_aligned(p.input | p.output)) return lamport_ragged_call<T, N>(p);
    lamport_call<T, N, true>(p);
  });
}

}  // namespace signal_comm
