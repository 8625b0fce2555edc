// Packs as their elements in f32, and back.
#pragma once

#include "dtype.h"

namespace signal_comm {

// The elements of a pack, in f32.
template <class T>
struct Values {
  static constexpr uint32_t kCount = 4 * T::kPerWord;
  float value[kCount];
};

template <class T>
SIGNAL_DEVICE Values<T> widen(const Pack& pack) {
  Values<T> to;
  SIGNAL_UNROLL
  for (uint32_t w = 0; w < 4; w++) {
    float wide[T::kPerWord];
    T::widen(pack.word[w], wide);
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < T::kPerWord; e++) to.value[w * T::kPerWord + e] = wide[e];
  }
  return to;
}

// To nearest even; a NaN stays as the platform has it.
template <class T>
SIGNAL_DEVICE Pack narrow(const Values<T>& from) {
  Pack pack;
  SIGNAL_UNROLL
  for (uint32_t w = 0; w < 4; w++) {
    float wide[T::kPerWord];
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < T::kPerWord; e++) wide[e] = from.value[w * T::kPerWord + e];
    pack.word[w] = T::narrow(wide);
  }
  return pack;
}

// Pair by pair, of kCount from `from` on.
template <uint32_t kCount>
SIGNAL_DEVICE float sum_of(const float* from) {
  if constexpr (kCount == 1) {
    return from[0];
  } else {
    return sum_of<kCount / 2>(from) + sum_of<kCount / 2>(from + kCount / 2);
  }
}

// To nearest even; a NaN becomes the type's canonical one. There seldom is any, so all are asked at once, by their sum; that may be a NaN by infinities,
// too, which then stay what they are.
template <class T>
SIGNAL_DEVICE Pack round(const Values<T>& from) {
  const Pack pack = narrow<T>(from);
  return is_nan(sum_of<Values<T>::kCount>(from.value)) ? canonical<T>(pack) : pack;
}

// A sum that is not rounded yet.
template <class T>
SIGNAL_DEVICE Values<T> values_of(const Sum<T>& sum) {
  Values<T> values;
  SIGNAL_UNROLL
  for (uint32_t w = 0; w < 4; w++) {
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < T::kPerWord; e++) values.value[w * T::kPerWord + e] = sum.value[w][e];
  }
  return values;
}

}  // namespace signal_comm
