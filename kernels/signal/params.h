// Parameter structs, passed by value. Mirrors crates/signal-core/src/kernel/params.rs, which explains each field.
#pragma once

#include "layout.h"

namespace signal_comm {

enum Operation : uint32_t {
  kOpBarrier = 1,
  kOpBarrierProbe = 2,
  kOpAllReduceOneStage = 3,
  kOpAllReduceTwoStage = 4,
  kOpAllReduceLamport = 5,
  kOpCheck = 6,
  kOpReduceScatter = 7,
  kOpReduce = 8,
  kOpAllGather = 9,
  kOpBroadcast = 10,
  kOpScatter = 11,
  kOpGather = 12,
  kOpAllToAll = 13,
  kOpSendRecv = 14,
  kOpAllReduceLines = 15,
  kOpAllReduceTwoShot = 16,
  kOpAllToAllCounted = 17,
  kOpAllReduceNorm = 18,
  kOpReduceScatterNorm = 19,
  kOpAllGatherNorm = 20,
  kOpTrace = 21,
  kOpUser = 64,  // a kernel of a user (include/signal/device.h); numbers below are the library's
};

enum Phase : uint32_t { kPhaseStart = 1, kPhaseMiddle = 2, kPhaseExit = 3, kPhaseExchange = 4 };

enum Reduction : uint32_t { kReduceSum = 0, kReduceMin = 1, kReduceMax = 2, kReduceProd = 3, kReduceAvg = 4 };

enum DtypeNumber : uint32_t {
  kDtypeF32 = 0,
  kDtypeF16 = 1,
  kDtypeBf16 = 2,
  kDtypeF64 = 3,
  kDtypeI8 = 4,
  kDtypeU8 = 5,
  kDtypeI32 = 6,
  kDtypeU32 = 7,
  kDtypeI64 = 8,
  kDtypeU64 = 9,
  kDtypeE4m3 = 10,
  kDtypeE5m2 = 11,
};

enum RowFormat : uint32_t {
  kRowsPlain = 0,
  kRowsE4m3Tensor = 1,
  kRowsE4m3Row = 2,
  kRowsE4m3Group = 3,
  kRowsI8Row = 4,
  kRowsMxfp8 = 5,
  kRowsNvfp4 = 6,
};

constexpr uint32_t kFlagOrdered = 1;
constexpr uint32_t kFlagStaged = 2;
constexpr uint32_t kFlagAllowNext = 4;
constexpr uint32_t kFlagPush = 8;
constexpr uint32_t kFlagWhole = 16;

struct GroupParams {
  uint64_t control;
  uint64_t line_counters;
  uint64_t lines;
  uint32_t line_out;
  uint32_t rank;
  uint32_t world;
  uint32_t flags;
  uint64_t base[kMaxGpus];
  uint64_t own;
  uint64_t scratch_offset;
  uint64_t scratch_bytes;
  uint64_t host_control;
  uint64_t deadline_ticks;
  uint64_t delay_ticks;
  uint32_t delay_phase;
  uint32_t domain;
};

struct BarrierParams {
  GroupParams group;
};

struct BarrierProbeParams {
  GroupParams group;
  uint64_t mismatches;
  uint32_t rounds;
  uint32_t seed;
  uint32_t max_delay;
  uint32_t reserved;
};

struct CheckParams {
  GroupParams group;
  uint64_t description[kMaxGpus][2];
  uint32_t partners;
  uint32_t reserved;
};

// One call on the timeline, in ticks of the device's clock.
struct TraceRecord {
  uint64_t call;
  uint64_t ready;
  uint64_t seen[kMaxGpus];
  uint64_t began;
  uint64_t ended;
};

struct TraceParams {
  GroupParams group;
  uint64_t count;
  uint64_t records;
  uint64_t call;
  uint32_t capacity;
  uint32_t partners;
  uint32_t is_end;
  uint32_t reserved;
};

struct PeerProbeParams {
  uint64_t remote;
  uint64_t mismatches;
  uint32_t words;
  uint32_t seed;
  uint32_t check;
  uint32_t delay;
};

struct AllReduceParams {
  GroupParams group;
  uint64_t input;
  uint64_t output;
  uint64_t bytes;
  uint64_t packs;
  uint64_t whole_packs;
  uint64_t window_packs;
  uint64_t view[kMaxGpus];
  uint32_t op;
  uint32_t dtype;
};

struct ExchangeParams {
  GroupParams group;
  uint64_t source[kMaxGpus];
  uint64_t send_bytes[kMaxGpus];
  uint64_t target[kMaxGpus];
  uint64_t receive_bytes[kMaxGpus];
  uint64_t window_bytes;
  uint64_t slot_bytes;
  uint64_t banks;
  uint32_t blocks[kMaxGpus];
  uint32_t seal[kMaxGpus];
  uint32_t operation;
  uint32_t op;
  uint32_t dtype;
  uint32_t reserved;
};

struct CountedParams {
  ExchangeParams exchange;
  uint64_t counts;
  uint64_t received_counts;
  uint64_t element_bytes;
};

struct NormParams {
  AllReduceParams all_reduce;
  uint64_t residual;
  uint64_t new_residual;
  uint64_t sum;
  uint64_t weight;
  uint64_t row_bytes;
  uint32_t rows;
  uint32_t row_packs;
  float inverse_elements;
  float epsilon;
  float offset;
  uint32_t format;
  uint64_t bias;
  uint64_t scales;
  uint64_t tensor_scale;
  uint64_t kept;
  uint64_t sums;
  uint32_t shard_rows;
  uint32_t window_rows;
  uint32_t operation;
  uint32_t elements;
  uint32_t is_layer;
  uint32_t is_fast;
};

static_assert(sizeof(GroupParams) == 160, "params");
static_assert(offsetof(GroupParams, base) == 40, "params");
static_assert(offsetof(GroupParams, domain) == 156, "params");
static_assert(sizeof(BarrierParams) == 160, "params");
static_assert(sizeof(BarrierProbeParams) == 184, "params");
static_assert(sizeof(PeerProbeParams) == 32, "params");
static_assert(sizeof(CheckParams) == 296, "params");
static_assert(sizeof(TraceRecord) == 96, "params");
static_assert(sizeof(TraceParams) == 200, "params");
static_assert(sizeof(AllReduceParams) == 280, "params");
static_assert(offsetof(AllReduceParams, view) == 208, "params");

static_assert(sizeof(NormParams) == 408, "params");
static_assert(offsetof(NormParams, row_bytes) == 312, "params");
static_assert(offsetof(NormParams, bias) == 344, "params");
static_assert(offsetof(NormParams, is_fast) == 404, "params");

static_assert(sizeof(ExchangeParams) == 520, "params");
static_assert(offsetof(ExchangeParams, window_bytes) == 416, "params");
static_assert(sizeof(CountedParams) == 544, "params");

}  // namespace signal_comm
