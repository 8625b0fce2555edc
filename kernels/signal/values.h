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

// To nearest even; a NaN becomes the type's canonical one.
template <class T>
SIGNAL_DEVICE Pack round(const Values<T>& from) {
  Pack pack;
  SIGNAL_UNROLL
  for (uint32_t w = 0; w < 4; w++) {
    float wide[T::kPerWord];
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < T::kPerWord; e++) wide[e] = from.value[w * T::kPerWord + e];
    pack.word[w] = T::round(wide);
  }
  return pack;
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
