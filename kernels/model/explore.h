// How the machine's questions are answered.
//
// Exhaustively. The search goes through all answers, depth first, by copies of the whole state (stacks too), and turns back at a
// state that it has seen. Few points suffice as points of choice; that nothing is lost rests on this:
//   1. A write does not wait. Whoever has not read it may go on reading what was there before, and it may be placed before other
//      writes that its thread does not know of: so a write that comes early allows all that a late one does. The order in which
//      threads write is therefore no choice; where a write lands is one (kWrite), and what a read sees (kRead).
//   2. A read may wait, since what it can see is only added to: a row of reads may all be made when its thread next writes or
//      meets its block. So the other threads need a turn only before the first read behind a write (kSchedule). A read-modify-
//      write counts as both.
//   3. That holds for contended places; for others the order of accesses is the same in every run. Which places are contended shows
//      during the search: the first access that is not ordered with an earlier one marks its place, and the search begins again. If two
//      threads can meet at a place in some run, then also in one that the search makes before that place matters.
//   4. A poll in vain changes nothing but what its thread can no longer see. So it is not followed (kTurnBack): the state before it
//      allows the same and more. But a thread need not see what it could: if at some state no thread gets further by reading the
//      newest writes, that is a deadlock, though an older value might have helped.
//   5. Plain accesses are no points of choice: if they are ordered, what they see is settled, and if not, that is a failure. The order
//      is that of happens-before, which rows of reads do not change.
//   6. What a thread does depends on what its code has seen since its kernel began. So the hash of that stands for its stack and
//      registers. States are told apart by 64-bit hashes.
//
// At random: threads have priorities, of which the first that can run does; at some points the first becomes the last (PCT). A read
// sees the newest write or an older one. Here a poll in vain waits until something that it read has changed.
#pragma once

#include "machine.h"

namespace model {

struct Result {
  bool failed = false;
  bool complete = false;
  std::string what;      // of a failure
  std::string schedule;  // that repeats it
  uint64_t states = 0;   // exhaustive: different ones
  uint64_t runs = 0;     // random: schedules; exhaustive: paths to an end, to a state seen before or to a poll in vain
  uint64_t steps = 0;    // accesses made
  double seconds = 0;
};

Result explore(const Setup& s, double seconds_limit);
Result explore_at_random(const Setup& s, uint64_t runs, uint64_t seed, double seconds_limit);
// Repeats one run, with a trace of it.
Result replay(const Setup& s, const std::string& schedule);

}  // namespace model
