// GELU(sum over ranks + bias), in one kernel: an all-reduce by Lamport's algorithm with an epilogue in f32. The same source is compiled by nvcc,
// as HIP (bias_gelu.hip) and for CPU threads. Only + - * and correctly rounded division, so that src/main.rs computes the same bits.
#include <signal/device.h>

using namespace signal_comm::device;

struct Params {
  Group group;
  uint64_t input, bias, output;  // bf16
  uint64_t bytes;                // of the input
  uint64_t bias_bytes;           // of the bias: whole packs, repeated over the input
};

// e^x for |x| < 87: 2^n, and a polynomial for what is left of the exponent.
SIGNAL_DEVICE float exponential(float x) {
  const float t = x * 1.44269504f;
  const int32_t n = int32_t(t + (t < 0 ? -0.5f : 0.5f));
  const float r = (x - float(n) * 0.693359375f) + float(n) * 2.12194440e-4f;
  float y = 1.9875691e-4f;
  y = y * r + 1.3981999e-3f;
  y = y * r + 8.3334519e-3f;
  y = y * r + 4.1665796e-2f;
  y = y * r + 1.6666665e-1f;
  y = y * r + 0.5f;
  return (y * (r * r) + r + 1.0f) * as_float(uint32_t(n + 127) << 23);
}

// x / 2 * (1 + tanh(v / 2)) = x / (1 + e^-v), with v / 2 = sqrt(2 / pi) * (x + 0.044715 x^3).
SIGNAL_DEVICE float gelu(float x) {
  const float v = 1.59576912f * (x + 0.044715f * (x * x * x));
  return v > 80.0f ? x : v < -80.0f ? 0.0f : divide(x, 1.0f + exponential(-v));
}

SIGNAL_DEVICE void bias_gelu(const Params& p) {
  LamportAllReduce<Bf16> call(p.group, p.bytes);
  const uint32_t bias_packs = uint32_t(p.bias_bytes / 16);
  if (!call.begin()) return;
  for (uint32_t i = call.first(); i < call.packs(); i += call.step()) call.push(i, call.load(p.input, i));
  call.arrive();
  for (uint32_t i = call.first(); i < call.packs(); i += call.step()) {
    Values<Bf16> x;
    if (!call.sum(i, call.load(p.input, i), x)) break;
    const Values<Bf16> bias = widen<Bf16>(load(p.bias, i % bias_packs, p.bias_bytes));
    SIGNAL_UNROLL
    for (uint32_t e = 0; e < x.kCount; e++) x.value[e] = gelu(x.value[e] + bias.value[e]);
    call.store(p.output, i, round<Bf16>(x));
  }
  call.end();
}

SIGNAL_ENTRY(bias_gelu_bf16, Params, bias_gelu)
SIGNAL_IMAGE(bias_gelu_image, SIGNAL_NAMED(bias_gelu_bf16))
