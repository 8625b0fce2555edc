// Normed rows as codes of few bits, with scales: value = code x scale, for blocks of elements that share one (crates/signal-core/src/reference/rows.rs
// says the same in few words). By bit code, which is the same everywhere; e4m3 by an instruction where there is one that rounds alike.
#pragma once

#include "values.h"

namespace signal_comm {

// The largest magnitude among the first `count`, as bits: as integers they are in the same order, and a NaN is above all.
template <class T>
SIGNAL_DEVICE uint32_t most_of(const Values<T>& values, uint32_t count) {
  uint32_t most = 0;
  SIGNAL_UNROLL
  for (uint32_t e = 0; e < Values<T>::kCount; e++) {
    const uint32_t bits = platform::as_bits(values.value[e]) & 0x7fffffffu;
    if (e < count && bits > most) most = bits;
  }
  return most;
}

// The same over `width` neighbouring threads, a power of two. All of the wave take part.
template <uint32_t kBit = 1>
SIGNAL_DEVICE uint32_t most_of_lanes(uint32_t most, uint32_t width) {
  if constexpr (kBit < platform::kSumLanes) {
    if (kBit < width) {
      const uint32_t other = platform::partner<kBit>(most);
      most = other > most ? other : most;
    }
    return most_of_lanes<2 * kBit>(most, width);
  }
  return most;
}

SIGNAL_DEVICE bool is_scaled_by_row(uint32_t format) { return format == kRowsE4m3Row || format == kRowsI8Row; }

// Elements of a row that share a scale; 0: the row, or all rows.
SIGNAL_DEVICE uint32_t block_elements(uint32_t format) {
  return format == kRowsE4m3Group ? 128 : format == kRowsMxfp8 ? 32 : format == kRowsNvfp4 ? 16 : 0;
}

struct Scale {
  uint32_t bits;  // as it is stored: an f32, an e8m0 or an e4m3
  float inverse;  // what values are multiplied by
};

// Of blocks of nothing but zeros, so that there is an inverse: 2^-126 and 2^126.
constexpr uint32_t kLeastScale = 0x00800000, kMostInverse = 0x7e800000;

// Both by division, beside each other.
SIGNAL_DEVICE Scale scale_by_largest(float most, float largest) {
  const uint32_t bits = platform::as_bits(platform::divide(most, largest));
  const float inverse = platform::divide(largest, most);
  if (most != most) return Scale{0x7fc00000u, inverse};
  return bits < kLeastScale ? Scale{kLeastScale, platform::as_float(kMostInverse)} : Scale{bits, inverse};
}

SIGNAL_DEVICE bool is_e4m3(uint32_t format) { return format == kRowsE4m3Tensor || format == kRowsE4m3Row || format == kRowsE4m3Group; }

// Of the formats besides e4m3 with scales in f32. Out of line, as `other_codes_of` is, so that the path of those is short.
SIGNAL_COLD Scale other_scale_of(uint32_t format, uint32_t most_bits, float tensor_scale) {
  const float most = platform::as_float(most_bits);
  if (format == kRowsI8Row) return scale_by_largest(most, 127.0f);
  if (format == kRowsMxfp8) {
    // 2^(floor(log2 of the largest) - 8), 8 being the exponent of e4m3's largest.
    const uint32_t exponent = most_bits >> 23;
    if (exponent == 0xff) return Scale{0xff, platform::as_float(0x7fc00000u)};
    const uint32_t e8m0 = exponent < 8 ? 0 : exponent - 8;
    return Scale{e8m0, platform::as_float((254 - e8m0) << 23)};
  }
  const uint32_t e4m3 = AnyE4m3::bits(platform::divide(platform::divide(most, 6.0f), tensor_scale));
  const float scale = AnyE4m3::value(uint8_t(e4m3)) * tensor_scale;
  return Scale{e4m3, scale == 0.0f ? 0.0f : platform::reciprocal(scale)};
}

// The scale of a block whose largest magnitude has these bits; not of kRowsE4m3Tensor, which has one for all.
SIGNAL_DEVICE Scale scale_of(uint32_t format, uint32_t most_bits, float tensor_scale) {
  if (is_e4m3(format)) return scale_by_largest(platform::as_float(most_bits), 448.0f);
  return other_scale_of(format, most_bits, tensor_scale);
}

// An i8, rounded to nearest even; 0 for a NaN, whose scale is one.
SIGNAL_DEVICE uint32_t to_i8(float x) {
  const float held = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : is_nan(x) ? 0.0f : x;
  return platform::as_bits(held + 12582912.0f) & 0xffu;  // 1.5 x 2^23: the units are in the last bits
}

// An e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
SIGNAL_DEVICE uint32_t to_e2m1(float x) {
  const uint32_t code = to_fp8<1, 0, 7, 0>(x);
  return (code >> 4 & 8u) | (code & 7u);
}

SIGNAL_DEVICE uint32_t to_e4m3s(float low, float high) {
  if constexpr (platform::kHasE4m3) return platform::f32x2_to_e4m3(low, high);
  return AnyE4m3::bits(low) | uint32_t(AnyE4m3::bits(high)) << 8;
}

// Of four values: as many as are passed in registers.
SIGNAL_COLD uint32_t other_codes_of(uint32_t format, float a, float b, float c, float d) {
  if (format == kRowsNvfp4) return to_e2m1(a) | to_e2m1(b) << 4 | to_e2m1(c) << 8 | to_e2m1(d) << 12;
  return to_i8(a) | to_i8(b) << 8 | to_i8(c) << 16 | to_i8(d) << 24;
}

// The codes of a pack's values, the first in the lowest bits.
template <class T>
SIGNAL_DEVICE uint64_t codes_of(uint32_t format, const Values<T>& values, float inverse) {
  uint64_t codes = 0;
  if (!is_e4m3(format) && format != kRowsMxfp8) {
    const uint32_t bits = format == kRowsNvfp4 ? 4 : 8;
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < Values<T>::kCount; e += 4) {
      const float *x = values.value + e;
      codes |= uint64_t(other_codes_of(format, x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse)) << bits * e;
    }
    return codes;
  }
  SIGNAL_UNROLL
  for (uint32_t e = 0; e < Values<T>::kCount; e += 2) {
    codes |= uint64_t(to_e4m3s(values.value[e] * inverse, values.value[e + 1] * inverse)) << 8 * e;
  }
  return codes;
}

// The first `bytes` bytes of codes, byte by byte.
SIGNAL_COLD void store_few_codes(uint64_t address, uint64_t codes, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i++) platform::store(reinterpret_cast<uint8_t*>(address + i), uint8_t(codes >> 8 * i));
}

template <class T>
SIGNAL_DEVICE void store_codes(uint64_t address, uint64_t codes, uint32_t bytes) {
  if (bytes == 8 && address % 8 == 0) return platform::store(reinterpret_cast<uint64_t*>(address), codes);
  if (bytes == 4 && address % 4 == 0) return platform::store(reinterpret_cast<uint32_t*>(address), uint32_t(codes));
  store_few_codes(address, codes, bytes);
}

}  // namespace signal_comm
