// The host image: the catalogue's kernels as functions that one OS thread per device thread runs.
#include "image.h"
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

namespace signal_comm {
namespace {

template <class Params, void (*kKernel)(const Params&)>
void run(const void* params, const HostThread* self) {
  platform::self = self;
  kKernel(*static_cast<const Params*>(params));
}

constexpr HostEntry kEntries[] = {
#define SIGNAL_KERNEL(name, Params, ...) {#name, run<Params, __VA_ARGS__>},
#include "../signal/kernels.def"
#undef SIGNAL_KERNEL
};

}  // namespace
}  // namespace signal_comm

extern "C" const HostImageTable signal_host_image;
extern "C" const HostImageTable signal_host_image = {
    signal_comm::kLayoutVersion,
    sizeof(signal_comm::kEntries) / sizeof(signal_comm::kEntries[0]),
    signal_comm::kEntries,
};
