// What all kernels do whose ranks read each other's memory between two barriers (DESIGN P3, P14).
#pragma once

#include "barrier.h"
#include "memory.h"

namespace signal_comm {

SIGNAL_DEVICE uint64_t scratch_of(const GroupParams& g) { return g.own + g.scratch_offset; }

SIGNAL_DEVICE bool is_staged(const GroupParams& g) { return (g.flags & kFlagStaged) != 0; }
SIGNAL_DEVICE bool is_pushed(const GroupParams& g) { return (g.flags & kFlagPush) != 0; }

// Whether to copy the input to the scratch. Not once a fault is known: a call that gave up waiting for a peer left the scratch to
// it, and a peer that is merely slow reads it yet, and would take what is staged now for that call's. Every thread of the block
// asks, since only the first ones have read the abort word; and all of them know of it then, or one that read the word sooner would
// publish what was not staged.
SIGNAL_DEVICE bool may_stage(Member& m) {
#if defined(SIGNAL_MUTANT_STAGES_AFTER_A_FAULT)
  return is_staged(m.group);
#elif defined(SIGNAL_MUTANT_PUBLISHES_UNSTAGED)
  return is_staged(m.group) && !platform::block_any(m.abort != 0);
#else
  if (!is_staged(m.group)) return false;
  if (platform::block_any(m.abort != 0)) m.abort = kAbortRaised;
  return m.abort == 0;
#endif
}

// Of a block that is pushed to.
struct PushShared {
  BlockShared places;  // where each rank wants what is for it
  BlockShared slots;   // where each rank's packs are that are reduced here
};

// Behind it is here what the peers have pushed; false: the kernel must leave now. The release is behind what this block has pushed, and
// pairs with the peer's acquire, before it reads that or ends.
template <class Barriers>
SIGNAL_DEVICE bool await_pushes(Barriers& barriers, uint32_t phase) {
#ifdef SIGNAL_MUTANT_PUSHES_NOT_AWAITED
  if (phase == kPhaseExit) return true;
#endif
#ifdef SIGNAL_MUTANT_SHARDS_NOT_AWAITED
  if (phase == kPhaseMiddle) return true;
#endif
#ifdef SIGNAL_MUTANT_PUSHES_RELAXED
  if (phase == kPhaseExit) return barriers.meet(phase, false, Turn::kBetween);
#endif
#ifdef SIGNAL_MUTANT_RELAXED_MIDDLE_BARRIER
  if (phase == kPhaseMiddle) return barriers.meet(phase, false, Turn::kBetween);
#endif
  return barriers.meet(phase, true, Turn::kBetween);
}

// Peers have read this rank's memory: its owner may overwrite it. Nothing was published since the last barrier.
template <class Barriers>
SIGNAL_DEVICE bool exit_barrier(Barriers& barriers, Turn turn) {
#ifdef SIGNAL_MUTANT_NO_EXIT_BARRIER
  return (void)barriers, (void)turn, true;
#else
  return barriers.meet(kPhaseExit, false, turn);
#endif
}

}  // namespace signal_comm
