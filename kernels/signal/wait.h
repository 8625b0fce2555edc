// What a thread knows of its rank, and the one waiting primitive with all that ends a wait (DESIGN P13).
//
// Most of a small call's time is instructions that run once: after a launch they come from a cold cache, at about ten
// cycles each on an H200. So the path of a call that succeeds is kept short: addresses are one base and one 32-bit offset,
// and all work of a fault is done where a fault is found.
#pragma once

#include "params.h"

// The translation unit has included its platform.h before this file. It defines SIGNAL_DEVICE, SIGNAL_UNROLL,
// SIGNAL_SHARED and the accessors of namespace platform; nothing here or below touches shared memory in any other way.

namespace signal_comm {

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
constexpr uint32_t kLineRatio = sizeof(Line) / sizeof(flag_t);

constexpr uint32_t kSelfCounters = offsetof(Signal, self_counter);
constexpr uint32_t kPeerCounters = offsetof(Signal, peer_counter);
constexpr uint32_t kLineCounters = kControlOffset + offsetof(Control, line_counter);
constexpr uint32_t kLines = kControlOffset + offsetof(Control, lines);
constexpr uint32_t kAbort = kControlOffset + offsetof(Control, abort);
constexpr uint32_t kSequence = kControlOffset + offsetof(Control, sequence);
constexpr uint32_t kClaim = kControlOffset + offsetof(Control, claim);

// One thread's view of its rank: the parameters, and what it read of the rank's memory when the kernel began. Everything
// is read there at once: one trip to memory instead of one before each barrier.
struct Member {
  const GroupParams& group;
  uint32_t operation;
  // Of peer `thread_id()`, if there is one: barriers begun, of either kind. The memory follows at each barrier.
  flag_t count;
  flag_t line_count;
  // Where this block's words of that peer lie, for even values: at the peer, and here.
  uint64_t count_out, count_in, line_out, line_in;
  uint64_t abort;     // the abort word when the kernel began
  uint32_t sequence;  // calls begun before this one, if thread 0 of block 0 asks

  SIGNAL_DEVICE Member(const GroupParams& params, uint32_t op)
      : group(params),
        operation(op),
        count(0),
        line_count(0),
        count_out(0),
        count_in(0),
        line_out(0),
        line_in(0),
        abort(0),
        sequence(0) {
    const uint32_t thread = platform::thread_id();
    const uint32_t block = platform::block_id();
    if (thread < params.world) {
      const uint32_t offset = counter_offset(params.domain, block, thread);
      abort = platform::load_relaxed(at<uint64_t>(params.own, kAbort));
      line_count = platform::load(at<flag_t>(params.own, kLineCounters + offset));
      count = platform::load(at<flag_t>(params.own, kSelfCounters + offset));
      // By all, though one needs it: a branch here would wait for the loads above.
      sequence = platform::load_relaxed(sequence_word());
      // While the loads are under way: what the barriers will need of addresses.
      const uint64_t peer = params.base[thread];
      const uint32_t out = set_offset(params.domain, block, params.rank);
      const uint32_t in = set_offset(params.domain, block, thread);
      count_out = platform::here(peer + (kPeerCounters + out));
      count_in = platform::here(params.own + (kPeerCounters + in));
      line_out = platform::here(peer + (kLines + kLineRatio * out));
      line_in = platform::here(params.own + (kLines + kLineRatio * in));
    }
  }

  SIGNAL_DEVICE uint32_t* sequence_word() const { return at<uint32_t>(group.own, kSequence + group.domain * 4); }
  SIGNAL_DEVICE HostControl* host() const { return reinterpret_cast<HostControl*>(group.host_control); }

  // Counts the call, for fault records. One writer, after its first signal has left.
  SIGNAL_DEVICE void count_call() const {
    if ((platform::thread_id() | platform::block_id()) == 0) platform::store_relaxed(sequence_word(), sequence + 1);
  }
};

// Polls `ready()` until it holds; false when the abort word, the host or the deadline ended the wait. Clock and abort
// words are looked at once in kPollsPerCheck polls, so that a wait that succeeds soon costs no more than its polls. The
// deadline counts from the first such look.
template <class Ready>
SIGNAL_DEVICE bool wait_until(const Member& m, Ready ready) {
  uint64_t began = 0;
  for (uint32_t polls = 1; !ready(); polls++) {
    platform::relax();
    if (polls % platform::kPollsPerCheck != 0) continue;
    const uint64_t now = platform::clock();
    if (began == 0) began = now | 1;
    const bool over = int64_t(now - began) > int64_t(m.group.deadline_ticks);
    const bool raised = platform::load_relaxed(at<uint64_t>(m.group.own, kAbort)) != 0;
    // One more look: what arrived while this thread was not running is not late.
    if (over || raised || platform::load_relaxed(&m.host()->abort_request) != 0) return ready();
  }
  return true;
}

// Why a block leaves: written for the host once a rank, by whichever thread claims it first; then raised at this rank, so
// that its other blocks leave and its later kernels return at once, and at last at the peers.
//
// `late` has bit r set when the calling thread gave up waiting for rank r; the barrier, `kind`, shows who else is missing.
template <class Kind>
SIGNAL_DEVICE void report_fault(const Kind& kind, uint32_t phase, uint32_t late) {
  const Member& m = kind.m;
  const GroupParams& g = m.group;
  if (!platform::claim(at<uint32_t>(g.own, kClaim))) return;
  HostControl* const host = m.host();
  FaultRecord& record = host->record;
  const uint32_t sequence = platform::load_relaxed(m.sequence_word());

  for (uint32_t peer = 0; peer < g.world; peer++) {
    if (peer == g.rank) continue;
    // Relaxed: the block's other threads have stored their counters long ago, or are about to see the abort word too.
    const flag_t expected = platform::load_relaxed(kind.counter(peer));
    const flag_t seen = kind.look(peer, expected).value();
    platform::store_relaxed(&record.expected[peer], expected);
    platform::store_relaxed(&record.seen[peer], seen);
    if (seen != expected) late |= 1u << peer;
  }

  uint32_t status = kWoken;
  uint64_t word = platform::load_relaxed(at<uint64_t>(g.own, kAbort));
  if (word == 0) {
    const bool requested = platform::load_relaxed(&host->abort_request) != 0;
    status = requested ? kRequested : kExpired;
    word = kAbortRaised | uint64_t(g.rank) << 48 | uint64_t(requested ? 0 : late) << 40 | uint64_t(g.domain) << 32 | sequence;
  }
  platform::store_relaxed(&record.abort, word);
  platform::store_relaxed(&record.operation, m.operation);
  platform::store_relaxed(&record.sequence, sequence);
  platform::store_relaxed(&record.domain, g.domain);
  platform::store_relaxed(&record.block, platform::block_id());
  platform::store_relaxed(&record.phase, phase);
  platform::store_relaxed(&record.missing, uint32_t(word >> 40) & 0xff);
  // Release: pairs with the host's acquire load of the status, behind which it reads the record. A relaxed store could
  // show the status before the record.
  platform::signal_release(&host->status, status);

  if (status == kWoken) return;  // whoever raised it tells the others
  platform::store_relaxed(at<uint64_t>(g.own, kAbort), word);
  for (uint32_t peer = 0; peer < g.world; peer++) {
    if (peer != g.rank) platform::store_relaxed(at<uint64_t>(g.base[peer], kAbort), word);
  }
}

}  // namespace signal_comm
