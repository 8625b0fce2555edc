// Reducing ranges of packs that lie at every rank, where the last barrier said (DESIGN P12).
#pragma once

#include "barrier.h"
#include "world.h"

namespace signal_comm {

// A range of packs that one rank reduces.
struct Range {
  uint64_t source;  // its first byte, from where each rank's data lies
  uint64_t output;  // where its first result goes
  Pack* kept;       // results go there too, unless null
  uint64_t bytes;   // below 2^36; the last pack may be ragged
};

// Reduces packs i, i + step, ... of a range: all that is left of it for this thread.
template <class T>
SIGNAL_COLD void reduce_rest(const GroupParams& g, uint32_t op, const BlockShared& shared, uint64_t source, uint64_t output,
                             Pack* kept, uint64_t bytes, uint32_t i, uint32_t step) {
  const uint32_t packs = uint32_t(packs_of(bytes));
  for (; i < packs; i += step) {
    const Pack sum = sum_ranks<T, 0>(op, g.world, g.rank, [&](uint32_t r) {
      return load_any<From::kPeer>(shared.source[r] + source, i, bytes);
    });
    store_any(output, i, bytes, sum);
    if (kept != nullptr) platform::store_pack(&kept[i], sum);
  }
}

// Where each rank's data lies, in registers.
template <uint32_t N>
struct Sources {
  uint64_t at[N];
  uint64_t bits;  // of all of them

  SIGNAL_DEVICE explicit Sources(const BlockShared& shared) : bits(0) {
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) bits |= at[r] = shared.source[r];
  }
};

// Packs of each rank that a thread has on their way at once: as many as the registers hold.
template <uint32_t N>
constexpr uint32_t kMostAhead = N == 2 ? 4 : N == 4 ? 2 : 1;

// The summation of packs that are whole and aligned on every rank: pack `i` of the range and every `step`th behind it,
// below `end`, kAhead at a time. The range begins at pack `first` of the sources. Gives the first pack that it left.
template <class T, uint32_t N, uint32_t kAhead>
SIGNAL_DEVICE uint32_t reduce_whole(uint32_t rank, const Sources<N>& sources, Pack* output, Pack* kept, uint64_t first,
                                    uint32_t i, uint32_t end, uint32_t step) {
  const auto reduce_some = [&](auto ahead) SIGNAL_INLINE {
    constexpr uint32_t kSome = decltype(ahead)::value;
    Pack packs[kSome][N];  // all loads are on their way before the first is needed
    SIGNAL_UNROLL
    for (uint32_t k = 0; k < kSome; k++) {
      SIGNAL_UNROLL
      for (uint32_t r = 0; r < N; r++) {
        packs[k][r] = load_whole<From::kPeer>(sources.at[r] + (first + i + k * step) * kPackBytes);
      }
    }
    SIGNAL_UNROLL
    for (uint32_t k = 0; k < kSome; k++) {
      const Pack sum = sum_ranks<T, N>(kReduceSum, N, rank, [&](uint32_t r) { return packs[k][r]; });
      platform::store_pack(&output[i + k * step], sum);
      if (kept != nullptr) platform::store_pack(&kept[i + k * step], sum);
    }
    i += kSome * step;
  };
  if constexpr (kAhead > 1) {
    while (i + (kAhead - 1) * step < end) reduce_some(Count<kAhead>{});
  }
  SIGNAL_NO_UNROLL
  while (i < end) reduce_some(Count<1>{});
  return i;
}

// Reduces this thread's packs of a range; `op` and `dtype` matter to Any alone.
template <class T>
SIGNAL_DEVICE void reduce(const GroupParams& g, uint32_t op, uint32_t dtype, const BlockShared& shared, const Range& range) {
  const Stride stride;
  uint32_t i = stride.first;
  if constexpr (T::kIsAny) {
    with_type(dtype, [&](auto type) SIGNAL_INLINE {
      reduce_rest<decltype(type)>(g, op, shared, range.source, range.output, range.kept, range.bytes, i, stride.step);
    });
  } else {
    with_world(g.world, [&](auto world) SIGNAL_INLINE {
      constexpr uint32_t N = decltype(world)::value;
      const Sources<N> sources(shared);
      if (!is_aligned(sources.bits | range.source | range.output)) return;
      Pack* const output = reinterpret_cast<Pack*>(range.output);
      const uint32_t whole = uint32_t(range.bytes / kPackBytes);
      i = reduce_whole<T, N, kMostAhead<N>>(g.rank, sources, output, range.kept, range.source / kPackBytes, i, whole, stride.step);
    });
    if (i < uint32_t(packs_of(range.bytes))) {
      reduce_rest<T>(g, op, shared, range.source, range.output, range.kept, range.bytes, i, stride.step);
    }
  }
}

}  // namespace signal_comm
