// Moving packs between memory and registers: whole and aligned where possible, in smaller units where not. Nothing here knows
// element types: data moves bit by bit.
#pragma once

#include "params.h"

namespace signal_comm {

// The unit in which data moves.
struct alignas(16) Pack {
  uint32_t word[4];
};

// A number that the compiler knows, as an argument.
template <uint32_t N>
struct Count {
  static constexpr uint32_t value = N;
};

// Who may write the memory while this kernel runs, or has cached it: decides the kind of load.
enum class From { kOwn, kPeer };

SIGNAL_DEVICE uint64_t packs_of(uint64_t bytes) { return (bytes + (kPackBytes - 1)) / kPackBytes; }

// Bytes that pack `pack` of `bytes` bytes holds.
SIGNAL_DEVICE uint32_t bytes_in(uint64_t bytes, uint64_t pack) {
  const uint64_t left = bytes - pack * kPackBytes;
  return left < kPackBytes ? uint32_t(left) : kPackBytes;
}

SIGNAL_DEVICE bool is_aligned(uint64_t address) { return address % kPackBytes == 0; }

// Element `e` of a pack, as bits.
template <class Bits>
SIGNAL_DEVICE Bits element_of(const Pack& pack, uint32_t e) {
  if constexpr (sizeof(Bits) == 8) {
    return uint64_t(pack.word[2 * e + 1]) << 32 | pack.word[2 * e];
  } else {
    constexpr uint32_t kPerWord = 4 / sizeof(Bits);
    return Bits(pack.word[e / kPerWord] >> (e % kPerWord * 8 * sizeof(Bits)));
  }
}

// Sets element `e` of a pack in which it is 0.
template <class Bits>
SIGNAL_DEVICE void set_element(Pack& pack, uint32_t e, Bits bits) {
  if constexpr (sizeof(Bits) == 8) {
    pack.word[2 * e] = uint32_t(bits);
    pack.word[2 * e + 1] = uint32_t(bits >> 32);
  } else {
    constexpr uint32_t kPerWord = 4 / sizeof(Bits);
    pack.word[e / kPerWord] |= uint32_t(bits) << (e % kPerWord * 8 * sizeof(Bits));
  }
}

template <From from>
SIGNAL_DEVICE Pack load_whole(uint64_t address) {
  const Pack* at = reinterpret_cast<const Pack*>(address);
  return from == From::kPeer ? platform::load_pack_peer(at) : platform::load_pack(at);
}

SIGNAL_DEVICE void store_whole(uint64_t address, const Pack& pack) { platform::store_pack(reinterpret_cast<Pack*>(address), pack); }

template <class Unit, From from>
SIGNAL_DEVICE Pack load_units(uint64_t address, uint32_t bytes) {
  const Unit* at = reinterpret_cast<const Unit*>(address);
  Pack pack = {};
  SIGNAL_UNROLL
  for (uint32_t e = 0; e < kPackBytes / sizeof(Unit); e++) {  // a fixed count keeps the pack in registers
    if (e * sizeof(Unit) >= bytes) continue;
    set_element<Unit>(pack, e, from == From::kPeer ? platform::load_peer(at + e) : platform::load(at + e));
  }
  return pack;
}

template <class Unit>
SIGNAL_DEVICE void store_units(uint64_t address, const Pack& pack, uint32_t bytes) {
  Unit* at = reinterpret_cast<Unit*>(address);
  SIGNAL_UNROLL
  for (uint32_t e = 0; e < kPackBytes / sizeof(Unit); e++) {
    if (e * sizeof(Unit) < bytes) platform::store(at + e, element_of<Unit>(pack, e));
  }
}

// The first `bytes` bytes at an address, in the largest units that fit both; the rest of the pack is 0. So elements at an
// address that is a multiple of their size are never torn.
template <From from>
SIGNAL_COLD Pack load_ragged(uint64_t address, uint32_t bytes) {
  const uint64_t bits = address | bytes;
  if (bits % 8 == 0) return load_units<uint64_t, from>(address, bytes);
  if (bits % 4 == 0) return load_units<uint32_t, from>(address, bytes);
  if (bits % 2 == 0) return load_units<uint16_t, from>(address, bytes);
  return load_units<uint8_t, from>(address, bytes);
}

SIGNAL_COLD void store_ragged(uint64_t address, Pack pack, uint32_t bytes) {
  const uint64_t bits = address | bytes;
  if (bits % 8 == 0) return store_units<uint64_t>(address, pack, bytes);
  if (bits % 4 == 0) return store_units<uint32_t>(address, pack, bytes);
  if (bits % 2 == 0) return store_units<uint16_t>(address, pack, bytes);
  store_units<uint8_t>(address, pack, bytes);
}

// Pack `pack` of the `bytes` bytes at `base`.
template <From from>
SIGNAL_DEVICE Pack load_any(uint64_t base, uint64_t pack, uint64_t bytes) {
  const uint64_t address = base + pack * kPackBytes;
  const uint32_t held = bytes_in(bytes, pack);
  if (held == kPackBytes && is_aligned(address)) return load_whole<from>(address);
  return load_ragged<from>(address, held);
}

SIGNAL_DEVICE void store_any(uint64_t base, uint64_t pack, uint64_t bytes, const Pack& value) {
  const uint64_t address = base + pack * kPackBytes;
  const uint32_t held = bytes_in(bytes, pack);
  if (held == kPackBytes && is_aligned(address)) return store_whole(address, value);
  store_ragged(address, value, held);
}

// Packs of a range that belong to this thread: a stride over the whole grid, or its first blocks, the same for every rank, since
// after a barrier block b may read only what the peers' block b wrote (P2).
struct Stride {
  uint32_t first;
  uint32_t step;

  SIGNAL_DEVICE Stride() : Stride(platform::grid_dim()) {}
  SIGNAL_DEVICE explicit Stride(uint32_t blocks)
      : first(platform::block_id() * platform::block_dim() + platform::thread_id()), step(blocks * platform::block_dim()) {}
};

// Copies pack `i`, and every `step`th behind it, of the `bytes` bytes at `source`.
template <From from>
SIGNAL_COLD void copy_rest(uint64_t source, uint64_t target, uint64_t bytes, uint32_t i, uint32_t step) {
  const uint32_t packs = uint32_t(packs_of(bytes));
  for (; i < packs; i += step) store_any(target, i, bytes, load_any<from>(source, i, bytes));
}

// Copies this thread's packs of the `bytes` bytes at `source`, of which there are fewer than 2^32, with several on their way at
// once.
template <From from>
SIGNAL_DEVICE void copy(uint64_t source, uint64_t target, uint64_t bytes, const Stride& stride) {
  constexpr uint32_t kAhead = 8;
  uint32_t i = stride.first;
  if (is_aligned(source | target)) {
    const uint32_t whole = uint32_t(bytes / kPackBytes);
    const auto copy_some = [&](auto ahead) SIGNAL_INLINE {
      constexpr uint32_t kSome = decltype(ahead)::value;
      Pack packs[kSome];
      SIGNAL_UNROLL
      for (uint32_t k = 0; k < kSome; k++) packs[k] = load_whole<from>(source + uint64_t(i + k * stride.step) * kPackBytes);
      SIGNAL_UNROLL
      for (uint32_t k = 0; k < kSome; k++) store_whole(target + uint64_t(i + k * stride.step) * kPackBytes, packs[k]);
      i += kSome * stride.step;
    };
    while (uint64_t(i) + (kAhead - 1) * stride.step < whole) copy_some(Count<kAhead>{});
    SIGNAL_NO_UNROLL
    while (i < whole) copy_some(Count<1>{});
  }
  if (i < uint32_t(packs_of(bytes))) copy_rest<from>(source, target, bytes, i, stride.step);
}

}  // namespace signal_comm
