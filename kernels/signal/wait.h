// The one waiting primitive, and what happens when a wait ends without its peers (DESIGN P13).
#pragma once

#include "params.h"

// The translation unit has included its platform.h before this file. It defines SIGNAL_DEVICE, SIGNAL_UNROLL,
// SIGNAL_SHARED and the accessors of namespace platform; nothing here or below touches shared memory in any other way.

namespace signal_comm {

SIGNAL_DEVICE Signal* signal_of(const GroupParams& group, uint32_t rank) {
  return reinterpret_cast<Signal*>(group.base[rank]);
}

SIGNAL_DEVICE Control* control_of(const GroupParams& group, uint32_t rank) {
  return reinterpret_cast<Control*>(group.base[rank] + kControlOffset);
}

// One thread's view of its rank: the parameters, the rank's own structures, and what it read of them when the kernel
// began. Everything is read there at once: one trip to memory instead of one before each barrier.
struct Member {
  const GroupParams& group;
  Signal* signal;
  Control* control;
  HostControl* host;
  uint32_t operation;
  // Of peer `thread_id()`, if there is one: barriers begun, of either kind. The memory follows at each barrier.
  flag_t count;
  flag_t line_count;
  uint64_t abort;     // the abort word when the kernel began
  uint32_t sequence;  // calls begun before this one; thread 0 of block 0 alone

  SIGNAL_DEVICE Member(const GroupParams& params, uint32_t op)
      : group(params),
        signal(signal_of(params, params.rank)),
        control(control_of(params, params.rank)),
        host(reinterpret_cast<HostControl*>(params.host_control)),
        operation(op),
        count(0),
        line_count(0),
        abort(0),
        sequence(0) {
    const uint32_t thread = platform::thread_id();
    const uint32_t block = platform::block_id();
    if (thread < params.world) {
      abort = platform::load_relaxed(&control->abort);
      count = platform::load(&signal->self_counter[params.domain][block][thread]);
      line_count = platform::load(&control->line_counter[params.domain][block][thread]);
      if (thread == 0 && block == 0) sequence = platform::load_relaxed(&control->sequence[params.domain]);
    }
  }

  // Counts the call, for fault records. One writer, after its first signal has left.
  SIGNAL_DEVICE void count_call() const {
    if (platform::block_id() == 0 && platform::thread_id() == 0) {
      platform::store_relaxed(&control->sequence[group.domain], sequence + 1);
    }
  }
};

SIGNAL_DEVICE bool aborted(const Member& m) { return platform::load_relaxed(&m.control->abort) != 0; }

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
    // One more look: what arrived while this thread was not running is not late.
    if (over || aborted(m) || platform::load_relaxed(&m.host->abort_request) != 0) return ready();
  }
  return true;
}

// Why a block leaves: written for the host once a rank, by whichever block claims it first; then raised at this rank, so
// that its later kernels return at once, and at last at the peers. Called by one thread, after a block barrier.
//
// `late` has bit r set when this block gave up waiting for rank r; `kind` is the barrier, which knows its words.
template <class Kind>
SIGNAL_DEVICE void report_fault(const Member& m, const Kind& kind, uint32_t phase, uint32_t late) {
  if (!platform::claim(&m.control->claim)) return;
  const GroupParams& g = m.group;
  const uint32_t sequence = platform::load_relaxed(&m.control->sequence[g.domain]);

  uint32_t status = kWoken;
  uint64_t word = platform::load_relaxed(&m.control->abort);
  if (word == 0) {
    const bool requested = platform::load_relaxed(&m.host->abort_request) != 0;
    status = requested ? kRequested : kExpired;
    word = kAbortRaised | uint64_t(g.rank) << 48 | uint64_t(requested ? 0 : late) << 40 | uint64_t(g.domain) << 32 | sequence;
  }

  FaultRecord& record = m.host->record;
  platform::store_relaxed(&record.abort, word);
  platform::store_relaxed(&record.operation, m.operation);
  platform::store_relaxed(&record.sequence, sequence);
  platform::store_relaxed(&record.domain, g.domain);
  platform::store_relaxed(&record.block, platform::block_id());
  platform::store_relaxed(&record.phase, phase);
  platform::store_relaxed(&record.missing, uint32_t(word >> 40) & 0xff);
  for (uint32_t peer = 0; peer < g.world; peer++) {
    if (peer == g.rank) continue;
    const flag_t value = platform::load(kind.counter(peer));
    platform::store_relaxed(&record.expected[peer], value);
    platform::store_relaxed(&record.seen[peer], kind.look(peer, value).value());
  }
  // Release: pairs with the host's acquire load of the status, behind which it reads the record. A relaxed store could
  // show the status before the record.
  platform::signal_release(&m.host->status, status);

  if (status == kWoken) return;  // whoever raised it tells the others
  platform::store_relaxed(&m.control->abort, word);
  for (uint32_t peer = 0; peer < g.world; peer++) {
    if (peer != g.rank) platform::store_relaxed(&control_of(g, peer)->abort, word);
  }
}

}  // namespace signal_comm
