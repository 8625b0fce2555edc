// Collectives by lines: small pieces of data that may hold any bits, pushed together with the epoch that tells that they are
// there (DESIGN P10). One hop, no barrier, on every domain.
//
// A line is 8 bytes of a piece, each half beside the call's epoch, so that whoever finds the epoch in both halves has the data.
// Each rank has a slot for every peer in each of two banks, which take turns. That is safe because every rank sends every other at
// least one line in each call: a peer that writes a bank again, two calls later, has heard from this rank in the call between, whose
// lines left this rank after its kernel that read the bank had ended.
//
// A line of 2^32 calls ago would look like one of today. So before the epoch starts anew, and once it has, a call clears the
// other bank before it sends anything: peers write there only once they have heard from this call. One block does all of such a
// call, the last that has read the state: no other has anything left to read of the input, which may be the output too.
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

SIGNAL_DEVICE LineState* line_state(const GroupParams& g) {
  return at<LineState>(g.control, offsetof(Control, line_state) + g.domain * uint32_t(sizeof(LineState)));
}

// What a thread knows of a call by lines, once it knows how many there were.
struct LineCall {
  const ExchangeParams& p;
  uint32_t count;    // of calls before it
  flag_t epoch;      // never 0, which a fresh bank holds
  uint32_t step;     // threads that divide the lines
  uint32_t first;    // this thread's number among them
  uint32_t arrived;  // kNoCount; of a block's first thread: blocks that had read the state before it

  SIGNAL_DEVICE LineCall(const ExchangeParams& params, uint32_t before, uint32_t arrived_before = kNoCount)
      : p(params), count(before), epoch(before + 1), step(platform::block_dim()), first(platform::thread_id()), arrived(arrived_before) {
#ifndef SIGNAL_MUTANT_LINES_WRAP_BY_ALL_BLOCKS
    if (wraps()) return;
#endif
    first += platform::block_id() * step;
    step *= platform::grid_dim();
  }

#if defined(SIGNAL_MUTANT_LINES_NEVER_CLEARED)
  SIGNAL_DEVICE bool wraps() const { return false; }
#elif defined(SIGNAL_MUTANT_LINES_CLEARED_ONCE)
  SIGNAL_DEVICE bool wraps() const { return count == 0; }
#else
  SIGNAL_DEVICE bool wraps() const { return count == 0 || count == kLastCount; }
#endif

  // From the first bank to that of this call.
  SIGNAL_DEVICE uint64_t bank_bytes(flag_t of) const { return uint64_t(of % kBanks) * kMaxGpus * p.slot_bytes; }
  SIGNAL_DEVICE Line* line(uint32_t at, uint32_t sender, uint32_t number) const {
    return reinterpret_cast<Line*>(p.group.base[at] + p.banks + bank_bytes(epoch) + sender * p.slot_bytes + uint64_t(number) * sizeof(Line));
  }

  SIGNAL_DEVICE void send(uint32_t to, uint32_t number, uint64_t data) const { send(line(to, p.group.rank, number), data); }
  SIGNAL_DEVICE void send(Line* to, uint64_t data) const {
    // Relaxed: all that the reader acts on is in the line. Released around the wrap: pairs with `acquire` in `accept`, so that what
    // the peer writes behind it comes after what this call cleared.
#ifdef SIGNAL_MUTANT_LINES_WRAP_RELAXED
    LineWord::send(to, epoch, data, false);
#else
    LineWord::send(to, epoch, data, wraps());
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

// Whether all pieces are whole lines, and aligned.
SIGNAL_DEVICE bool is_whole(const GroupParams& g) { return (g.flags & kFlagWhole) != 0; }

// Runs through the lines of all peers' pieces as if they were one row, of which each thread has every `step`th, from `number` on:
// `visit(peer, number)`.
template <class Visit>
SIGNAL_DEVICE void for_each_line(const LineCall& call, const uint64_t (&bytes)[kMaxGpus], uint32_t number, Visit visit) {
  const GroupParams& g = call.p.group;
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
SIGNAL_DEVICE void for_each_number(const LineCall& call, const uint64_t (&bytes)[kMaxGpus], uint32_t number, Visit visit) {
  const GroupParams& g = call.p.group;
  uint32_t most = 0;
  SIGNAL_NO_UNROLL
  for (uint32_t r = 0; r < g.world; r++) {
    const uint32_t lines = r == g.rank ? 0 : lines_of(bytes[r]);
    most = lines > most ? lines : most;
  }
  SIGNAL_NO_UNROLL
  for (; number < most; number += call.step) {
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
  LineState* const state = line_state(call.p.group);
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

// The fault of a call that found an abort word raised, or an earlier one that was given up.
SIGNAL_COLD void report_stopped_lines(const ExchangeParams& p, uint32_t count, uint32_t arrived) {
  const LineCall call(p, count, arrived);
  report_fault(Member(p.group, p.operation), kPhaseExchange, 0, [&](uint32_t) { return Seen{call.epoch, call.epoch - 1}; });
  give_up_lines(call);
}

// The count of calls, from the state at `state_at`; with it the thread reads what all kernels read of their rank.
SIGNAL_DEVICE uint32_t read_line_state(uint64_t state_at, Member& m) {
  const uint32_t count = platform::load_relaxed(&reinterpret_cast<const LineState*>(state_at)->count);
  m.read();
  return count;
}

// Says that this block has read the state, behind a block barrier.
SIGNAL_DEVICE void arrive_lines(LineCall& call, const Member& m, bool ordered) {
  if (platform::thread_id() != 0) return;
  uint32_t* const arrival = &line_state(call.p.group)->arrival;
  call.arrived = ordered ? platform::arrive_ordered(arrival) : platform::arrive(arrival);
  if (platform::block_id() == 0) m.count_call();
}

// Around the wrap: whether this block does all, before which it clears the other bank.
SIGNAL_DEVICE bool takes_over(LineCall& call, const Member& m) {
  platform::release_wave();
  platform::block_sync();
  // Ordered: behind what the other blocks have loaded in vain, which this one may overwrite.
#ifdef SIGNAL_MUTANT_LINES_WRAP_ARRIVES_RELAXED
  arrive_lines(call, m, false);
#else
  arrive_lines(call, m, true);
#endif
  const bool last = platform::block_any(platform::thread_id() == 0 && call.arrived == platform::grid_dim() - 1);
#ifndef SIGNAL_MUTANT_LINES_WRAP_BY_ALL_BLOCKS
  if (!last) return false;
#endif
  if (last) {
    const uint64_t bank = call.p.group.own + call.p.banks + call.bank_bytes(call.epoch + 1);
    const uint32_t lines = uint32_t(call.p.group.world * call.p.slot_bytes / sizeof(Line));
    for (uint32_t i = platform::thread_id(); i < lines; i += platform::block_dim()) {
      platform::signal_relaxed(reinterpret_cast<Line*>(bank) + i, 0, 0);
    }
  }
  platform::release_wave();
  platform::block_sync();
  return true;
}

// A call behind the reading of its state: `send()` sends all lines of this thread, and `own()` runs while they are on their way. False,
// if the kernel must leave.
template <class Send, class Own>
SIGNAL_DEVICE bool send_lines(LineCall& call, const Member& m, Send send, Own own) {
  test_delay(m, kPhaseStart);
  if (call.wraps() && !takes_over(call, m)) return false;
  // Sent also if an abort word is raised: what is sent belongs to a call that the peers may be in.
  send();
  if (!call.wraps()) {
    platform::block_sync();  // the whole block has read the state
    arrive_lines(call, m, false);
  }
  if (m.abort != 0) {
    report_stopped_lines(call.p, call.count, call.arrived);
    return false;
  }
  own();
  return true;
}

SIGNAL_DEVICE void end_lines(const LineCall& call) {
  test_delay(Member(call.p.group, call.p.operation), kPhaseExchange);
  leave_lines(call, next_count(call.count));
}

}  // namespace signal_comm
