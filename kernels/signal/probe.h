// Kernels that test the protocol and the machine: for doctor, for the conformance suite, and as the plain program that
// race detectors look at.
#pragma once

#include "barrier.h"

namespace signal_comm {

SIGNAL_DEVICE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

SIGNAL_DEVICE uint32_t probe_token(uint32_t seed, uint32_t round, uint32_t rank, uint32_t thread) {
  return mix(seed ^ mix(round ^ mix(rank << 20 ^ thread)));
}

// A 62-bit number in place of an address: both halves of the line must arrive together.
SIGNAL_DEVICE uint64_t published(uint32_t round, uint32_t rank) {
  return uint64_t(mix(round ^ rank)) << 30 ^ mix(rank ^ ~round);
}

SIGNAL_DEVICE void probe_delay(uint32_t random, uint32_t max_delay) {
  if (max_delay == 0) return;
  for (uint32_t i = random % max_delay; i > 0; i--) platform::relax();
}

// Each thread leaves a token in its rank's scratch, meets the peers, checks theirs, and meets them again. Odd rounds
// publish a number with the first barrier and check the peers' numbers too.
SIGNAL_DEVICE void barrier_probe_kernel(const BarrierProbeParams& params) {
  SIGNAL_SHARED(BlockShared, shared);
  const GroupParams& g = params.group;
  Member m(g, kOpBarrierProbe);
  Barriers<CounterBarrier> counters(m, shared);
  Barriers<LineBarrier> lines(m, shared);
  begin(m, counters, lines);
  const uint32_t block = platform::block_id();
  const uint32_t thread = block * platform::block_dim() + platform::thread_id();
  uint32_t wrong_rounds = 0;

  for (uint32_t round = 0; round < params.rounds; round++) {
    const uint32_t random = mix(probe_token(~params.seed, round, g.rank, block));
    probe_delay(random, params.max_delay);
    uint32_t* const mine = reinterpret_cast<uint32_t*>(g.own + g.scratch_offset) + thread;
    platform::store(mine, probe_token(params.seed, round, g.rank, thread));

    bool alive;
    const bool publishing = round % 2 == 1;
    if (publishing) {
      const uint64_t nowhere[kMaxGpus] = {};
      lines.publish(InputPlace{g, false, nowhere, published(round, g.rank)}, true, Turn::kBetween);
      alive = lines.complete();
    } else {
      alive = round == 0 ? counters.meet(kPhaseStart, true, Turn::kFirst) : counters.meet(kPhaseMiddle, true, Turn::kBetween);
    }
    if (!alive) break;

    probe_delay(random >> 16, params.max_delay);
    bool wrong = false;
    for (uint32_t peer = 0; peer < g.world; peer++) {
      if (peer == g.rank) continue;
      const uint32_t* const theirs = reinterpret_cast<const uint32_t*>(g.base[peer] + g.scratch_offset) + thread;
      wrong |= platform::load_peer(theirs) != probe_token(params.seed, round, peer, thread);
      if (publishing) wrong |= shared.source[peer] != published(round, peer);
    }
    wrong_rounds += platform::block_any(wrong) ? 1 : 0;
    if (!counters.meet(kPhaseExit, false, Turn::kBetween)) break;
  }
  if (platform::thread_id() == 0) {
    platform::store(reinterpret_cast<uint32_t*>(params.mismatches) + block, wrong_rounds);
  }
}

// Writes a pattern to memory of another device, or checks it there.
SIGNAL_DEVICE void peer_probe_kernel(const PeerProbeParams& params) {
  uint32_t* const remote = reinterpret_cast<uint32_t*>(params.remote);
  const uint32_t threads = platform::grid_dim() * platform::block_dim();
  platform::wait_for_earlier();
  if (params.delay != 0) {
    platform::allow_next();
    const uint64_t began = platform::clock();
    while (platform::clock() - began < params.delay) platform::relax();
  }
  bool wrong = false;
  for (uint32_t i = platform::block_id() * platform::block_dim() + platform::thread_id(); i < params.words; i += threads) {
    const uint32_t word = params.seed + i * 2654435761u;
    if (params.check == 0) {
      platform::store_relaxed(&remote[i], word);
    } else {
      wrong |= platform::load_relaxed(&remote[i]) != word;
    }
  }
  if (platform::block_any(wrong) && platform::thread_id() == 0) {
    platform::store_relaxed(reinterpret_cast<uint32_t*>(params.mismatches), 1u);
  }
}

}  // namespace signal_comm
