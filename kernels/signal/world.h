// Code for each world size, and the one order in which sums run.
#pragma once

#include "dtype.h"

namespace signal_comm {

// Calls `act` with the world size, from kLeast to kMost, as a constant, so that addresses and packs are registers. The
// commonest first; opaque, so that the choice becomes no jump table, which would be read from cold memory.
template <uint32_t kLeast = 1, uint32_t kMost = kMaxGpus, class Act>
SIGNAL_DEVICE void with_world(uint32_t world, Act act) {
  const auto is = [&](uint32_t n) { return platform::opaque(world) == n; };
  if constexpr (kLeast <= 4) {
    if (is(2)) return act(Count<2>{});
    if (is(4)) return act(Count<4>{});
  }
  if constexpr (kMost > 4) {
    if (is(8)) return act(Count<8>{});
    if (is(5)) return act(Count<5>{});
    if (is(6)) return act(Count<6>{});
    if (is(7)) return act(Count<7>{});
  }
  if constexpr (kLeast <= 4) {
    if (is(3)) return act(Count<3>{});
    act(Count<1>{});
  }
}

// The reduction of one pack over all ranks, in rank order, before it is rounded. N is the world size, or the most that it can be, or 0 where only
// `world` tells. `op` matters to types that are not specialised for sums.
template <class T, uint32_t N, bool kExact = true, class Load>
SIGNAL_DEVICE typename T::Fold fold_ranks(uint32_t op, uint32_t world, uint32_t rank, Load load) {
  typename T::Fold sum(op);
#ifdef SIGNAL_MUTANT_LOCAL_FIRST_ORDER
  for (uint32_t k = 0; k < world; k++) sum.add(load((rank + k) % world));
#else
  (void)rank;
  if constexpr (N != 0) {
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) {
      if (kExact || r < world) sum.add(load(r));
    }
  } else {
    for (uint32_t r = 0; r < world; r++) sum.add(load(r));
  }
#endif
  return sum;
}

template <class T, uint32_t N, bool kExact = true, class Load>
SIGNAL_DEVICE Pack sum_ranks(uint32_t op, uint32_t world, uint32_t rank, Load load) {
  return fold_ranks<T, N, kExact>(op, world, rank, load).finish(world);
}

}  // namespace signal_comm
