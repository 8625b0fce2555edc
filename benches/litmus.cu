// What a GPU sees of another's stores: are 16 bytes torn, and do the packs of a 128-byte line arrive together and in order?
// The protocol relies on 4-byte (Lamport) and 8-byte (lines) atomicity alone; this tells what the hardware does.
// Build: nvcc -std=c++17 -O3 -arch=sm_90 -o litmus benches/litmus.cu; run: ./litmus [looks in millions, 1000]
//
// A kernel on the first GPU stores to memory of the second, one on the second looks at it; with one GPU both run there.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

static void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

constexpr int kBlocks = 66, kThreads = 256;  // both kernels fit one GPU
constexpr int kPacks = kBlocks * kThreads;

__device__ __forceinline__ void put(uint4* p, uint32_t w) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(p), "r"(w) : "memory");
}
__device__ __forceinline__ uint4 get(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// Every byte of a pack is the same, and differs from the next pack's.
__device__ __forceinline__ uint32_t pattern(uint32_t n) { return (n & 0xff) * 0x01010101u; }

struct Counts {
  unsigned long long looks, changes, torn4, torn8, torn16, mixed_lines, reordered_near, reordered_far;
};

// Each thread stores ever new packs to its place until `*stop`; a warp's store covers four lines.
__global__ void tear_writer(uint4* far, const volatile uint32_t* stop) {
  uint4* const mine = far + blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t n = 1; *stop == 0; n++) put(mine, pattern(n));
}

__global__ void tear_reader(const uint4* near, uint32_t looks, Counts* counts, uint32_t* stop, uint32_t* left) {
  const uint4* const mine = near + blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long changes = 0, torn4 = 0, torn8 = 0, torn16 = 0, mixed = 0;
  uint32_t last = 0;
  for (uint32_t i = 0; i < looks; i++) {
    const uint4 v = get(mine);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    bool within = false;
    for (uint32_t w : words) within |= w != (w & 0xff) * 0x01010101u;
    torn4 += within;
    torn8 += v.x != v.y || v.z != v.w;
    torn16 += v.x != v.z || v.y != v.w;
    changes += v.x != last;
    last = v.x;
    // Eight neighbours look at one line with one instruction.
    const uint32_t first = __shfl_sync(0xffffffffu, v.x, threadIdx.x & 24);
    const uint32_t differ = __ballot_sync(0xffffffffu, v.x != first);
    mixed += (threadIdx.x & 7) == 0 && (differ >> (threadIdx.x & 24) & 0xff) != 0;
  }
  atomicAdd(&counts->looks, (unsigned long long)looks), atomicAdd(&counts->changes, changes);
  atomicAdd(&counts->torn4, torn4), atomicAdd(&counts->torn8, torn8), atomicAdd(&counts->torn16, torn16);
  atomicAdd(&counts->mixed_lines, mixed);
  __syncthreads();
  if (threadIdx.x == 0 && atomicSub(left, 1) == 1) *(volatile uint32_t*)stop = 1;
}

// A thread's three places: two packs of one line, and a pack of another line. It counts up in all three, in order.
__global__ void order_writer(uint4* far, const volatile uint32_t* stop) {
  uint4* const mine = far + (blockIdx.x * blockDim.x + threadIdx.x) * 16;
  for (uint32_t n = 1; *stop == 0; n++) put(mine, n), put(mine + 1, n), put(mine + 8, n);
}

// Looks at what was stored last, first: what was stored before must be at least as new.
__global__ void order_reader(const uint4* near, uint32_t looks, Counts* counts, uint32_t* stop, uint32_t* left) {
  const uint4* const mine = near + (blockIdx.x * blockDim.x + threadIdx.x) * 16;
  unsigned long long close = 0, distant = 0;
  for (uint32_t i = 0; i < looks; i++) {
    const uint32_t third = get(mine + 8).x;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    const uint32_t second = get(mine + 1).x;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    const uint32_t first = get(mine).x;
    close += int32_t(first - second) < 0;
    distant += int32_t(second - third) < 0;
  }
  atomicAdd(&counts->reordered_near, close), atomicAdd(&counts->reordered_far, distant);
  __syncthreads();
  if (threadIdx.x == 0 && atomicSub(left, 1) == 1) *(volatile uint32_t*)stop = 1;
}

template <class Writer, class Reader>
static Counts run(int writer_device, int reader_device, Writer writer, Reader reader, uint32_t looks) {
  cudaStream_t writing, reading;
  uint4* packs;
  uint32_t *stop, *left;
  Counts *counts, found;
  check(cudaSetDevice(reader_device), "cudaSetDevice");
  check(cudaStreamCreateWithFlags(&reading, cudaStreamNonBlocking), "stream");
  check(cudaMalloc(&packs, size_t(kPacks) * 16 * 16), "malloc"), check(cudaMemset(packs, 0, size_t(kPacks) * 16 * 16), "memset");
  check(cudaMalloc(&left, 4), "malloc"), check(cudaMalloc(&counts, sizeof found), "malloc");
  check(cudaMemset(counts, 0, sizeof found), "memset");
  const uint32_t blocks = kBlocks;
  check(cudaMemcpy(left, &blocks, 4, cudaMemcpyHostToDevice), "copy");
  check(cudaHostAlloc(&stop, 4, cudaHostAllocPortable | cudaHostAllocMapped), "host memory");
  *stop = 0;
  check(cudaDeviceSynchronize(), "setup");
  check(cudaSetDevice(writer_device), "cudaSetDevice");
  check(cudaStreamCreateWithFlags(&writing, cudaStreamNonBlocking), "stream");
  writer<<<kBlocks, kThreads, 0, writing>>>(packs, stop);
  check(cudaGetLastError(), "writer");
  check(cudaSetDevice(reader_device), "cudaSetDevice");
  reader<<<kBlocks, kThreads, 0, reading>>>(packs, looks, counts, stop, left);
  check(cudaGetLastError(), "reader");
  check(cudaStreamSynchronize(reading), "reader");
  check(cudaSetDevice(writer_device), "cudaSetDevice");
  check(cudaStreamSynchronize(writing), "writer");
  check(cudaMemcpy(&found, counts, sizeof found, cudaMemcpyDefault), "copy");
  return found;
}

int main(int argc, char** argv) {
  const uint64_t wanted = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000) * 1000000;
  const uint32_t looks = uint32_t((wanted + kPacks - 1) / kPacks);
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  const int pairs = devices > 1 ? 2 : 1;
  for (int d = 0; d < 2 && devices > 1; d++) {
    check(cudaSetDevice(d), "cudaSetDevice"), check(cudaDeviceEnablePeerAccess(1 - d, 0), "peer access");
  }
  for (int pair = 0; pair < pairs; pair++) {
    const int from = pair, to = devices > 1 ? 1 - pair : 0;
    Counts c = run(from, to, tear_writer, tear_reader, looks);
    std::printf("GPU %d to GPU %d: %llu looks at 16-byte packs, %llu changes seen; torn within 4 bytes %llu, 8 bytes %llu, 16 bytes %llu; "
                "128-byte lines of two stores %llu\n", from, to, c.looks, c.changes, c.torn4, c.torn8, c.torn16, c.mixed_lines);
    c = run(from, to, order_writer, order_reader, looks / 8);
    std::printf("GPU %d to GPU %d: %llu looks at order; the later of two stores seen before the earlier: in one line %llu, in two lines %llu\n",
                from, to, (unsigned long long)(looks / 8) * kPacks, c.reordered_near, c.reordered_far);
    std::fflush(stdout);
  }
  return 0;
}
