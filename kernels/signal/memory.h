// Moving packs between memory and registers: whole and aligned where possible, element by element where not.
#pragma once

#include "dtype.h"

namespace signal_comm {

// Who may write the memory while this kernel runs, or has cached it: decides the kind of load.
enum class From { kOwn, kPeer };

// Elements that pack `pack` of a message of `count` elements holds.
template <class T>
SIGNAL_DEVICE uint32_t elements_in(uint64_t count, uint64_t pack) {
  constexpr uint32_t kPerPack = kPackBytes / T::kBytes;
  const uint64_t left = count - pack * kPerPack;
  return left < kPerPack ? uint32_t(left) : kPerPack;
}

SIGNAL_DEVICE bool is_aligned(uint64_t address) { return address % kPackBytes == 0; }

template <From from>
SIGNAL_DEVICE Pack load_whole(uint64_t address) {
  const Pack* at = reinterpret_cast<const Pack*>(address);
  return from == From::kPeer ? platform::load_pack_peer(at) : platform::load_pack(at);
}

// The first `elements` elements at an element-aligned address; the rest of the pack is +0.
template <class T, From from>
SIGNAL_DEVICE Pack load_elements(uint64_t address, uint32_t elements) {
  using Bits = typename T::Bits;
  const Bits* at = reinterpret_cast<const Bits*>(address);
  Pack pack = {};
  SIGNAL_UNROLL
  for (uint32_t e = 0; e < kPackBytes / T::kBytes; e++) {  // a fixed count keeps the pack in registers
    if (e >= elements) continue;
    set_element<Bits>(pack, e, from == From::kPeer ? platform::load_peer(at + e) : platform::load(at + e));
  }
  return pack;
}

template <class T>
SIGNAL_DEVICE void store_elements(uint64_t address, const Pack& pack, uint32_t elements) {
  using Bits = typename T::Bits;
  Bits* at = reinterpret_cast<Bits*>(address);
  SIGNAL_UNROLL
  for (uint32_t e = 0; e < kPackBytes / T::kBytes; e++) {
    if (e < elements) platform::store(at + e, element_of<Bits>(pack, e));
  }
}

// Pack `pack` of the message at `base` that has `count` elements.
template <class T, From from>
SIGNAL_DEVICE Pack load_any(uint64_t base, uint64_t pack, uint64_t count) {
  const uint64_t address = base + pack * kPackBytes;
  const uint32_t elements = elements_in<T>(count, pack);
  if (elements == kPackBytes / T::kBytes && is_aligned(address)) return load_whole<from>(address);
  return load_elements<T, from>(address, elements);
}

template <class T>
SIGNAL_DEVICE void store_any(uint64_t base, uint64_t pack, uint64_t count, const Pack& value) {
  const uint64_t address = base + pack * kPackBytes;
  const uint32_t elements = elements_in<T>(count, pack);
  if (elements == kPackBytes / T::kBytes && is_aligned(address)) {
    platform::store_pack(reinterpret_cast<Pack*>(address), value);
  } else {
    store_elements<T>(address, value, elements);
  }
}

// Packs of a range that belong to this thread: a stride over the whole grid, the same for every rank, since after a
// barrier block b may read only what the peers' block b wrote (P2).
struct Stride {
  uint32_t first;
  uint32_t step;

  SIGNAL_DEVICE Stride()
      : first(platform::block_id() * platform::block_dim() + platform::thread_id()),
        step(platform::grid_dim() * platform::block_dim()) {}
};

}  // namespace signal_comm
