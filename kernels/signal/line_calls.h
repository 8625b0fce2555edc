// The collectives by lines: moves and reductions.
//
// Each has two forms. One is for pieces that are whole lines and aligned, as most are: a thread's first line is loaded beside the
// count of calls, which it does not depend on, all addresses are worked out before the stream's earlier work has ended, and the path of
// a call whose lines come soon holds no call of a function (benches/NOTES.md). The other, which knows the count from the start, does
// ragged pieces, and any around the wrap of the count.
#pragma once

#include "lines.h"
#include "world.h"

namespace signal_comm {

SIGNAL_DEVICE uint64_t load_whole_line(uint64_t piece, uint32_t number) {
  return platform::load(reinterpret_cast<const uint64_t*>(piece + uint64_t(number) * kLineBytes));
}
SIGNAL_DEVICE void store_whole_line(uint64_t piece, uint32_t number, uint64_t data) {
  platform::store(reinterpret_cast<uint64_t*>(piece + uint64_t(number) * kLineBytes), data);
}

// This rank's line for a peer, which may be a token.
SIGNAL_DEVICE uint64_t load_for(const ExchangeParams& p, uint32_t peer, uint32_t number) {
  return p.send_bytes[peer] == 0 ? 0 : load_data(p.source[peer], p.send_bytes[peer], number);
}

// A thread's first line of the row of all peers' lines.
struct FirstLine {
  bool any = false;
  bool data = false;  // it is no token
  uint32_t peer = 0;
  uint32_t number = 0;
  bool more = false;  // the thread has others behind it

  SIGNAL_DEVICE FirstLine(const GroupParams& g, const uint64_t (&bytes)[kMaxGpus], const Stride& stride) {
    uint32_t all = 0;
    SIGNAL_NO_UNROLL
    for (uint32_t k = 1; k < g.world; k++) {
      const uint32_t r = rank_after(g, k), lines = lines_of(bytes[r]);
      if (!any && stride.first - all < lines) any = true, data = bytes[r] != 0, peer = r, number = stride.first - all;
      all += lines;
    }
    more = stride.first + stride.step < all;
  }
};

// Keeps a thread's lines, from the `number`th of the row on: the rest of a call.
SIGNAL_COLD void keep_lines(const ExchangeParams& p, uint32_t count, uint32_t arrived, uint32_t number) {
  const LineCall call(p, count, arrived);
  bool alive = true;
  for_each_line(call, p.receive_bytes, number, [&](uint32_t peer, uint32_t line) SIGNAL_INLINE {
    uint64_t data = 0;
    alive = alive && receive_line(call, peer, line, data);
    if (alive && p.receive_bytes[peer] != 0) store_data(p.target[peer], p.receive_bytes[peer], line, data);
  });
  if (alive) end_lines(call);
}

// A move behind the reading of the state.
SIGNAL_COLD void move_lines(const ExchangeParams& p, uint32_t count, uint64_t abort, uint32_t sequence) {
  LineCall call(p, count);
  Member m(p.group, p.operation);
  m.abort = abort, m.sequence = sequence;
  const auto send = [&] {
    for_each_line(call, p.send_bytes, call.first, [&](uint32_t peer, uint32_t number) SIGNAL_INLINE { call.send(peer, number, load_for(p, peer, number)); });
  };
  const uint32_t rank = p.group.rank;
  const auto own = [&] {
    Stride stride;
    stride.first = call.first, stride.step = call.step;
    if (p.source[rank] != p.target[rank]) copy<From::kOwn>(p.source[rank], p.target[rank], p.receive_bytes[rank], stride);
  };
  if (send_lines(call, m, send, own)) keep_lines(p, count, call.arrived, call.first);
}

SIGNAL_DEVICE uint64_t line_state_at(const GroupParams& g) { return platform::opaque(reinterpret_cast<uint64_t>(line_state(g))); }

// A form that loads nothing beside the count: `go_on(p, count, abort, sequence)` is what follows.
template <class GoOn>
SIGNAL_DEVICE void read_and(const ExchangeParams& p, GoOn go_on) {
  Member m(p.group, p.operation);
  const uint64_t state_at = line_state_at(p.group);
  begin_call(p.group);
  const uint32_t count = read_line_state(state_at, m);
  if (count != kNoCount) return go_on(p, count, m.abort, m.sequence);
  if (platform::thread_id() == 0) report_stopped_lines(p, count, kNoCount);
}

// Keeps every piece that is for this rank.
SIGNAL_DEVICE void lines_move(const ExchangeParams& p) {
  const GroupParams& g = p.group;
  if (!is_whole(g)) return read_and(p, move_lines);

  const Stride stride;
  const FirstLine out(g, p.send_bytes, stride), in(g, p.receive_bytes, stride);
  const uint64_t state_at = line_state_at(p.group);
  const uint64_t from = platform::opaque(p.source[out.peer]), to = platform::opaque(p.target[in.peer]);
  const uint64_t slots = p.banks + g.rank * p.slot_bytes;
  const uint64_t out_at = platform::opaque(g.base[out.peer] + slots + uint64_t(out.number) * sizeof(Line));
  const uint64_t in_at = platform::opaque(g.own + p.banks + in.peer * p.slot_bytes + uint64_t(in.number) * sizeof(Line));
  const uint64_t own_from = platform::opaque(p.source[g.rank]), own_to = platform::opaque(p.target[g.rank]);
  const uint32_t own_lines = own_from == own_to ? 0 : uint32_t(p.receive_bytes[g.rank] / kLineBytes);
  Member m(g, p.operation);

  begin_call(g);
  const uint64_t data = out.data ? load_whole_line(from, out.number) : 0;
  const uint64_t own = stride.first < own_lines ? load_whole_line(own_from, stride.first) : 0;
  const uint32_t count = read_line_state(state_at, m);
  if (count == kNoCount) {
    if (platform::thread_id() == 0) report_stopped_lines(p, count, kNoCount);
    return;
  }
  LineCall call(p, count);
  if (call.wraps()) return move_lines(p, count, m.abort, m.sequence);
  test_delay(m, kPhaseStart);
  const uint64_t bank = call.bank_bytes(call.epoch);
  if (out.any) call.send(reinterpret_cast<Line*>(out_at + bank), data);
  if (out.more) {
    for_each_line(call, p.send_bytes, stride.first + stride.step, [&](uint32_t peer, uint32_t number) SIGNAL_INLINE {
      call.send(peer, number, p.send_bytes[peer] == 0 ? 0 : load_whole_line(p.source[peer], number));
    });
  }
  platform::block_sync();  // the whole block has read the state
  arrive_lines(call, m, false);
  if (m.abort != 0) return report_stopped_lines(p, count, call.arrived);
  if (stride.first < own_lines) {
    store_whole_line(own_to, stride.first, own);
    SIGNAL_NO_UNROLL
    for (uint32_t i = stride.first + stride.step; i < own_lines; i += stride.step) store_whole_line(own_to, i, load_whole_line(own_from, i));
  }
  if (in.any) {
    LineWord found;
    SIGNAL_NO_UNROLL
    for (uint32_t polls = 0; !kBounded || polls < platform::kPollsPerCheck; polls++) {  // nothing but the polls, as in a barrier
      found.line = platform::load_line(reinterpret_cast<const Line*>(in_at + bank));
      if (found.is(call.epoch)) break;
      platform::relax();
    }
    if (!found.is(call.epoch)) return keep_lines(p, count, call.arrived, stride.first);
    if (in.data) store_whole_line(to, in.number, found.data());
    if (in.more) return keep_lines(p, count, call.arrived, stride.first + stride.step);
  }
  end_lines(call);
}

// A line of each rank.
struct LineOfEach {
  uint64_t data[kMaxGpus];
};

// Looks for line `number` of the ranks in the mask `missing`, of which it takes out those that came, several at once. Not again once it was
// there, for the reason that wait_for_line gives.
template <uint32_t N>
SIGNAL_DEVICE void poll_lines(const LineCall& call, uint32_t number, LineOfEach& each, uint32_t& missing) {
  const uint32_t rank = call.p.group.rank;
  const Line* at[N];
  SIGNAL_UNROLL
  for (uint32_t r = 0; r < N; r++) at[r] = call.line(rank, r, number);
  SIGNAL_NO_UNROLL
  for (uint32_t polls = 0; missing != 0 && (!kBounded || polls < platform::kPollsPerCheck); polls++) {
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) {
      if (r == rank) continue;
      const LineWord found{platform::load_line(at[r])};
      const bool take = (missing & 1u << r) != 0 && found.is(call.epoch);
      each.data[r] = take ? found.data() : each.data[r];
      missing &= take ? ~(1u << r) : ~0u;
    }
    if (missing != 0) platform::relax();
  }
}

// The reduction of a line of each rank, in rank order.
template <class Fold>
SIGNAL_DEVICE uint64_t fold_lines(uint32_t op, uint32_t world, const LineOfEach& each) {
  Fold sum(op);
  SIGNAL_UNROLL
  for (uint32_t r = 0; r < kMaxGpus; r++) {
    if (r >= world) break;
    Pack pack = {};
    set_element<uint64_t>(pack, 0, each.data[r]);
    sum.add(pack);
  }
  return element_of<uint64_t>(sum.finish(world), 0);
}
template <class T>
SIGNAL_DEVICE uint64_t reduced_line(const ExchangeParams& p, const LineOfEach& each) {
  if constexpr (T::kIsAny) {
    uint64_t reduced = 0;
    with_type(p.dtype, [&](auto type) SIGNAL_INLINE { reduced = fold_lines<typename decltype(type)::LineFold>(p.op, p.group.world, each); });
    return reduced;
  } else {
    return fold_lines<typename T::Fold>(p.op, p.group.world, each);
  }
}

// Keeps the reduction of a thread's lines, from line `number` on, of which those of the peers in the mask `missing` have yet to come and the
// others are in `each`: the rest of a call. Of a rank for which there is nothing, each peer's token.
template <class T>
SIGNAL_COLD void keep_reduced(const ExchangeParams& p, uint32_t count, uint32_t arrived, uint32_t number, uint32_t missing, LineOfEach each) {
  const LineCall call(p, count, arrived);
  const uint32_t rank = p.group.rank;
  const uint64_t bytes = p.receive_bytes[rank];
  const uint32_t lines = lines_of(bytes);
  SIGNAL_NO_UNROLL
  for (; number < lines; number += call.step, missing = peers_of(p.group)) {
    SIGNAL_NO_UNROLL
    for (uint32_t r = 0; r < p.group.world; r++) {
      uint64_t found = 0;
      if (r == rank) {
        found = bytes == 0 ? 0 : load_data(p.source[rank], bytes, number);
      } else if ((missing & 1u << r) == 0) {
        continue;
      } else if (!receive_line(call, r, number, found)) {
        return;
      }
      SIGNAL_UNROLL
      for (uint32_t k = 0; k < kMaxGpus; k++) each.data[k] = k == r ? found : each.data[k];  // by constants, so that it stays in registers
    }
    if (bytes != 0) store_data(p.target[rank], bytes, number, reduced_line<T>(p, each));
  }
  end_lines(call);
}

// A reduction behind the reading of the state.
template <class T>
SIGNAL_COLD void reduce_lines(const ExchangeParams& p, uint32_t count, uint64_t abort, uint32_t sequence) {
  LineCall call(p, count);
  Member m(p.group, p.operation);
  m.abort = abort, m.sequence = sequence;
  const auto send = [&] {
    const auto one = [&](uint32_t peer, uint32_t number) SIGNAL_INLINE { call.send(peer, number, load_for(p, peer, number)); };
#ifdef SIGNAL_MUTANT_LINES_SENT_PIECE_BY_PIECE
    for_each_line(call, p.send_bytes, call.first, one);
#else
    for_each_number(call, p.send_bytes, call.first, one);
#endif
  };
  if (send_lines(call, m, send, [] {})) keep_reduced<T>(p, count, call.arrived, call.first, peers_of(p.group), LineOfEach{});
}

// Keeps the reduction of the pieces that are for this rank, which all ranks have, of one size.
template <class T>
SIGNAL_DEVICE void lines_reduce(const ExchangeParams& p) {
  const GroupParams& g = p.group;
#ifdef SIGNAL_MUTANT_LINES_SENT_PIECE_BY_PIECE
  return read_and(p, reduce_lines<T>);
#endif
  if (!is_whole(g)) return read_and(p, reduce_lines<T>);

  const Stride stride;
  const uint32_t rank = g.rank, number = stride.first;
  const uint64_t bytes = p.receive_bytes[rank];
  const uint32_t lines = lines_of(bytes);
  const uint64_t to = platform::opaque(p.target[rank]);
  const uint64_t state_at = line_state_at(g);
  Member m(g, p.operation);
  LineOfEach each = {};
  uint32_t count = kNoCount, arrived = kNoCount, missing = number < lines ? peers_of(g) : 0;
  bool alone = false;
  with_world(g.world, [&](auto world) SIGNAL_INLINE {
    constexpr uint32_t N = decltype(world)::value;
    uint64_t from[N];
    bool more = false;  // lines to send behind the first
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) {
      from[r] = uint64_t(number) * kLineBytes < p.send_bytes[r] ? p.source[r] : 0;
      more = more || (r != rank && uint64_t(number + stride.step) * kLineBytes < p.send_bytes[r]);
    }
    begin_call(g);
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) each.data[r] = from[r] != 0 ? load_whole_line(from[r], number) : 0;
    count = read_line_state(state_at, m);
    LineCall call(p, count);
    alone = call.wraps();
    if (count == kNoCount || alone) return;
    test_delay(m, kPhaseStart);
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) {
      if (r != rank && number < lines_of(p.send_bytes[r])) call.send(r, number, each.data[r]);
    }
    if (more) {
      for_each_number(call, p.send_bytes, number + stride.step, [&](uint32_t peer, uint32_t line) SIGNAL_INLINE {
        call.send(peer, line, load_whole_line(p.source[peer], line));
      });
    }
    platform::block_sync();  // the whole block has read the state
    arrive_lines(call, m, false);
    arrived = call.arrived;
    if (m.abort == 0) poll_lines<N>(call, number, each, missing);
  });
  if (count == kNoCount) {
    if (platform::thread_id() == 0) report_stopped_lines(p, count, kNoCount);
    return;
  }
  if (alone) return reduce_lines<T>(p, count, m.abort, m.sequence);
  if (m.abort != 0) return report_stopped_lines(p, count, arrived);
  if (missing != 0) return keep_reduced<T>(p, count, arrived, number, missing, each);
  if (number < lines && bytes != 0) {
    store_whole_line(to, number, reduced_line<T>(p, each));
    if (number + stride.step < lines) return keep_reduced<T>(p, count, arrived, number + stride.step, peers_of(g), each);
  }
  end_lines(LineCall(p, count, arrived));
}

}  // namespace signal_comm
