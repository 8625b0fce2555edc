// Collectives by lines: small pieces of data that may hold any bits, pushed together with the epoch that tells that they are
// there (DESIGN P10). One hop, no barrier, on every domain.
//
// A line is 8 bytes of a piece, each half beside the call's epoch, so that whoever finds the epoch in both halves has the data.
// Each rank has a slot for every peer in each of two banks, which take turns. That is safe because every rank sends every other at
// least one line in each call: a peer that writes a bank again, two calls later, has heard from this rank in the call between, whose
// lines left this rank after its kernel that read the bank had ended.
//
// A line of 2^32 calls ago would look like one of today. So before the epoch starts anew, and once it has, a call clears the
// other bank before it sends anything: peers write there only once they have heard from this call.
#pragma once

#include "barrier.h"
#include "world.h"

namespace signal_comm {

constexpr uint32_t kLineBytes = 8;  // of data
constexpr uint32_t kNoCount = 0xffffffffu;
#ifdef SIGNAL_MUTANT_LINES_ONE_BANK
constexpr uint32_t kBanks = 1;
#else
constexpr uint32_t kBanks = 2;
#endif
#ifdef SIGNAL_MUTANT_LINES_COUNT_WRAPS_LATE
constexpr uint32_t kLastCount = 0xfffffffeu;
#else
constexpr uint32_t kLastCount = 0xfffffffdu;  // of an even number, so that the banks keep taking turns
#endif

SIGNAL_DEVICE uint32_t next_count(uint32_t count) { return count == kLastCount ? 0 : count + 1; }

// What a thread knows of a call by lines.
struct LineCall {
  const ExchangeParams& p;
  uint32_t count;    // of calls before it
  flag_t epoch;      // never 0, which a fresh bank holds
  uint32_t step;     // threads that divide the lines
  uint32_t first;    // this thread's number among them
  uint32_t arrived;  // kNoCount; of a block's first thread: blocks that had read the state before it

  SIGNAL_DEVICE explicit LineCall(const ExchangeParams& params) : p(params), count(0), epoch(0), step(0), first(0), arrived(kNoCount) {}

  SIGNAL_DEVICE uint64_t state_at() const {
    return p.group.control + offsetof(Control, line_state) + p.group.domain * uint32_t(sizeof(LineState));
  }

  SIGNAL_DEVICE void start(uint32_t before) {
    count = before;
    epoch = before + 1;
    // Around the wrap one block does all: it must have cleared the other bank before any of its lines leaves.
#ifdef SIGNAL_MUTANT_LINES_WRAP_BY_ALL_BLOCKS
    const bool alone = false;
#else
    const bool alone = wraps();
#endif
    step = (alone ? 1 : platform::grid_dim()) * platform::block_dim();
    first = platform::block_id() * platform::block_dim() + platform::thread_id();
  }

#if defined(SIGNAL_MUTANT_LINES_NEVER_CLEARED)
  SIGNAL_DEVICE bool wraps() const { return false; }
#elif defined(SIGNAL_MUTANT_LINES_CLEARED_ONCE)
  SIGNAL_DEVICE bool wraps() const { return count == 0; }
#else
  SIGNAL_DEVICE bool wraps() const { return count == 0 || count == kLastCount; }
#endif

  SIGNAL_DEVICE uint64_t bank_at(uint32_t bank) const { return p.banks + uint64_t(bank) * kMaxGpus * p.slot_bytes; }
  SIGNAL_DEVICE Line* line(uint32_t at, uint32_t sender, uint32_t number) const {
    return reinterpret_cast<Line*>(p.group.base[at] + bank_at(epoch % kBanks) + sender * p.slot_bytes + uint64_t(number) * sizeof(Line));
  }

  SIGNAL_DEVICE void send(uint32_t to, uint32_t number, uint64_t data) const {
    // Relaxed: all that the reader acts on is in the line. Released around the wrap: pairs with `acquire` in `accept`, so that what
    // the peer writes behind it comes after what this call cleared.
#ifdef SIGNAL_MUTANT_LINES_WRAP_RELAXED
    LineWord::send(line(to, p.group.rank, number), epoch, data, false);
#else
    LineWord::send(line(to, p.group.rank, number), epoch, data, wraps());
#endif
  }

  SIGNAL_DEVICE LineWord look(uint32_t sender, uint32_t number) const {
    return LineWord{platform::load_line(line(p.group.rank, sender, number))};
  }

  // Behind the last line of a sender that this thread reads.
  SIGNAL_DEVICE void accept(uint32_t sender, uint32_t number) const {
    if (wraps()) platform::acquire(&line(p.group.rank, sender, number)->low);
  }
};

// Lines that a piece takes: at least one, which is a token where there is no data.
#ifdef SIGNAL_MUTANT_LINES_WITHOUT_TOKENS
SIGNAL_DEVICE uint32_t lines_of(uint64_t bytes) { return uint32_t((bytes + (kLineBytes - 1)) / kLineBytes); }
#else
SIGNAL_DEVICE uint32_t lines_of(uint64_t bytes) { return bytes == 0 ? 1 : uint32_t((bytes + (kLineBytes - 1)) / kLineBytes); }
#endif

// Bytes of a piece that line `number` holds.
SIGNAL_DEVICE uint32_t bytes_in_line(uint64_t bytes, uint32_t number) {
  const uint64_t start = uint64_t(number) * kLineBytes;
  return bytes <= start ? 0 : bytes - start < kLineBytes ? uint32_t(bytes - start) : kLineBytes;
}

SIGNAL_DEVICE uint64_t load_data(uint64_t piece, uint64_t bytes, uint32_t number) {
  const uint64_t at = piece + uint64_t(number) * kLineBytes;
  const uint32_t held = bytes_in_line(bytes, number);
  if (held == kLineBytes && at % kLineBytes == 0) return platform::load(reinterpret_cast<const uint64_t*>(at));
  return element_of<uint64_t>(load_ragged<From::kOwn>(at, held), 0);
}

SIGNAL_DEVICE void store_data(uint64_t piece, uint64_t bytes, uint32_t number, uint64_t data) {
  const uint64_t at = piece + uint64_t(number) * kLineBytes;
  const uint32_t held = bytes_in_line(bytes, number);
  if (held == kLineBytes && at % kLineBytes == 0) return platform::store(reinterpret_cast<uint64_t*>(at), data);
  Pack pack = {};
  set_element<uint64_t>(pack, 0, data);
  store_ragged(at, pack, held);
}

// Runs through the lines of all peers' pieces as if they were one row, of which each thread has every `step`th: `visit(peer, number)`.
// Around the wrap the other blocks have none.
template <class Visit>
SIGNAL_DEVICE void for_each_line(const LineCall& call, const uint64_t (&bytes)[kMaxGpus], Visit visit) {
  if (call.first >= call.step) return;
  const GroupParams& g = call.p.group;
  uint32_t number = call.first;
  SIGNAL_NO_UNROLL
  for (uint32_t k = 1; k < g.world; k++) {
    const uint32_t peer = rank_after(g, k);
    const uint32_t lines = lines_of(bytes[peer]);
    SIGNAL_NO_UNROLL
    for (; number < lines; number += call.step) visit(peer, number);
    number -= lines;
  }
}

// The same, with all peers' lines of one number for one thread: it sends them before it overwrites, in place, what they hold.
template <class Visit>
SIGNAL_DEVICE void for_each_number(const LineCall& call, const uint64_t (&bytes)[kMaxGpus], Visit visit) {
  if (call.first >= call.step) return;
  const GroupParams& g = call.p.group;
  uint32_t most = 0;
  SIGNAL_NO_UNROLL
  for (uint32_t r = 0; r < g.world; r++) {
    const uint32_t lines = r == g.rank ? 0 : lines_of(bytes[r]);
    most = lines > most ? lines : most;
  }
  SIGNAL_NO_UNROLL
  for (uint32_t number = call.first; number < most; number += call.step) {
    SIGNAL_NO_UNROLL
    for (uint32_t r = 0; r < g.world; r++) {
      if (r != g.rank && number < lines_of(bytes[r])) visit(r, number);
    }
  }
}

// What a block's first thread does with the state, once all blocks have read it: its block was the last to say so.
SIGNAL_DEVICE void leave_lines(const LineCall& call, uint32_t count) {
#ifdef SIGNAL_MUTANT_LINES_ADVANCE_AT_ONCE
  const uint32_t last = 0;
#else
  const uint32_t last = platform::grid_dim() - 1;
#endif
  if (platform::thread_id() != 0 || call.arrived != last) return;
  LineState* const state = reinterpret_cast<LineState*>(call.state_at());
  platform::store_relaxed(&state->arrival, 0u);
  platform::store_relaxed(&state->count, count);
}

// A call that leaves its state as it was would write the same bank again in the next one: so a thread that gives up leaves kNoCount
// instead, with which no call sends anything.
SIGNAL_DEVICE void give_up_lines(const LineCall& call) {
#ifdef SIGNAL_MUTANT_LINES_GIVE_UP_AS_IS
  leave_lines(call, call.count);
#else
  leave_lines(call, kNoCount);
#endif
  platform::end_thread();
}

// The wait for a line that did not come at once. True when `found` has it; else the fault has been reported and the thread ends, where
// the platform lets it. Nobody may look again: the peer may have given up the next call, for want of this rank, and write the bank in
// the one behind it, if another of its blocks advanced its state.
SIGNAL_COLD bool wait_for_line(const LineCall& call, uint32_t peer, uint32_t number, LineWord& found) {
  const Member m(call.p.group, call.p.operation);
  const bool came = wait_until(m, [&] {
    found = call.look(peer, number);
    return found.is(call.epoch);
  });
#ifdef SIGNAL_MUTANT_LINE_LOOKED_AT_AGAIN
  found = call.look(peer, number);
#endif
  if (came) return true;
  // Of the other ranks the line is looked at that each must have sent.
  report_fault(m, kPhaseExchange, 1u << peer, [&](uint32_t r) {
    return Seen{call.epoch, call.look(r, 0).is(call.epoch) ? call.epoch : call.epoch - 1};
  });
  give_up_lines(call);
  return false;
}

// The fault of a call that found an abort word raised.
SIGNAL_COLD void report_stopped_lines(const LineCall& call) {
  report_fault(Member(call.p.group, call.p.operation), kPhaseExchange, 0, [&](uint32_t) { return Seen{call.epoch, call.epoch - 1}; });
  give_up_lines(call);
}

// What all calls by lines begin with: false, if the kernel must leave. `own` runs while the lines are on their way.
template <bool kByNumber, class Own>
SIGNAL_DEVICE bool send_lines(LineCall& call, Own own) {
  const ExchangeParams& p = call.p;
  Member m(p.group, p.operation);
  const uint64_t state_at = platform::opaque(call.state_at());
  begin_call(p.group);
  const uint32_t count = platform::load_relaxed(&reinterpret_cast<const LineState*>(state_at)->count);
  m.read();
  call.start(count);
  if (count == kNoCount) {
    if (platform::thread_id() == 0) report_stopped_lines(call);
    return false;
  }
  test_delay(m, kPhaseStart);
  if (call.wraps()) {
    if (platform::block_id() == 0) {
      const uint64_t bank = p.group.own + call.bank_at((call.epoch + 1) % kBanks);
      const uint32_t lines = uint32_t(p.group.world * p.slot_bytes / sizeof(Line));
      for (uint32_t i = platform::thread_id(); i < lines; i += platform::block_dim()) {
        platform::signal_relaxed(reinterpret_cast<Line*>(bank) + i, 0, 0);
      }
    }
    platform::release_wave();
    platform::block_sync();
  }

  // Sent also if an abort word is raised: what is sent belongs to a call that the peers may be in.
  const auto send = [&](uint32_t peer, uint32_t number) SIGNAL_INLINE {
    call.send(peer, number, p.send_bytes[peer] == 0 ? 0 : load_data(p.source[peer], p.send_bytes[peer], number));
  };
  if constexpr (kByNumber) {
    for_each_number(call, p.send_bytes, send);
  } else {
    for_each_line(call, p.send_bytes, send);
  }
  platform::block_sync();  // the whole block has read the state
  if (platform::thread_id() == 0) {
    call.arrived = platform::arrive(&reinterpret_cast<LineState*>(state_at)->arrival);
    if (platform::block_id() == 0) m.count_call();
  }
  if (m.abort != 0) {
    report_stopped_lines(call);
    return false;
  }
  own();
  return true;
}

SIGNAL_DEVICE void end_lines(const LineCall& call) {
  test_delay(Member(call.p.group, call.p.operation), kPhaseExchange);
  leave_lines(call, next_count(call.count));
}

// A line of a peer, which is waited for; false: it did not come, and the kernel must leave.
SIGNAL_DEVICE bool receive_line(const LineCall& call, uint32_t peer, uint32_t number, uint64_t& data) {
  LineWord found;
  SIGNAL_NO_UNROLL
  for (uint32_t polls = 0; !kBounded || polls < platform::kPollsPerCheck; polls++) {
    found = call.look(peer, number);
    if (found.is(call.epoch)) break;
    platform::relax();
  }
  if (!found.is(call.epoch) && !wait_for_line(call, peer, number, found)) return false;
  call.accept(peer, number);
  data = found.data();
  return true;
}

// Keeps every piece that is for this rank.
SIGNAL_DEVICE void lines_move(const ExchangeParams& p) {
  LineCall call(p);
  const uint32_t rank = p.group.rank;
  const bool going = send_lines<false>(call, [&] {
    if (p.source[rank] != p.target[rank]) copy<From::kOwn>(p.source[rank], p.target[rank], p.receive_bytes[rank], Stride());
  });
  if (!going) return;
  bool alive = true;
  for_each_line(call, p.receive_bytes, [&](uint32_t peer, uint32_t number) SIGNAL_INLINE {
    uint64_t data = 0;
    alive = alive && receive_line(call, peer, number, data);
    if (alive && p.receive_bytes[peer] != 0) store_data(p.target[peer], p.receive_bytes[peer], number, data);
  });
  if (alive) end_lines(call);
}

// Line `number` of every rank, this one's among them. Several polls are on their way at once. False as in `receive_line`.
SIGNAL_DEVICE bool receive_lines(const LineCall& call, uint32_t number, uint64_t (&data)[kMaxGpus]) {
  const ExchangeParams& p = call.p;
  const uint32_t rank = p.group.rank;
  const uint64_t own = load_data(p.source[rank], p.send_bytes[rank], number);
  uint32_t missing = ((1u << p.group.world) - 1) & ~(1u << rank);
  with_world(p.group.world, [&](auto world) SIGNAL_INLINE {
    constexpr uint32_t N = decltype(world)::value;
    const Line* at[N];
    SIGNAL_UNROLL
    for (uint32_t r = 0; r < N; r++) at[r] = call.line(rank, r, number);
    SIGNAL_NO_UNROLL
    for (uint32_t polls = 0; missing != 0 && (!kBounded || polls < platform::kPollsPerCheck); polls++) {
      SIGNAL_UNROLL
      for (uint32_t r = 0; r < N; r++) {
        if (r == rank) continue;
        const LineWord found{platform::load_line(at[r])};
        // Not again once it was there, for the reason that wait_for_line gives.
        const bool take = (missing & 1u << r) != 0 && found.is(call.epoch);
        data[r] = take ? found.data() : data[r];
        missing &= take ? ~(1u << r) : ~0u;
      }
      if (missing != 0) platform::relax();
    }
  });
  if (missing != 0 || call.wraps()) {
    SIGNAL_NO_UNROLL
    for (uint32_t r = 0; r < p.group.world; r++) {
      if (r == rank) continue;
      if ((missing & 1u << r) == 0) {
        call.accept(r, number);
        continue;
      }
      uint64_t found = 0;
      if (!receive_line(call, r, number, found)) return false;
      SIGNAL_UNROLL
      for (uint32_t k = 0; k < kMaxGpus; k++) data[k] = k == r ? found : data[k];  // by constants, so that it stays in registers
    }
  }
  SIGNAL_UNROLL
  for (uint32_t k = 0; k < kMaxGpus; k++) data[k] = k == rank ? own : data[k];
  return true;
}

// The reduction of what receive_lines has brought, in rank order.
template <class T>
SIGNAL_DEVICE uint64_t fold_lines(uint32_t op, uint32_t world, const uint64_t (&data)[kMaxGpus]) {
  typename T::LineFold sum(op);
  SIGNAL_UNROLL
  for (uint32_t r = 0; r < kMaxGpus; r++) {
    if (r >= world) break;
    Pack pack = {};
    set_element<uint64_t>(pack, 0, data[r]);
    sum.add(pack);
  }
  return element_of<uint64_t>(sum.finish(world), 0);
}

// Keeps the reduction of the pieces that are for this rank, which all ranks have, of one size.
SIGNAL_DEVICE void lines_reduce(const ExchangeParams& p) {
  LineCall call(p);
#ifdef SIGNAL_MUTANT_LINES_SENT_PIECE_BY_PIECE
  if (!send_lines<false>(call, [] {})) return;
#else
  if (!send_lines<true>(call, [] {})) return;
#endif
  const uint64_t bytes = p.receive_bytes[p.group.rank];
  bool alive = true;
  if (bytes != 0 && call.first < call.step) {
    const uint32_t rank = p.group.rank, lines = lines_of(bytes);
    SIGNAL_NO_UNROLL
    for (uint32_t number = call.first; number < lines; number += call.step) {
      uint64_t data[kMaxGpus] = {};
      alive = receive_lines(call, number, data);
      if (!alive) break;
      uint64_t reduced = 0;
      with_type(p.dtype, [&](auto type) SIGNAL_INLINE { reduced = fold_lines<decltype(type)>(p.op, p.group.world, data); });
      store_data(p.target[rank], bytes, number, reduced);
    }
  } else {
    for_each_line(call, p.receive_bytes, [&](uint32_t peer, uint32_t number) SIGNAL_INLINE {  // tokens
      uint64_t data;
      alive = alive && receive_line(call, peer, number, data);
    });
  }
  if (alive) end_lines(call);
}

}  // namespace signal_comm
