// What a host image is: a table of functions. Mirrors crates/signal-host/src/module.rs, which explains each field.
#pragma once

#include <stdint.h>

extern "C" {

struct HostThread;

using HostKernel = void (*)(const void* params, const HostThread* self);

struct HostEntry {
  const char* name;
  HostKernel run;
};

struct HostImageTable {
  uint32_t layout_version;
  uint32_t count;
  const HostEntry* entries;
};

}  // extern "C"
