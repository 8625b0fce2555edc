// Your own kernel behind a collective: all of Signal that such a kernel may use. One source for nvcc, for hipcc or plain clang, and for the
// host's C++ compiler (C++17). What is not named here is the library's own and may change; names here stay, and an image compiled with a header of
// another ABI is refused when it is loaded.
//
// A call, from all threads of all blocks:
//
//   LamportAllReduce<Bf16> call(p.group, bytes);             // addresses only
//   if (!call.begin()) return;                               // waits for the stream's earlier work
//   for (i = call.first(); i < call.packs(); i += call.step()) call.push(i, call.load(p.input, i));
//   call.arrive();
//   for (i = ...; the same) {
//     Values<Bf16> x;                                        // f32, summed over rank 0, 1, ... from +0.0
//     if (!call.sum(i, call.load(p.input, i), x)) break;     // a peer did not come: a fault was reported
//     ...                                                    // your epilogue
//     call.store(p.output, i, round<Bf16>(x));
//   }
//   call.end();
//
// or, to read what the peers' blocks wrote, `Barrier` below. One of the two in a kernel, once: each counts and begins the call.
//
// What you answer for, and what breaks otherwise:
// - Every rank launches the same kernel with the same grid and the same bytes, in the same order among the communicator's calls. A rank that does
//   not leaves its peers waiting until the deadline; SIGNAL_CHECK=1 names both calls instead.
// - Nothing of a call's memory (Signal, input, output) is touched before `begin` or `wait`: the kernel may have been launched while the one before
//   it still runs. Weights that no kernel of the stream writes may be read before.
// - Every thread of every block goes through begin, arrive and end, whatever happened between. A thread that returns instead leaves the count of
//   the call as it was, and the next call overwrites what slow peers have yet to read.
// - Each pack below packs() is pushed once and summed once, by whichever thread. One that is not summed stays in the way of a later call,
//   which takes it for its own data. Since every rank so hears from every peer in every call, three generations of slots suffice.
// - LamportAllReduce runs on domain 0 only: all calls share one count of calls. Of `UserLaunch::lamport_bytes` the host checks that, and the size.
// - Compiled without fast math and without contraction (nvcc -fmad=false, others -ffp-contract=off): sums have the same bits everywhere, and so
//   has an epilogue of +, -, * and `divide`.
// - Shared memory is static: one SIGNAL_SHARED a kernel, at most 4,032 bytes. On CPU threads two would be one.
// - When the kernel has ended without an error, the input may be overwritten and the output is complete.
#pragma once

#if defined(SIGNAL_OTHER_PLATFORM)  // included before this: that of the model checker
#elif defined(__HIP__)
#include "../../kernels/hip/platform.h"
#elif defined(__CUDACC__)
#include "../../kernels/cuda/platform.h"
#else
#include "../../kernels/host/platform.h"
#include "../../kernels/host/image.h"
#endif

#include "../../kernels/signal/barrier.h"
#include "../../kernels/signal/lamport.h"
#include "../../kernels/signal/values.h"

namespace signal_comm {
namespace device {

// Of the layout, GroupParams and the protocol, as crates/signal-core/src/comm/user.rs has it; part of the name of an entry of every image.
static_assert(kLayoutVersion == 2 && sizeof(GroupParams) == 160, "then SIGNAL_DEVICE_ABI is another");
#define SIGNAL_DEVICE_ABI signal_device_abi_1

// What the host gives each rank's kernel, a member of the kernel's parameter struct. `rank`, `world` and `scratch_bytes` may be read.
using Group = GroupParams;
// 16 bytes, the unit in which data moves: `word[4]`.
using signal_comm::Pack;
// Element types.
using signal_comm::Bf16;
using signal_comm::F16;
using signal_comm::F32;

// The thread's place.
using platform::block_dim;
using platform::block_id;
using platform::grid_dim;
using platform::thread_id;
// All threads of the block meet; block_any also tells whether any came with `true`.
using platform::block_any;
using platform::block_sync;
// Rounded to nearest, on every platform.
using platform::divide;
using platform::square_root;
// The bits of an f32, and back.
using platform::as_bits;
using platform::as_float;

// The elements of a pack in f32, `value[kCount]`; a pack as that; and that as a pack, to nearest even, where a NaN becomes the type's canonical one.
using signal_comm::round;
using signal_comm::Values;
using signal_comm::widen;

// Pack `i` of the `bytes` bytes at an address: in one access where it is whole and aligned, else element by element; what lies behind the end
// is 0, and is not written. `load` is for memory of this rank, `pull` for what a peer's kernel may write meanwhile.
SIGNAL_DEVICE Pack load(uint64_t address, uint32_t i, uint64_t bytes) { return load_any<From::kOwn>(address, i, bytes); }
SIGNAL_DEVICE Pack pull(uint64_t address, uint32_t i, uint64_t bytes) { return load_any<From::kPeer>(address, i, bytes); }
SIGNAL_DEVICE void store(uint64_t address, uint32_t i, uint64_t bytes, const Pack& pack) { store_any(address, i, bytes, pack); }

// An all-reduce by sum through the Lamport region: each rank pushes its packs to all, and the data tells that it is there. For f32, f16 and bf16,
// 1 to 8 ranks, 1 byte up to 1 MiB (2 MiB with three or four ranks, 4 MiB with two, 8 MiB with one). With kMostRanks = 4 for groups of
// at most 4, which takes fewer registers.
template <class T, uint32_t kMostRanks = kMaxGpus>
class LamportAllReduce {
  static_assert(kMostRanks == 4 || kMostRanks == 8, "kMostRanks is 4 or 8");

 public:
  SIGNAL_DEVICE LamportAllReduce(const Group& group, uint64_t bytes)
      : m_(group, kOpUser), mail_(Message{group, kReduceSum, packs_of(bytes)}, 0), bytes_(bytes) {}
  LamportAllReduce(const LamportAllReduce&) = delete;

  // This thread's packs, spread over the grid: i = first(), first() + step(), ... below packs(). Another distribution will do too.
  SIGNAL_DEVICE uint32_t first() const { return Stride().first; }
  SIGNAL_DEVICE uint32_t step() const { return Stride().step; }
  SIGNAL_DEVICE uint32_t packs() const { return uint32_t(mail_.p.packs); }
  SIGNAL_DEVICE uint64_t bytes() const { return bytes_; }

  // Pack `i` of the call's message at an address of this rank.
  SIGNAL_DEVICE Pack load(uint64_t address, uint32_t i) const { return device::load(address, i, bytes_); }
  SIGNAL_DEVICE void store(uint64_t address, uint32_t i, const Pack& pack) const { device::store(address, i, bytes_, pack); }

  // Waits for the stream's earlier work, and lets the next kernel come. `begin` does it, if nobody has: what is loaded between the two is
  // under way together with what `begin` reads, which saves that time.
  SIGNAL_DEVICE void wait() {
    begin_call(m_.group);
    waited_ = true;
  }

  // False, for all threads: an earlier call failed. Return then, at once.
  SIGNAL_DEVICE bool begin() {
    if (!waited_) wait();
    const Pack state = platform::poll_pack(at<Pack>(m_.group.own, kLamportState));
    m_.read();
    flag_ = state.word[0];
    left_ = state.word[1];
    if (flag_ == kNoFlag) {
      if (platform::thread_id() == 0) report();
      return false;
    }
    mail_.use(flag_ % kGenerations);
    test_delay(m_, kPhaseStart);
    return true;
  }

  // Sends this rank's pack `i` to all peers.
  SIGNAL_DEVICE void push(uint32_t i, const Pack& own) const { mail_.send(in_mail(i), own); }

  // Behind all that this thread pushes, before anything is summed: the threads of the block meet, and clear what the call before has left.
  SIGNAL_DEVICE void arrive() {
    platform::block_sync();  // the whole block has read the state
    if (platform::thread_id() == 0) {
      arrived_before_ = platform::arrive(at<uint32_t>(m_.group.own, kLamportState + offsetof(LamportState, arrival)));
      if (platform::block_id() == 0) m_.count_call();
    }
    const uint64_t back = bytes_to_generation_before(flag_);
    const Stride stride;
    for (uint32_t i = stride.first; i < left_; i += stride.step) mail_.clear(back + uint64_t(i) * kPackBytes);
    if (m_.abort == 0) return;
    report();
    failed_ = true;
  }

  // Pack `i` of the sum; `own` is what this rank has pushed. False: a peer did not come in time, or somebody gave up; it has been reported, and
  // `end` is next. Threads do not agree in that: before they meet (block_sync), they ask `block_any(failed)`.
  SIGNAL_DEVICE bool sum(uint32_t i, const Pack& own, Values<T>& to) {
    Pack packs[kMostRanks] = {};
    if (!receive(i, own, packs)) return false;
    to = values_of(mail_.fold(packs));
    return true;
  }
  // The same, rounded: the bits that an all-reduce gives.
  SIGNAL_DEVICE bool sum(uint32_t i, const Pack& own, Pack& to) {
    Values<T> values;
    const bool came = sum(i, own, values);
    if (came) to = round<T>(values);
    return came;
  }

  // The last that every thread does: counts the call on.
  SIGNAL_DEVICE void end() const {
    test_delay(m_, kPhaseExchange);
    // A call that was given up leaves no count with which another sends anything.
    leave_state(m_.group, arrived_before_, failed_ ? kNoFlag : next_flag(flag_), failed_ ? 0 : left_to_clear<T>(mail_.p));
  }

 private:
  SIGNAL_DEVICE uint64_t in_mail(uint32_t i) const {
    return uint64_t(m_.group.world <= kMaxGpus / 2 ? in_slots<kMaxGpus / 2>(i, m_.group.world) : i) * kPackBytes;
  }

  SIGNAL_DEVICE bool receive(uint32_t i, const Pack& own, Pack (&packs)[kMostRanks]) {
    if (failed_) return false;
    const uint64_t bytes = in_mail(i);
    SIGNAL_NO_UNROLL
    for (uint32_t polls = 0; !mail_.look(bytes, own, packs); polls++) {  // nothing but the polls, as in a barrier
      if (kBounded && polls >= platform::kPollsPerCheck &&
          !wait_for_packs(m_.group, kOpUser, flag_, uint32_t(bytes / kPackBytes), kEveryone)) {
        failed_ = true;
        return false;
      }
      platform::relax();
    }
    if (i >= kMostLeftToClear) mail_.clear(bytes);  // the next call clears the others
    return true;
  }

  SIGNAL_DEVICE void report() const {
    report_fault(Member(m_.group, kOpUser), kPhaseExchange, 0, [&](uint32_t) { return Seen{flag_ + 1, flag_}; });
  }

  struct Message {
    const Group& group;
    uint32_t op;
    uint64_t packs;
  };

  Member m_;
  Mail<T, kMostRanks, false, Message> mail_;
  uint64_t bytes_;
  flag_t flag_ = kNoFlag;
  uint32_t left_ = 0;  // packs of the call before, to clear
  uint32_t arrived_before_ = kNoFlag;
  bool waited_ = false;
  bool failed_ = false;
};

// Where rank `r` has its scratch, `group.scratch_bytes` bytes, as this rank sees it: what one rank's block stores there, or in its own, the peers'
// block of the same number reads behind a meeting. All calls of a domain use it in turn.
SIGNAL_DEVICE uint64_t scratch(const Group& group, uint32_t r) { return group.base[r] + group.scratch_offset; }

using BarrierShared = BlockShared;

// Meetings of the blocks of one number of all ranks. From all threads of all blocks, of which each has 32 threads at least:
//
//   SIGNAL_SHARED(BarrierShared, shared);
//   Barrier barrier(p.group, shared);
//   if (!barrier.begin()) return;
//   ...                                // store to scratch(p.group, p.group.rank)
//   if (!barrier.meet()) return;       // what the peers' same block stored before is here
//   ...                                // pull from scratch(p.group, r), or push there and meet again
//   barrier.leave();                   // all have read what is here: without it the next call overwrites what a slow peer reads
//
// Each meeting releases and acquires at system scope. Block b may read only what the peers' block b wrote. Any domain will do.
class Barrier {
 public:
  SIGNAL_DEVICE Barrier(const Group& group, BarrierShared& shared) : barriers_(Member(group, kOpUser), shared) {}
  Barrier(const Barrier&) = delete;

  // False, for all threads: an earlier call failed. Return then, at once: a slow peer may still read what you would overwrite.
  SIGNAL_DEVICE bool begin() {
    signal_comm::begin(barriers_.m, barriers_);
    if (!platform::block_any(barriers_.m.abort != 0)) return true;
    if (platform::thread_id() == 0) report_missing<CounterBarrier>(barriers_.m.group, kOpUser, kPhaseStart, 0);
    return false;
  }

  // False, for all threads: a rank did not come; it has been reported. Return then.
  SIGNAL_DEVICE bool meet() {
    const bool first = first_;
    first_ = false;
    return barriers_.meet(first ? kPhaseStart : kPhaseMiddle, true, first ? Turn::kFirst : Turn::kBetween);
  }

  // The last meeting. Behind it nothing of the peers' may be touched.
  SIGNAL_DEVICE void leave() { barriers_.meet(kPhaseExit, true, Turn::kLast); }

 private:
  Barriers<CounterBarrier, Everyone, Member> barriers_;
  bool first_ = true;
};

}  // namespace device
}  // namespace signal_comm

// Makes a kernel `name` of a device function that takes `const Params&`: SIGNAL_ENTRY(my_kernel, MyParams, my_function<Bf16>). Blocks have up to
// 512 threads. In every image stands one SIGNAL_IMAGE(symbol, SIGNAL_NAMED(name), ...), which marks it with the header's ABI; for CPU threads
// it is also the table, under that symbol, of the kernels in it.
#define SIGNAL_TEXT_OF(x) #x
#define SIGNAL_TEXT(x) SIGNAL_TEXT_OF(x)
#if defined(__HIP__)
#define SIGNAL_ENTRY(name, Params, ...)                                                                                            \
  extern "C" __attribute__((global))                                                                                               \
  __attribute__((amdgpu_flat_work_group_size(1, signal_comm::platform::kMaxBlockThreads))) void name(const Params) {               \
    __VA_ARGS__(*(const Params*)(const void*)__builtin_amdgcn_kernarg_segment_ptr());                                              \
  }
#define SIGNAL_MARK(abi) extern "C" __attribute__((global)) void abi() {}
#define SIGNAL_IMAGE(symbol, ...) SIGNAL_MARK(SIGNAL_DEVICE_ABI)
#elif defined(__CUDACC__)
#define SIGNAL_ENTRY(name, Params, ...)                                                                                            \
  extern "C" __global__ void __launch_bounds__(signal_comm::platform::kMaxBlockThreads)     \
      name(const __grid_constant__ Params params) {                                                                                \
    __VA_ARGS__(params);                                                                                                           \
  }
#define SIGNAL_MARK(abi) extern "C" __global__ void abi() {}
#define SIGNAL_IMAGE(symbol, ...) SIGNAL_MARK(SIGNAL_DEVICE_ABI)
#else
#define SIGNAL_ENTRY(name, Params, ...)                                     \
  static void name(const void* params, const HostThread* self) {            \
    signal_comm::platform::self = self;                                     \
    __VA_ARGS__(*static_cast<const Params*>(params));                       \
  }
#define SIGNAL_NAMED(name) {#name, name}
#define SIGNAL_IMAGE(symbol, ...)                                                                                                  \
  static const HostEntry symbol##_entries[] = {{SIGNAL_TEXT(SIGNAL_DEVICE_ABI), [](const void*, const HostThread*) {}}, __VA_ARGS__}; \
  extern "C" const HostImageTable symbol;                                                                                          \
  extern "C" const HostImageTable symbol = {signal_comm::kLayoutVersion, sizeof(symbol##_entries) / sizeof(HostEntry), symbol##_entries};
#endif
