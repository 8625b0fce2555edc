// The table of kernels that each form of the platform gives.
#pragma once

namespace model {

struct Entry {
  const char* name;
  void (*run)(const void* params);
};

}  // namespace model

extern "C" const model::Entry model_kernels_relaxed[];
extern "C" const model::Entry model_kernels_ordered[];
