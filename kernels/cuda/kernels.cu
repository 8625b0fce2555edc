// The CUDA image: the catalogue's kernels as global functions.
#include "platform.h"

#include "../signal/all_reduce.h"
#include "../signal/check.h"
#include "../signal/exchange.h"
#include "../signal/lamport.h"
#include "../signal/lamport_norm.h"
#include "../signal/line_calls.h"
#include "../signal/probe.h"
#include "../signal/trace.h"
#include "../signal/two_shot.h"
#include "../signal/two_stage_norm.h"

using namespace signal_comm;

#define SIGNAL_KERNEL(name, Params, ...)                                                                             \
  extern "C" __global__ void __launch_bounds__(platform::kMaxBlockThreads, platform::kBlocksPerUnit) name(const __grid_constant__ Params params) { \
    __VA_ARGS__(params);                                                                                             \
  }
#include "../signal/kernels.def"
