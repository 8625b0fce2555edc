// What the model runs: ranks, the calls that they make, and what must hold. The host side does what crates/signal-core does.
#pragma once

#include <string>
#include <vector>

#include "explore.h"

namespace model {

enum class Kind : uint8_t {
  kBarrier, kProbe, kCheck, kOneStage, kTwoStage, kLamport, kTwoShot,
  kNorm,  // with RMSNorm behind it: rows of `window` packs
  kMove, kReduceScatter,  // by pulling, unless they are pushed
  kMoveCounted,           // the pieces that there would be are counted in the device's memory
  kLinesMove, kLinesReduce,
};

// Of an exchange: for whom each rank has a piece. `count` elements, unless it says otherwise.
enum class Pieces : uint8_t {
  kEach,       // for every rank
  kSame,       // the same for every rank
  kRagged,     // of sizes that differ, and none one way between two ranks
  kFromFirst,  // the first rank, for all others
  kToFirst,    // every rank, for the first one
  kNext,       // every rank but the last, for the one behind it: the first pair by all blocks, the others by one
};

struct Call {
  Kind kind;
  char type;       // 'f': f32, 'b': bf16
  uint32_t count;  // elements; of a probe: rounds
  bool staged;     // the input is not symmetric
  bool in_place;
  uint32_t domain;
  uint32_t blocks;
  uint32_t threads;
  Pieces pieces = Pieces::kEach;
  uint32_t without = 0;  // ranks that have no part in it, as bits: they make no call
  uint32_t window = 0;   // packs, of a two-shot call, or of a row
  bool push = false;     // of a two-stage call, also with a norm, or an exchange; `staged`: the output is not symmetric
  uint32_t direct = 0;   // of a staged call, ranks whose memory is symmetric all the same, as bits
  uint32_t room = 0;     // elements of each piece, of a counted call; rows of a window, of one with a norm
  bool user = false;     // a Lamport or a staged one-stage call, made with include/signal/device.h
};

enum class Story : uint8_t {
  kCalls,    // of memory that is ready
  kInit,     // the hosts prepare it first
  kAbsent,   // the last rank makes no call, its peers' deadlines pass; all recover, and make the calls again
  kLate,     // deadlines may pass at any wait; likewise
  kAbort,    // the first rank's host asks for an abort; likewise
  kMismatch, // the last rank makes another call: in checked mode, or of an exchange as far as the first rank can tell
};

struct Scenario {
  std::string name;
  uint32_t world;
  std::vector<Call> calls;
  Story story = Story::kCalls;
  bool relaxed = false;   // CUDA's form of the platform
  bool early = false;     // launch
  bool zeros = false;     // inputs that look like "not ready"
  uint32_t shift = 0;     // bytes by which the buffers are misaligned
  uint32_t counters = 0;  // first values
  uint32_t flag = 0;
  uint32_t lines = 0;     // calls by lines before
  bool old_lines = false;  // the banks hold what looks like a line of the first calls behind the wrap
  uint32_t scratch = 256;  // bytes, of a domain
  uint32_t expiries = 0;
  uint32_t atoms = 4;
  bool extent = true;     // compare prev_num_packs: else a wrong one shows by what it does
  bool watch_polls = false;  // the paths behind the first polls: one poll, then a look at clock and abort words
  bool exhaustive = true;
  uint32_t runs = 300;  // random ones, by default
};

std::vector<Scenario> scenarios();
Setup prepare(const Scenario& s);  // for the explorer

}  // namespace model
