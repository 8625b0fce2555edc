// RMSNorm of rows, behind the addition of a residual, to rows of their own type or e4m3 with one scale for all: arithmetic, in one order everywhere, and
// the kernel that does it alone where rows are short and whole. What else may become of a row: row_forms.h, whose bits for this are the same.
//
// v = round(x + residual), y = round(v * (1 / sqrt(mean(v^2) + epsilon)) * (weight + offset)), with all between the roundings in f32. The sum of
// squares runs over the elements of each pack, then over packs of one lane, lane p mod kLanes of pack p, then over the lanes pair by pair. So
// a row's bits depend on nothing but the row: not on grid, threads, number of rows or platform.
#pragma once

#include "quantise.h"
#include "wait.h"
#include "world.h"

namespace signal_comm {

#ifdef SIGNAL_MODEL_LANES  // the model checker has no room for as many
constexpr uint32_t kLanes = SIGNAL_MODEL_LANES;
#else
constexpr uint32_t kLanes = 512;
#endif
constexpr uint32_t kParts = kLanes / platform::kSumLanes;
// With two sets, by turns, one barrier a row does: a thread writes a set again when all have come to the barrier behind the one that they
// read it after.
constexpr uint32_t kPartSets = platform::kSumLanes == 1 ? 1 : 2;

// Sums of some lanes each.
struct NormShared {
  float part[kPartSets][kParts];
};

template <class T>
SIGNAL_DEVICE float sum_of_squares(const Pack& pack) {
  float sum = 0.0f;
  SIGNAL_UNROLL
  for (uint32_t w = 0; w < 4; w++) {
    float wide[T::kPerWord];
    T::widen(pack.word[w], wide);
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < T::kPerWord; e++) sum += wide[e] * wide[e];
  }
  return sum;
}

// Pack k of the row at an address. kWhole: all packs of all operands are whole and aligned.
template <bool kWhole>
SIGNAL_DEVICE Pack load_of_row(uint64_t row, uint32_t k, uint64_t row_bytes) {
  if constexpr (kWhole) return load_whole<From::kOwn>(row + uint64_t(k) * kPackBytes);
  return load_any<From::kOwn>(row, k, row_bytes);
}

template <bool kWhole>
SIGNAL_DEVICE void store_of_row(uint64_t row, uint32_t k, uint64_t row_bytes, const Pack& pack) {
  if constexpr (kWhole) return store_whole(row + uint64_t(k) * kPackBytes, pack);
  store_any(row, k, row_bytes, pack);
}

// Meets the block behind the sums of squares of its lanes; false where some thread comes with `failed`: then all leave together.
SIGNAL_DEVICE bool scale_of_row(const NormParams& p, const float (&parts)[kParts], bool failed, float& scale) {
#ifdef SIGNAL_MUTANT_NORM_LEAVES_ALONE
  if (failed) return false;
#endif
  if (platform::block_any(failed)) return false;
  const float mean = sum_of<kParts>(parts) * p.inverse_elements;
  scale = platform::reciprocal(platform::square_root(mean + p.epsilon));
#ifndef SIGNAL_MUTANT_NORM_PARTS_OF_TWO_ROWS
  if constexpr (kPartSets == 1) platform::block_sync();  // all have read the parts
#endif
  return true;
}

// What the end of a row needs of memory that is constant while kernels run, but for weights: so that it is asked for early (P9).
struct Given {
  float tensor_scale = 1.0f;
  Scale tensor = {};  // of that, for formats that have no other

  SIGNAL_DEVICE explicit Given(const NormParams& p, bool may_code = true) {
    if (!may_code) return;
    if (p.format != kRowsE4m3Tensor && p.format != kRowsNvfp4) return;
    tensor_scale = platform::as_float(platform::load(reinterpret_cast<const uint32_t*>(p.tensor_scale)));
    if (p.format == kRowsE4m3Tensor) tensor.inverse = platform::reciprocal(tensor_scale);
  }
};

// The parts of lanes that have no thread.
SIGNAL_DEVICE void put_nothing(float (&parts)[kParts]) {
  const uint32_t thread = platform::thread_id(), threads = platform::block_dim();
  if constexpr (platform::kSumLanes >= kParts) {
    if (thread < kParts && thread >= threads / platform::kSumLanes) parts[thread] = 0.0f;
  } else {
    for (uint32_t i = threads / platform::kSumLanes + thread; i < kParts; i += threads) parts[i] = 0.0f;
  }
}

// The packs of a row that a thread has: pack `k` is its `j`th.
template <uint32_t kEach, class Visit>
SIGNAL_DEVICE void for_own_packs(const NormParams& p, Visit visit) {
  SIGNAL_UNROLL
  for (uint32_t j = 0; j < kEach; j++) {
    const uint32_t k = platform::thread_id() + j * kLanes;
    if (k < p.row_packs) visit(j, k);
  }
}

// Whether rows may become codes, e4m3 with one scale for all.
enum class Codes { kNever, kMaybe, kAlways };

template <class T>
SIGNAL_DEVICE void store_e4m3(uint64_t address, const Pack& pack, float inverse) {
  store_codes<T>(address, codes_of<T>(kRowsE4m3Tensor, widen<T>(pack), inverse), Values<T>::kCount);
}
template <class T>
SIGNAL_COLD void store_some_e4m3(uint64_t address, Pack pack, float inverse) {
  store_e4m3<T>(address, pack, inverse);
}

// What becomes of one row of one block. Each thread has packs of its own, from the sum to the normed row, so that nobody else waits for what it
// stores.
template <class T, bool kWhole>
struct Row {
  const NormParams& p;
  uint64_t begin;  // of the row, in bytes

  SIGNAL_DEVICE Row(const NormParams& params, uint32_t row) : p(params), begin(uint64_t(row) * params.row_bytes) {}

  SIGNAL_DEVICE Pack load(uint64_t rows, uint32_t k) const { return load_of_row<kWhole>(rows + begin, k, p.row_bytes); }
  SIGNAL_DEVICE Pack own(uint32_t k) const { return load(p.all_reduce.input, k); }
  SIGNAL_DEVICE Pack weight(uint32_t k) const { return load_of_row<kWhole>(p.weight, k, p.row_bytes); }
  SIGNAL_DEVICE Pack residual(uint32_t k) const { return p.residual != 0 ? load(p.residual, k) : Pack{}; }
  SIGNAL_DEVICE void store(uint64_t rows, uint32_t k, const Pack& pack) const { store_of_row<kWhole>(rows + begin, k, p.row_bytes, pack); }

  // The sum of pack k, its NaNs as the platform has them, with its residual: what is normed; and its sum of squares.
  SIGNAL_DEVICE Pack add(uint32_t k, const Pack& sum, const Pack& residual, float& squares) const {
    if (p.sum != 0) store(p.sum, k, canonical<T>(sum));
    Pack added = p.residual == 0 ? sum : add_packs<T>(sum, residual);
    squares = sum_of_squares<T>(added);
    if (is_nan(squares)) added = canonical<T>(added);  // asked once of all
    if (p.residual != 0) store(p.new_residual, k, added);
    return added;
  }

  // `inverse` is that of the scale of codes, where there may be any.
  template <Codes kCodes>
  SIGNAL_DEVICE void finish(uint32_t k, const Pack& pack, Pack weight, float scale, float inverse) const {
    // Else it is widened as soon as it is there, which what is asked for after it has to wait for.
    SIGNAL_UNROLL
    for (uint32_t w = 0; w < 4; w++) weight.word[w] = platform::opaque(weight.word[w]);
    Values<T> x = widen<T>(pack);
    const Values<T> w = widen<T>(weight);
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < Values<T>::kCount; e++) x.value[e] = x.value[e] * scale * (w.value[e] + p.offset);
    const Pack y = round<T>(x);
    if (kCodes == Codes::kNever || (kCodes == Codes::kMaybe && p.format == kRowsPlain)) return store(p.all_reduce.output, k, y);
    constexpr uint32_t kCount = Values<T>::kCount;
    const uint64_t at = p.all_reduce.output + begin / (kPackBytes / kCount) + k * kCount;
    if constexpr (kCodes == Codes::kAlways) return store_e4m3<T>(at, y, inverse);
    store_some_e4m3<T>(at, y, inverse);
  }
};

// Whether a block has threads enough for rows of which each has kEach packs. The host has seen to that, but where a wave is one thread of a
// library that stands for another device.
template <uint32_t kEach>
SIGNAL_DEVICE bool has_threads_for(const NormParams& p) {
  if constexpr (platform::kSumLanes != 1) return true;
  const uint32_t lanes = p.row_packs < kLanes ? p.row_packs : kLanes;
  return platform::block_dim() >= lanes && p.row_packs <= kEach * kLanes;
}

// What a thread needs for its packs of its block's next row, where it has kEach at most, pack t + j * kLanes of thread t: asked for before anything is
// waited for.
template <class T, uint32_t kEach>
struct Soon {
  Pack own[kEach] = {};
  Pack residual[kEach] = {};
  Pack weight[kEach] = {};

  // Weights are constant while kernels run, so they are read before the stream's earlier work has ended (P9). Of two packs they take more
  // registers than there are.
  SIGNAL_DEVICE explicit Soon(const NormParams& p) {
    if (kEach == 1) load_weight(p);
  }

  SIGNAL_DEVICE void load_weight(const NormParams& p) {
    const Row<T, true> row(p, 0);
    for_own_packs<kEach>(p, [&](uint32_t j, uint32_t k) SIGNAL_INLINE { weight[j] = row.weight(k); });
  }

  SIGNAL_DEVICE void load(const NormParams& p, uint32_t r) { load_from(p, r, addresses(p, r)); }

  // Where the thread's first pack of a row lies, and of its residual; 0: there is none. Of a kernel's first row before it waits: parameters come from
  // cold memory too.
  struct Addresses {
    uint64_t own, residual;
  };
  SIGNAL_DEVICE static Addresses addresses(const NormParams& p, uint32_t r) {
    const uint64_t at = uint64_t(r) * p.row_bytes + platform::thread_id() * kPackBytes;
    return Addresses{p.all_reduce.input + at, p.residual == 0 ? 0 : p.residual + at};
  }
  SIGNAL_DEVICE void load_from(const NormParams& p, uint32_t r, const Addresses& at) {
    if (r >= p.rows) return;
    for_own_packs<kEach>(p, [&](uint32_t j, uint32_t) SIGNAL_INLINE {
      own[j] = load_whole<From::kOwn>(at.own + j * kLanes * kPackBytes);
      if (at.residual != 0) residual[j] = load_whole<From::kOwn>(at.residual + j * kLanes * kPackBytes);
    });
  }
};

// All of a row, the block's `turn`th, by threads that have kEach packs of it at most, which stay in registers. `sum(j, k, x)` gives the thread's
// pack `j`, pack k of the row, before the residual, false where a wait for it has ended in a fault.
template <uint32_t kEach, Codes kCodes, class T, class Sum>
SIGNAL_DEVICE bool norm_narrow(const Row<T, true>& row, uint32_t turn, bool failed, Soon<T, kEach>& soon, const Given& given, NormShared& shared, Sum sum) {
  const uint32_t thread = platform::thread_id();
  float (&parts)[kParts] = shared.part[turn % kPartSets];
  Pack x[kEach] = {};
  float squares = 0.0f;
  for_own_packs<kEach>(row.p, [&](uint32_t j, uint32_t k) SIGNAL_INLINE {
    failed = failed || !sum(j, k, x[j]);
    if (failed) return;
    float own;
    x[j] = row.add(k, x[j], soon.residual[j], own);
    squares += own;
  });
  if (kEach > 1) soon.load_weight(row.p);
  const float lanes = platform::add_lanes(squares);
  if (thread % platform::kSumLanes == 0) parts[thread / platform::kSumLanes] = lanes;
  put_nothing(parts);
  float scale;
  if (!scale_of_row(row.p, parts, failed, scale)) return false;
  for_own_packs<kEach>(row.p, [&](uint32_t j, uint32_t k) SIGNAL_INLINE { row.template finish<kCodes>(k, x[j], soon.weight[j], scale, given.tensor.inverse); });
  return true;
}

template <class T, uint32_t kEach>
SIGNAL_DEVICE void rms_norm_rows(const NormParams& p, NormShared& shared) {
  Soon<T, kEach> soon(p);
  const Given given(p);
  begin_call(p.all_reduce.group);
  uint32_t turn = 0;
  SIGNAL_NO_UNROLL
  for (uint32_t r = platform::block_id(); r < p.rows; r += platform::grid_dim(), turn++) {
    soon.load(p, r);
    norm_narrow<kEach, Codes::kMaybe>(Row<T, true>(p, r), turn, false, soon, given, shared, [&](uint32_t j, uint32_t, Pack& x) SIGNAL_INLINE { return x = soon.own[j], true; });
  }
}

}  // namespace signal_comm
