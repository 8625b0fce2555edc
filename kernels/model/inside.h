// What the parts of the machine share.
#pragma once

#include "machine.h"

namespace model {

enum class Why { kWaits, kAsks, kEnds };  // a fibre gives the processor back

// Of the running thread.
uint32_t slot();
Thread& running();
void give_back(Why reason);
uint32_t ask(Ask what, uint32_t options);
void end_run(Ask how);         // does not come back to a fibre
void remember(uint64_t value);  // the thread's code has seen it
void stop_before(uint64_t at);  // a read there; if the thread must
void no_poll();                 // what the thread just did is no part of a poll

void contend(uint32_t place);  // from now on; the search begins again
std::string shown(uint64_t value);
std::string short_name_of_thread(uint32_t slot);

// What the polls of a thread saw last, by the places in Thread::polled; for random schedules.
extern uint32_t polled_at[kMaxSlots][kMostPolled];

}  // namespace model
