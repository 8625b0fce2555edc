// Floors: what one or two GPUs of a host allow, by kernels that do nothing but the work. The product's numbers stand as
// ratios to these, taken in the same job. Build: nvcc -std=c++17 -O3 -arch=sm_90 -o floor benches/floor.cu; run: ./floor
//
// Two ranks, on two GPUs or side by side on one. bf16 sum. Each number is microseconds per call inside a graph of 50
// calls: median of the graphs, the slower rank, best grid of a sweep. --brief: a few sizes; --copies: copies alone, up to 256 MiB.
//
//   pull    barrier (relaxed), read both inputs, add, write, barrier: the one-stage floor
//   push    Lamport exchange with early launch: the small-message floor
//   copy    device-to-device copy of as many bytes by one rank (for the rate: read and written)
//   both    the same by both ranks at once
//   write   both ranks copy to the peer's memory at once; on two GPUs alone, like the next
//   read    both ranks copy from the peer's memory at once
//   empty   a kernel that does nothing
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

static void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

using Words = uint4;
constexpr uint32_t kNotReady = 0x80000000u;
constexpr int kCalls = 50;

__device__ __forceinline__ Words sum(Words a, Words b) {
  Words out;
  const uint32_t *x = &a.x, *y = &b.x;
  uint32_t* z = &out.x;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float low = __uint_as_float(x[i] << 16) + __uint_as_float(y[i] << 16);
    const float high = __uint_as_float(x[i] & 0xffff0000u) + __uint_as_float(y[i] & 0xffff0000u);
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    z[i] = *reinterpret_cast<const uint32_t*>(&both);
  }
  return out;
}

__device__ __forceinline__ void put(Words* p, Words v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ Words get(const Words* p) {
  Words v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ bool ready(Words v) { return v.x != kNotReady && v.y != kNotReady && v.z != kNotReady && v.w != kNotReady; }

struct Pull {
  uint32_t *counter, *mine, *theirs;  // by block; the two words have two sets of 1,024
  const Words *first, *second;        // inputs in rank order
  Words* output;
  uint32_t packs;
};

__device__ __forceinline__ void meet(const Pull& p) {
  if (threadIdx.x == 0) {
    const uint32_t value = ++p.counter[blockIdx.x];
    const uint32_t at = (value & 1) * 1024 + blockIdx.x;
    uint32_t seen;
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p.theirs + at), "r"(value) : "memory");
    do asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(p.mine + at) : "memory");
    while (seen != value);
  }
}

template <int kUnroll>
__global__ void __launch_bounds__(512) pull(const __grid_constant__ Pull p) {
  meet(p);
  __syncthreads();
  const uint32_t step = gridDim.x * blockDim.x;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < p.packs; i += step * kUnroll) {
    Words a[kUnroll], b[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; k++) {
      if (i + k * step < p.packs) a[k] = p.first[i + k * step], b[k] = p.second[i + k * step];
    }
#pragma unroll
    for (int k = 0; k < kUnroll; k++) {
      if (i + k * step < p.packs) p.output[i + k * step] = sum(a[k], b[k]);
    }
  }
  __syncthreads();
  meet(p);
}

struct Push {
  Words *mine, *theirs;  // three generations of `stride` packs
  uint32_t* state;       // flag, packs of the last call, arrivals
  const Words* input;
  Words* output;
  uint32_t packs, stride, rank;
};

__global__ void __launch_bounds__(1024) push(const __grid_constant__ Push p) {
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  Words own;
  if (first < p.packs) own = p.input[first];
  volatile uint32_t* const state = p.state;
  const uint32_t flag = state[0], extent = state[1];
  const uint32_t now = flag % 3, old = (now + 2) % 3;
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&p.state[2], 1);  // early: the advance is off the critical path
  for (uint32_t i = first; i < p.packs; i += step) put(p.theirs + now * p.stride + i, i == first ? own : p.input[i]);
  for (uint32_t i = first; i < extent; i += step) put(p.mine + old * p.stride + i, make_uint4(kNotReady, kNotReady, kNotReady, kNotReady));
  for (uint32_t i = first; i < p.packs; i += step) {
    const Words a = i == first ? own : p.input[i];
    Words b;
    do b = get(p.mine + now * p.stride + i);
    while (!ready(b));
    p.output[i] = p.rank ? sum(b, a) : sum(a, b);
  }
  if (first == 0) {
    while (state[2] != gridDim.x) {
    }
    state[2] = 0, state[1] = p.packs, state[0] = flag + 1;
  }
}

template <int kUnroll>
__global__ void __launch_bounds__(512) copy(const Words* from, Words* to, uint32_t packs) {
  const uint32_t step = gridDim.x * blockDim.x;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += step * kUnroll) {
    Words words[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; k++)
      if (i + k * step < packs) words[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < kUnroll; k++)
      if (i + k * step < packs) to[i + k * step] = words[k];
  }
}

__global__ void empty() {}

static int devices = 1;
static cudaStream_t streams[2];
static void use(int rank) { check(cudaSetDevice(rank % devices), "cudaSetDevice"); }

// Median over graphs of the slower rank's microseconds per call. Each graph runs twice and the second run is timed: while
// the first keeps the ranks in step, the second is enqueued on both, so that no rank is timed while the host still
// launches another's.
static float measure(int ranks, int calls, int graphs, const std::function<void(int)>& launch) {
  cudaGraphExec_t exec[2];
  cudaEvent_t begin[2], end[2];
  for (int r = 0; r < ranks; r++) {
    use(r);
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(streams[r], cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < calls; i++) launch(r);
    check(cudaStreamEndCapture(streams[r], &graph), "capture");
    check(cudaGraphInstantiate(&exec[r], graph, 0), "instantiate");
    cudaGraphDestroy(graph);
    cudaEventCreate(&begin[r]);
    cudaEventCreate(&end[r]);
  }
  std::vector<float> times;
  for (int g = 0; g < graphs + 2; g++) {
    float slower = 0;
    for (int r = 0; r < ranks; r++) {
      use(r);
      check(cudaGraphLaunch(exec[r], streams[r]), "launch");
      cudaEventRecord(begin[r], streams[r]);
      check(cudaGraphLaunch(exec[r], streams[r]), "launch");
      cudaEventRecord(end[r], streams[r]);
    }
    for (int r = 0; r < ranks; r++) {
      use(r);
      check(cudaEventSynchronize(end[r]), "synchronize");
      float ms;
      cudaEventElapsedTime(&ms, begin[r], end[r]);
      slower = std::max(slower, ms * 1000 / calls);
    }
    if (g >= 2) times.push_back(slower);
  }
  for (int r = 0; r < ranks; r++) {
    cudaGraphExecDestroy(exec[r]);
    cudaEventDestroy(begin[r]);
    cudaEventDestroy(end[r]);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Whether `copies` grids of a kernel that waits for its peers' same blocks can be resident at once on one GPU: else it would
// wait forever.
static bool fits(const void* kernel, int blocks, int threads, int copies) {
  static const int units = [] {
    int n = 0;
    check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0), "attribute");
    return n;
  }();
  int each = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0), "occupancy");
  return each * units >= blocks * (devices > 1 ? (copies + 1) / 2 : copies);
}

struct Best {
  float us = 1e9f;
  std::string grid;
  void offer(float t, int blocks, int threads, const char* note = "") {
    if (t < us) us = t, grid = std::to_string(blocks) + "x" + std::to_string(threads) + note;
  }
};

static int copies(Words* const (&input)[2], Words* const (&output)[2], size_t most) {
  std::printf("%10s %9s %-10s %9s %-10s %9s %-10s %9s %-10s\n", "bytes", "copy", "", "both", "", "write", "", "read", "");
  for (size_t bytes = size_t(4) << 20; bytes <= most; bytes *= 2) {
    std::printf("%10zu", bytes);
    for (int kind = 0; kind < (devices > 1 ? 4 : 2); kind++) {
      Best best;
      for (int blocks : {64, 132, 264, 528}) {
        for (const auto& [kernel, note] : {std::pair{copy<1>, ""}, std::pair{copy<8>, "*8"}}) {
          best.offer(measure(kind == 0 ? 1 : 2, 10, 10, [&, kernel = kernel](int r) {
            kernel<<<blocks, 512, 0, streams[r]>>>(input[kind == 3 ? 1 - r : r], output[kind == 2 ? 1 - r : r], bytes / 16);
          }), blocks, 512, note);
        }
      }
      std::printf(" %9.2f %-10s", best.us, best.grid.c_str());
    }
    std::printf("\n");
  }
  return 0;
}

int main(int argc, char** argv) {
  const bool brief = argc > 1 && std::string(argv[1]) == "--brief", only_copies = argc > 1 && std::string(argv[1]) == "--copies";
  check(cudaGetDeviceCount(&devices), "devices");
  devices = std::min(devices, 2);
  const size_t bytes = size_t(only_copies ? 256 : 64) << 20;
  const uint32_t stride = 65536;
  Words *input[2], *output[2], *region[2];
  uint32_t *state[2], *counter[2], *words[2];
  for (int r = 0; r < 2; r++) {
    use(r);
    if (devices > 1) check(cudaDeviceEnablePeerAccess(1 - r, 0), "peer access");
    check(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking), "stream");
    for (Words** p : {&input[r], &output[r]}) check(cudaMalloc(p, bytes), "malloc");
    check(cudaMalloc(&region[r], 3 * size_t(stride) * 16), "malloc");
    for (uint32_t** p : {&state[r], &counter[r], &words[r]}) check(cudaMalloc(p, 8192), "malloc"), check(cudaMemset(*p, 0, 8192), "memset");
    std::vector<uint16_t> values(bytes / 2);
    uint32_t x = 12345 + r;
    for (auto& v : values) x = x * 1664525u + 1013904223u, v = uint16_t((x >> 31) << 15 | (0x3c00 + (x >> 16 & 0x3ff)));
    check(cudaMemcpy(input[r], values.data(), bytes, cudaMemcpyHostToDevice), "copy");
    const std::vector<uint32_t> fill(3 * size_t(stride) * 4, kNotReady);
    check(cudaMemcpy(region[r], fill.data(), fill.size() * 4, cudaMemcpyHostToDevice), "copy");
    check(cudaDeviceSynchronize(), "setup");
  }
  const auto pull_params = [&](int r, uint32_t packs) { return Pull{counter[r], words[r], words[1 - r], input[0], input[1], output[r], packs}; };

  std::printf("# floors: %d GPU(s), us per call; best grid\n", devices);
  if (only_copies) return copies(input, output, bytes);
  std::printf("empty %.3f\n", measure(1, kCalls, 20, [&](int r) { empty<<<1, 32, 0, streams[r]>>>(); }));
  std::printf("%10s %9s %-14s %9s %-10s %9s %-10s\n", "bytes", "pull", "", "push", "", "copy", "");
  for (size_t b = 2048; b <= bytes; b *= 2) {
    if (brief && b != 2048 && b != 16384 && b != 65536 && b != 262144 && b != (1u << 20) && b != (4u << 20) && b != (64u << 20)) continue;
    const uint32_t packs = b / 16;
    const int graphs = b > (1u << 20) ? 10 : 20, calls = b > (4u << 20) ? 10 : kCalls;
    Best best_pull, best_push, best_copy;
    for (int threads : {32, 64, 128, 256, 512, 1024}) {
      for (int blocks : {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 132, 264}) {
        const size_t all = size_t(threads) * blocks;
        if (all < packs / 16 && blocks < 132) continue;       // too few to keep the memory busy
        if (all / 2 > packs && blocks > 1) continue;          // idle blocks
        if (packs > 4096 && threads < 256) continue;
        if (packs > 65536 && (threads < 512 || blocks < 48)) continue;
        const auto try_pull = [&](auto kernel, const char* note) {
          if (threads > 512 || !fits(reinterpret_cast<const void*>(kernel), blocks, threads, 2)) return;
          best_pull.offer(measure(2, calls, graphs, [&](int r) { kernel<<<blocks, threads, 0, streams[r]>>>(pull_params(r, packs)); }), blocks, threads, note);
        };
        try_pull(pull<1>, "");
        if (packs > 4096) try_pull(pull<4>, "*4");
        if (packs <= stride && fits(reinterpret_cast<const void*>(push), blocks, threads, 4)) {  // with early launch two a rank
          best_push.offer(measure(2, calls, graphs, [&](int r) {
            cudaLaunchConfig_t config = {};
            config.gridDim = blocks, config.blockDim = threads, config.stream = streams[r];
            cudaLaunchAttribute early;
            early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            early.val.programmaticStreamSerializationAllowed = 1;
            config.attrs = &early, config.numAttrs = 1;
            check(cudaLaunchKernelEx(&config, push, Push{region[r], region[1 - r], state[r], input[r], output[r], packs, stride, uint32_t(r)}), "push");
          }), blocks, threads);
        }
        if (threads == 512) best_copy.offer(measure(1, calls, graphs, [&](int r) { copy<1><<<blocks, threads, 0, streams[r]>>>(input[r], output[r], packs); }), blocks, threads);
      }
    }
    std::printf("%10zu %9.2f %-14s ", b, best_pull.us, best_pull.grid.c_str());
    if (packs <= stride) std::printf("%9.2f %-10s ", best_push.us, best_push.grid.c_str());
    else std::printf("%9s %-10s ", "-", "");
    std::printf("%9.2f %-10s\n", best_copy.us, best_copy.grid.c_str());
    std::fflush(stdout);
  }
  return 0;
}
