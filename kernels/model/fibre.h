// Fibres: stacks of their own that the explorer switches to and back from, and whose used part it can copy and put back.
#pragma once

#include <stddef.h>

namespace model {

constexpr size_t kStackBytes = 64 * 1024;

// Puts a fibre at the beginning of `run` on the stack that ends at `top`; gives its stack pointer.
void* new_fibre(unsigned char* top, void (*run)());

// Goes on where `to` was left, and leaves the present place in `*from`.
extern "C" void model_switch(void** from, void* to);

}  // namespace model
