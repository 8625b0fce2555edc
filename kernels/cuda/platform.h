// CUDA as a platform. Each primitive is one line; no vendor intrinsic or assembly stands anywhere else.
//
// What the forms cost on sm_80 to sm_100, by ptxas and nvdisasm: a relaxed system load or store is one LDG or STG
// .STRONG.SYS; st.release.sys adds MEMBAR.ALL.SYS before the store; ld.acquire.sys and fence.acquire.sys add CCTL.IVALL,
// which drops the multiprocessor's L1.
#pragma once

#include <stdint.h>

#define SIGNAL_DEVICE __device__ __forceinline__
#define SIGNAL_COLD __device__ __noinline__
#define SIGNAL_INLINE // of lambdas
#define SIGNAL_UNROLL _Pragma("unroll")
#define SIGNAL_NO_UNROLL _Pragma("unroll 1")
#define SIGNAL_SHARED(Type, name) __shared__ Type name

namespace signal_comm {

struct alignas(16) Pack;
struct alignas(16) Line;

namespace platform {

constexpr bool kAlwaysOrdered = false;
constexpr uint32_t kMinBlockThreads = 32;  // the host launches no smaller blocks
constexpr bool kTestHooks = false;
constexpr uint32_t kPollsPerCheck = 256;    // a poll of local memory takes about 0.3 us, so a check comes after 80 us
constexpr uint32_t kChecksPerAsk = 64;      // so within 5 ms
constexpr uint32_t kWaveThreads = 32;
constexpr uint32_t kSumLanes = 32;
constexpr uint32_t kMaxBlockThreads = 512;
constexpr uint32_t kBlocksPerUnit = 2;  // of that many threads, on a multiprocessor: 65,536 registers leave 64 a thread

SIGNAL_DEVICE uint32_t thread_id() { return threadIdx.x; }
SIGNAL_DEVICE uint32_t block_id() { return blockIdx.x; }
SIGNAL_DEVICE uint32_t block_dim() { return blockDim.x; }
SIGNAL_DEVICE uint32_t grid_dim() { return gridDim.x; }

SIGNAL_DEVICE void relax() {}
SIGNAL_DEVICE uint32_t rest(uint32_t) { return kPollsPerCheck; }
SIGNAL_DEVICE uint64_t clock() { uint64_t t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }  // ns


// The same value, of which the compiler knows nothing.
SIGNAL_DEVICE uint32_t opaque(uint32_t v) { asm volatile("" : "+r"(v)); return v; }
SIGNAL_DEVICE uint64_t opaque(uint64_t v) { asm volatile("" : "+l"(v)); return v; }

SIGNAL_DEVICE uint64_t global(const void* p) { return __cvta_generic_to_global(p); }

template <class V> SIGNAL_DEVICE V load(const V* p) { return *p; }
template <class V> SIGNAL_DEVICE void store(V* p, V v) { *p = v; }
template <class V> SIGNAL_DEVICE V load_peer(const V* p) { return *static_cast<const volatile V*>(p); }  // not from L1

SIGNAL_DEVICE uint32_t load_relaxed(const uint32_t* p) { uint32_t v; asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(global(p)) : "memory"); return v; }
SIGNAL_DEVICE uint64_t load_relaxed(const uint64_t* p) { uint64_t v; asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(global(p)) : "memory"); return v; }
SIGNAL_DEVICE void store_relaxed(uint32_t* p, uint32_t v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(global(p)), "r"(v) : "memory"); }
SIGNAL_DEVICE void store_relaxed(uint64_t* p, uint64_t v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(global(p)), "l"(v) : "memory"); }

SIGNAL_DEVICE void signal_release(uint32_t* p, uint32_t v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(global(p)), "r"(v) : "memory"); }
SIGNAL_DEVICE void signal_relaxed(uint32_t* p, uint32_t v) { store_relaxed(p, v); }
SIGNAL_DEVICE void signal_relaxed(Line* p, uint64_t low, uint64_t high) { asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(global(p)), "l"(low), "l"(high) : "memory"); }
SIGNAL_DEVICE void signal_release(Line* p, uint64_t low, uint64_t high) { asm volatile("fence.acq_rel.sys;" ::: "memory"); signal_relaxed(p, low, high); }

template <class L> SIGNAL_DEVICE L load_line(const L* p) { L l; asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(l.low), "=l"(l.high) : "l"(global(p)) : "memory"); return l; }

#if __CUDA_ARCH__ >= 900
template <class V> SIGNAL_DEVICE void acquire(const V*) { asm volatile("fence.acquire.sys;" ::: "memory"); }
#else
SIGNAL_DEVICE void acquire(const uint32_t* p) { [[maybe_unused]] uint32_t v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(global(p)) : "memory"); }
SIGNAL_DEVICE void acquire(const uint64_t* p) { [[maybe_unused]] uint64_t v; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(global(p)) : "memory"); }
#endif

template <class P> SIGNAL_DEVICE P load_pack(const P* p) { P v; asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(global(p)) : "memory"); return v; }
// Strong, so never from L1, which a relaxed barrier leaves as it is; as fast as a plain load, where L1::no_allocate took 93 us
// instead of 75 at 64 MiB (two ranks on one H200).
template <class P> SIGNAL_DEVICE P load_pack_peer(const P* p) { P v; asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(global(p)) : "memory"); return v; }
template <class P> SIGNAL_DEVICE void store_pack(P* p, const P& v) { asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global(p)), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory"); }

// A pack that another rank polls, and the poll: 4-byte atomicity is all that is relied on, and no order among packs.
template <class P> SIGNAL_DEVICE void send_pack(P* p, const P& v) { asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global(p)), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory"); }
template <class P> SIGNAL_DEVICE P poll_pack(const P* p) { return load_pack_peer(p); }

// Counts up, mostly by one, and gives what was there. Relaxed suffices: what it tells, that the block has read the state, its thread knows
// from the values read; and a store that depends on the result comes after it.
SIGNAL_DEVICE uint32_t arrive(uint32_t* p, uint32_t by = 1) { uint32_t v; asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(v) : "l"(global(p)), "r"(by) : "memory"); return v; }
// The same, behind all that this block did and before all that it does next: whoever comes last comes behind all others.
SIGNAL_DEVICE uint32_t arrive_ordered(uint32_t* p) { uint32_t v; asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(global(p)) : "memory"); return v; }

#if __CUDA_ARCH__ >= 900
SIGNAL_DEVICE void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
SIGNAL_DEVICE void allow_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
SIGNAL_DEVICE void wait_for_earlier() {}
SIGNAL_DEVICE void allow_next() {}
#endif

SIGNAL_DEVICE bool claim(uint32_t* p) { return atomicExch(p, 1u) == 0; }

// Ends the calling thread, whom the block barrier then no longer waits for; on other platforms it goes on.
SIGNAL_DEVICE void end_thread() { asm volatile("exit;"); __builtin_unreachable(); }

SIGNAL_DEVICE void release_wave() {}  // a system release is cumulative over the block barrier
SIGNAL_DEVICE void block_sync() { __syncthreads(); }
SIGNAL_DEVICE bool block_any(bool vote) { return __syncthreads_or(vote) != 0; }

// The sum over kSumLanes neighbouring threads, pair by pair. All of them take part.
SIGNAL_DEVICE float add_lanes(float x) { for (uint32_t m = 1; m < kSumLanes; m *= 2) x += __shfl_xor_sync(0xffffffffu, x, m); return x; }

// The value of the thread whose number differs in this bit. All threads of the wave take part.
template <uint32_t kBit> SIGNAL_DEVICE uint32_t partner(uint32_t x) { return __shfl_xor_sync(0xffffffffu, x, kBit); }

SIGNAL_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
SIGNAL_DEVICE float reciprocal(float x) { return __frcp_rn(x); }
SIGNAL_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
SIGNAL_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
SIGNAL_DEVICE uint32_t as_bits(float f) { return __float_as_uint(f); }
SIGNAL_DEVICE double as_double(uint64_t bits) { return __longlong_as_double(int64_t(bits)); }
SIGNAL_DEVICE uint64_t as_bits64(double f) { return uint64_t(__double_as_longlong(f)); }
SIGNAL_DEVICE float f16_to_f32(uint16_t h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
SIGNAL_DEVICE uint32_t f32x2_to_f16(float low, float high) { uint32_t v; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low)); return v; }
SIGNAL_DEVICE uint32_t f32x2_to_bf16(float low, float high) { uint32_t v; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low)); return v; }

#if __CUDA_ARCH__ >= 900
constexpr bool kAddsHalves = true;
SIGNAL_DEVICE uint32_t add_f16x2(uint32_t a, uint32_t b) { uint32_t v; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b)); return v; }
SIGNAL_DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) { uint32_t v; asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b)); return v; }
#else
constexpr bool kAddsHalves = false;
SIGNAL_DEVICE uint32_t add_f16x2(uint32_t, uint32_t) { return 0; }
SIGNAL_DEVICE uint32_t add_bf16x2(uint32_t, uint32_t) { return 0; }
#endif

#if __CUDA_ARCH__ >= 890
constexpr bool kHasE4m3 = true;
SIGNAL_DEVICE uint32_t f32x2_to_e4m3(float low, float high) { uint16_t v; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low)); return v; }
#else
constexpr bool kHasE4m3 = false;
SIGNAL_DEVICE uint32_t f32x2_to_e4m3(float, float) { return 0; }
#endif

}  // namespace platform
}  // namespace signal_comm
