// The floor of an all-reduce with residual and RMSNorm behind it: a kernel that does nothing but the work, a block for each row and a thread for
// each 16 bytes, by pushing with early launch. Two ranks, on two GPUs or side by side on one; bf16. Microseconds per call inside a graph of 50,
// median of the graphs, the slower rank.
// Build: nvcc -std=c++17 -O3 -arch=sm_90 -o norm_floor benches/norm_floor.cu; run: ./norm_floor
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

constexpr uint32_t kNotReady = 0x80000000u, kStride = 131072;
constexpr int kCalls = 50, kGraphs = 20;

__device__ __forceinline__ void put(uint4* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint4 get(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ bool ready(uint4 v) { return v.x != kNotReady && v.y != kNotReady && v.z != kNotReady && v.w != kNotReady; }

__device__ __forceinline__ void widen(uint4 v, float (&f)[8]) {
  const uint32_t* w = &v.x;
#pragma unroll
  for (int i = 0; i < 4; i++) f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
}
__device__ __forceinline__ uint4 narrow(const float (&f)[8]) {
  uint4 v;
  uint32_t* w = &v.x;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
    w[i] = *reinterpret_cast<const uint32_t*>(&both);
  }
  return v;
}
__device__ __forceinline__ uint4 add(uint4 a, uint4 b) {
  float x[8], y[8];
  widen(a, x), widen(b, y);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] += y[i];
  return narrow(x);
}

struct Call {
  uint4 *mine, *theirs;  // three generations of kStride packs
  uint32_t* state;       // flag, packs of the last call, arrivals
  const uint4 *input, *weight;
  uint4 *residual, *output;
  uint32_t rows, packs;  // of a row
};

__global__ void __launch_bounds__(1024) fused(const __grid_constant__ Call p) {
  __shared__ float part[32];
  const uint32_t t = threadIdx.x, at = blockIdx.x * p.packs + t;
  const bool has = t < p.packs;
  const uint4 none = make_uint4(0, 0, 0, 0);
  const uint4 weight = has ? p.weight[t] : none;  // constant, so before the wait
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const uint4 own = has ? p.input[at] : none, residual = has ? p.residual[at] : none;
  volatile uint32_t* const state = p.state;
  const uint32_t flag = state[0], extent = state[1], now = flag % 3, old = (now + 2) % 3;
  __syncthreads();
  if (t == 0) atomicAdd(&p.state[2], 1);
  if (has) put(p.theirs + now * kStride + at, own);
  for (uint32_t i = blockIdx.x * blockDim.x + t; i < extent; i += gridDim.x * blockDim.x)
    put(p.mine + old * kStride + i, make_uint4(kNotReady, kNotReady, kNotReady, kNotReady));
  float x[8] = {}, squares = 0;
  if (has) {
    uint4 other;
    do other = get(p.mine + now * kStride + at);
    while (!ready(other));
    const uint4 sum = add(add(own, other), residual);
    p.residual[at] = sum;
    widen(sum, x);
#pragma unroll
    for (int i = 0; i < 8; i++) squares += x[i] * x[i];
  }
  for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  if (t % 32 == 0) part[t / 32] = squares;
  __syncthreads();
  float all = 0;
  for (uint32_t w = 0; w < blockDim.x / 32; w++) all += part[w];
  const float scale = rsqrtf(all / float(p.packs * 8) + 1e-5f);
  if (has) {
    float w[8];
    widen(weight, w);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale * w[i];
    p.output[at] = narrow(x);
  }
  if (blockIdx.x == 0 && t == 0) {
    while (state[2] != gridDim.x) {
    }
    state[2] = 0, state[1] = p.rows * p.packs, state[0] = flag + 1;
  }
}

int main() {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "devices");
  devices = std::min(devices, 2);
  cudaStream_t streams[2];
  Call call[2] = {};
  const auto use = [&](int rank) { check(cudaSetDevice(rank % devices), "cudaSetDevice"); };
  const size_t bytes = size_t(kStride) * 16;
  for (int r = 0; r < 2; r++) {
    use(r);
    if (devices > 1) check(cudaDeviceEnablePeerAccess(1 - r, 0), "peer access");
    check(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking), "stream");
    uint4* buffer[4];
    for (uint4*& b : buffer) check(cudaMalloc(&b, bytes), "malloc"), check(cudaMemset(b, 0x3c + r, bytes), "memset");
    call[r].input = buffer[0], call[r].weight = buffer[1], call[r].residual = buffer[2], call[r].output = buffer[3];
    check(cudaMalloc(&call[r].mine, 3 * bytes), "malloc");
    const std::vector<uint32_t> fill(3 * bytes / 4, kNotReady);
    check(cudaMemcpy(call[r].mine, fill.data(), 3 * bytes, cudaMemcpyHostToDevice), "copy");
    check(cudaMalloc(&call[r].state, 256), "malloc"), check(cudaMemset(call[r].state, 0, 256), "memset");
    check(cudaDeviceSynchronize(), "setup");
  }
  for (int r = 0; r < 2; r++) call[r].theirs = call[1 - r].mine;
  std::printf("# %d GPU(s), us per call\n%6s %6s %8s %8s\n", devices, "hidden", "tokens", "bytes", "bare");
  for (uint32_t hidden : {2880, 4096, 5120, 7168, 8192}) {
    for (uint32_t rows : {1, 4, 8, 16, 32, 64, 128}) {
      const uint32_t packs = hidden / 8, threads = (packs + 31) / 32 * 32;
      int each = 0, units = 0;
      check(cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, 0), "attribute");
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, fused, threads, 0), "occupancy");
      // Both ranks' calls, and the next ones, which are launched early.
      if (int(rows) * (devices > 1 ? 2 : 4) > each * units) continue;
      cudaGraphExec_t graphs[2];
      cudaEvent_t begin[2], end[2];
      for (int r = 0; r < 2; r++) {
        use(r);
        call[r].rows = rows, call[r].packs = packs;
        cudaGraph_t graph;
        check(cudaStreamBeginCapture(streams[r], cudaStreamCaptureModeThreadLocal), "capture");
        for (int i = 0; i < kCalls; i++) {
          cudaLaunchConfig_t config = {};
          config.gridDim = rows, config.blockDim = threads, config.stream = streams[r];
          cudaLaunchAttribute early;
          early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
          early.val.programmaticStreamSerializationAllowed = 1;
          config.attrs = &early, config.numAttrs = 1;
          check(cudaLaunchKernelEx(&config, fused, call[r]), "launch");
        }
        check(cudaStreamEndCapture(streams[r], &graph), "capture");
        check(cudaGraphInstantiate(&graphs[r], graph, 0), "instantiate");
        cudaGraphDestroy(graph);
        cudaEventCreate(&begin[r]), cudaEventCreate(&end[r]);
      }
      std::vector<float> times;
      for (int g = 0; g < kGraphs + 2; g++) {
        float slower = 0;
        // The first ones keep the ranks in step until the timed one is enqueued on both.
        for (int r = 0; r < 2; r++) {
          use(r);
          for (int lead = 0; lead < 15; lead++) check(cudaGraphLaunch(graphs[r], streams[r]), "launch");
        }
        for (int r = 0; r < 2; r++) {
          use(r);
          cudaEventRecord(begin[r], streams[r]);
          check(cudaGraphLaunch(graphs[r], streams[r]), "launch");
          cudaEventRecord(end[r], streams[r]);
        }
        for (int r = 0; r < 2; r++) {
          use(r);
          check(cudaEventSynchronize(end[r]), "synchronize");
          float ms;
          cudaEventElapsedTime(&ms, begin[r], end[r]);
          slower = std::max(slower, ms * 1000 / kCalls);
        }
        if (g >= 2) times.push_back(slower);
      }
      std::sort(times.begin(), times.end());
      std::printf("%6u %6u %8u %8.2f\n", hidden, rows, rows * hidden * 2, times[times.size() / 2]);
      std::fflush(stdout);
      for (int r = 0; r < 2; r++) cudaGraphExecDestroy(graphs[r]), cudaEventDestroy(begin[r]), cudaEventDestroy(end[r]);
    }
  }
}
