// The AMD image: the catalogue's kernels as global functions.
#include "platform.h"

#include "../signal/all_reduce.h"
#include "../signal/lamport.h"
#include "../signal/probe.h"

using namespace signal_comm;

#define SIGNAL_KERNEL(name, Params, ...)                                                                       \
  extern "C" __attribute__((global))                                                                           \
  __attribute__((amdgpu_flat_work_group_size(1, platform::kMaxBlockThreads))) void name(const Params params) { \
    __VA_ARGS__(params);                                                                                       \
  }
#include "../signal/kernels.def"
