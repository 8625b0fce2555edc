// The memory of the model: what each thread may see of it, and whether plain accesses race.
//
// A place is a word that is accessed atomically. It keeps its writes, called messages, in modification order, by timestamp. A view
// says for each place which message its owner knows of, and has two vector clocks. A thread reads any message that is not older
// than its view's, and places a write anywhere behind that: so what is relaxed may be seen late, land late, and out of order. A
// message carries the view that its writer released; who acquires it knows what the writer knew.
//
// Only places that threads access without an order between them (contended) take part in that, which shows in the course of the
// exploration: see explore.h.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

namespace model {

using Id = uint16_t;
constexpr Id kNoId = 0xffff;
constexpr uint32_t kApart = 1 << 16;  // between the timestamps of two messages of which one was appended behind the other

struct Message {
  uint64_t value;
  uint32_t at;  // its timestamp
  Id older;
  Id view;    // released with it
  Id now;     // all that its writer knew: for what was only read before (see `lenient`)
  Id before;  // what its writer knew when its kernel began
  uint8_t writer;
  bool joined;  // a read-modify-write: nothing may come between it and the message that it read
  uint32_t step;
};

// Two bytes of plain memory.
struct Cell {
  uint16_t value;
  uint8_t writer;
  uint32_t epoch;  // of the writer, when it wrote; 0: written before all began
};

// A range of plain memory.
struct Region {
  uint64_t at;
  uint32_t bytes;
  uint32_t cell;  // of its first byte
  std::string name;
  bool real;  // addresses are of this program, which keeps the values: a block's shared memory
};

struct Place {
  uint64_t at;
  uint32_t bytes;
  uint32_t rank;      // whose memory it is
  uint32_t column;    // in views, if contended
  bool contended;
};

// What is known of all places and does not change in a run.
struct Map {
  std::vector<Place> places;
  std::vector<Region> regions;
  uint32_t contended = 0;  // places
  uint32_t slots = 0;
  uint32_t cells = 0;
  uint64_t (*initial)(uint64_t at, uint32_t bytes) = nullptr;

  uint32_t view_words() const { return contended + 2 * slots; }
  uint32_t find(uint64_t at, uint32_t bytes);  // makes it where it is not
  uint32_t lookup(uint64_t at) const;           // one that is there
  const Region* region(uint64_t at, uint32_t bytes) const;
  void clear();

 private:
  std::vector<uint32_t> table_;  // by hash of the address: a place and one
};
extern Map map;

// What one thread knows.
struct Knowledge {
  Id now;       // what its accesses must respect
  Id acquired;  // what it would know behind an acquire fence
  Id released;  // what its relaxed writes carry: what it knew at its last release fence
  Id before;    // when its kernel began
  // Where a block's barrier does not wait for the stores of other waves (see `by_waves`): what the thread may release to the
  // system, and what its wave has released for whoever comes behind the block's next barrier.
  Id system, offered;
  // The same as messages carry them; kNoId when they have changed since.
  Id now_copy, released_copy;
  bool published;  // since the last access: the next one belongs to a new epoch
};

struct Memory {
  std::vector<Id> newest;  // by place
  std::vector<Message> messages;
  std::vector<Id> free_messages;
  std::vector<uint32_t> views;
  std::vector<Id> free_views;
  std::vector<Cell> cells;
  std::vector<uint32_t> cell_reads;  // by cell and slot: epoch of the last read
  std::vector<uint32_t> accesses;    // by place, read or written, and slot: likewise
  std::vector<uint32_t> fills;       // by rank, slot and epoch of who has set its memory to its first state
  uint64_t content = 0;              // hash of all cells

  void reset(uint32_t ranks);

  uint32_t* view(Id id) { return &views[size_t(id) * map.view_words()]; }
  Id new_view();
  Id copy_view(Id of);
  void join(Id to, Id from);
  uint32_t known(Id view_id, uint32_t slot) { return view(view_id)[map.contended + slot]; }
  uint32_t known_reads(Id view_id, uint32_t slot) { return view(view_id)[map.contended + map.slots + slot]; }

  Message& latest(uint32_t place);
  Id new_message();

  void start(Knowledge& k, Id view_id, uint32_t slot);  // of a kernel, with what `view_id` holds
  void learn(Knowledge& k, Id view_id);                  // joins it to all that `k` knows
  void touch(Knowledge& k, uint32_t slot);               // an access begins
  uint32_t epoch(const Knowledge& k, uint32_t slot) { return known(k.now, slot); }
};

// Barriers that are not ordered: peers see what predates a kernel by relaxed reads alone, and a read is over when what its thread
// signals behind it is seen. Neither is promised by the PTX model; the kernels rely on both (DESIGN P2).
extern bool lenient;

// As on gfx9: behind a block's barrier a thread knows what the block's other threads did, but can release it to the system only if they
// have released it themselves before the barrier. Each thread of the model is a wave.
extern bool by_waves;

}  // namespace model
