// What a device thread of the model can do. platform.h turns each primitive of the kernels into one of these; all of them run on
// a fibre, and those that can wait or choose give the processor back to the explorer.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace model {

struct Ids {
  uint32_t thread, block, block_dim, grid_dim;
};
extern Ids self;                 // of the running fibre
extern uint32_t polls_per_check;  // the largest number: a wait polls for ever, without a look at clock and abort words

void* shared_memory(size_t bytes);

// Atomic accesses, relaxed unless they say so.
uint64_t read(const void* at, uint32_t bytes);
void write(void* at, uint32_t bytes, uint64_t value, bool release);
uint32_t add(uint32_t* at, uint32_t value, bool ordered = false);  // ordered: it releases and acquires
uint32_t exchange(uint32_t* at, uint32_t value);
void read_words(const void* at, uint32_t* to);           // four of 32 bits, each by itself
void write_words(void* at, const uint32_t* from);        // likewise
void read_line(const void* at, uint64_t* to);            // two of 64 bits, likewise
void acquire(const void* at);                            // what the thread last read there

// Plain accesses: checked for races, and no points of choice.
void load(const void* at, void* to, uint32_t bytes);
void store(void* at, const void* from, uint32_t bytes);

void release_wave();
bool block_any(bool vote);
void relax();
uint64_t clock();
void wait_for_earlier();
void allow_next();
void end_thread();

}  // namespace model
