#include "scenario.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../signal/params.h"
#include "kernels.h"
#include "places.h"

namespace model {

using namespace signal_comm;

namespace {

const Scenario* now;  // of which everything here speaks

// ---- Calls and what they should give.

uint32_t bytes_of(const Call& c) { return c.count * (c.type == 'b' ? 2 : 4); }
bool is_reduction(const Call& c) { return c.kind == Kind::kOneStage || c.kind == Kind::kTwoStage || c.kind == Kind::kLamport; }

// Whether peers read the input where it lies.
bool is_readable(const Call& c) { return c.kind != Kind::kLamport && !c.staged && !(c.kind == Kind::kOneStage && c.in_place); }

uint32_t bits_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
uint16_t to_bf16(float f) {
  const uint32_t bits = bits_of(f);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// An element of an input: its bits. Sums of such are inexact, so that their order shows. `round`: 1 for calls that are made again.
uint32_t input_bits(const Call& c, uint32_t call, uint32_t round, uint32_t rank, uint32_t i) {
  const bool zero = now->zeros && (call + rank + i) % 3 != 0;
  if (c.type == 'b') return zero ? (i % 2 == 1 ? 0x8000u : 0) : to_bf16(float(1 + round * 100 + call * 16 + rank * 5 + i) / 7.0f);
  return zero ? 0x80000000u : bits_of(float(1 + round * 100 + call * 16 + rank * 5 + i) / 7.0f);
}

uint32_t sum_bits(const Call& c, uint32_t call, uint32_t round, uint32_t i) {
  float sum = 0;
  for (uint32_t r = 0; r < now->world; r++) {
    const uint32_t bits = input_bits(c, call, round, r, i);
    sum += float_of(c.type == 'b' ? bits << 16 : bits);
  }
  return c.type == 'b' ? to_bf16(sum) : bits_of(sum);
}

// ---- Memory.

constexpr uint32_t kRoom = 256;  // bytes of a buffer, of which a call uses the first

uint64_t input_at(uint32_t rank, uint32_t domain) { return buffer_of(rank, domain * 4) + now->shift; }
uint64_t output_at(uint32_t rank, uint32_t domain) { return buffer_of(rank, domain * 4 + 1) + now->shift; }
uint64_t found_at(uint32_t rank, uint32_t domain) { return buffer_of(rank, domain * 4 + 2); }  // a probe's mismatches

uint64_t initial(uint64_t at, uint32_t bytes) {
  const uint64_t offset = at - base_of(rank_of(at));
  const uint64_t lines = kControlOffset + offsetof(Control, line_counter);
  if (offset < offsetof(Signal, lamport_state) || (offset >= lines && offset < kControlOffset + sizeof(Control))) {
    return bytes == 8 ? uint64_t(now->counters) << 32 | now->counters : now->counters;
  }
  if (offset == offsetof(Signal, lamport_state)) return now->flag;
  if (offset >= offsetof(Signal, lamport_region) && offset < sizeof(Signal)) return 0x80000000u;
  return 0;
}

uint32_t domains() {
  uint32_t most = 0;
  for (const Call& c : now->calls) most = c.domain > most ? c.domain : most;
  return most + 1;
}

void add_region(uint64_t at, uint32_t bytes, const std::string& name, bool real) {
  map.regions.push_back(Region{at, bytes, map.cells, name, real});
  map.cells += bytes / 2;
}

// ---- What stands between two calls of a stream: it checks the output of the call before, overwrites all that this rank may
// overwrite now, and writes the input of the call to come. Its stores are ordered by the stream alone, as a user's are.

struct FeedParams {
  uint32_t rank, domain, call, round, early;
};

void feed(const void* given) {
  FeedParams p;
  memcpy(&p, given, sizeof p);
  wait_for_earlier();
  if (p.early != 0) allow_next();
  const uint64_t input = input_at(p.rank, p.domain), output = output_at(p.rank, p.domain);
  const auto bits_at = [](uint64_t at, char type) {
    uint32_t bits = 0;
    load(reinterpret_cast<const void*>(at), &bits, type == 'b' ? 2 : 4);
    return bits;
  };
  const auto put = [](uint64_t at, uint32_t bits, char type) { store(reinterpret_cast<void*>(at), &bits, type == 'b' ? 2 : 4); };
  int before = -1;
  for (uint32_t c = 0; c < p.call; c++) {
    if (now->calls[c].domain == p.domain) before = int(c);
  }
  // Results of a call that reported a fault, and of those behind it, are unspecified; and peers may still read its input, if they
  // read any.
  const bool faulty = peek(host_control_of(p.rank) + offsetof(HostControl, status), 4) != 0 ||
                      peek(host_control_of(p.rank) + offsetof(HostControl, leaving), 4) != 0;
  bool read_by_peers = false;
  for (const Call& c : now->calls) read_by_peers |= is_reduction(c) && is_readable(c);
  if (faulty && read_by_peers) return;
  if (before >= 0 && is_reduction(now->calls[before]) && !faulty) {
    const Call& c = now->calls[before];
    const uint64_t result = c.in_place ? input : output;
    for (uint32_t i = 0; i < c.count; i++) {
      const uint64_t at = result + i * (c.type == 'b' ? 2 : 4);
      const uint32_t found = bits_at(at, c.type), expected = sum_bits(c, uint32_t(before), p.round, i);
      if (found != expected) {
        fail("wrong result: %s is %#x behind call %d, and should be %#x", name_of(at).c_str(), found, before, expected);
      }
    }
    for (uint32_t at = bytes_of(c); at < bytes_of(c) + 8; at += 4) {
      if (bits_at(result + at, 'f') == 0xfefefefeu) continue;
      fail("%s was overwritten behind the end of call %d's output", name_of(result + at).c_str(), before);
    }
  }
  if (before >= 0 && now->calls[before].kind == Kind::kProbe && !faulty) {
    for (uint32_t b = 0; b < now->calls[before].blocks; b++) {
      if (bits_at(found_at(p.rank, p.domain) + b * 4, 'f') != 0) fail("block %u of rank %u found a wrong token", b, p.rank);
    }
  }
  if (p.call == now->calls.size()) {
    if (before >= 0) put(input, 0xfdfdfdfdu, 'f');
    return;
  }
  const Call& next = now->calls[p.call];
  if (!is_reduction(next)) {
    put(input, 0xfdfdfdfdu, 'f');
    return;
  }
  for (uint32_t i = 0; i < next.count; i++) {
    put(input + i * (next.type == 'b' ? 2 : 4), input_bits(next, p.call, p.round, p.rank, i), next.type);
  }
  for (const uint64_t at : {input, output}) {
    for (uint32_t b = bytes_of(next); b < bytes_of(next) + 8; b += 4) put(at + b, 0xfefefefeu, 'f');
  }
  if (!next.in_place) {
    for (uint32_t b = 0; b < bytes_of(next); b += 2) put(output + b, 0xfefe, 'b');
  }
}

// ---- One rank's host.

const Entry& entry(const char* name) {
  const Entry* e = now->relaxed ? model_kernels_relaxed : model_kernels_ordered;
  while (e->name != nullptr && strcmp(e->name, name) != 0) e++;
  if (e->name == nullptr) {
    fprintf(stderr, "no kernel %s\n", name);
    exit(2);
  }
  return *e;
}

GroupParams group_params(uint32_t rank, uint32_t domain) {
  GroupParams g{};
  g.own = base_of(rank);
  g.control = g.own + kControlOffset;
  g.line_counters = g.control + offsetof(Control, line_counter) + domain * sizeof(Control::line_counter[0]);
  const uint64_t lines = kControlOffset + offsetof(Control, lines) + domain * sizeof(Control::lines[0]);
  g.lines = g.own + lines;
  g.line_out = uint32_t(lines + rank * sizeof(Line));
  g.rank = rank;
  g.world = now->world;
  g.flags = now->early ? kFlagAllowNext : 0;
  for (uint32_t r = 0; r < now->world; r++) g.base[r] = base_of(r);
  g.scratch_offset = kScratchAt + domain * now->scratch;
  g.scratch_bytes = now->scratch;
  g.host_control = host_control_of(rank);
  g.deadline_ticks = 1000;
  g.domain = domain;
  return g;
}

uint32_t stream_of(uint32_t rank, uint32_t domain) { return rank * domains() + domain; }

uint32_t grid_of(const Call& c, uint32_t rank) {
#if defined(SIGNAL_MUTANT_GRIDS_DIFFER)
  return rank == 1 && c.blocks > 1 ? c.blocks - 1 : c.blocks;
#elif defined(SIGNAL_MUTANT_GRID_OF_LOCAL_OCCUPANCY)
  const uint32_t resident = rank == 0 ? c.blocks : 1;  // instead of the least of all ranks
  return c.blocks < resident ? c.blocks : resident;
#else
  (void)rank;
  return c.blocks;
#endif
}

void launch_call(uint32_t rank, uint32_t number) {
  const Call& c = now->calls[number];
  const GroupParams group = group_params(rank, c.domain);
  const uint32_t stream = stream_of(rank, c.domain);
  const uint32_t grid = grid_of(c, rank);
  char name[24];
  const auto start = [&](const char* kernel, const void* params, uint32_t bytes) {
    snprintf(name, sizeof name, "call%u", number);
    launch(stream, entry(kernel).run, params, bytes, name, grid, c.threads, now->early);
  };
  switch (c.kind) {
    case Kind::kBarrier: {
      const BarrierParams p{group};
      return start("barrier", &p, sizeof p);
    }
    case Kind::kProbe: {
      const BarrierProbeParams p{group, found_at(rank, c.domain), c.count, 7 + number, 0, 0};
      return start("probe", &p, sizeof p);
    }
    case Kind::kCheck: {
      const bool other = now->story == Story::kMismatch && rank == now->world - 1;
      CheckParams p{};
      p.group = group;
      for (auto& words : p.description) words[0] = 1, words[1] = other ? 3 : 2;
      p.partners = (1u << now->world) - 1;
      return start("check", &p, sizeof p);
    }
    default: break;
  }
#ifndef SIGNAL_MUTANT_EMPTY_CALL_ADVANCES
  if (c.count == 0) return;  // it launches nothing, and touches no state (DESIGN P15)
#endif
  const uint32_t bytes = bytes_of(c);
  AllReduceParams p{};
  p.group = group;
  p.input = input_at(rank, c.domain);
  p.output = c.in_place ? p.input : output_at(rank, c.domain);
  p.bytes = bytes;
  p.packs = (bytes + kPackBytes - 1) / kPackBytes;
  p.whole_packs = bytes / kPackBytes;
  p.window_packs = group.scratch_bytes / kPackBytes;
  if (c.kind == Kind::kTwoStage) p.window_packs = p.window_packs / (now->world + 1) * now->world;
  for (uint64_t& view : p.view) view = p.input;
  if (!is_readable(c) && c.kind != Kind::kLamport) p.group.flags |= kFlagStaged;
  const uint64_t few = 2 * uint64_t(c.blocks) * c.threads < p.window_packs ? 2 * uint64_t(c.blocks) * c.threads : p.window_packs;
  const bool small = now->world <= 4 && p.packs <= few && (p.group.flags & ~kFlagAllowNext) == 0;
  const char* stem = small && c.type == 'f' ? "one_stage_small" : "one_stage";
  if (c.kind == Kind::kLamport) stem = "lamport";
  if (c.kind == Kind::kTwoStage) stem = "two_stage";
  char kernel[32];
  snprintf(kernel, sizeof kernel, "%s_%s", stem, c.type == 'b' ? "bf16" : "f32");
  start(kernel, &p, sizeof p);
}

void launch_feed(uint32_t rank, uint32_t domain, uint32_t call, uint32_t round) {
  const FeedParams p{rank, domain, call, round, now->early};
  char name[24];
  snprintf(name, sizeof name, "feed%u", call);
  launch(stream_of(rank, domain), feed, &p, sizeof p, name, 1, 1, now->early);
}

void launch_all(uint32_t rank, uint32_t round) {
  for (uint32_t c = 0; c < now->calls.size(); c++) {
    launch_feed(rank, now->calls[c].domain, c, round);
    launch_call(rank, c);
  }
  for (uint32_t d = 0; d < domains(); d++) launch_feed(rank, d, uint32_t(now->calls.size()), round);
}

uint64_t own_streams(uint32_t rank) { return ((uint64_t(1) << domains()) - 1) << (rank * domains()); }
uint64_t all_streams() { return (uint64_t(1) << (domains() * now->world)) - 1; }

bool keeps_nothing(uint64_t) { return false; }
#ifdef SIGNAL_MUTANT_RECOVER_LEAVES_SLOTS
bool keeps_slots(uint64_t at) {
  const uint64_t offset = at - base_of(rank_of(at));
  return offset >= offsetof(Signal, lamport_region) && offset < sizeof(Signal);
}
#else
constexpr bool (*keeps_slots)(uint64_t) = keeps_nothing;
#endif

uint32_t status_of(uint32_t rank) {
  return uint32_t(read_acquire(reinterpret_cast<const void*>(host_control_of(rank) + offsetof(HostControl, status)), 4));
}

// What the state must be behind `times` times all calls.
void check_state(uint32_t rank, uint32_t status) {
  if (status != kRunning) fail("rank %u reports status %u behind calls without a fault", rank, status);
  uint32_t flag = now->flag, left = 0;
  for (const Call& c : now->calls) {
    if (c.kind != Kind::kLamport || c.count == 0) continue;
    flag = flag + 1 == 0xffffffffu ? 0 : flag + 1;
    left = (bytes_of(c) + kPackBytes - 1) / kPackBytes;
  }
#ifdef SIGNAL_MODEL_LEFT_TO_CLEAR
  left = left < SIGNAL_MODEL_LEFT_TO_CLEAR ? left : SIGNAL_MODEL_LEFT_TO_CLEAR;
#endif
  const uint64_t state = base_of(rank) + offsetof(Signal, lamport_state);
  const uint32_t expected[4] = {flag, left, 0, 0};
  for (uint32_t w = 0; w < 4; w++) {
    if (w == 1 && !now->extent) continue;
    const uint32_t found = uint32_t(peek(state + w * 4, 4));
    if (found == expected[w]) continue;
    fail("%s is %#x behind all calls, and should be %#x", name_of(state + w * 4).c_str(), found, expected[w]);
  }
}

// As in signal_core::comm::recover: until no kernel of the group runs, then a meeting, the memory's first state, a meeting.
void recover(uint32_t rank) {
  wait_for(all_streams());
  // Whoever gave up has raised the word at itself, so that its later kernels return at once.
  const uint32_t status = status_of(rank);
  if ((status == kExpired || status == kRequested) && peek(base_of(rank) + kControlOffset + offsetof(Control, abort), 8) == 0) {
    fail("rank %u has reported a fault, and its abort word is not raised", rank);
  }
#ifndef SIGNAL_MUTANT_RECOVER_WITHOUT_MEETING
  meet();
#endif
  fill(rank, keeps_slots);
  meet();
  world.expiries = 0;  // from here on nobody is late
}

void host(uint32_t rank) {
  const bool last = rank == now->world - 1;
  switch (now->story) {
    case Story::kCalls: break;
    case Story::kInit:
#ifdef SIGNAL_MUTANT_MEETS_BEFORE_THE_FILL
      meet();
      fill(rank, keeps_nothing);
#else
      fill(rank, keeps_nothing);
      meet();
#endif
      break;
    case Story::kAbsent:
      if (!last) launch_all(rank, 0);
      recover(rank);
      break;
    case Story::kLate:
      if (last) pause();  // so that a peer may have given up before
      launch_all(rank, 0);
      recover(rank);
      break;
    case Story::kAbort:
      launch_all(rank, 0);
      if (rank == 0) write(reinterpret_cast<void*>(host_control_of(rank)), 8, 1, false);
      recover(rank);
      break;
    case Story::kMismatch: {
      launch_all(rank, 0);
      wait_for(own_streams(rank));
      if (status_of(rank) != kMismatch) fail("rank %u has not noticed that a peer makes another call", rank);
      const uint64_t word = peek(host_control_of(rank) + offsetof(HostControl, record), 8);
      const uint32_t missing = uint32_t(word >> 40) & 0xff, expected = last ? 1u : 1u << (now->world - 1);
      if (missing != expected) fail("rank %u names ranks %#x as making another call", rank, missing);
      return;
    }
  }
  launch_all(rank, 1);
  wait_for(own_streams(rank));
  check_state(rank, status_of(rank));
}

}  // namespace

Setup prepare(const Scenario& s) {
  now = &s;
  map.clear();
  map.initial = initial;
  lenient = s.relaxed;
  by_waves = !s.relaxed;
  polls_per_check = s.watch_polls ? 1 : kForever;
  uint32_t slots = 1;
  for (const Call& c : s.calls) slots = c.blocks * c.threads > slots ? c.blocks * c.threads : slots;
  const uint32_t of_stream = slots * (s.early ? 2 : 1);
  std::vector<bool> first(kMaxSlots);
  for (uint32_t r = 0; r < s.world; r++) {
    add_region(base_of(r) + kScratchAt, s.scratch * domains(), "scratch of r" + std::to_string(r), false);
    for (uint32_t d = 0; d < domains(); d++) {
      const std::string of = (d == 0 ? "" : "[d" + std::to_string(d) + "]") + std::string(" of r") + std::to_string(r);
      add_region(buffer_of(r, d * 4), kRoom, "input" + of, false);
      add_region(buffer_of(r, d * 4 + 1), kRoom, "output" + of, false);
      add_region(found_at(r, d), 16, "mismatches" + of, false);
      for (const Call& c : s.calls) {
        for (uint32_t b = 0; b < c.blocks; b++) {
          for (uint32_t parity = 0; parity < (s.early ? 2u : 1u); parity++) {
            const uint32_t slot = s.world + stream_of(r, d) * of_stream + parity * slots + b * c.threads;
            if (slot < kMaxSlots && !first[slot]) {
              const std::string block = "shared memory of block " + std::to_string(b);
              add_region(reinterpret_cast<uint64_t>(shared_bytes[slot]), kSharedBytes, block + of, true);
              first[slot] = true;
            }
          }
        }
      }
    }
  }
  Setup setup{};
  setup.ranks = s.world;
  setup.streams = domains();
  setup.slots = slots;
  setup.two_kernels = s.early;
  setup.expiries = s.expiries;
  setup.atoms = s.atoms;
  setup.host = host;
  return setup;
}

}  // namespace model
