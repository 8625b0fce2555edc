// The host as a platform: a device thread is an OS thread, scopes are all "system", every barrier is ordered. Each
// primitive is one line. ThreadSanitizer runs on this build, so orderings are on the accesses, never on bare fences.
#pragma once

#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define SIGNAL_DEVICE inline
#define SIGNAL_COLD __attribute__((noinline)) inline
#define SIGNAL_INLINE // of lambdas
#define SIGNAL_UNROLL _Pragma("GCC unroll 8")
#define SIGNAL_NO_UNROLL
#define SIGNAL_SHARED(Type, name) Type& name = *static_cast<Type*>(::signal_comm::platform::shared_memory(sizeof(Type)))

// What the backend hands to each thread of a launch; mirrors crates/signal-host/src/module.rs.
extern "C" struct HostThread {
  uint32_t thread, block, block_dim, grid_dim;
  void* state;  // of the block: 4,096 bytes, zero when the block starts
};

namespace signal_comm {

struct alignas(16) Pack;
struct alignas(16) Line;

namespace platform {

constexpr bool kAlwaysOrdered = true;
constexpr uint32_t kMinBlockThreads = 1;
constexpr bool kTestHooks = true;
constexpr uint32_t kPollsPerCheck = 64;  // each poll yields, so a check comes after tens of microseconds at least
constexpr uint32_t kChecksPerAsk = 1;    // its memory is the device's
constexpr uint32_t kWaveThreads = 1;
constexpr uint32_t kSumLanes = 1;

struct BlockState {
  uint32_t arrived;
  uint32_t generation;
  uint32_t votes[2];
  alignas(64) unsigned char shared[4096 - 64];
};
static_assert(sizeof(BlockState) == 4096, "the backend allocates this many bytes");

inline thread_local const HostThread* self;

inline BlockState& state() { return *static_cast<BlockState*>(self->state); }
inline void* shared_memory(size_t) { return state().shared; }

inline uint32_t thread_id() { return self->thread; }
inline uint32_t block_id() { return self->block; }
inline uint32_t block_dim() { return self->block_dim; }
inline uint32_t grid_dim() { return self->grid_dim; }

inline void relax() { sched_yield(); }
// Comes before the next polls of a wait, of which it gives the number. A wait that has lasted leaves the processor to those it waits
// for, ever longer, up to a millisecond.
inline uint32_t rest(uint32_t turn) {
  if (turn < 4) return kPollsPerCheck;
  const timespec nap = {0, 50'000 * (turn < 23 ? turn - 3 : 20)};
  nanosleep(&nap, nullptr);
  return 1;
}
inline uint64_t clock() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec); }

template <class V> V opaque(V v) { return v; }

template <class V> V load(const V* p) { return *p; }
template <class V> void store(V* p, V v) { *p = v; }
template <class V> V load_peer(const V* p) { return *p; }
template <class V> V load_relaxed(const V* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
template <class V> void store_relaxed(V* p, V v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }

#ifdef SIGNAL_MUTANT_RELAXED_RELEASE
constexpr int kRelease = __ATOMIC_RELAXED;
#else
constexpr int kRelease = __ATOMIC_RELEASE;
#endif
#ifdef SIGNAL_MUTANT_RELAXED_ACQUIRE
constexpr int kAcquire = __ATOMIC_RELAXED;
#else
constexpr int kAcquire = __ATOMIC_ACQUIRE;
#endif

template <class V> void signal_release(V* p, V v) { __atomic_store_n(p, v, kRelease); }
template <class V> void signal_relaxed(V* p, V v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
template <class V> void acquire(const V* p) { (void)__atomic_load_n(p, kAcquire); }
template <class L> void signal_release(L* p, uint64_t low, uint64_t high) { __atomic_store_n(&p->low, low, kRelease); __atomic_store_n(&p->high, high, __ATOMIC_RELAXED); }
template <class L> void signal_relaxed(L* p, uint64_t low, uint64_t high) { __atomic_store_n(&p->low, low, __ATOMIC_RELAXED); __atomic_store_n(&p->high, high, __ATOMIC_RELAXED); }
template <class L> L load_line(const L* p) { return L{__atomic_load_n(&p->low, __ATOMIC_RELAXED), __atomic_load_n(&p->high, __ATOMIC_RELAXED)}; }

template <class P> P load_pack(const P* p) { return *p; }
template <class P> P load_pack_peer(const P* p) { return *p; }
template <class P> void store_pack(P* p, const P& v) { *p = v; }

// Release and acquire: the writes of one place by its owner and by a peer are ordered by the data between them.
template <class P> void send_pack(P* p, const P& v) { uint64_t h[2]; memcpy(h, &v, 16); uint64_t* q = reinterpret_cast<uint64_t*>(p); __atomic_store_n(q, h[0], kRelease); __atomic_store_n(q + 1, h[1], kRelease); }
template <class P> P poll_pack(const P* p) { const uint64_t* q = reinterpret_cast<const uint64_t*>(p); const uint64_t h[2] = {__atomic_load_n(q, kAcquire), __atomic_load_n(q + 1, kAcquire)}; P v; memcpy(&v, h, 16); return v; }

inline uint32_t arrive(uint32_t* p, uint32_t by = 1) { return __atomic_fetch_add(p, by, __ATOMIC_ACQ_REL); }
inline uint32_t arrive_ordered(uint32_t* p) { return arrive(p); }

inline void wait_for_earlier() {}
inline void allow_next() {}

inline bool claim(uint32_t* p) { return __atomic_exchange_n(p, 1u, __ATOMIC_RELAXED) == 0; }

inline void end_thread() {}  // a function cannot

inline void release_wave() {}

// A block barrier that also tells every thread whether any came with `vote`. Arrivals are released to the last arriver and
// by it to all (acquire-release on the count, release and acquire on the generation). The votes have two sets: the last
// arriver clears the next one, which all have finished reading when they arrive here.
inline bool block_any(bool vote) {
  if (block_dim() == 1) return vote;
  BlockState& s = state();
  const uint32_t generation = __atomic_load_n(&s.generation, __ATOMIC_RELAXED);
  if (vote) __atomic_store_n(&s.votes[generation % 2], 1u, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&s.arrived, 1u, __ATOMIC_ACQ_REL) == block_dim()) {
    __atomic_store_n(&s.arrived, 0u, __ATOMIC_RELAXED);
    __atomic_store_n(&s.votes[(generation + 1) % 2], 0u, __ATOMIC_RELAXED);
    __atomic_store_n(&s.generation, generation + 1, __ATOMIC_RELEASE);
  } else {
    for (uint32_t turn = 0, polls = 0; __atomic_load_n(&s.generation, __ATOMIC_ACQUIRE) == generation; polls--) {
      if (polls == 0) polls = rest(turn++);
      relax();
    }
  }
  return __atomic_load_n(&s.votes[generation % 2], __ATOMIC_RELAXED) != 0;
}
inline void block_sync() { (void)block_any(false); }

inline float add_lanes(float x) { return x; }

template <uint32_t> uint32_t partner(uint32_t x) { return x; }  // of waves of one thread there is none
inline float divide(float a, float b) { return a / b; }
inline float reciprocal(float x) { return 1.0f / x; }
inline float square_root(float x) { return __builtin_sqrtf(x); }
inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }
inline double as_double(uint64_t bits) { double f; memcpy(&f, &bits, 8); return f; }
inline uint64_t as_bits64(double f) { uint64_t bits; memcpy(&bits, &f, 8); return bits; }

// Conversions by bit code: no instruction set beyond the baseline is asked for.
inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x0400) return as_float(sign | ((magnitude << 13) + (112u << 23)));
  // Subnormal: magnitude x 2^-24, exact in f32.
  return as_float(sign | as_bits(float(magnitude) * as_float(103u << 23)));
}

inline uint16_t f32_to_f16(float f) {
  const uint32_t bits = as_bits(f);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x47800000) return uint16_t(sign | 0x7c00);  // 65,536 and above, infinity
  if (magnitude < 0x38800000) {
    // Below 2^-14: adding 0.5 puts the units of 2^-24 at the end of the significand, rounded to nearest even.
    return uint16_t(sign | uint16_t(as_bits(as_float(magnitude) + 0.5f) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | uint16_t((rounded - (112u << 23)) >> 13));
}

inline uint16_t f32_to_bf16(float f) { const uint32_t bits = as_bits(f); return f != f ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16); }
inline uint32_t f32x2_to_f16(float low, float high) { return uint32_t(f32_to_f16(high)) << 16 | f32_to_f16(low); }
inline uint32_t f32x2_to_bf16(float low, float high) { return uint32_t(f32_to_bf16(high)) << 16 | f32_to_bf16(low); }

constexpr bool kAddsHalves = false;
inline uint32_t add_f16x2(uint32_t, uint32_t) { return 0; }
inline uint32_t add_bf16x2(uint32_t, uint32_t) { return 0; }

constexpr bool kHasE4m3 = false;
inline uint32_t f32x2_to_e4m3(float, float) { return 0; }

}  // namespace platform
}  // namespace signal_comm
