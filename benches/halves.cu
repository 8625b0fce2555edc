// Whether adding two elements of 16 bits by one instruction gives the bits that adding them in f32 and rounding does: all pairs of f16 and of bf16,
// with NaNs as the hardware has them. Prints the number of pairs that differ.
// Build: nvcc -std=c++17 -O3 -fmad=false -arch=sm_90 -o halves benches/halves.cu; run: ./halves
#include <cstdint>
#include <cstdio>

#include "../kernels/cuda/platform.h"
#include "../kernels/signal/dtype.h"

using namespace signal_comm;

// Both halves of a word, each with all of the other operand's.
template <class T>
__global__ void compare(unsigned long long* differ) {
  const uint32_t a = blockIdx.x * blockDim.x + threadIdx.x, both = a | (a ^ 0x5a5au) << 16;
  unsigned long long found = 0;
  for (uint32_t b = 0; b < 65536; b++) found += T::add(both, b | b << 16) != add_by_f32<T>(both, b | b << 16);
  atomicAdd(differ, found);
}

int main() {
  unsigned long long* differ = nullptr;
  if (cudaMallocManaged(&differ, 16) != cudaSuccess) return 1;
  differ[0] = differ[1] = 0;
  compare<F16><<<256, 256>>>(differ);
  compare<Bf16><<<256, 256>>>(differ + 1);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  std::printf("pairs that differ: f16 %llu, bf16 %llu\n", differ[0], differ[1]);
  return differ[0] + differ[1] != 0;
}
