// Where things lie in the model's memory.
#pragma once

#include <stdint.h>

namespace model {

inline uint64_t base_of(uint32_t rank) { return uint64_t(rank + 1) << 40; }
inline uint64_t host_control_of(uint32_t rank) { return base_of(rank) + (uint64_t(1) << 32); }
inline uint64_t buffer_of(uint32_t rank, uint32_t number) { return base_of(rank) + (uint64_t(2) << 32) + (uint64_t(number) << 20); }
constexpr uint64_t kScratchAt = 29360128 - 112;  // from a rank's base

// Bytes of a rank's slot in a bank of lines, which the host chooses: four lines, since some calls clear all of it.
constexpr uint32_t kLineSlotBytes = 64;

}  // namespace model
