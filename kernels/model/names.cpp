// Names of addresses. Memory of the model has addresses of no machine: each rank has 2^40 bytes, its Signal at their beginning.
#include <stdio.h>

#include "../signal/params.h"
#include "machine.h"
#include "places.h"

namespace model {

using namespace signal_comm;

uint32_t rank_of(uint64_t at) { return uint32_t(at >> 40) - 1; }

std::string name_of(uint64_t at) {
  char text[160];
  if (const Region* const region = map.region(at, 1)) {
    snprintf(text, sizeof text, "%s+%u", region->name.c_str(), uint32_t(at - region->at));
    return text;
  }
  const uint32_t rank = rank_of(at);
  if (rank >= kMaxGpus) {
    snprintf(text, sizeof text, "address %#llx", (unsigned long long)at);
    return text;
  }
  const uint64_t offset = at - base_of(rank);
  if (offset >= host_control_of(0) - base_of(0) && offset < host_control_of(0) - base_of(0) + sizeof(HostControl)) {
    const uint64_t in = offset - (host_control_of(0) - base_of(0));
    const char* const field = in == 0 ? "abort_request" : in == offsetof(HostControl, status) ? "status" : in == offsetof(HostControl, leaving) ? "leaving" : nullptr;
    if (field != nullptr) {
      snprintf(text, sizeof text, "host.%s of r%u", field, rank);
    } else {
      snprintf(text, sizeof text, "host.record+%u of r%u", uint32_t(in - offsetof(HostControl, record)), rank);
    }
    return text;
  }
  const auto counter = [&](const char* name, uint64_t index, bool sets) {
    const unsigned peer = index % kMaxGpus, block = index / kMaxGpus % kMaxNumBlocksUpperBound;
    const unsigned set = index / (kMaxGpus * kMaxNumBlocksUpperBound);
    if (sets) {
      snprintf(text, sizeof text, "%s[d%u][set%u][b%u][r%u] at r%u", name, set / 2, set % 2, block, peer, rank);
    } else {
      snprintf(text, sizeof text, "%s[d%u][b%u][r%u] of r%u", name, set, block, peer, rank);
    }
  };
  if (offset < offsetof(Signal, peer_counter)) {
    counter("self_counter", offset / 4, false);
  } else if (offset < offsetof(Signal, lamport_state)) {
    counter("peer_counter", (offset - offsetof(Signal, peer_counter)) / 4, true);
  } else if (offset < offsetof(Signal, lamport_region)) {
    static const char* const kFields[] = {"flag", "prev_num_packs", "arrival", "reserved"};
    snprintf(text, sizeof text, "lamport.%s of r%u", kFields[(offset - offsetof(Signal, lamport_state)) / 4], rank);
  } else if (offset < sizeof(Signal)) {
    const uint64_t in = offset - offsetof(Signal, lamport_region);
    const unsigned slot = unsigned(in / kLamportSlotBytes);
    snprintf(text, sizeof text, "lamport_region[gen%u][r%u] pack %u word %u at r%u", slot / kMaxGpus, slot % kMaxGpus,
             unsigned(in % kLamportSlotBytes / kPackBytes), unsigned(in % kPackBytes / 4), rank);
  } else if (offset >= kControlOffset && offset < kControlOffset + sizeof(Control)) {
    const uint64_t in = offset - kControlOffset;
    if (in == offsetof(Control, abort)) {
      snprintf(text, sizeof text, "abort word of r%u", rank);
    } else if (in == offsetof(Control, claim)) {
      snprintf(text, sizeof text, "claim of r%u", rank);
    } else if (in >= offsetof(Control, line_banks)) {
      const uint64_t at_line = in - offsetof(Control, line_banks);
      const unsigned slot = unsigned(at_line / kLineSlotBytes);
      snprintf(text, sizeof text, "bank[d%u][%u][r%u] line %u %s at r%u", slot / (2 * kMaxGpus), slot / kMaxGpus % 2, slot % kMaxGpus,
               unsigned(at_line % kLineSlotBytes / sizeof(Line)), at_line % sizeof(Line) == 0 ? "low" : "high", rank);
    } else if (in >= offsetof(Control, lines)) {
      counter(in % 16 == 0 ? "line.low" : "line.high", (in - offsetof(Control, lines)) / 16, true);
    } else if (in >= offsetof(Control, line_counter)) {
      counter("line_counter", (in - offsetof(Control, line_counter)) / 4, false);
    } else if (in >= offsetof(Control, line_state)) {
      const unsigned word = unsigned(in - offsetof(Control, line_state)) / 4;
      snprintf(text, sizeof text, "line_state[d%u].%s of r%u", word / 2, word % 2 == 0 ? "count" : "arrival", rank);
    } else if (in >= offsetof(Control, sequence)) {
      snprintf(text, sizeof text, "sequence[d%u] of r%u", unsigned(in - offsetof(Control, sequence)) / 4, rank);
    } else {
      snprintf(text, sizeof text, "control+%u of r%u", unsigned(in), rank);
    }
  } else {
    snprintf(text, sizeof text, "r%u+%#llx", rank, (unsigned long long)offset);
  }
  return text;
}

}  // namespace model
