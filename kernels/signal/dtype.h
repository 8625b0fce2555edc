// Element types: how packs become summands and how finished results become packs again.
//
// Sums of f32, f16 and bf16, which engines call for by far the most, have kernels of their own, in which two elements of 16 bits
// are rounded at once and each world size has its code. All other types and operators share one kernel (Any).
//
// Of these three, `narrow` rounds to nearest even and `add` gives the rounded sums of two words' elements; both leave a NaN as the platform has it, of
// 16 bits 0x7fff. `canonical` makes it the type's; `round` is both.
#pragma once

#include "memory.h"

namespace signal_comm {

SIGNAL_DEVICE bool is_nan(float x) { return x != x; }

// A NaN result is the type's canonical quiet NaN on every backend (DESIGN P12). Two 16-bit elements are rounded at once; what
// the platforms make of a NaN is 0x7fff, which this turns into `nan` in either half. Without a branch: one between the loads
// of several packs keeps the compiler from having them on their way together.
SIGNAL_DEVICE uint32_t canonical_halves(uint32_t word, uint32_t nan) {
  const uint32_t found = ((word & 0x7fff7fffu) + 0x00010001u) & 0x80008000u;
  return word - (found >> 15) * (0x7fffu - nan);
}

template <class T>
struct Sum;

// Rounded twice, which comes to the same as once: f32 has at least twice the places of either type and two more. benches/halves.cu compares all pairs.
template <class T>
SIGNAL_DEVICE uint32_t add_by_f32(uint32_t a, uint32_t b) {
  float x[T::kPerWord], y[T::kPerWord];
  T::widen(a, x);
  T::widen(b, y);
  for (uint32_t e = 0; e < T::kPerWord; e++) x[e] += y[e];
  return T::narrow(x);
}

struct F32 {
  static constexpr bool kIsAny = false;
  static constexpr uint32_t kPerWord = 1;
  using Fold = Sum<F32>;

  SIGNAL_DEVICE static void widen(uint32_t word, float (&to)[1]) { to[0] = platform::as_float(word); }
  SIGNAL_DEVICE static uint32_t narrow(const float (&from)[1]) { return platform::as_bits(from[0]); }
  SIGNAL_DEVICE static uint32_t canonical(uint32_t word) { return is_nan(platform::as_float(word)) ? 0x7fc00000u : word; }
  SIGNAL_DEVICE static uint32_t round(const float (&from)[1]) { return canonical(narrow(from)); }
  SIGNAL_DEVICE static uint32_t add(uint32_t a, uint32_t b) { return platform::as_bits(platform::as_float(a) + platform::as_float(b)); }
};

struct F16 {
  static constexpr bool kIsAny = false;
  static constexpr uint32_t kPerWord = 2;
  using Fold = Sum<F16>;

  SIGNAL_DEVICE static void widen(uint32_t word, float (&to)[2]) {
    to[0] = platform::f16_to_f32(uint16_t(word));
    to[1] = platform::f16_to_f32(uint16_t(word >> 16));
  }
  SIGNAL_DEVICE static uint32_t narrow(const float (&from)[2]) { return platform::f32x2_to_f16(from[0], from[1]); }
  SIGNAL_DEVICE static uint32_t canonical(uint32_t word) { return canonical_halves(word, 0x7e00u); }
  SIGNAL_DEVICE static uint32_t round(const float (&from)[2]) { return canonical(narrow(from)); }
  SIGNAL_DEVICE static uint32_t add(uint32_t a, uint32_t b) {
    if constexpr (platform::kAddsHalves) return platform::add_f16x2(a, b);
    return add_by_f32<F16>(a, b);
  }
};

struct Bf16 {
  static constexpr bool kIsAny = false;
  static constexpr uint32_t kPerWord = 2;
  using Fold = Sum<Bf16>;

  SIGNAL_DEVICE static void widen(uint32_t word, float (&to)[2]) {
    to[0] = platform::as_float(word << 16);
    to[1] = platform::as_float(word & 0xffff0000u);
  }
  SIGNAL_DEVICE static uint32_t narrow(const float (&from)[2]) { return platform::f32x2_to_bf16(from[0], from[1]); }
  SIGNAL_DEVICE static uint32_t canonical(uint32_t word) { return canonical_halves(word, 0x7fc0u); }
  SIGNAL_DEVICE static uint32_t round(const float (&from)[2]) { return canonical(narrow(from)); }
  SIGNAL_DEVICE static uint32_t add(uint32_t a, uint32_t b) {
    if constexpr (platform::kAddsHalves) return platform::add_bf16x2(a, b);
    return add_by_f32<Bf16>(a, b);
  }
};

template <class T>
SIGNAL_DEVICE Pack canonical(Pack pack) {
  SIGNAL_UNROLL
  for (uint32_t w = 0; w < 4; w++) pack.word[w] = T::canonical(pack.word[w]);
  return pack;
}

template <class T>
SIGNAL_DEVICE Pack add_packs(const Pack& a, const Pack& b) {
  Pack sum;
  SIGNAL_UNROLL
  for (uint32_t w = 0; w < 4; w++) sum.word[w] = T::add(a.word[w], b.word[w]);
  return sum;
}

// The running sums of one pack's elements: f32 from +0.0, so that a -0.0 counts as +0.0.
template <class T>
struct Sum {
  float value[4][T::kPerWord];

  SIGNAL_DEVICE explicit Sum(uint32_t) {
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
  SIGNAL_DEVICE Pack narrow() const {
    Pack pack;
    for (uint32_t w = 0; w < 4; w++) pack.word[w] = T::narrow(value[w]);
    return pack;
  }
  SIGNAL_DEVICE Pack finish(uint32_t) const { return canonical<T>(narrow()); }
};

// The types as Any has them: what an element's bits are worth (`Value`), and the bits of a result. A -0.0 that comes in counts as
// +0.0 for every operator. Numbers of the integers are added and multiplied as `Wrapping`.

struct AnyF32 {
  using Bits = uint32_t;
  using Value = float;
  using Wrapping = float;
  SIGNAL_DEVICE static float value(uint32_t bits) { return platform::as_float(bits) + 0.0f; }
  SIGNAL_DEVICE static uint32_t bits(float x) { return is_nan(x) ? 0x7fc00000u : platform::as_bits(x); }
};

struct AnyF16 {
  using Bits = uint16_t;
  using Value = float;
  using Wrapping = float;
  SIGNAL_DEVICE static float value(uint16_t bits) { return platform::f16_to_f32(bits) + 0.0f; }
  SIGNAL_DEVICE static uint16_t bits(float x) { return is_nan(x) ? 0x7e00u : uint16_t(platform::f32x2_to_f16(x, 0.0f)); }
};

struct AnyBf16 {
  using Bits = uint16_t;
  using Value = float;
  using Wrapping = float;
  SIGNAL_DEVICE static float value(uint16_t bits) { return platform::as_float(uint32_t(bits) << 16) + 0.0f; }
  SIGNAL_DEVICE static uint16_t bits(float x) { return is_nan(x) ? 0x7fc0u : uint16_t(platform::f32x2_to_bf16(x, 0.0f)); }
};

struct AnyF64 {
  using Bits = uint64_t;
  using Value = double;
  using Wrapping = double;
  SIGNAL_DEVICE static double value(uint64_t bits) { return platform::as_double(bits) + 0.0; }
  SIGNAL_DEVICE static uint64_t bits(double x) { return x != x ? 0x7ff8000000000000u : platform::as_bits64(x); }
};

// A result of an 8-bit type: its magnitude rounded to nearest even, at most `kLargest`, with the sign. kFraction bits behind the
// point, and exponents that begin at 2^kLeast; below that multiples of 2^(kLeast - kFraction).
template <uint32_t kFraction, int32_t kLeast, uint32_t kLargest, uint32_t kNan>
SIGNAL_DEVICE uint8_t to_fp8(float x) {
  if (is_nan(x)) return kNan;
  constexpr uint32_t kDropped = 23 - kFraction;
  constexpr uint32_t kFirst = uint32_t(kLeast + 127) << 23;  // the bits of 2^kLeast
  const uint32_t bits = platform::as_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded;
  if (magnitude < kFirst) {
    // Added to a number whose last place is the least multiple, which is how the hardware rounds it.
    constexpr uint32_t kMagic = uint32_t(kLeast - int32_t(kFraction) + 23 + 127) << 23;
    rounded = platform::as_bits(platform::as_float(magnitude) + platform::as_float(kMagic)) - kMagic;
  } else {
    const uint32_t nearest = magnitude + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1);
    rounded = (nearest >> kDropped) - (kFirst >> kDropped) + (1u << kFraction);
  }
  return uint8_t(bits >> 24 & 0x80u) | uint8_t(rounded < kLargest ? rounded : kLargest);
}

// OCP fp8: four bits of exponent, three of fraction, no infinity; results saturate.
struct AnyE4m3 {
  using Bits = uint8_t;
  using Value = float;
  using Wrapping = float;
  SIGNAL_DEVICE static float value(uint8_t bits) {
    const uint32_t sign = uint32_t(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    if (magnitude == 0x7f) return platform::as_float(0x7fc00000u);
    // Below 2^-6: multiples of 2^-9.
    if (magnitude < 8) return platform::as_float(sign | platform::as_bits(float(magnitude) * platform::as_float(118u << 23))) + 0.0f;
    return platform::as_float(sign | ((magnitude << 20) + (120u << 23)));
  }
  SIGNAL_DEVICE static uint8_t bits(float x) { return to_fp8<3, -6, 0x7e, 0x7f>(x); }
};

// OCP fp8: five bits of exponent, two of fraction: the upper half of an f16. Results saturate.
struct AnyE5m2 {
  using Bits = uint8_t;
  using Value = float;
  using Wrapping = float;
  SIGNAL_DEVICE static float value(uint8_t bits) { return platform::f16_to_f32(uint16_t(bits) << 8) + 0.0f; }
  SIGNAL_DEVICE static uint8_t bits(float x) { return to_fp8<2, -14, 0x7b, 0x7e>(x); }
};

template <class V, class U>
struct AnyInt {
  using Bits = U;
  using Value = V;
  using Wrapping = U;
  SIGNAL_DEVICE static V value(U bits) { return V(bits); }
  SIGNAL_DEVICE static U bits(V x) { return U(x); }
};

using AnyI8 = AnyInt<int8_t, uint8_t>;
using AnyU8 = AnyInt<uint8_t, uint8_t>;
using AnyI32 = AnyInt<int32_t, uint32_t>;
using AnyU32 = AnyInt<uint32_t, uint32_t>;
using AnyI64 = AnyInt<int64_t, uint64_t>;
using AnyU64 = AnyInt<uint64_t, uint64_t>;

// The running results of the elements in a pack, or in its first bytes, under the operator that the call names.
template <class T, uint32_t kBytes>
struct AnyFold {
  using Value = typename T::Value;
  using Wrapping = typename T::Wrapping;
  static constexpr uint32_t kPerPack = kBytes / sizeof(typename T::Bits);

  uint32_t op;
  bool empty = true;
  Value value[kPerPack] = {};

  SIGNAL_DEVICE explicit AnyFold(uint32_t reduction) : op(reduction) {}

  SIGNAL_DEVICE void add(const Pack& pack) {
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < kPerPack; e++) {
      const Value x = T::value(element_of<typename T::Bits>(pack, e));
      // The first is what +0.0 + x, and 1 * x, are.
      value[e] = empty ? x : combine(value[e], x);
    }
    empty = false;
  }

  SIGNAL_DEVICE Value combine(Value a, Value b) const {
    // By selection: a jump for each element of each rank, through a table in cold memory, costs more than the other results do.
    const bool nan = b != b;  // it stays: nothing is below or above it
    const Value least = nan || b < a ? b : a, most = nan || b > a ? b : a;
    const Value product = Value(Wrapping(Wrapping(a) * Wrapping(b))), sum = Value(Wrapping(Wrapping(a) + Wrapping(b)));
    const Value extreme = op == kReduceMin ? least : most, other = op == kReduceProd ? product : sum;
    return op == kReduceMin || op == kReduceMax ? extreme : other;
  }

  SIGNAL_DEVICE Pack finish(uint32_t world) const {
    Pack pack = {};
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < kPerPack; e++) {
      // Integers are cut off towards zero.
      const Value x = op == kReduceAvg ? Value(value[e] / Value(world)) : value[e];
      set_element(pack, e, T::bits(x));
    }
    return pack;
  }
};

// One of the types of Any, as the reduction has it.
template <class T>
struct AnyOf {
  using Fold = AnyFold<T, kPackBytes>;
  using LineFold = AnyFold<T, 8>;
};

// Stands for the type and the operator that the call names: for kernels that take all of them.
struct Any {
  static constexpr bool kIsAny = true;
};

// Calls `act` with the type that the call names. Opaque as in `with_world`, and for the same reason.
template <class Act>
SIGNAL_DEVICE void with_type(uint32_t dtype, Act act) {
  const auto is = [&](uint32_t d) { return platform::opaque(dtype) == d; };
  if (is(kDtypeI32)) return act(AnyOf<AnyI32>{});
  if (is(kDtypeF32)) return act(AnyOf<AnyF32>{});
  if (is(kDtypeBf16)) return act(AnyOf<AnyBf16>{});
  if (is(kDtypeF16)) return act(AnyOf<AnyF16>{});
  if (is(kDtypeI64)) return act(AnyOf<AnyI64>{});
  if (is(kDtypeF64)) return act(AnyOf<AnyF64>{});
  if (is(kDtypeU32)) return act(AnyOf<AnyU32>{});
  if (is(kDtypeU64)) return act(AnyOf<AnyU64>{});
  if (is(kDtypeU8)) return act(AnyOf<AnyU8>{});
  if (is(kDtypeI8)) return act(AnyOf<AnyI8>{});
  if (is(kDtypeE4m3)) return act(AnyOf<AnyE4m3>{});
  act(AnyOf<AnyE5m2>{});
}

}  // namespace signal_comm
