// The comparison of calls before any of them moves data: checked mode (DESIGN P4 asks that all ranks make the same call).
#pragma once

#include "barrier.h"

namespace signal_comm {

// One word of a call's description, to every peer with whom the call has to do. Its three highest bits are clear: behind a barrier
// they say that a peer did not come.
struct DescriptionWord {
  const CheckParams& p;
  uint32_t number;

  static constexpr bool kHasPlace = true;

  SIGNAL_DEVICE uint64_t to(uint32_t peer) const { return p.description[peer][number]; }
  SIGNAL_DEVICE uint64_t to_first() const { return to(platform::thread_id() % kMaxGpus); }
  SIGNAL_DEVICE static bool is_staged(uint64_t) { return false; }
  SIGNAL_DEVICE uint64_t place(uint32_t, uint64_t data) const { return data; }
};

// Tells the host which rank makes another call, and what that is; then this rank's kernels return at once. The peers are not
// told: each of them finds the difference by itself, and names it.
SIGNAL_COLD void report_mismatch(const CheckParams& p, uint32_t peer, uint64_t first, uint64_t second) {
  const GroupParams& g = p.group;
  const Member m(g, kOpCheck);
  if (!claim_report(m)) return;
  FaultRecord& record = m.host()->record;
  const uint64_t own[2] = {p.description[peer][0], p.description[peer][1]};
  const uint64_t theirs[2] = {first, second};
  SIGNAL_UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    platform::store_relaxed(&record.expected[i], uint32_t(own[i / 2] >> (i % 2 * 32)));
    platform::store_relaxed(&record.seen[i], uint32_t(theirs[i / 2] >> (i % 2 * 32)));
  }
  const uint64_t word = kAbortMismatch | raised_word(g, 1u << peer, platform::load_relaxed(m.sequence_word()));
  publish_fault(m, kPhaseStart, word, kMismatch);
  platform::store_relaxed(m.abort_word(), word);
}

// Every partner hears every other's description, so all find a difference, and whether one left early makes none of them wait.
SIGNAL_DEVICE void check_kernel(const CheckParams& p) {
  SIGNAL_SHARED(BlockShared, shared);
  const GroupParams& g = p.group;
  Member m(g, kOpCheck);
  Barriers<LineBarrier, Partners> barriers(m, shared);
  barriers.who.mask = p.partners;
  begin(m, barriers);

  barriers.run(kPhaseStart, false, Turn::kFirst, DescriptionWord{p, 0});
  platform::block_sync();
  test_delay(m, kPhaseStart);
  if (!barriers.complete()) return;
  uint64_t first[kMaxGpus];
  SIGNAL_UNROLL
  for (uint32_t r = 0; r < kMaxGpus; r++) first[r] = r < g.world ? shared.source[r] : 0;

  barriers.run(kPhaseMiddle, false, Turn::kBetween, DescriptionWord{p, 1});
  platform::block_sync();
  if (!barriers.complete() || platform::thread_id() != 0) return;
  SIGNAL_UNROLL
  for (uint32_t r = 0; r < kMaxGpus; r++) {
    if (r == g.rank || !barriers.who.has(r) || (first[r] == p.description[r][0] && shared.source[r] == p.description[r][1])) continue;
    return report_mismatch(p, r, first[r], shared.source[r]);
  }
}

}  // namespace signal_comm
