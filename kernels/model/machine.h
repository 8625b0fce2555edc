// The machine that runs kernels and hosts: fibres, streams, block barriers. What it leaves open (who goes on, which write a read
// sees) it asks of the explorer, one question at a time.
#pragma once

#include <string>
#include <vector>

#include "device.h"
#include "memory.h"

namespace model {

constexpr uint32_t kMaxSlots = 64;
constexpr uint32_t kMaxRanks = 8;
constexpr uint32_t kSharedBytes = 640;  // of a block: parameters with other sizes, behind the places, of a counted exchange
constexpr uint32_t kMostPolled = 40;
constexpr uint32_t kForever = 0xffffffffu;

enum class State : uint8_t {
  kFree,
  kRun,
  kStopped,  // before a read that others' writes may change
  kBarrier,  // of its block
  kEarlier,  // for the stream's earlier work
  kStream,   // a host, for streams
  kMeeting,  // a host, for the others
  kRelaxed,  // has polled in vain (random schedules only: an exhaustive search turns back there)
  kDone,
};

// A device thread or a host. Hosts come first, one for each rank.
struct Thread {
  State state;
  bool must_stop;    // a write, or a barrier, since the last stop: see explore.h
  bool just_relaxed;
  bool early;        // began before the kernel ahead of it had ended, and has not waited for that yet
  bool allowed;      // the stream's next kernel, as far as this thread is concerned
  bool vote;
  uint8_t stream;
  Id launch;
  Id block;
  Ids ids;
  Knowledge knows;
  uint64_t history;    // all that the thread has seen since its kernel began: with its code it says where the thread is
  uint64_t interval;   // of reads since the last `relax`
  uint64_t last_interval;
  uint64_t time;
  uint64_t about;      // the address that it stopped at, or streams that it waits for
  void* stack;
  uint32_t polls;
  Id polled[kMostPolled];  // places, since the last `relax`
};

struct Launch {
  void (*run)(const void* params);
  alignas(8) unsigned char params[640];
  char name[24];
  uint32_t grid, threads;
  uint8_t stream;
  bool early;
  Id view;  // of the host that launched it
};

struct Instance {  // a running kernel
  Id launch;      // kNoId: none
  uint16_t left;  // threads
  uint16_t not_allowed;  // threads that have not allowed the next kernel
  Id view;
  bool parity;
};

struct Stream {
  uint8_t rank;
  uint8_t slot;     // its first
  uint8_t slots;    // of one kernel
  bool two;         // kernels at once
  uint16_t enqueued, begun, ended;
  Id queue[40];
  Instance running[2];
  Id view;  // of all that has ended
};

struct Block {
  uint16_t threads, here;
  uint32_t turn;
  bool vote, result;
  Id view;     // what the threads know that have come
  Id offered;  // what their waves have released
};

struct World {
  Memory memory;
  std::vector<Thread> threads;
  std::vector<Launch> launches;
  std::vector<Stream> streams;
  std::vector<Block> blocks;  // by slot of the block's first thread
  uint32_t met;       // hosts at the meeting
  Id meeting;         // what they know
  uint32_t expiries;  // deadlines that may yet pass
  uint32_t steps;
  int running;  // slot, or -1
  bool fresh;   // all reads since the last scheduling saw the newest write
  uint64_t notes[kMaxRanks];  // of hosts
};
extern World world;
extern unsigned char stacks[kMaxSlots][64 * 1024];
extern unsigned char shared_bytes[kMaxSlots][kSharedBytes];

// What the machine wants to know, or how a run ended.
enum class Ask { kSchedule, kRead, kWrite, kExpire, kEnd, kStuck, kFail, kTurnBack, kAgain };

struct Question {
  Ask ask;
  uint32_t options;
};

struct Setup {
  uint32_t ranks;
  uint32_t streams;      // a rank
  uint32_t slots;        // threads of the largest kernel
  bool two_kernels;      // at once on a stream
  uint32_t expiries;
  uint32_t atoms;        // of a pack: words that land together
  bool exhaustive;       // polls in vain end a run instead of waiting
  void (*host)(uint32_t rank);
  void (*ended)();       // behind a run without a failure, if not null
};
extern Setup setup;

void begin(const Setup& s);  // a new run
Question go();               // until the next question
void answer(uint32_t option);
void ask_again(const Question& q);   // before an answer, where the state was put back
uint32_t slot_of(uint32_t option);  // of a kSchedule
std::string waiting();       // for what each thread waits
uint64_t digest();           // of the state, at a kSchedule; also frees what nobody can reach
void collect();

// For hosts, on their fibres.
void launch(uint32_t stream, void (*run)(const void*), const void* params, uint32_t bytes, const char* name, uint32_t grid,
            uint32_t threads, bool early);
void pause();  // lets others go first
void wait_for(uint64_t streams);
void meet();
void fill(uint32_t rank, bool (*keeps)(uint64_t at));
uint64_t read_acquire(const void* at, uint32_t bytes);
uint64_t peek(uint64_t at, uint32_t bytes);  // the newest value, outside of the model's memory

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
extern std::string failure;

// Names of what addresses mean.
std::string name_of(uint64_t at);
uint32_t rank_of(uint64_t at);
std::string name_of_thread(uint32_t slot);

// Prints a step where tracing is on.
extern bool tracing;
void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));

inline uint64_t mix(uint64_t a, uint64_t b) {
  a = (a ^ b) * 0x9e3779b97f4a7c15u;
  a ^= a >> 29;
  a *= 0xbf58476d1ce4e5b9u;
  return a ^ a >> 32;
}

}  // namespace model
