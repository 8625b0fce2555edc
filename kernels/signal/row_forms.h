// All that may become of a row besides what norm.h has kernels for: LayerNorm, f32 between the steps, codes with scales, rows of any length at any
// address. Which of these is a choice of the call, the same for all threads, so that one kernel has them all.
//
// A row: s = sum, x = s + residual, y = (x - mean) * (1 / sqrt(v + epsilon)) * (weight + offset) + bias, where v is the mean of (x - mean)^2, and mean is 0
// for RMSNorm. Exact: s, x and y are rounded to the type as soon as they are there. Fast: nothing is rounded but what is stored. Sums over a row run as
// norm.h says.
#pragma once

#include "norm.h"

namespace signal_comm {

template <class T>
SIGNAL_DEVICE float added(const Values<T>& x, uint32_t count) {
  float sum = 0.0f;
  SIGNAL_UNROLL
  for (uint32_t e = 0; e < Values<T>::kCount; e++) sum = e < count ? sum + x.value[e] : sum;
  return sum;
}

// Of what lies `mean` away from 0.
template <class T>
SIGNAL_DEVICE float added_squares(const Values<T>& x, uint32_t count, float mean) {
  float sum = 0.0f;
  SIGNAL_UNROLL
  for (uint32_t e = 0; e < Values<T>::kCount; e++) sum = e < count ? sum + (x.value[e] - mean) * (x.value[e] - mean) : sum;
  return sum;
}

// What the norm of a row comes to.
struct Moments {
  float mean = 0.0f;
  float scale = 0.0f;
};

SIGNAL_DEVICE float scale_by_squares(const NormParams& p, float squares) {
  return platform::reciprocal(platform::square_root(squares * p.inverse_elements + p.epsilon));
}

// Sums and largest values over a row, of which each lane has a part. A block's threads meet in each; where one has come with `failed`, all
// leave.
struct RowFolds {
  NormShared& shared;
  uint32_t turn = 0;

  SIGNAL_DEVICE explicit RowFolds(NormShared& s) : shared(s) {}

  SIGNAL_DEVICE float (&next())[kParts] { return shared.part[turn++ % kPartSets]; }

  SIGNAL_DEVICE static void put(float (&parts)[kParts], uint32_t lane, float sum) {
    const float lanes = platform::add_lanes(sum);
    if (lane % platform::kSumLanes == 0) parts[lane / platform::kSumLanes] = lanes;
  }
  SIGNAL_DEVICE static void put_most(float (&parts)[kParts], uint32_t lane, uint32_t most) {
    most = most_of_lanes(most, platform::kSumLanes);
    if (lane % platform::kSumLanes == 0) parts[lane / platform::kSumLanes] = platform::as_float(most);
  }

  // Behind what all have put.
  SIGNAL_DEVICE static bool meet(bool failed) {
#ifdef SIGNAL_MUTANT_NORM_LEAVES_ALONE
    if (failed) return false;
#endif
    return !platform::block_any(failed);
  }
  SIGNAL_DEVICE static void done() {
#ifndef SIGNAL_MUTANT_NORM_PARTS_OF_TWO_ROWS
    if constexpr (kPartSets == 1) platform::block_sync();  // all have read the parts
#endif
  }
  SIGNAL_DEVICE static float sum(const float (&parts)[kParts]) {
    const float all = sum_of<kParts>(parts);
    done();
    return all;
  }
  SIGNAL_DEVICE static uint32_t most(const float (&parts)[kParts]) {
    uint32_t all = 0;
    for (uint32_t i = 0; i < kParts; i++) {
      const uint32_t bits = platform::as_bits(parts[i]);
      all = bits > all ? bits : all;
    }
    done();
    return all;
  }
};

template <class T, bool kWhole>
struct AnyRow : Row<T, kWhole> {
  using Base = Row<T, kWhole>;
  using Base::p;
  uint32_t number;

  SIGNAL_DEVICE AnyRow(const NormParams& params, uint32_t row) : Base(params, row), number(row) {}

  // Elements that pack k has.
  SIGNAL_DEVICE uint32_t count(uint32_t k) const {
    if constexpr (kWhole) return Values<T>::kCount;
    const uint32_t left = p.elements - k * Values<T>::kCount;
    return left < Values<T>::kCount ? left : Values<T>::kCount;
  }

  SIGNAL_DEVICE Pack bias(uint32_t k) const { return p.bias != 0 ? load_of_row<kWhole>(p.bias, k, p.row_bytes) : Pack{}; }

  // The sum of pack k with its residual, which is what is normed.
  SIGNAL_DEVICE Values<T> add(uint32_t k, Values<T> x, const Pack& residual) const {
    const bool exact = p.is_fast == 0;
    const Pack sum = narrow<T>(x);
    if (p.sum != 0) Base::store(p.sum, k, canonical<T>(sum));
    if (exact) x = widen<T>(sum);
    if (p.residual == 0) return x;
    const Values<T> wide = widen<T>(residual);
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < Values<T>::kCount; e++) x.value[e] += wide.value[e];
    const Pack both = round<T>(x);
    Base::store(p.new_residual, k, both);
    return exact ? widen<T>(both) : x;
  }

  SIGNAL_DEVICE Values<T> normed(Values<T> x, const Pack& weight, const Pack& bias, const Moments& m) const {
    const Values<T> w = widen<T>(weight), b = widen<T>(bias);
    const bool has_bias = p.bias != 0;
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < Values<T>::kCount; e++) {
      const float y = (x.value[e] - m.mean) * m.scale * (w.value[e] + p.offset);
      x.value[e] = has_bias ? y + b.value[e] : y;
    }
    return p.is_fast == 0 ? widen<T>(narrow<T>(x)) : x;
  }

  SIGNAL_DEVICE void store_plain(uint32_t k, const Values<T>& y) const { Base::store(p.all_reduce.output, k, round<T>(y)); }

  SIGNAL_DEVICE void store_coded(uint32_t k, const Values<T>& y, float inverse) const {
    const uint32_t halved = p.format == kRowsNvfp4 ? 1 : 0;
    const uint64_t at = p.all_reduce.output + (uint64_t(number) * p.elements >> halved) + (k * Values<T>::kCount >> halved);
    store_codes<T>(at, codes_of<T>(p.format, y, inverse), count(k) >> halved);
  }

  // Block `block` of the row, among `blocks`.
  SIGNAL_DEVICE void store_scale(uint32_t block, uint32_t blocks, uint32_t bits) const {
    const uint64_t at = uint64_t(number) * blocks + block;
    if (p.format == kRowsMxfp8 || p.format == kRowsNvfp4) {
      platform::store(reinterpret_cast<uint8_t*>(p.scales + at), uint8_t(bits));
    } else {
      platform::store(reinterpret_cast<uint32_t*>(p.scales + at * 4), bits);
    }
  }
  SIGNAL_DEVICE uint32_t blocks() const { return (p.elements + (block_elements(p.format) - 1)) / block_elements(p.format); }

};

// A row by threads of any number. What is normed waits in a place of the block's, in f32.
template <class T>
struct WideRow : AnyRow<T, false> {
  using Base = AnyRow<T, false>;
  using Base::p;
  RowFolds& folds;
  uint64_t place;
  Given given;

  SIGNAL_DEVICE WideRow(const NormParams& params, uint32_t row, RowFolds& f) : Base(params, row), folds(f), place(0), given(params) {
    place = p.all_reduce.group.own + p.kept + uint64_t(platform::block_id()) * p.row_packs * sizeof(Values<T>);
  }

  static constexpr uint32_t kPacks = sizeof(Values<T>) / kPackBytes;

  SIGNAL_DEVICE void keep(uint32_t k, const Values<T>& x) const {
    SIGNAL_UNROLL
    for (uint32_t i = 0; i < kPacks; i++) {
      Pack pack;
      SIGNAL_UNROLL
      for (uint32_t w = 0; w < 4; w++) pack.word[w] = platform::as_bits(x.value[4 * i + w]);
      store_whole(place + (k * kPacks + i) * kPackBytes, pack);
    }
  }
  SIGNAL_DEVICE Values<T> kept(uint32_t k) const {
    Values<T> x;
    SIGNAL_UNROLL
    for (uint32_t i = 0; i < kPacks; i++) {
      const Pack pack = load_whole<From::kOwn>(place + (k * kPacks + i) * kPackBytes);
      SIGNAL_UNROLL
      for (uint32_t w = 0; w < 4; w++) x.value[4 * i + w] = platform::as_float(pack.word[w]);
    }
    return x;
  }

  // Visits the packs of this thread's lanes.
  template <class Visit>
  SIGNAL_DEVICE void for_own(Visit visit) const {
    for (uint32_t lane = platform::thread_id(); lane < kLanes; lane += platform::block_dim()) {
      for (uint32_t k = lane; k < p.row_packs; k += kLanes) visit(k);
    }
  }
  template <class Part>
  SIGNAL_DEVICE bool fold(bool& failed, float& total, Part part) const {
    float (&parts)[kParts] = folds.next();
    for (uint32_t lane = platform::thread_id(); lane < kLanes; lane += platform::block_dim()) {
      float sum = 0.0f;
      for (uint32_t k = lane; k < p.row_packs && !failed; k += kLanes) sum += part(k);
      RowFolds::put(parts, lane, sum);
    }
    if (!RowFolds::meet(failed)) return false;
    total = RowFolds::sum(parts);
    return true;
  }

  SIGNAL_DEVICE Values<T> result(uint32_t k, const Moments& m) const { return Base::normed(kept(k), Base::weight(k), Base::bias(k), m); }

  // `sum(k, x)` gives pack k before the residual, false where a wait for it has ended in a fault.
  template <class Sum>
  SIGNAL_DEVICE bool norm(bool failed, Sum sum) const {
    Moments m;
    float total;
    const bool came = fold(failed, total, [&](uint32_t k) SIGNAL_INLINE {
      Values<T> x = {};
      if (!sum(k, x)) return failed = true, 0.0f;
      x = Base::add(k, x, Base::residual(k));
      keep(k, x);
      return p.is_layer != 0 ? added<T>(x, Base::count(k)) : added_squares<T>(x, Base::count(k), 0.0f);
    });
    if (!came) return false;
    if (p.is_layer != 0) {
      m.mean = total * p.inverse_elements;
      fold(failed, total, [&](uint32_t k) SIGNAL_INLINE { return added_squares<T>(kept(k), Base::count(k), m.mean); });
    }
    m.scale = scale_by_squares(p, total);
    if (p.format == kRowsPlain) {
      for_own([&](uint32_t k) SIGNAL_INLINE { Base::store_plain(k, result(k, m)); });
    } else if (block_elements(p.format) == 0) {
      store_by_row(m);
    } else {
      store_by_blocks(m);
    }
    return true;
  }

  SIGNAL_DEVICE void store_by_row(const Moments& m) const {
    uint32_t most = 0;
    if (is_scaled_by_row(p.format)) {
      float (&parts)[kParts] = folds.next();
      for (uint32_t lane = platform::thread_id(); lane < kLanes; lane += platform::block_dim()) {
        uint32_t own = 0;
        for (uint32_t k = lane; k < p.row_packs; k += kLanes) {
          const uint32_t of_pack = most_of<T>(result(k, m), Base::count(k));
          own = of_pack > own ? of_pack : own;
        }
        RowFolds::put_most(parts, lane, own);
      }
      RowFolds::meet(false);
      most = RowFolds::most(parts);
    }
    const Scale scale = p.format == kRowsE4m3Tensor ? given.tensor : scale_of(p.format, most, given.tensor_scale);
    if (is_scaled_by_row(p.format) && platform::thread_id() == 0) Base::store_scale(0, 1, scale.bits);
    for_own([&](uint32_t k) SIGNAL_INLINE { Base::store_coded(k, result(k, m), scale.inverse); });
  }

  // A thread has all of a block of elements.
  SIGNAL_DEVICE void store_by_blocks(const Moments& m) const {
    const uint32_t blocks = Base::blocks(), packs = block_elements(p.format) / Values<T>::kCount;
    platform::block_sync();  // others have kept their packs
    for (uint32_t b = platform::thread_id(); b < blocks; b += platform::block_dim()) {
      const uint32_t begin = b * packs, end = begin + packs < p.row_packs ? begin + packs : p.row_packs;
      uint32_t most = 0;
      for (uint32_t k = begin; k < end; k++) {
        const uint32_t of_pack = most_of<T>(result(k, m), Base::count(k));
        most = of_pack > most ? of_pack : most;
      }
      const Scale scale = scale_of(p.format, most, given.tensor_scale);
      Base::store_scale(b, blocks, scale.bits);
      for (uint32_t k = begin; k < end; k++) Base::store_coded(k, result(k, m), scale.inverse);
    }
#ifndef SIGNAL_MUTANT_NORM_KEEPS_TOO_SOON
    platform::block_sync();  // the next row is kept in the same place
#endif
  }
};

// A row of which each thread has kEach packs at most, pack t + j * kLanes of thread t, which stay in registers; whole. On platforms whose waves are of more
// than one thread.
template <class T, uint32_t kEach>
struct NarrowRow : AnyRow<T, true> {
  using Base = AnyRow<T, true>;
  using Base::p;
  static constexpr uint32_t kCount = Values<T>::kCount;

  SIGNAL_DEVICE NarrowRow(const NormParams& params, uint32_t row) : Base(params, row) {}

  static SIGNAL_DEVICE bool fold(RowFolds& folds, bool failed, float own, float& total) {
    float (&parts)[kParts] = folds.next();
    RowFolds::put(parts, platform::thread_id(), own);
    put_nothing(parts);
    if (!RowFolds::meet(failed)) return false;
    total = RowFolds::sum(parts);
    return true;
  }
  static SIGNAL_DEVICE uint32_t fold_most(RowFolds& folds, uint32_t most) {
    float (&parts)[kParts] = folds.next();
    RowFolds::put_most(parts, platform::thread_id(), most);
    put_nothing(parts);
    RowFolds::meet(false);
    return RowFolds::most(parts);
  }

  // `sum(j, k, x)` gives the thread's pack `j`, pack k of the row, before the residual; false where a wait for it has ended in a fault.
  template <class Sum>
  SIGNAL_DEVICE bool norm(RowFolds& folds, bool failed, Soon<T, kEach>& soon, const Given& given, Sum sum) const {
    Values<T> x[kEach] = {};
    float own = 0.0f, total;
    for_own_packs<kEach>(p, [&](uint32_t j, uint32_t k) SIGNAL_INLINE {
      failed = failed || !sum(j, k, x[j]);
      if (failed) return;
      x[j] = Base::add(k, x[j], soon.residual[j]);
      own += p.is_layer != 0 ? added<T>(x[j], kCount) : added_squares<T>(x[j], kCount, 0.0f);
    });
    if (kEach > 1) soon.load_weight(p);
    // Asked for before the threads meet; sooner it takes more registers than there are.
    Pack bias[kEach] = {};
    if constexpr (kEach == 1) for_own_packs<kEach>(p, [&](uint32_t j, uint32_t k) SIGNAL_INLINE { bias[j] = Base::bias(k); });
    if (!fold(folds, failed, own, total)) return false;
    Moments m;
    if (p.is_layer != 0) {
      m.mean = total * p.inverse_elements;
      own = 0.0f;
      for_own_packs<kEach>(p, [&](uint32_t j, uint32_t) SIGNAL_INLINE { own += added_squares<T>(x[j], kCount, m.mean); });
      fold(folds, false, own, total);
    }
    m.scale = scale_by_squares(p, total);
    for_own_packs<kEach>(p, [&](uint32_t j, uint32_t k) SIGNAL_INLINE {
      x[j] = Base::normed(x[j], soon.weight[j], kEach == 1 ? bias[j] : Base::bias(k), m);
    });
    if (p.format == kRowsPlain) {
      for_own_packs<kEach>(p, [&](uint32_t j, uint32_t k) SIGNAL_INLINE { Base::store_plain(k, x[j]); });
    } else {
      store_codes_of(folds, given, x);
    }
    return true;
  }

  SIGNAL_DEVICE void store_codes_of(RowFolds& folds, const Given& given, const Values<T> (&x)[kEach]) const {
    const uint32_t elements = block_elements(p.format), packs = elements / kCount;
    const bool by_row = is_scaled_by_row(p.format);
    uint32_t most[kEach] = {};
    for_own_packs<kEach>(p, [&](uint32_t j, uint32_t) SIGNAL_INLINE { most[j] = most_of<T>(x[j], kCount); });
    Scale of_row = given.tensor;
    if (by_row) {
      uint32_t all = most[0];
      SIGNAL_UNROLL
      for (uint32_t j = 1; j < kEach; j++) all = most[j] > all ? most[j] : all;
      of_row = scale_of(p.format, fold_most(folds, all), given.tensor_scale);
      if (platform::thread_id() == 0) Base::store_scale(0, 1, of_row.bits);
    }
    SIGNAL_UNROLL
    for (uint32_t j = 0; j < kEach; j++) {
      const uint32_t k = platform::thread_id() + j * kLanes;
      Scale scale = of_row;
      if (elements != 0) {
        scale = scale_of(p.format, most_of_lanes(most[j], packs), given.tensor_scale);  // all threads: some have no pack
        if (k < p.row_packs && k % packs == 0) Base::store_scale(k / packs, Base::blocks(), scale.bits);
      }
      if (k < p.row_packs) Base::store_coded(k, x[j], scale.inverse);
    }
  }
};

// Rows of this rank alone.
template <class T>
SIGNAL_DEVICE void norm_rows(const NormParams& p) {
  SIGNAL_SHARED(NormShared, shared);
  RowFolds folds(shared);
  begin_call(p.all_reduce.group);
  for (uint32_t r = platform::block_id(); r < p.rows; r += platform::grid_dim()) {
    const WideRow<T> row(p, r, folds);
    row.norm(false, [&](uint32_t k, Values<T>& x) SIGNAL_INLINE { return x = widen<T>(row.own(k)), true; });
  }
}

template <class T, uint32_t kEach>
SIGNAL_DEVICE void norm_any_narrow_rows(const NormParams& p, NormShared& shared) {
  RowFolds folds(shared);
  Soon<T, kEach> soon(p);
  const Given given(p);
  begin_call(p.all_reduce.group);
  SIGNAL_NO_UNROLL
  for (uint32_t r = platform::block_id(); r < p.rows; r += platform::grid_dim()) {
    soon.load(p, r);
    NarrowRow<T, kEach>(p, r).norm(folds, false, soon, given, [&](uint32_t j, uint32_t, Values<T>& x) SIGNAL_INLINE {
      return x = widen<T>(soon.own[j]), true;
    });
  }
}

// The same of whole rows, of which each thread has two packs at most: the host has seen to that.
template <class T>
SIGNAL_DEVICE void norm_narrow_rows(const NormParams& p) {
  if constexpr (platform::kSumLanes == 1) return norm_rows<T>(p);
  SIGNAL_SHARED(NormShared, shared);
  if (p.row_packs <= kLanes) return norm_any_narrow_rows<T, 1>(p, shared);
  norm_any_narrow_rows<T, 2>(p, shared);
}

// Rows of this rank alone, whole, of which each thread has two packs at most: the host has seen to that.
template <class T>
SIGNAL_DEVICE void rms_norm(const NormParams& p) {
  if (!has_threads_for<2>(p)) return norm_rows<T>(p);
  SIGNAL_SHARED(NormShared, shared);
  if (p.row_packs <= kLanes) return rms_norm_rows<T, 1>(p, shared);
  rms_norm_rows<T, 2>(p, shared);
}

}  // namespace signal_comm
