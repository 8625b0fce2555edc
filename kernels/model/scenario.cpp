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

uint32_t element_bytes(const Call& c) { return c.type == 'b' ? 2 : 4; }
uint32_t bytes_of(const Call& c) { return c.count * element_bytes(c); }
uint32_t packs_of(const Call& c) { return (bytes_of(c) + kPackBytes - 1) / kPackBytes; }
uint32_t windows_of(const Call& c) { return (packs_of(c) + c.window - 1) / c.window; }
bool uses_region(const Call& c) { return c.kind == Kind::kLamport || c.kind == Kind::kTwoShot || (c.kind == Kind::kNorm && !c.push); }
bool is_all_reduce(const Call& c) { return c.kind == Kind::kOneStage || c.kind == Kind::kTwoStage || c.kind == Kind::kNorm || uses_region(c); }
bool is_counted(const Call& c) { return c.kind == Kind::kMoveCounted; }
bool goes_by_lines(const Call& c) { return c.kind == Kind::kLinesMove || c.kind == Kind::kLinesReduce; }
bool is_exchange(const Call& c) {
  return c.kind == Kind::kMove || c.kind == Kind::kReduceScatter || is_counted(c) || goes_by_lines(c);
}
bool reduces(const Call& c) { return is_all_reduce(c) || c.kind == Kind::kReduceScatter || c.kind == Kind::kLinesReduce; }

// Whether peers touch memory of the user's: read the input, or write the output where they push. Else it goes by the scratch.
bool may_touch(const Call& c) { return (is_all_reduce(c) || is_exchange(c)) && !uses_region(c) && c.kind != Kind::kNorm && !goes_by_lines(c); }
bool is_staged(const Call& c, uint32_t rank) {
  if (!may_touch(c)) return false;
  if (c.staged && (c.direct >> rank & 1) == 0) return true;
  if (c.push) return c.kind == Kind::kReduceScatter;
  return c.in_place && (c.kind == Kind::kOneStage || c.kind == Kind::kReduceScatter);
}
bool is_touched(const Call& c, uint32_t rank) { return may_touch(c) && !is_staged(c, rank); }

// Elements that a rank would have for another in an exchange.
uint32_t told_count(const Call& c, uint32_t from, uint32_t to) {
  if (((c.without >> from | c.without >> to) & 1) != 0) return 0;
  switch (c.pieces) {
    case Pieces::kEach:
    case Pieces::kSame: return c.count;
    case Pieces::kRagged: return c.count * ((from + 2 * to + c.count) % 3);
    case Pieces::kFromFirst: return from == 0 && to != 0 ? c.count : 0;
    case Pieces::kToFirst: return to == 0 ? c.count : 0;
    case Pieces::kNext: return to == from + 1 ? c.count : 0;
  }
  return 0;
}

// And has: no more than there is room for.
uint32_t piece_count(const Call& c, uint32_t from, uint32_t to) {
  const uint32_t told = told_count(c, from, to);
  return is_counted(c) && told > c.room ? c.room : told;
}

uint32_t blocks_between(const Call& c, uint32_t a, uint32_t b) {
  return c.pieces == Pieces::kNext && a != 0 && b != 0 ? 1 : c.blocks;
}

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

// Likewise, of the piece for one rank.
uint32_t piece_bits(const Call& c, uint32_t call, uint32_t round, uint32_t from, uint32_t to, uint32_t i) {
  return input_bits(c, call, round, from, is_exchange(c) && c.pieces != Pieces::kSame ? to * 37 + i : i);
}

uint32_t sum_bits(const Call& c, uint32_t call, uint32_t round, uint32_t to, uint32_t i) {
  float sum = 0;
  for (uint32_t r = 0; r < now->world; r++) {
    const uint32_t bits = piece_bits(c, call, round, r, to, i);
    sum += float_of(c.type == 'b' ? bits << 16 : bits);
  }
  return c.type == 'b' ? to_bf16(sum) : bits_of(sum);
}

constexpr float kEpsilon = 0.125f;

// An element of a normed row, whose weights are all 1; f32. The squares are added as kernels/signal/norm.h says.
uint32_t normed_bits(const Call& c, uint32_t call, uint32_t round, uint32_t i) {
  const uint32_t row = c.window * 4, begin = i / row * row;
  float lanes[SIGNAL_MODEL_LANES] = {};
  for (uint32_t pack = 0; pack < c.window; pack++) {
    float squares = 0;
    for (uint32_t e = 0; e < 4; e++) {
      const float x = float_of(sum_bits(c, call, round, 0, begin + pack * 4 + e));
      squares += x * x;
    }
    lanes[pack % SIGNAL_MODEL_LANES] += squares;
  }
  for (uint32_t n = SIGNAL_MODEL_LANES; n > 1; n /= 2) {
    for (uint32_t lane = 0; lane < n / 2; lane++) lanes[lane] = lanes[2 * lane] + lanes[2 * lane + 1];
  }
  const float scale = 1.0f / __builtin_sqrtf(lanes[0] * (1.0f / float(row)) + kEpsilon);
  return bits_of(float_of(sum_bits(c, call, round, 0, i)) * scale);
}

// ---- Memory.

constexpr uint32_t kPieceRoom = 64;  // in an input, of what is for one rank; in an output, of what is from one

uint64_t input_at(uint32_t rank, uint32_t domain) { return buffer_of(rank, domain * 4) + now->shift; }
uint64_t output_at(uint32_t rank, uint32_t domain) { return buffer_of(rank, domain * 4 + 1) + now->shift; }
uint64_t found_at(uint32_t rank, uint32_t domain) { return buffer_of(rank, domain * 4 + 2); }  // a probe's mismatches
uint64_t counts_at(uint32_t rank, uint32_t domain) { return buffer_of(rank, domain * 4 + 3); }
uint64_t received_at(uint32_t rank, uint32_t domain) { return counts_at(rank, domain) + kMaxGpus * 4; }

// A part of an input, for a rank, or of an output, from one.
struct Part {
  uint64_t at;
  uint32_t count, peer;
};
struct Parts {  // of no heap, since fibres are copied
  Part part[kMaxGpus];
  uint32_t count = 0;

  void add(uint64_t at, uint32_t elements, uint32_t peer) {
    if (elements != 0) part[count++] = Part{at, elements, peer};
  }
  const Part* begin() const { return part; }
  const Part* end() const { return part + count; }
};

uint64_t piece_at(const Call& c, uint32_t rank, uint32_t to) {
  return input_at(rank, c.domain) + (c.pieces == Pieces::kSame ? 0 : to * kPieceRoom);
}
uint64_t result_at(const Call& c, uint32_t rank, uint32_t from) {
  if (c.in_place && reduces(c)) return is_exchange(c) ? piece_at(c, rank, rank) : input_at(rank, c.domain);
  return output_at(rank, c.domain) + (reduces(c) ? 0 : from * kPieceRoom);
}

Parts inputs_of(const Call& c, uint32_t rank) {
  Parts parts;
  if (is_all_reduce(c)) parts.add(input_at(rank, c.domain), c.count, 0);
  if (!is_exchange(c)) return parts;
  for (uint32_t to = 0; to < now->world; to++) {
    if (c.pieces == Pieces::kSame && to != 0) break;
    parts.add(piece_at(c, rank, to), piece_count(c, rank, to), to);
  }
  return parts;
}

Parts outputs_of(const Call& c, uint32_t rank) {
  Parts parts;
  if (is_all_reduce(c)) parts.add(result_at(c, rank, 0), c.count, 0);
  if (!is_exchange(c)) return parts;
  for (uint32_t from = 0; from < now->world; from++) {
    if (reduces(c) && from != 0) break;
    parts.add(result_at(c, rank, from), piece_count(c, from, rank), from);
  }
  return parts;
}

uint64_t initial(uint64_t at, uint32_t bytes) {
  const uint64_t offset = at - base_of(rank_of(at));
  const uint64_t states = kControlOffset + offsetof(Control, line_state), banks = kControlOffset + offsetof(Control, line_banks);
  if (offset >= states && offset < states + sizeof(Control::line_state)) return offset % sizeof(LineState) == 0 ? now->lines : 0;
  if (offset >= banks && offset < kControlOffset + sizeof(Control)) {
    if (!now->old_lines) return 0;
    const bool odd = (offset - banks) / (kMaxGpus * kLineSlotBytes) % 2 != 0;
    return (odd ? uint64_t(1) : uint64_t(2)) << 32 | 0x0ddba11;
  }
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
  const Parts outputs = before < 0 ? Parts() : outputs_of(now->calls[before], p.rank);
  // Results of a call that reported a fault, and of those behind it, are unspecified; and peers may still touch its memory, if they
  // touch any.
  const bool faulty = peek(host_control_of(p.rank) + offsetof(HostControl, status), 4) != 0 ||
                      peek(host_control_of(p.rank) + offsetof(HostControl, leaving), 4) != 0;
  bool touched = false;
  for (const Call& c : now->calls) touched |= is_touched(c, p.rank);
  if (faulty && now->story == Story::kMismatch && (p.rank == 0 || p.rank == now->world - 1)) {
    for (const Part& part : outputs) {
      if (bits_at(part.at, 'f') != 0xfefefefeu) fail("%s was written by a call that no peer makes", name_of(part.at).c_str());
    }
  }
  if (faulty && touched) return;
  for (const Part& part : outputs) {
    if (faulty) break;
    const Call& c = now->calls[before];
    const uint32_t size = element_bytes(c);
    for (uint32_t i = 0; i < part.count; i++) {
      const uint64_t at = part.at + i * size;
      const uint32_t found = bits_at(at, c.type);
      const uint32_t expected = c.kind == Kind::kNorm ? normed_bits(c, uint32_t(before), p.round, i)
                                : reduces(c)          ? sum_bits(c, uint32_t(before), p.round, p.rank, i)
                                                      : piece_bits(c, uint32_t(before), p.round, part.peer, p.rank, i);
      if (found != expected) {
        fail("wrong result: %s is %#x behind call %d, and should be %#x", name_of(at).c_str(), found, before, expected);
      }
    }
    for (uint32_t at = part.count * size; at < part.count * size + 8; at += 4) {
      if (bits_at(part.at + at, 'f') == 0xfefefefeu) continue;
      fail("%s was overwritten behind the end of call %d's output", name_of(part.at + at).c_str(), before);
    }
  }
  if (before >= 0 && is_counted(now->calls[before]) && !faulty) {
    for (uint32_t from = 0; from < now->world; from++) {
      const uint64_t at = received_at(p.rank, p.domain) + from * 4;
      const uint32_t found = bits_at(at, 'f'), told = told_count(now->calls[before], from, p.rank);
      if (found != told) fail("%s is %u behind call %d, and should be %u", name_of(at).c_str(), found, before, told);
    }
  }
  if (before >= 0 && now->calls[before].kind == Kind::kProbe && !faulty) {
    for (uint32_t b = 0; b < now->calls[before].blocks; b++) {
      if (bits_at(found_at(p.rank, p.domain) + b * 4, 'f') != 0) fail("block %u of rank %u found a wrong token", b, p.rank);
    }
  }
  if (before >= 0) {
    for (const Part& part : inputs_of(now->calls[before], p.rank)) put(part.at, 0xfdfdfdfdu, 'f');
    for (uint32_t to = 0; to < now->world && is_counted(now->calls[before]); to++) put(counts_at(p.rank, p.domain) + to * 4, 99, 'f');
  }
  if (p.call == now->calls.size()) return;
  const Call& next = now->calls[p.call];
  const uint32_t size = element_bytes(next);
  const auto put_end = [&](const Part& part, uint32_t mark) {
    for (uint32_t b = 0; b < 8; b += 4) put(part.at + part.count * size + b, mark, 'f');
  };
  for (const Part& part : inputs_of(next, p.rank)) {
    for (uint32_t i = 0; i < part.count; i++) {
      put(part.at + i * size, piece_bits(next, p.call, p.round, p.rank, part.peer, i), next.type);
    }
    put_end(part, next.in_place ? 0xfefefefeu : 0xfcfcfcfcu);
  }
  for (uint32_t r = 0; r < now->world && is_counted(next); r++) {
    put(counts_at(p.rank, p.domain) + r * 4, told_count(next, p.rank, r), 'f');
    put(received_at(p.rank, p.domain) + r * 4, 0xfefefefeu, 'f');
  }
  for (const Part& part : outputs_of(next, p.rank)) {
    if (next.in_place) continue;
    for (uint32_t b = 0; b < part.count * size; b += 2) put(part.at + b, 0xfefe, 'b');
    put_end(part, 0xfefefefeu);
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

// As signal_core::comm::exchange does.
ExchangeParams exchange_params(const Call& c, uint32_t rank, const GroupParams& group) {
  ExchangeParams p{};
  p.group = group;
  for (uint32_t r = 0; r < now->world; r++) {
    p.source[r] = piece_at(c, rank, r);
    p.send_bytes[r] = (is_counted(c) ? c.room : piece_count(c, rank, r)) * element_bytes(c);
    p.target[r] = result_at(c, rank, r);
    p.receive_bytes[r] = (is_counted(c) ? c.room : piece_count(c, r, rank)) * element_bytes(c);
    p.blocks[r] = blocks_between(c, rank, r);
    const bool other = now->story == Story::kMismatch && rank == now->world - 1 && r == 0;
    p.seal[r] = other ? 6 : 5;
  }
  const bool same = c.pieces == Pieces::kSame && !c.push;
  p.window_bytes = group.scratch_bytes / (same ? 1 : now->world) / kPackBytes * kPackBytes;
  p.slot_bytes = goes_by_lines(c) ? kLineSlotBytes : same ? 0 : p.window_bytes;
  p.banks = kControlOffset + offsetof(Control, line_banks) + c.domain * 2 * kMaxGpus * kLineSlotBytes;
  if (is_staged(c, rank)) p.group.flags |= kFlagStaged;
  if (c.push) p.group.flags |= kFlagPush;
  bool whole = goes_by_lines(c);
  for (uint32_t r = 0; r < now->world; r++) {
    whole = whole && (p.send_bytes[r] == 0 || (p.source[r] | p.send_bytes[r]) % 8 == 0);
    whole = whole && (p.receive_bytes[r] == 0 || (p.target[r] | p.receive_bytes[r]) % 8 == 0);
  }
  if (whole) p.group.flags |= kFlagWhole;
  p.operation = c.kind == Kind::kReduceScatter ? kOpReduceScatter : c.kind == Kind::kLinesReduce ? kOpAllReduceLines : kOpAllToAll;
  if (is_counted(c)) p.operation = kOpAllToAllCounted;
  p.op = kReduceSum;
  p.dtype = c.type == 'b' ? kDtypeBf16 : kDtypeF32;
  return p;
}

void launch_call(uint32_t rank, uint32_t number) {
  const Call& c = now->calls[number];
  const GroupParams group = group_params(rank, c.domain);
  const uint32_t stream = stream_of(rank, c.domain);
  uint32_t grid = grid_of(c, rank);
  if (is_exchange(c)) {
    grid = 1;
    for (uint32_t r = 0; r < now->world; r++) {
      const bool partner = piece_count(c, rank, r) != 0 || piece_count(c, r, rank) != 0 || goes_by_lines(c) || is_counted(c);
      if (partner && blocks_between(c, rank, r) > grid) grid = blocks_between(c, rank, r);
    }
  }
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
    case Kind::kMove:
    case Kind::kReduceScatter:
    case Kind::kMoveCounted:
    case Kind::kLinesMove:
    case Kind::kLinesReduce: {
      if ((c.without >> rank & 1) != 0) return;
      const ExchangeParams p = exchange_params(c, rank, group);
      const char* kernel = c.type == 'b' ? "reduce_scatter_bf16" : "reduce_scatter_f32";
      if (c.kind == Kind::kMove) kernel = "move";
      if (is_counted(c)) {
        const CountedParams counted{p, counts_at(rank, c.domain), received_at(rank, c.domain), element_bytes(c)};
        return start("move_counted", &counted, sizeof counted);
      }
      if (c.kind == Kind::kLinesMove) kernel = "lines_move";
      if (c.kind == Kind::kLinesReduce) kernel = c.type == 'b' ? "lines_reduce_any" : "lines_reduce_f32";
      return start(kernel, &p, sizeof p);
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
  p.packs = packs_of(c);
  p.whole_packs = bytes / kPackBytes;
  p.window_packs = group.scratch_bytes / kPackBytes;
  if (c.kind == Kind::kTwoStage) p.window_packs = p.window_packs / (c.push ? 2 * now->world : now->world + 1) * now->world;
  if (c.kind == Kind::kTwoShot) p.window_packs = c.window;
  for (uint64_t& view : p.view) view = c.push ? p.output : p.input;
  if (is_staged(c, rank)) p.group.flags |= kFlagStaged;
  if (c.push) p.group.flags |= kFlagPush;
  const uint64_t few = 2 * uint64_t(c.blocks) * c.threads < p.window_packs ? 2 * uint64_t(c.blocks) * c.threads : p.window_packs;
  const bool small = now->world <= 4 && p.packs <= few && (p.group.flags & ~kFlagAllowNext) == 0;
  if (c.kind == Kind::kNorm) {
    NormParams norm{};
    norm.all_reduce = p;
    norm.weight = counts_at(rank, c.domain);  // zeros
    norm.offset = 1.0f;
    norm.row_bytes = c.window * kPackBytes;
    norm.rows = packs_of(c) / c.window;
    norm.row_packs = c.window;
    norm.inverse_elements = 1.0f / float(c.window * 4);
    norm.epsilon = kEpsilon;
    norm.elements = c.window * 4;
    norm.kept = group.scratch_offset;
    norm.operation = kOpAllReduceNorm;
    if (c.push) {
      norm.shard_rows = (norm.rows + now->world - 1) / now->world;
      norm.window_rows = c.room;
      const uint64_t pushed = uint64_t(now->world) * c.room * norm.row_bytes;
      norm.sums = group.scratch_offset + pushed;
      norm.kept = norm.sums + pushed;
      return start("norm_two_stage_f32", &norm, sizeof norm);
    }
    const bool narrow = c.window <= c.threads;
    return start(!narrow ? "norm_wide_f32" : now->world == 2 ? "norm_pair_f32" : "norm_f32", &norm, sizeof norm);
  }
  const char* stem = small && c.type == 'f' ? "one_stage_small" : "one_stage";
  if (c.kind == Kind::kLamport) stem = c.user ? "user" : "lamport";
  if (c.kind == Kind::kOneStage && c.user) stem = "user_pull";
  if (c.kind == Kind::kTwoStage) stem = "two_stage";
  if (c.kind == Kind::kTwoShot) stem = "two_shot";
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
  uint32_t counts[kNumBarrierDomains];
  for (uint32_t& count : counts) count = now->lines;
  for (const Call& c : now->calls) {
    if (goes_by_lines(c)) counts[c.domain] = counts[c.domain] == 0xfffffffdu ? 0 : counts[c.domain] + 1;
    if (!uses_region(c) || c.count == 0) continue;
    const bool many = c.kind == Kind::kTwoShot;
    flag = uint32_t((uint64_t(flag) + (many ? windows_of(c) : 1)) % 0xffffffffu);
    left = many ? 0 : packs_of(c);
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
  for (uint32_t d = 0; d < domains(); d++) {
    const uint64_t of_lines = base_of(rank) + kControlOffset + offsetof(Control, line_state) + d * sizeof(LineState);
    for (uint32_t w = 0; w < 2; w++) {
      const uint32_t found = uint32_t(peek(of_lines + w * 4, 4)), wanted = w == 0 ? counts[d] : 0;
      if (found != wanted) fail("%s is %#x behind all calls, and should be %#x", name_of(of_lines + w * 4).c_str(), found, wanted);
    }
  }
}

// Behind a call of which the last rank makes another one than the first: both know, unless one has told the other before that could
// look; and who agrees with both must have been told.
void check_mismatch(uint32_t rank) {
  const uint32_t last = now->world - 1, status = status_of(rank);
  const bool exchange = is_exchange(now->calls[0]), other = rank == 0 || rank == last || !exchange;
  const uint32_t missing = uint32_t(peek(host_control_of(rank) + offsetof(HostControl, record), 8) >> 40) & 0xff;
  if (status == kMismatch && other) {
    const uint32_t expected = rank == last ? 1u : 1u << last;
    if (missing != expected) fail("rank %u names ranks %#x as making another call", rank, missing);
  } else if (!exchange || status != kWoken) {
    fail("rank %u has not noticed that a peer makes another call: status %u", rank, status);
  } else if (missing != 1 && missing != 1u << last) {
    fail("rank %u was woken because of ranks %#x", rank, missing);
  }
  if (!exchange) return;
  meet();
  if (status_of(0) != kMismatch && status_of(last) != kMismatch) fail("nobody reports that the calls differ");
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
      return check_mismatch(rank);
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
  // No more than the calls need, since all of it is copied with each state.
  uint32_t room = 16, slots = 1, shared = 64;  // what the places of one barrier take
  bool counts = false, scratch = false;
  for (const Call& c : s.calls) {
    const uint32_t of_call = is_all_reduce(c) ? bytes_of(c) + 16 : is_exchange(c) ? s.world * kPieceRoom : 0;
    room = of_call > room ? of_call : room;
    slots = c.blocks * c.threads > slots ? c.blocks * c.threads : slots;
    counts |= is_counted(c) || c.kind == Kind::kNorm;
    if (c.push && shared < 128) shared = 128;
    if (is_counted(c)) shared = kSharedBytes;
    scratch |= c.push || c.kind == Kind::kTwoStage || c.kind == Kind::kProbe || c.kind == Kind::kNorm;
    for (uint32_t r = 0; r < s.world; r++) scratch |= is_staged(c, r);
  }
  const uint32_t of_stream = slots * (s.early ? 2 : 1);
  std::vector<bool> first(kMaxSlots);
  for (uint32_t r = 0; r < s.world; r++) {
    if (scratch) add_region(base_of(r) + kScratchAt, s.scratch * domains(), "scratch of r" + std::to_string(r), false);
    for (uint32_t d = 0; d < domains(); d++) {
      const std::string of = (d == 0 ? "" : "[d" + std::to_string(d) + "]") + std::string(" of r") + std::to_string(r);
      add_region(buffer_of(r, d * 4), room, "input" + of, false);
      add_region(buffer_of(r, d * 4 + 1), room, "output" + of, false);
      add_region(found_at(r, d), 16, "mismatches" + of, false);
      if (counts) add_region(counts_at(r, d), 2 * kMaxGpus * 4, "counts" + of, false);
      for (const Call& c : s.calls) {
        for (uint32_t b = 0; b < c.blocks; b++) {
          for (uint32_t parity = 0; parity < (s.early ? 2u : 1u); parity++) {
            const uint32_t slot = s.world + stream_of(r, d) * of_stream + parity * slots + b * c.threads;
            if (slot < kMaxSlots && !first[slot]) {
              const std::string block = "shared memory of block " + std::to_string(b);
              add_region(reinterpret_cast<uint64_t>(shared_bytes[slot]), shared, block + of, true);
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
