// The model as a platform: a device thread is a fibre, and each primitive is one call of the machine that explores what memory
// may show and when. docs/verification.md has the memory model and how it differs from those of the GPUs.
//
// Two builds: SIGNAL_MODEL_RELAXED is CUDA's form, where barriers over data that predates the kernels are relaxed and a thread has one
// peer; the other is that of AMD and of the host, where all barriers are ordered and one thread may stand for all ranks.
#pragma once

#include <string.h>

#include "device.h"

#define SIGNAL_DEVICE inline
#define SIGNAL_COLD inline
#define SIGNAL_INLINE // of lambdas
#define SIGNAL_UNROLL
#define SIGNAL_NO_UNROLL
#define SIGNAL_SHARED(Type, name) Type& name = *static_cast<Type*>(::model::shared_memory(sizeof(Type)))

namespace signal_comm {

struct alignas(16) Pack;
struct alignas(16) Line;

namespace platform {

#ifdef SIGNAL_MODEL_RELAXED
constexpr bool kAlwaysOrdered = false;
constexpr uint32_t kMinBlockThreads = 32;  // the model launches as many as there are ranks
#else
constexpr bool kAlwaysOrdered = true;
constexpr uint32_t kMinBlockThreads = 1;
#endif
constexpr bool kTestHooks = false;
static const uint32_t& kPollsPerCheck = ::model::polls_per_check;
constexpr uint32_t kChecksPerAsk = 1;
constexpr uint32_t kWaveThreads = 1;
constexpr uint32_t kSumLanes = 1;

inline uint32_t thread_id() { return ::model::self.thread; }
inline uint32_t block_id() { return ::model::self.block; }
inline uint32_t block_dim() { return ::model::self.block_dim; }
inline uint32_t grid_dim() { return ::model::self.grid_dim; }

// In its caller also where nothing else is inlined: the model tells polls apart by where they are.
__attribute__((always_inline)) inline void relax() { ::model::relax(); }
__attribute__((always_inline)) inline uint32_t rest(uint32_t) { return kPollsPerCheck; }
inline uint64_t clock() { return ::model::clock(); }

template <class V> V opaque(V v) { return v; }

template <class V> V load(const V* p) { V v; ::model::load(p, &v, sizeof v); return v; }
template <class V> void store(V* p, V v) { ::model::store(p, &v, sizeof v); }
template <class V> V load_peer(const V* p) { return load(p); }
template <class V> V load_relaxed(const V* p) { return V(::model::read(p, sizeof(V))); }
template <class V> void store_relaxed(V* p, V v) { ::model::write(p, sizeof(V), v, false); }
#ifdef SIGNAL_MUTANT_RELAXED_RELEASE
constexpr bool kReleases = false;
#else
constexpr bool kReleases = true;
#endif

template <class V> void signal_release(V* p, V v) { ::model::write(p, sizeof(V), v, kReleases); }
template <class V> void signal_relaxed(V* p, V v) { ::model::write(p, sizeof(V), v, false); }
#ifdef SIGNAL_MUTANT_RELAXED_ACQUIRE
template <class V> void acquire(const V*) {}
#else
template <class V> void acquire(const V* p) { ::model::acquire(p); }
#endif

// As on AMD, which promises least: the release stands before the first element alone.
template <class L> void signal_release(L* p, uint64_t low, uint64_t high) { ::model::write(&p->low, 8, low, kReleases); ::model::write(&p->high, 8, high, false); }
template <class L> void signal_relaxed(L* p, uint64_t low, uint64_t high) { ::model::write(&p->low, 8, low, false); ::model::write(&p->high, 8, high, false); }
template <class L> L load_line(const L* p) { L l; ::model::read_line(p, &l.low); return l; }

template <class P> P load_pack(const P* p) { P v; ::model::load(p, &v, sizeof v); return v; }
template <class P> P load_pack_peer(const P* p) { return load_pack(p); }
template <class P> void store_pack(P* p, const P& v) { ::model::store(p, &v, sizeof v); }

// Relaxed, and atomic by 32 bits: what CUDA promises.
template <class P> void send_pack(P* p, const P& v) { ::model::write_words(p, v.word); }
template <class P> P poll_pack(const P* p) { P v; ::model::read_words(p, v.word); return v; }

inline uint32_t arrive(uint32_t* p, uint32_t by = 1) { return ::model::add(p, by, false); }
inline uint32_t arrive_ordered(uint32_t* p) { return ::model::add(p, 1, true); }

inline void wait_for_earlier() { ::model::wait_for_earlier(); }
inline void allow_next() { ::model::allow_next(); }

inline bool claim(uint32_t* p) { return ::model::exchange(p, 1) == 0; }

#ifdef SIGNAL_MODEL_RELAXED
inline void end_thread() { ::model::end_thread(); }
#else
inline void end_thread() {}
#endif

#ifdef SIGNAL_MUTANT_NO_RELEASE_OF_THE_WAVE
inline void release_wave() {}
#else
inline void release_wave() { ::model::release_wave(); }
#endif
inline bool block_any(bool vote) { return ::model::block_any(vote); }
inline void block_sync() { (void)::model::block_any(false); }

inline float add_lanes(float x) { return x; }
template <uint32_t> uint32_t partner(uint32_t x) { return x; }  // of waves of one thread there is none
inline float divide(float a, float b) { return a / b; }
inline float reciprocal(float x) { return 1.0f / x; }
inline float square_root(float x) { return __builtin_sqrtf(x); }
inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }
inline double as_double(uint64_t bits) { double f; memcpy(&f, &bits, 8); return f; }
inline uint64_t as_bits64(double f) { uint64_t bits; memcpy(&bits, &f, 8); return bits; }
// The model knows no f16: what it would add to bf16 is arithmetic, which the conformance suite tests.
inline float f16_to_f32(uint16_t) { return 0; }
inline uint32_t f32x2_to_f16(float, float) { return 0; }
inline uint16_t f32_to_bf16(float f) { const uint32_t bits = as_bits(f); return f != f ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16); }
inline uint32_t f32x2_to_bf16(float low, float high) { return uint32_t(f32_to_bf16(high)) << 16 | f32_to_bf16(low); }

constexpr bool kAddsHalves = false;
inline uint32_t add_f16x2(uint32_t, uint32_t) { return 0; }
inline uint32_t add_bf16x2(uint32_t, uint32_t) { return 0; }

constexpr bool kHasE4m3 = false;
inline uint32_t f32x2_to_e4m3(float, float) { return 0; }

}  // namespace platform
}  // namespace signal_comm
