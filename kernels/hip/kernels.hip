// The AMD image: the catalogue's kernels as global functions.
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

// The parameters are read where they lie, at the start of the kernel's arguments: where there are many accesses, the
// compiler would make a copy of the struct in scratch memory.
#define SIGNAL_KERNEL(name, Params, ...)                                                                 \
  extern "C" __attribute__((global))                                                                     \
  __attribute__((amdgpu_flat_work_group_size(1, platform::kMaxBlockThreads))) void name(const Params) {  \
    __VA_ARGS__(*(const Params*)(const void*)__builtin_amdgcn_kernarg_segment_ptr());                    \
  }
#include "../signal/kernels.def"
