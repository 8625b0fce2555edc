// Byte-exact layout of the memory that ranks share. Mirrors crates/signal-core/src/layout.rs, which explains each field;
// both sides assert the same numbers.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace signal_comm {

constexpr uint32_t kNumBarrierDomains = 8;
constexpr uint32_t kMaxNumBlocksUpperBound = 1024;
constexpr uint32_t kMaxGpus = 8;
constexpr uint32_t kLamportGenerations = 3;
constexpr uint32_t kLamportSlotBytes = 1u << 20;
constexpr uint32_t kLamportRegionBytes = kLamportGenerations * kMaxGpus * kLamportSlotBytes;
constexpr uint32_t kLineBanksBytes = 8u << 20;
constexpr uint32_t kLayoutVersion = 2;
constexpr uint32_t kPackBytes = 16;

using flag_t = uint32_t;

struct LamportState {
  flag_t flag;
  uint32_t prev_num_packs;
  uint32_t arrival;
  uint32_t reserved;
};

struct Signal {
  flag_t self_counter[kNumBarrierDomains][kMaxNumBlocksUpperBound][kMaxGpus];     // local, one writing thread a word
  flag_t peer_counter[kNumBarrierDomains][2][kMaxNumBlocksUpperBound][kMaxGpus];  // written by the peer of the last index
  LamportState lamport_state;                                                     // local
  uint8_t lamport_region[kLamportRegionBytes];                                    // written by peers
};

static_assert(offsetof(Signal, self_counter) == 0, "layout");
static_assert(offsetof(Signal, peer_counter) == 262144, "layout");
static_assert(offsetof(Signal, lamport_state) == 786432, "layout");
static_assert(offsetof(Signal, lamport_region) == 786448, "layout");
static_assert(sizeof(Signal) == 25952272, "layout");

// 64 bits of data in two elements, the epoch beside each half (bits 32..64): readiness travels with the data.
struct alignas(16) Line {
  uint64_t low;
  uint64_t high;
};

struct LineState {
  uint32_t count;
  uint32_t arrival;
};

struct Control {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t world;
  uint32_t rank;
  uint32_t claim;                          // local, 0 or 1
  uint64_t abort;                          // written by this rank and by peers
  uint32_t sequence[kNumBarrierDomains];   // local, written by thread 0 of block 0
  LineState line_state[kNumBarrierDomains];  // local
  flag_t line_counter[kNumBarrierDomains][kMaxNumBlocksUpperBound][kMaxGpus];  // local, one writing thread a word
  Line lines[kNumBarrierDomains][2][kMaxNumBlocksUpperBound][kMaxGpus];        // written by the peer of the last index
  uint64_t pad[2];
  uint8_t line_banks[kLineBanksBytes];  // written by peers
};

constexpr uint64_t kControlOffset = 25956352;
static_assert(kControlOffset == (sizeof(Signal) + 4095) / 4096 * 4096, "layout");
static_assert(offsetof(Control, abort) == 24, "layout");
static_assert(offsetof(Control, sequence) == 32, "layout");
static_assert(offsetof(Control, line_counter) == 128, "layout");
static_assert(offsetof(Control, lines) == 262272, "layout");
static_assert(offsetof(Control, line_state) == 64, "layout");
static_assert(offsetof(Control, line_banks) == 2359440, "layout");
static_assert(sizeof(Control) == 10748048, "layout");

struct FaultRecord {
  uint64_t abort;
  uint32_t operation;
  uint32_t sequence;
  uint32_t domain;
  uint32_t block;
  uint32_t phase;
  uint32_t missing;
  uint32_t expected[kMaxGpus];
  uint32_t seen[kMaxGpus];
};

struct HostControl {
  uint64_t abort_request;  // written by the host
  uint32_t status;         // a Status, written last, with release
  uint32_t leaving;        // 1: a kernel has left of which another one's record tells
  FaultRecord record;
};

static_assert(offsetof(HostControl, status) == 8, "layout");
static_assert(offsetof(HostControl, leaving) == 12, "layout");
static_assert(offsetof(HostControl, record) == 16, "layout");
static_assert(sizeof(FaultRecord) == 96, "layout");
static_assert(sizeof(HostControl) == 112, "layout");

enum Status : uint32_t { kRunning = 0, kExpired = 1, kWoken = 2, kRequested = 3, kMismatch = 4 };

constexpr uint64_t kAbortRaised = uint64_t(1) << 63;
constexpr uint64_t kAbortReported = 1;  // alone: another kernel of this rank is about to raise its word here, or has
constexpr uint64_t kAbortMismatch = uint64_t(1) << 62;  // ranks make different calls: nobody is late

}  // namespace signal_comm
