// The kernels under the model, once for each form of the platform; the namespace keeps the two apart in one program.
#ifdef SIGNAL_MODEL_RELAXED
#define signal_comm signal_comm_relaxed
#define SIGNAL_MODEL_TABLE model_kernels_relaxed
#else
#define signal_comm signal_comm_ordered
#define SIGNAL_MODEL_TABLE model_kernels_ordered
#endif

#include "platform.h"

#include "../signal/all_reduce.h"
#include "../signal/check.h"
#include "../signal/exchange.h"
#include "../signal/lamport.h"
#include "../signal/lamport_norm.h"
#include "../signal/line_calls.h"
#include "../signal/probe.h"
#include "../signal/two_shot.h"
#include "../signal/two_stage_norm.h"

#include "kernels.h"

namespace signal_comm {
namespace {

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
