// Collectives of rows with a norm behind them, of any number of rows, in one kernel: reduce-scatter, all-gather, and the two one behind the other, which are an
// all-reduce. By pushing to the peers' scratch, so nothing is staged and no rank reads another's memory.
//
// Rank r's shard are `shard_rows` rows from row r * shard_rows on. The work goes through the shards in windows of as many rows of each. Row j of a
// window's shard belongs to block j mod grid on every rank, which alone touches its places: so blocks wait for their like alone (P2). The
// scratch holds, of each rank, the rows that it has pushed here to be added; then the sums of each rank's shard, in f32 where nothing is
// rounded between; then what a block is norming.
#pragma once

#include "row_forms.h"
#include "stage.h"

namespace signal_comm {

struct TwoStageNormShared {
  BlockShared places;
  NormShared norm;
};

template <class T>
struct TwoStageNorm {
  const NormParams& p;
  const GroupParams& g;
  const bool scatters, gathers;  // what of the two the call does
  Barriers<CounterBarrier> barriers;
  RowFolds folds;
  uint32_t first = 0;  // row of each shard that the window begins with

  SIGNAL_DEVICE TwoStageNorm(const NormParams& params, Member& m, TwoStageNormShared& shared)
      : p(params),
        g(params.all_reduce.group),
        scatters(params.operation != kOpAllGatherNorm),
        gathers(params.operation != kOpReduceScatterNorm),
        barriers(m, shared.places),
        folds(shared.norm) {}

  // Rows of a rank's shard in this window.
  SIGNAL_DEVICE uint32_t rows_of(uint32_t r) const {
    const uint32_t begin = r * p.shard_rows + first;
    const uint32_t in_shard = p.shard_rows - first;
    const uint32_t there = begin < p.rows ? p.rows - begin : 0;
    const uint32_t some = in_shard < p.window_rows ? in_shard : p.window_rows;
    return there < some ? there : some;
  }
  // Row `j` of a rank's shard in this window: its number in the message, and in the shard.
  SIGNAL_DEVICE uint32_t in_message(uint32_t r, uint32_t j) const { return r * p.shard_rows + first + j; }
  SIGNAL_DEVICE uint32_t in_shard(uint32_t j) const { return first + j; }

  template <class Visit>
  SIGNAL_DEVICE void for_rows_of(uint32_t r, Visit visit) const {
    const uint32_t rows = rows_of(r);
    for (uint32_t j = platform::block_id(); j < rows; j += platform::grid_dim()) visit(j);
  }
  template <class Visit>
  SIGNAL_DEVICE void for_packs(Visit visit) const {
    for (uint32_t k = platform::thread_id(); k < p.row_packs; k += platform::block_dim()) visit(k);
  }

  // A row in the scratch, where each begins with a pack of its own: of what `from` has pushed, and of sums, from a rank's base.
  SIGNAL_DEVICE uint64_t pushed_at(uint32_t from, uint32_t j) const {
    return g.scratch_offset + uint64_t(from * p.window_rows + j) * p.row_packs * kPackBytes;
  }
  SIGNAL_DEVICE bool has_wide_sums() const { return scatters && p.is_fast != 0; }
  SIGNAL_DEVICE uint64_t sums_at(uint32_t r, uint32_t j) const {
    const uint32_t bytes = has_wide_sums() ? sizeof(Values<T>) : kPackBytes;
    return p.sums + uint64_t(r * p.window_rows + j) * p.row_packs * bytes;
  }

  SIGNAL_DEVICE Pack own(uint32_t row, uint32_t k) const {
    return load_any<From::kOwn>(p.all_reduce.input + uint64_t(row) * p.row_bytes, k, p.row_bytes);
  }
  template <class Visit>
  SIGNAL_DEVICE void for_peers(Visit visit) const {
    for (uint32_t k = 1; k < g.world; k++) visit(rank_after(g, k));
  }

  // The sum of pack k in row j of this rank's shard, not yet rounded.
  SIGNAL_DEVICE Values<T> sum(uint32_t j, uint32_t k) const {
    return values_of(fold_ranks<T, 0>(kReduceSum, g.world, g.rank, [&](uint32_t r) {
      return r == g.rank ? own(in_message(r, j), k) : load_whole<From::kPeer>(g.own + pushed_at(r, j) + uint64_t(k) * kPackBytes);
    }));
  }

  SIGNAL_DEVICE void store_sum(uint64_t row, uint32_t k, const Values<T>& x) const {
    if (!has_wide_sums()) return store_whole(row + uint64_t(k) * kPackBytes, round<T>(x));
    SIGNAL_UNROLL
    for (uint32_t i = 0; i < sizeof(Values<T>) / kPackBytes; i++) {
      Pack pack;
      SIGNAL_UNROLL
      for (uint32_t w = 0; w < 4; w++) pack.word[w] = platform::as_bits(x.value[4 * i + w]);
      store_whole(row + uint64_t(k) * sizeof(Values<T>) + i * kPackBytes, pack);
    }
  }
  SIGNAL_DEVICE Values<T> load_sum(uint64_t row, uint32_t k) const {
    if (!has_wide_sums()) return widen<T>(load_whole<From::kPeer>(row + uint64_t(k) * kPackBytes));
    Values<T> x;
    SIGNAL_UNROLL
    for (uint32_t i = 0; i < sizeof(Values<T>) / kPackBytes; i++) {
      const Pack pack = load_whole<From::kPeer>(row + uint64_t(k) * sizeof(Values<T>) + i * kPackBytes);
      SIGNAL_UNROLL
      for (uint32_t w = 0; w < 4; w++) x.value[4 * i + w] = platform::as_float(pack.word[w]);
    }
    return x;
  }

  SIGNAL_DEVICE void scatter() const {
    for_peers([&](uint32_t to) SIGNAL_INLINE {
      for_rows_of(to, [&](uint32_t j) SIGNAL_INLINE {
        for_packs([&](uint32_t k) SIGNAL_INLINE { store_whole(g.base[to] + pushed_at(g.rank, j) + uint64_t(k) * kPackBytes, own(in_message(to, j), k)); });
      });
    });
  }

  // Adds this rank's shard, or takes its rows as they are, and pushes that to all.
  SIGNAL_DEVICE void gather() const {
    for_rows_of(g.rank, [&](uint32_t j) SIGNAL_INLINE {
      for_packs([&](uint32_t k) SIGNAL_INLINE {
        const Values<T> x = scatters ? sum(j, k) : widen<T>(own(in_shard(j), k));
        for (uint32_t r = 0; r < g.world; r++) store_sum(g.base[r] + sums_at(g.rank, j), k, x);
      });
    });
  }

  // Of a reduce-scatter the rows of this rank's shard, else all.
  SIGNAL_DEVICE void norm() {
    for (uint32_t r = 0; r < g.world; r++) {
      if (!gathers && r != g.rank) continue;
      for_rows_of(r, [&](uint32_t j) SIGNAL_INLINE {
        const uint64_t sums = g.own + sums_at(r, j);
        WideRow<T>(p, gathers ? in_message(r, j) : in_shard(j), folds).norm(false, [&](uint32_t k, Values<T>& x) SIGNAL_INLINE {
          return x = gathers ? load_sum(sums, k) : sum(j, k), true;
        });
      });
    }
  }

  SIGNAL_DEVICE void run(Member& m) {
    begin(m, barriers);
    for (first = 0; first < p.shard_rows; first += p.window_rows) {
      // Relaxed: behind it the peers' blocks have read their places, which nothing tells but that they came.
      if (!barriers.meet(kPhaseStart, false, first == 0 ? Turn::kFirst : Turn::kBetween)) return;
      if (scatters) {
        scatter();
        if (!await_pushes(barriers, kPhaseMiddle)) return;
      }
      if (gathers) {
        gather();
        if (!await_pushes(barriers, kPhaseExit)) return;
      }
      norm();
    }
  }
};

template <class T>
SIGNAL_DEVICE void norm_two_stage(const NormParams& p) {
  SIGNAL_SHARED(TwoStageNormShared, shared);
  Member m(p.all_reduce.group, p.operation);
  TwoStageNorm<T>(p, m, shared).run(m);
}

}  // namespace signal_comm
