// Element types: how 32-bit words of memory become f32 summands and how finished sums become words again.
#pragma once

#include <stdint.h>

namespace signal_comm {

// The unit in which data moves.
struct alignas(16) Pack {
  uint32_t word[4];
};

SIGNAL_DEVICE bool is_nan(float x) { return x != x; }

// A NaN result is the type's canonical quiet NaN on every backend (DESIGN P12). Two 16-bit elements are rounded at once; what
// the platforms make of a NaN is 0x7fff, which this turns into `nan` in either half. Without a branch: one between the loads
// of several packs keeps the compiler from having them on their way together.
SIGNAL_DEVICE uint32_t canonical_halves(uint32_t word, uint32_t nan) {
  const uint32_t found = ((word & 0x7fff7fffu) + 0x00010001u) & 0x80008000u;
  return word - (found >> 15) * (0x7fffu - nan);
}

struct F32 {
  static constexpr uint32_t kBytes = 4;
  static constexpr uint32_t kPerWord = 1;
  using Bits = uint32_t;

  SIGNAL_DEVICE static void widen(uint32_t word, float (&to)[1]) { to[0] = platform::as_float(word); }
  SIGNAL_DEVICE static uint32_t round(const float (&from)[1]) {
    return is_nan(from[0]) ? 0x7fc00000u : platform::as_bits(from[0]);
  }
};

struct F16 {
  static constexpr uint32_t kBytes = 2;
  static constexpr uint32_t kPerWord = 2;
  using Bits = uint16_t;

  SIGNAL_DEVICE static void widen(uint32_t word, float (&to)[2]) {
    to[0] = platform::f16_to_f32(uint16_t(word));
    to[1] = platform::f16_to_f32(uint16_t(word >> 16));
  }
  SIGNAL_DEVICE static uint32_t round(const float (&from)[2]) {
    return canonical_halves(platform::f32x2_to_f16(from[0], from[1]), 0x7e00u);
  }
};

struct Bf16 {
  static constexpr uint32_t kBytes = 2;
  static constexpr uint32_t kPerWord = 2;
  using Bits = uint16_t;

  SIGNAL_DEVICE static void widen(uint32_t word, float (&to)[2]) {
    to[0] = platform::as_float(word << 16);
    to[1] = platform::as_float(word & 0xffff0000u);
  }
  SIGNAL_DEVICE static uint32_t round(const float (&from)[2]) {
    return canonical_halves(platform::f32x2_to_bf16(from[0], from[1]), 0x7fc0u);
  }
};

// The running sums of one pack's elements: f32 from +0.0, so that a -0.0 counts as +0.0.
template <class T>
struct Sum {
  float value[4][T::kPerWord];

  SIGNAL_DEVICE Sum() {
    for (uint32_t w = 0; w < 4; w++) {
      for (uint32_t e = 0; e < T::kPerWord; e++) value[w][e] = 0.0f;
    }
  }
  SIGNAL_DEVICE void add(const Pack& pack) {
    for (uint32_t w = 0; w < 4; w++) {
      float wide[T::kPerWord];
      T::widen(pack.word[w], wide);
      for (uint32_t e = 0; e < T::kPerWord; e++) value[w][e] += wide[e];
    }
  }
  SIGNAL_DEVICE Pack finish() const {
    Pack pack;
    for (uint32_t w = 0; w < 4; w++) pack.word[w] = T::round(value[w]);
    return pack;
  }
};

}  // namespace signal_comm
