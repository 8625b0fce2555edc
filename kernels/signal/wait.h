// What a thread knows of its rank, and the one way to wait with all that ends a wait (DESIGN P13).
//
// Most of a small call's time is instructions that run once: after a launch code and constants come from cold caches. So
// the path of a call that succeeds is kept short and in one piece, and all work of a fault is done by a function of its own
// (benches/NOTES.md has what each step gave).
#pragma once

#include "params.h"

// The translation unit has included its platform.h before this file. It defines SIGNAL_DEVICE, SIGNAL_UNROLL,
// SIGNAL_SHARED and the accessors of namespace platform; nothing here or below touches shared memory in any other way.

namespace signal_comm {

// Whether the first polls of a wait are counted, behind which it watches clock and abort words. False in one build alone, which
// benches/bounded.rs compares with the others.
#ifdef SIGNAL_UNBOUNDED_WAITS
constexpr bool kBounded = false;
#else
constexpr bool kBounded = true;
#endif

template <class V>
SIGNAL_DEVICE V* at(uint64_t base, uint32_t offset) {
  return reinterpret_cast<V*>(base + offset);
}

// Offsets of the words of one block from a rank's base.
SIGNAL_DEVICE uint32_t counter_offset(uint32_t domain, uint32_t block, uint32_t rank) {
  return ((domain * kMaxNumBlocksUpperBound + block) * kMaxGpus + rank) * uint32_t(sizeof(flag_t));
}
// Words that peers write have two sets, by the lowest bit of the value.
SIGNAL_DEVICE uint32_t set_offset(uint32_t domain, uint32_t block, uint32_t rank) {
  return counter_offset(domain * 2, block, rank);
}
constexpr uint32_t kSetBytes = kMaxNumBlocksUpperBound * kMaxGpus * sizeof(flag_t);

constexpr uint32_t kSelfCounters = offsetof(Signal, self_counter);
constexpr uint32_t kPeerCounters = offsetof(Signal, peer_counter);
constexpr uint32_t kLineSetBytes = kMaxNumBlocksUpperBound * kMaxGpus * sizeof(Line);

// The `k`th rank behind this one, so that not all ranks turn to one peer at once.
SIGNAL_DEVICE uint32_t rank_after(const GroupParams& g, uint32_t k) { return g.rank + k < g.world ? g.rank + k : g.rank + k - g.world; }

// All ranks but this one, as bits.
SIGNAL_DEVICE uint32_t peers_of(const GroupParams& g) { return ((1u << g.world) - 1) & ~(1u << g.rank); }

// Where every kernel begins: it may have been launched while the stream's earlier work still ran (P9). Nothing of a call's
// memory is touched before, only addresses are worked out. From here on the next kernel may come, where the host allows it,
// and waits likewise.
SIGNAL_DEVICE void begin_call(const GroupParams& group) {
#ifndef SIGNAL_MUTANT_EARLY_LAUNCH_WITHOUT_WAIT
  platform::wait_for_earlier();
#endif
  if ((group.flags & kFlagAllowNext) != 0) platform::allow_next();
}

// One thread's view of its rank: the parameters, and what every kernel reads of the rank's memory when it begins.
struct Member {
  const GroupParams& group;
  uint32_t operation;
  // Of the first kMaxGpus threads, once they have been read:
  uint64_t abort = 0;     // the abort word when the kernel began; of a block that stages, not 0 on all threads if it is on one
  uint32_t sequence = 0;  // calls begun: read before this one was counted, if the reader is who counts it

  SIGNAL_DEVICE Member(const GroupParams& params, uint32_t op) : group(params), operation(op) {}

  SIGNAL_DEVICE void read() {
    if (platform::thread_id() < kMaxGpus) {  // a word that every warp of a large grid reads holds all of them up
      abort = platform::load_relaxed(abort_word());
      sequence = platform::load_relaxed(sequence_word());
    }
  }

  SIGNAL_DEVICE uint64_t* abort_word() const { return at<uint64_t>(group.control, offsetof(Control, abort)); }
  SIGNAL_DEVICE uint64_t* abort_word_of(uint32_t peer) const {
    return at<uint64_t>(group.base[peer], kControlOffset + offsetof(Control, abort));
  }
  SIGNAL_DEVICE uint32_t* claim_word() const { return at<uint32_t>(group.control, offsetof(Control, claim)); }
  SIGNAL_DEVICE uint32_t* sequence_word() const {
    return at<uint32_t>(group.control, offsetof(Control, sequence) + group.domain * 4);
  }
  SIGNAL_DEVICE HostControl* host() const { return reinterpret_cast<HostControl*>(group.host_control); }

  // Counts the call, for fault records. One thread of block 0 does it. A check is none.
  SIGNAL_DEVICE void count_call() const {
    if (operation == kOpCheck) return;
    // Opaque, so that nobody else waits for the word to be loaded and added to.
    platform::store_relaxed(sequence_word(), platform::opaque(sequence) + 1);
  }
};

// The host image alone carries the test hook that holds a rank up behind a phase.
SIGNAL_DEVICE void test_delay(const Member& m, uint32_t phase) {
  if constexpr (platform::kTestHooks) {
    if (m.group.delay_phase == phase) {
      const uint64_t began = platform::clock();
      while (platform::clock() - began < m.group.delay_ticks) platform::relax();
    }
  }
}

// Whether this wave asks the host, at check `turn` of a wait. The host's word is read over the bus, one read after the other: where all
// waves of a grid ask at once, each waits for all of them, 1 us a wave on an H200, and hears of its peer as much later. So they take
// turns.
SIGNAL_DEVICE bool asks_host(uint32_t turn) {
  return (turn + platform::block_id() + platform::thread_id() / platform::kWaveThreads) % platform::kChecksPerAsk == 0;
}

// Polls `ready()` until it holds; false when the abort word, the host or the deadline, which counts from here, ended the
// wait. Clock and abort words are looked at once in kPollsPerCheck polls. For waits of which the first polls are over.
template <class Ready>
SIGNAL_DEVICE bool wait_until(const Member& m, Ready ready) {
  const uint64_t began = platform::clock();
  uint32_t turn = 0;
  for (bool over = false; !over; turn++) {
    const uint32_t most = platform::rest(turn);
    for (uint32_t polls = 0; polls < most; polls++) {
      if (ready()) return true;
      platform::relax();
    }
    over = platform::clock() - began > m.group.deadline_ticks || platform::load_relaxed(m.abort_word()) != 0 ||
           (asks_host(turn) && platform::load_relaxed(&m.host()->abort_request) != 0);
  }
  return ready();  // what arrived while this thread was not running is not late
}

// What a wait expected of a peer, and what was there.
struct Seen {
  uint32_t expected;
  uint32_t seen;
};

SIGNAL_DEVICE uint64_t raised_word(const GroupParams& g, uint32_t missing, uint32_t sequence) {
  return kAbortRaised | uint64_t(g.rank) << 48 | uint64_t(missing) << 40 | uint64_t(g.domain) << 32 | sequence;
}

// The host's copy of a fault: the rest of the record, and the status behind it. For the thread that has claimed it.
SIGNAL_DEVICE void publish_fault(const Member& m, uint32_t phase, uint64_t word, uint32_t status) {
  HostControl* const host = m.host();
  FaultRecord& record = host->record;
  platform::store_relaxed(&record.abort, word);
  platform::store_relaxed(&record.operation, m.operation);
  platform::store_relaxed(&record.sequence, platform::load_relaxed(m.sequence_word()));
  platform::store_relaxed(&record.domain, m.group.domain);
  platform::store_relaxed(&record.block, platform::block_id());
  platform::store_relaxed(&record.phase, phase);
  platform::store_relaxed(&record.missing, uint32_t(word >> 40) & 0xff);
  // Release: pairs with the host's acquire load of the status, behind which it reads the record. A relaxed store could
  // show the status before the record.
  platform::signal_release(&host->status, status);
}

// Whether the calling thread is the one that reports. If not, whoever does may still be about it, in a kernel of another domain, when
// this one has ended: so the host is told here that a record will come, before it takes what this kernel left for complete.
SIGNAL_DEVICE bool claim_report(const Member& m) {
  if (platform::claim(m.claim_word())) return true;
#ifndef SIGNAL_MUTANT_LEAVES_WITHOUT_A_WORD
  // Relaxed: the host looks behind the end of the kernel, which orders it.
  platform::store_relaxed(&m.host()->leaving, 1u);
#endif
#ifndef SIGNAL_MUTANT_LEAVES_WITHOUT_RAISING
  // And whoever reports may have yet to raise the rank's abort word, without which this domain's next kernel would stage, or ask to be
  // pushed to, where a peer is still in the call that this one leaves. Relaxed: the stream orders the two kernels.
  platform::store_relaxed(m.abort_word(), kAbortReported);
#endif
  return false;
}

// Raises this rank's fault at its peers, who may wait for it.
SIGNAL_DEVICE void tell_peers(const GroupParams& g, const Member& m, uint64_t word) {
  SIGNAL_NO_UNROLL
  for (uint32_t peer = 0; peer < g.world; peer++) {
    if (peer != g.rank) platform::store_relaxed(m.abort_word_of(peer), word);
  }
}

// Peers of the mask `other` make another call than this rank does, or one of other sizes. The host knows this rank's.
SIGNAL_COLD void report_other(const GroupParams& g, uint32_t operation, uint32_t other) {
  const Member m(g, operation);
  if (!claim_report(m)) return;
  FaultRecord& record = m.host()->record;
  SIGNAL_NO_UNROLL
  for (uint32_t i = 0; i < kMaxGpus; i++) {
    platform::store_relaxed(&record.expected[i], 0u);
    platform::store_relaxed(&record.seen[i], 0u);
  }
  const uint64_t word = kAbortMismatch | raised_word(g, other, platform::load_relaxed(m.sequence_word()));
  publish_fault(m, kPhaseStart, word, kMismatch);
  platform::store_relaxed(m.abort_word(), word);
#ifndef SIGNAL_MUTANT_MISMATCH_NOT_TOLD
  tell_peers(g, m, word);
#endif
}

// Why a block leaves: written for the host once a rank, by whichever thread claims it first; then raised at this rank, so
// that its other blocks leave and its later kernels return at once, and at last at the peers.
//
// `late` has bit r set when the calling thread gave up waiting for rank r; `look(r)` shows who else is missing.
template <class Look>
SIGNAL_DEVICE void report_fault(const Member& m, uint32_t phase, uint32_t late, Look look) {
  const GroupParams& g = m.group;
  uint64_t word = platform::load_relaxed(m.abort_word());  // before the claim: whoever comes behind it stores there
  if (!claim_report(m)) return;
  HostControl* const host = m.host();
  FaultRecord& record = host->record;

  SIGNAL_NO_UNROLL
  for (uint32_t peer = 0; peer < g.world; peer++) {
    if (peer == g.rank) continue;
    const Seen found = look(peer);
    platform::store_relaxed(&record.expected[peer], found.expected);
    platform::store_relaxed(&record.seen[peer], found.seen);
    if (found.seen != found.expected) late |= 1u << peer;
  }

  uint32_t status = kWoken;
  if ((word & kAbortRaised) == 0) {
    const bool requested = platform::load_relaxed(&host->abort_request) != 0;
    status = requested ? kRequested : kExpired;
    word = raised_word(g, requested ? 0 : late, platform::load_relaxed(m.sequence_word()));
  }
  publish_fault(m, phase, word, status);

  if (status == kWoken) return;  // whoever raised it tells the others
#ifndef SIGNAL_MUTANT_ABORT_NOT_RAISED_AT_ITSELF
  platform::store_relaxed(m.abort_word(), word);
#endif
  tell_peers(g, m, word);
}

}  // namespace signal_comm
