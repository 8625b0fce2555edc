// AMD as a platform, by clang's builtins alone: the same file compiles under hipcc and freestanding, without HIP's headers
// or device libraries. Each primitive is one line.
//
// Pointers are cast to the global address space, since a generic pointer would make flat_ instructions. Every barrier is
// ordered, and each wave releases its own stores before the block barrier: on gfx9 that barrier does not wait for them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SIGNAL_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define SIGNAL_COLD SIGNAL_DEVICE  // a call would take scratch memory
#define SIGNAL_INLINE __attribute__((always_inline))  // of lambdas: a call would take scratch memory
#define SIGNAL_UNROLL _Pragma("unroll")
#define SIGNAL_NO_UNROLL _Pragma("nounroll")
#define SIGNAL_SHARED(Type, name) static __attribute__((shared)) Type name
#define SIGNAL_GLOBAL __attribute__((address_space(1)))

namespace signal_comm {

struct alignas(16) Pack;
struct alignas(16) Line;

namespace platform {

constexpr bool kAlwaysOrdered = true;
constexpr uint32_t kMinBlockThreads = 32;  // the host launches no smaller blocks
constexpr bool kTestHooks = false;
constexpr uint32_t kPollsPerCheck = 256;
constexpr uint32_t kChecksPerAsk = 64;
constexpr uint32_t kWaveThreads = 32;  // or 64: then two numbers fall to one
constexpr uint32_t kSumLanes = 32;  // also of a wave of 64
constexpr uint32_t kMaxBlockThreads = 512;

SIGNAL_DEVICE uint32_t thread_id() { return __builtin_amdgcn_workitem_id_x(); }
SIGNAL_DEVICE uint32_t block_id() { return __builtin_amdgcn_workgroup_id_x(); }
SIGNAL_DEVICE uint32_t block_dim() { return __builtin_amdgcn_workgroup_size_x(); }
SIGNAL_DEVICE uint32_t grid_dim() { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }

SIGNAL_DEVICE void relax() { __builtin_amdgcn_s_sleep(1); }
SIGNAL_DEVICE uint32_t rest(uint32_t) { return kPollsPerCheck; }
#if __has_builtin(__builtin_readsteadycounter)
SIGNAL_DEVICE uint64_t clock() { return __builtin_readsteadycounter(); }
#else
SIGNAL_DEVICE uint64_t clock() { return __builtin_amdgcn_s_memrealtime(); }  // gfx9, by compilers before clang 19
#endif

template <class V> SIGNAL_DEVICE V opaque(V v) { return v; }

using Words = uint32_t __attribute__((ext_vector_type(4)));

template <class V> SIGNAL_DEVICE SIGNAL_GLOBAL V* global(V* p) { return (SIGNAL_GLOBAL V*)(p); }

template <class V> SIGNAL_DEVICE V load(const V* p) { return *global(p); }
template <class V> SIGNAL_DEVICE void store(V* p, V v) { *global(p) = v; }
template <class V> SIGNAL_DEVICE V load_relaxed(const V* p) { return __hip_atomic_load(global(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
template <class V> SIGNAL_DEVICE V load_peer(const V* p) { return load_relaxed(p); }
template <class V> SIGNAL_DEVICE void store_relaxed(V* p, V v) { __hip_atomic_store(global(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
template <class V> SIGNAL_DEVICE void signal_release(V* p, V v) { __hip_atomic_store(global(p), v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM); }
template <class V> SIGNAL_DEVICE void signal_relaxed(V* p, V v) { store_relaxed(p, v); }
template <class V> SIGNAL_DEVICE void acquire(const V* p) { (void)__hip_atomic_load(global(p), __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM); }

// A line is two 8-byte accesses: no wider atomicity is documented. The release stands before the first element; the
// second needs none of its own, since a reader that acts has seen both and acquired the first.
template <class L> SIGNAL_DEVICE void signal_release(L* p, uint64_t low, uint64_t high) { signal_release(&p->low, low); store_relaxed(&p->high, high); }
template <class L> SIGNAL_DEVICE void signal_relaxed(L* p, uint64_t low, uint64_t high) { store_relaxed(&p->low, low); store_relaxed(&p->high, high); }
template <class L> SIGNAL_DEVICE L load_line(const L* p) { return L{load_relaxed(&p->low), load_relaxed(&p->high)}; }

template <class P> SIGNAL_DEVICE P load_pack(const P* p) { const Words w = *(const SIGNAL_GLOBAL Words*)(p); return P{{w.x, w.y, w.z, w.w}}; }
template <class P> SIGNAL_DEVICE P load_pack_peer(const P* p) { return load_pack(p); }
template <class P> SIGNAL_DEVICE void store_pack(P* p, const P& v) { *(SIGNAL_GLOBAL Words*)(p) = Words{v.word[0], v.word[1], v.word[2], v.word[3]}; }

template <class P> SIGNAL_DEVICE void send_pack(P* p, const P& v) { uint64_t* q = reinterpret_cast<uint64_t*>(p); store_relaxed(q, uint64_t(v.word[1]) << 32 | v.word[0]); store_relaxed(q + 1, uint64_t(v.word[3]) << 32 | v.word[2]); }
template <class P> SIGNAL_DEVICE P poll_pack(const P* p) { const uint64_t* q = reinterpret_cast<const uint64_t*>(p); const uint64_t a = load_relaxed(q), b = load_relaxed(q + 1); return P{{uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32)}}; }

SIGNAL_DEVICE uint32_t arrive(uint32_t* p, uint32_t by = 1) { return __hip_atomic_fetch_add(global(p), by, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
SIGNAL_DEVICE uint32_t arrive_ordered(uint32_t* p) { return __hip_atomic_fetch_add(global(p), 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT); }

SIGNAL_DEVICE void wait_for_earlier() {}
SIGNAL_DEVICE void allow_next() {}

SIGNAL_DEVICE bool claim(uint32_t* p) { return __hip_atomic_exchange(global(p), 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) == 0; }

SIGNAL_DEVICE void end_thread() {}  // one lane cannot

SIGNAL_DEVICE void release_wave() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, ""); }
SIGNAL_DEVICE void block_sync() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); __builtin_amdgcn_s_barrier(); __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); }

// No block-wide vote without the device libraries: two sets of a shared word would need a phase, so the word is cleared
// between two barriers and read behind a third.
SIGNAL_DEVICE bool block_any(bool vote) {
  static __attribute__((shared)) uint32_t any;
  if (thread_id() == 0) any = 0;
  block_sync();
  if (vote) any = 1;
  block_sync();
  const bool result = any != 0;
  block_sync();
  return result;
}

// The sum over kSumLanes neighbouring threads, pair by pair. All of them take part. The pattern: exclusive or with m, within 32 lanes.
template <int m> SIGNAL_DEVICE float add_partner(float x) { return x + __builtin_bit_cast(float, __builtin_amdgcn_ds_swizzle(__builtin_bit_cast(int, x), m << 10 | 0x1f)); }
SIGNAL_DEVICE float add_lanes(float x) { return add_partner<16>(add_partner<8>(add_partner<4>(add_partner<2>(add_partner<1>(x))))); }

// The value of the thread whose number differs in this bit, of the lowest five. All threads of the wave take part.
template <uint32_t kBit> SIGNAL_DEVICE uint32_t partner(uint32_t x) { return uint32_t(__builtin_amdgcn_ds_swizzle(int(x), kBit << 10 | 0x1f)); }

SIGNAL_DEVICE float divide(float a, float b) { return a / b; }
SIGNAL_DEVICE float reciprocal(float x) { return 1.0f / x; }
SIGNAL_DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
SIGNAL_DEVICE float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
SIGNAL_DEVICE uint32_t as_bits(float f) { return __builtin_bit_cast(uint32_t, f); }
SIGNAL_DEVICE double as_double(uint64_t bits) { return __builtin_bit_cast(double, bits); }
SIGNAL_DEVICE uint64_t as_bits64(double f) { return __builtin_bit_cast(uint64_t, f); }
SIGNAL_DEVICE float f16_to_f32(uint16_t h) { return float(__builtin_bit_cast(_Float16, h)); }
SIGNAL_DEVICE uint16_t f32_to_f16(float f) { return f != f ? 0x7fff : __builtin_bit_cast(uint16_t, _Float16(f)); }
SIGNAL_DEVICE uint16_t f32_to_bf16(float f) { const uint32_t bits = as_bits(f); return f != f ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16); }
SIGNAL_DEVICE uint32_t f32x2_to_f16(float low, float high) { return uint32_t(f32_to_f16(high)) << 16 | f32_to_f16(low); }
SIGNAL_DEVICE uint32_t f32x2_to_bf16(float low, float high) { return uint32_t(f32_to_bf16(high)) << 16 | f32_to_bf16(low); }

constexpr bool kAddsHalves = false;
SIGNAL_DEVICE uint32_t add_f16x2(uint32_t, uint32_t) { return 0; }
SIGNAL_DEVICE uint32_t add_bf16x2(uint32_t, uint32_t) { return 0; }

constexpr bool kHasE4m3 = false;  // gfx942 has another e4m3 than OCP
SIGNAL_DEVICE uint32_t f32x2_to_e4m3(float, float) { return 0; }

}  // namespace platform
}  // namespace signal_comm
