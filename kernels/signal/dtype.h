// Element types: how 32-bit words of memory become f32 summands and how finished sums become words again.
#pragma once

#include <stdint.h>

namespace signal_comm {

// The unit in which data moves.
struct alignas(16) Pack {
  uint32_t word[4];
};

SIGNAL_DEVICE bool is_nan(float x) { return x != x; }

// A NaN result is the type's canonical quiet NaN on every backend (DESIGN P12): hardware conversions differ in what they
// make of one.

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
    const uint32_t low = is_nan(from[0]) ? 0x7e00u : platform::f32_to_f16(from[0]);
    const uint32_t high = is_nan(from[1]) ? 0x7e00u : platform::f32_to_f16(from[1]);
    return high << 16 | low;
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
    const uint32_t low = is_nan(from[0]) ? 0x7fc0u : platform::f32_to_bf16(from[0]);
    const uint32_t high = is_nan(from[1]) ? 0x7fc0u : platform::f32_to_bf16(from[1]);
    return high << 16 | low;
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
