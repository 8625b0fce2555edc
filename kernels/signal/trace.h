// When a call began and ended, and when each peer was ready for it: a kernel before and one behind it, where someone wants a timeline (Settings::trace).
// Calls themselves know nothing of it, so that it costs nothing where nobody does.
#pragma once

#include "barrier.h"

namespace signal_comm {

SIGNAL_DEVICE TraceRecord* trace_record(const TraceParams& p, uint64_t number) {
  return reinterpret_cast<TraceRecord*>(p.records) + number % p.capacity;
}

// No data travels with the barrier; when a peer's word is there is what counts.
struct Arrivals {
  TraceRecord* record;

  static constexpr bool kHasPlace = true;

  SIGNAL_DEVICE uint64_t to(uint32_t) const { return 0; }
  SIGNAL_DEVICE uint64_t to_first() const { return 0; }
  SIGNAL_DEVICE static bool is_staged(uint64_t) { return false; }
  SIGNAL_DEVICE uint64_t place(uint32_t peer, uint64_t data) const {
    platform::store(&record->seen[peer], platform::clock());
    return data;
  }
};

// Behind the call: whatever ran before on the stream has ended.
SIGNAL_DEVICE void trace_end(const TraceParams& p) {
  begin_call(p.group);
  if (platform::thread_id() != 0) return;
  // Relaxed, as below: kernels of one stream alone touch the count, and each begins behind the one before.
  const uint64_t number = platform::load_relaxed(reinterpret_cast<const uint64_t*>(p.count)) - 1;
  platform::store(&trace_record(p, number)->ended, platform::clock());
}

SIGNAL_DEVICE void trace_kernel(const TraceParams& p) {
  if (p.is_end != 0) return trace_end(p);
  SIGNAL_SHARED(BlockShared, shared);
  const GroupParams& g = p.group;
  Member m(g, kOpTrace);
  Barriers<LineBarrier, Partners> barriers(m, shared);
  barriers.who.mask = p.partners;
  begin(m, barriers);
  const uint64_t ready = platform::clock();
  uint64_t* const count = reinterpret_cast<uint64_t*>(p.count);
  const uint64_t number = platform::load_relaxed(count);
  TraceRecord* const record = trace_record(p, number);
  barriers.run(kPhaseStart, false, Turn::kFirst, Arrivals{record});
  platform::block_sync();  // all threads have read the count, and know who came
  test_delay(m, kPhaseStart);
  if (!barriers.complete() || platform::thread_id() != 0) return;
  platform::store(&record->call, p.call);
  platform::store(&record->ready, ready);
  platform::store(&record->ended, uint64_t(0));
  platform::store_relaxed(count, number + 1);
  platform::store(&record->began, platform::clock());
}

}  // namespace signal_comm
