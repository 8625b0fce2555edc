// The kernels under the model, once for each form of the platform; the namespace keeps the two apart in one program.
#ifdef SIGNAL_MODEL_RELAXED
#define signal_comm signal_comm_relaxed
#define SIGNAL_MODEL_TABLE model_kernels_relaxed
#else
#define signal_comm signal_comm_ordered
#define SIGNAL_MODEL_TABLE model_kernels_ordered
#endif

#include "platform.h"
#define SIGNAL_OTHER_PLATFORM

#include "../signal/all_reduce.h"
#include "../signal/check.h"
#include "../signal/exchange.h"
#include "../signal/lamport.h"
#include "../signal/lamport_norm.h"
#include "../signal/line_calls.h"
#include "../signal/probe.h"
#include "../signal/two_shot.h"
#include "../signal/two_stage_norm.h"
#include "../../include/signal/device.h"

#include "kernels.h"

namespace signal_comm {
namespace {

// Kernels as users write them: an all-reduce by each of the two objects that the header has.

template <class T>
void user_sum(const AllReduceParams& p) {
  device::LamportAllReduce<T, 4> call(p.group, p.bytes);
  if (!call.begin()) return;
  for (uint32_t i = call.first(); i < call.packs(); i += call.step()) call.push(i, call.load(p.input, i));
  call.arrive();
  for (uint32_t i = call.first(); i < call.packs(); i += call.step()) {
    Pack sum;
#ifdef SIGNAL_MUTANT_USER_DOES_NOT_END
    if (!call.sum(i, call.load(p.input, i), sum)) return;
#else
    if (!call.sum(i, call.load(p.input, i), sum)) break;
#endif
    call.store(p.output, i, sum);
  }
  call.end();
}

void user_pull(const AllReduceParams& p) {
  SIGNAL_SHARED(device::BarrierShared, shared);
  device::Barrier barrier(p.group, shared);
  if (!barrier.begin()) return;
  const Stride stride;
  for (uint32_t i = stride.first; i < p.packs; i += stride.step) {
    device::store(device::scratch(p.group, p.group.rank), i, p.bytes, device::load(p.input, i, p.bytes));
  }
  if (!barrier.meet()) return;
  for (uint32_t i = stride.first; i < p.packs; i += stride.step) {
    Sum<F32> sum(kReduceSum);
    for (uint32_t r = 0; r < p.group.world; r++) sum.add(device::pull(device::scratch(p.group, r), i, p.bytes));
    device::store(p.output, i, p.bytes, sum.finish(p.group.world));
  }
#ifndef SIGNAL_MUTANT_USER_DOES_NOT_LEAVE
  barrier.leave();
#endif
}

template <class Params, void (*kKernel)(const Params&)>
void run(const void* params) {
  kKernel(*static_cast<const Params*>(params));
}

}  // namespace
}  // namespace signal_comm

using namespace signal_comm;

extern "C" const model::Entry SIGNAL_MODEL_TABLE[];
extern "C" const model::Entry SIGNAL_MODEL_TABLE[] = {
    {"barrier", run<BarrierParams, barrier_kernel>},
    {"probe", run<BarrierProbeParams, barrier_probe_kernel>},
    {"check", run<CheckParams, check_kernel>},
    {"one_stage_f32", run<AllReduceParams, all_reduce_one_stage<F32>>},
    {"one_stage_bf16", run<AllReduceParams, all_reduce_one_stage<Bf16>>},
    {"one_stage_small_f32", run<AllReduceParams, all_reduce_one_stage_small<F32>>},
    {"two_stage_f32", run<AllReduceParams, all_reduce_two_stage<F32>>},
    {"two_stage_bf16", run<AllReduceParams, all_reduce_two_stage<Bf16>>},
    {"lamport_f32", run<AllReduceParams, all_reduce_lamport<F32, 1, 4>>},
    {"lamport_bf16", run<AllReduceParams, all_reduce_lamport<Bf16, 1, 4>>},
    {"norm_f32", run<NormParams, all_reduce_rms_norm_small<F32>>},
    {"norm_wide_f32", run<NormParams, all_reduce_norm_wide_small<F32>>},
    {"norm_two_stage_f32", run<NormParams, norm_two_stage<F32>>},
    {"norm_pair_f32", run<NormParams, all_reduce_rms_norm_pair<F32>>},
    {"user_f32", run<AllReduceParams, user_sum<F32>>},
    {"user_bf16", run<AllReduceParams, user_sum<Bf16>>},
    {"user_pull_f32", run<AllReduceParams, user_pull>},
    {"two_shot_f32", run<AllReduceParams, all_reduce_two_shot_small<F32>>},
    {"two_shot_bf16", run<AllReduceParams, all_reduce_two_shot_small<Bf16>>},
    {"move", run<ExchangeParams, move_data>},
    {"move_counted", run<CountedParams, move_counted>},
    {"reduce_scatter_f32", run<ExchangeParams, reduce_scatter<F32>>},
    {"reduce_scatter_bf16", run<ExchangeParams, reduce_scatter<Bf16>>},
    {"lines_move", run<ExchangeParams, lines_move>},
    {"lines_reduce_f32", run<ExchangeParams, lines_reduce<F32>>},
    {"lines_reduce_any", run<ExchangeParams, lines_reduce<Any>>},
    {nullptr, nullptr},
};
