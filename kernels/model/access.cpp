// Accesses to memory: atomic ones, plain ones with their races, and those that hosts make.
#include <stdio.h>
#include <string.h>

#include "inside.h"

namespace model {

namespace {

// What feeds load and store is the same in every run: it would fill the trace.
bool quiet() { return world.launches[running().launch].name[0] == 'f'; }

// Notes an access and finds whether it is ordered with those of others.
void note(uint32_t place, bool writes) {
  Memory& m = world.memory;
  Knowledge& k = running().knows;
  m.latest(place);
  const uint32_t rank = map.places[place].rank;
  if (rank < setup.ranks && m.fills[rank * 2 + 1] > m.known(k.now, m.fills[rank * 2])) {
    fail("race: %s touches %s, and is not ordered behind the initialisation of rank %u's memory", name_of_thread(slot()).c_str(),
         name_of(map.places[place].at).c_str(), rank);
  }
  uint32_t* const reads = &m.accesses[place * 2 * map.slots];
  uint32_t* const writes_of = reads + map.slots;
  if (!map.places[place].contended) {
    for (uint32_t u = 0; u < map.slots; u++) {
      if (u == slot()) continue;
      const uint32_t known = m.known(k.now, u);
      if (writes_of[u] <= known && (!writes || reads[u] <= known)) continue;
      contend(place);
      return end_run(Ask::kAgain);
    }
  }
  (writes ? writes_of : reads)[slot()] = m.epoch(k, slot());
}

// A thread saw a message.
void apply_read(uint32_t place, const Message& message) {
  Memory& m = world.memory;
  Knowledge& k = running().knows;
  const Place& p = map.places[place];
  if (p.contended) {
    uint32_t& at = m.view(k.now)[p.column];
    if (at < message.at) {
      at = message.at;
      k.now_copy = kNoId;
    }
    for (const Id id : {k.acquired, k.system}) {
      if (id != 0 && m.view(id)[p.column] < message.at) m.view(id)[p.column] = message.at;
    }
  }
  m.join(k.acquired, message.view);
  if (lenient && (message.before != 0 || message.now != 0)) {
    uint32_t* const now = m.view(k.now) + map.contended;
    uint32_t* const acquired = m.view(k.acquired) + map.contended;
    const uint32_t* const before = m.view(message.before) + map.contended;
    const uint32_t* const all = m.view(message.now) + map.contended;
    for (uint32_t u = 0; u < map.slots; u++) {
      const uint32_t read = all[u] < all[map.slots + u] ? all[map.slots + u] : all[u];
      if (now[u] < before[u]) now[u] = before[u];
      if (acquired[u] < before[u]) acquired[u] = before[u];
      if (now[map.slots + u] < read) now[map.slots + u] = read;
      if (acquired[map.slots + u] < read) acquired[map.slots + u] = read;
    }
    k.now_copy = kNoId;
  }
}



std::string source(const Message& m) {
  if (m.writer == 0xff) return "its first state";
  return "by " + short_name_of_thread(m.writer) + " in step " + std::to_string(m.step);
}

// `age`: how many newer messages there were, or should be if it is not kForever.
uint64_t read_place(uint32_t place, uint32_t* age) {
  Memory& m = world.memory;
  note(place, false);
  Id id = m.newest[place];
  uint32_t pick = 0, options = 1;
  if (map.places[place].contended) {
    const uint32_t floor = m.view(running().knows.now)[map.places[place].column];
    for (Id i = id; m.messages[i].at > floor && m.messages[i].older != kNoId; i = m.messages[i].older) options++;
    pick = age != nullptr && *age < options ? *age : ask(Ask::kRead, options);
    if (age != nullptr) *age = pick;
    for (uint32_t i = 0; i < pick; i++) id = m.messages[id].older;
  }
  const Message message = m.messages[id];
  apply_read(place, message);
  remember(message.value);
  Thread& t = running();
  t.just_relaxed = false;
  t.interval = mix(t.interval, place);
  if (t.polls < kMostPolled) {
    polled_at[slot()][t.polls] = message.at;
    t.polled[t.polls++] = Id(place);
  }
  world.steps++;
  if (tracing) {
    trace("reads     %s = %s, written %s%s", name_of(map.places[place].at).c_str(), shown(message.value).c_str(),
          source(message).c_str(), pick != 0 ? " (there is a newer one)" : "");
  }
  return message.value;
}

Id now_copy(Knowledge& k) {
  if (k.now_copy == kNoId) k.now_copy = world.memory.copy_view(k.now);
  k.published = true;
  return k.now_copy;
}

// What the thread's wave can release: all that it did itself, in any case.
Id own_view(Knowledge& k) {
  world.memory.view(k.system)[map.contended + slot()] = world.memory.epoch(k, slot());
  k.published = true;
  return k.system;
}

Id released_copy(Knowledge& k) {
  if (k.released_copy == kNoId) k.released_copy = world.memory.copy_view(k.released);
  return k.released_copy;
}

void write_place(uint32_t place, uint64_t value, bool release, uint32_t* age) {
  Memory& m = world.memory;
  note(place, true);
  const Place p = map.places[place];
  Id above = kNoId;  // the message that is to come right behind
  uint32_t pick = 0;
  if (p.contended) {
    const uint32_t floor = m.view(running().knows.now)[p.column];
    // Behind the newest, or before any that this thread does not know of, but for one that is joined to what it read.
    Id behind[64];
    uint32_t options = 0;
    behind[options++] = kNoId;
    for (Id i = m.newest[place]; i != kNoId && m.messages[i].at > floor && options < 64; i = m.messages[i].older) {
      if (!m.messages[i].joined) behind[options++] = i;
    }
    pick = age != nullptr && *age < options ? *age : ask(Ask::kWrite, options);
    if (age != nullptr) *age = pick;
    above = behind[pick];
  }
  Knowledge& k = running().knows;
  const Id below = above == kNoId ? m.newest[place] : m.messages[above].older;
  const uint32_t base = below == kNoId ? 0 : m.messages[below].at;
  const uint32_t at = above == kNoId ? base + kApart : base + (m.messages[above].at - base) / 2;
  if (at == base) fail("the model has no room between two writes of %s", name_of(p.at).c_str());
  Message message{value, at, below, 0, 0, k.before, uint8_t(slot()), false, ++world.steps};
  if (release) k.now_copy = kNoId;  // with this thread's latest writes
  if (release || lenient) message.now = now_copy(k);
  message.view = release ? message.now : released_copy(k);
  if (release && by_waves) message.view = m.copy_view(own_view(k));
  if (!lenient) message.now = message.before = 0;
  const Id id = m.new_message();
  m.messages[id] = message;
  if (above == kNoId) m.newest[place] = id;
  if (above != kNoId) m.messages[above].older = id;
  if (p.contended) {
    m.view(k.now)[p.column] = at;
    for (const Id id : {k.acquired, k.system}) {
      if (id != 0 && m.view(id)[p.column] < at) m.view(id)[p.column] = at;
    }
    running().must_stop = true;
  }
  remember(place);
  no_poll();
  if (tracing) {
    trace("%s %s = %s%s", release ? "releases " : "writes   ", name_of(p.at).c_str(), shown(value).c_str(),
          pick != 0 ? " (it lands before a write that is there already)" : "");
  }
}

uint64_t modify(uint64_t at, uint32_t bytes, uint64_t operand, bool adds, bool ordered) {
  Memory& m = world.memory;
  m.touch(running().knows, slot());
  const uint32_t place = map.find(at, bytes);
  if (map.places[place].contended) stop_before(at);
  note(place, false);
  note(place, true);
  // It may read whatever a read may, if no other has joined itself to that.
  Id below = m.newest[place], above = kNoId, behind[64] = {kNoId};
  if (map.places[place].contended) {
    const uint32_t floor = m.view(running().knows.now)[map.places[place].column];
    uint32_t options = 1;
    for (Id i = below; m.messages[i].at > floor && m.messages[i].older != kNoId && options < 64; i = m.messages[i].older) {
      if (!m.messages[i].joined) behind[options++] = i;
    }
    above = behind[ask(Ask::kRead, options)];
    if (above != kNoId) below = m.messages[above].older;
  }
  const Message found = m.messages[below];
  const uint32_t at_time = above == kNoId ? found.at + kApart : found.at + (m.messages[above].at - found.at) / 2;
  if (at_time == found.at) fail("the model has no room between two writes of %s", name_of(at).c_str());
  apply_read(place, found);
  Knowledge& k = running().knows;
  Message message{adds ? uint32_t(found.value + operand) : operand, at_time, below, 0, 0, 0, uint8_t(slot()), true, ++world.steps};
  if (ordered) {
    m.learn(k, found.view);
    k.now_copy = kNoId;  // with this thread's latest writes
    message.view = m.copy_view(by_waves ? own_view(k) : now_copy(k));
  } else {
    message.view = m.copy_view(released_copy(k));
  }
  m.join(message.view, found.view);
  if (lenient) message.now = now_copy(k), message.before = k.before;
  const Id id = m.new_message();
  m.messages[id] = message;
  (above == kNoId ? m.newest[place] : m.messages[above].older) = id;
  if (map.places[place].contended) {
    m.view(k.now)[map.places[place].column] = message.at;
    m.view(k.acquired)[map.places[place].column] = message.at;
    if (by_waves) m.view(k.system)[map.places[place].column] = message.at;
    k.now_copy = kNoId;
    running().must_stop = true;
  }
  remember(found.value);
  no_poll();
  running().just_relaxed = false;
  if (tracing) {
    trace("%s %s: %s to %s", adds ? "adds to  " : "exchanges", name_of(at).c_str(), shown(found.value).c_str(),
          shown(message.value).c_str());
  }
  return found.value;
}

const Region& find_region(uint64_t at, uint32_t bytes, const char* how) {
  const Region* const region = map.region(at, bytes);
  if (region == nullptr) {
    fail("%s %s %u bytes at %s, which is no part of any buffer", name_of_thread(slot()).c_str(), how, bytes, name_of(at).c_str());
  }
  return *region;
}

// One plain access. Both sides of a race are named.
void plain(const Region& region, uint64_t at, uint32_t bytes, bool writes) {
  Memory& m = world.memory;
  Knowledge& k = running().knows;
  m.touch(k, slot());
  const uint32_t first = region.cell + uint32_t(at - region.at) / 2;
  const uint32_t epoch = m.epoch(k, slot());
  for (uint32_t c = first; c < first + (bytes + 1) / 2; c++) {
    Cell& cell = m.cells[c];
    uint32_t* const reads = &m.cell_reads[size_t(c) * map.slots];
    if (cell.epoch > m.known(k.now, cell.writer) && cell.writer != slot()) {
      fail("race: %s %s %s, and %s has written it, without an order between the two", name_of_thread(slot()).c_str(),
           writes ? "writes" : "reads", name_of(region.at + (c - region.cell) * 2).c_str(), name_of_thread(cell.writer).c_str());
    }
    if (writes) {
      for (uint32_t u = 0; u < map.slots; u++) {
        if (u == slot() || reads[u] <= m.known(k.now, u) || reads[u] <= m.known_reads(k.now, u)) continue;
        fail("race: %s writes %s, and %s has read it, without an order between the two", name_of_thread(slot()).c_str(),
             name_of(region.at + (c - region.cell) * 2).c_str(), name_of_thread(u).c_str());
      }
      cell.writer = uint8_t(slot());
      cell.epoch = epoch;
      for (uint32_t u = 0; u < map.slots; u++) reads[u] = 0;
    } else {
      reads[slot()] = epoch;
    }
  }
}

uint64_t cell_hash(uint32_t cell, uint16_t value) { return mix(cell, value); }

}  // namespace

// ---- What platform.h calls.

uint64_t read(const void* p, uint32_t bytes) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  world.memory.touch(running().knows, slot());
  const uint32_t place = map.find(at, bytes);
  if (map.places[place].contended) stop_before(at);
  return read_place(place, nullptr);
}

void write(void* p, uint32_t bytes, uint64_t value, bool release) {
  world.memory.touch(running().knows, slot());
  write_place(map.find(reinterpret_cast<uint64_t>(p), bytes), value, release, nullptr);
}

void read_words(const void* p, uint32_t* to) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  world.memory.touch(running().knows, slot());
  uint32_t age = kForever;
  for (uint32_t w = 0; w < 4; w++) {
    const uint32_t place = map.find(at + w * 4, 4);
    if (map.places[place].contended) stop_before(at + w * 4);
    if (w % (4 / setup.atoms) == 0) age = kForever;
    to[w] = uint32_t(read_place(place, &age));
  }
}

void read_line(const void* p, uint64_t* to) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  world.memory.touch(running().knows, slot());
  uint32_t age = kForever;
  for (uint32_t w = 0; w < 2; w++) {
    const uint32_t place = map.find(at + w * 8, 8);
    if (map.places[place].contended) stop_before(at + w * 8);
    if (setup.atoms != 1) age = kForever;
    to[w] = read_place(place, &age);
  }
}

void write_words(void* p, const uint32_t* from) {
  world.memory.touch(running().knows, slot());
  uint32_t age = kForever;
  for (uint32_t w = 0; w < 4; w++) {
    if (w % (4 / setup.atoms) == 0) age = kForever;
    write_place(map.find(reinterpret_cast<uint64_t>(p) + w * 4, 4), from[w], false, &age);
  }
}

uint32_t add(uint32_t* at, uint32_t value, bool ordered) { return uint32_t(modify(reinterpret_cast<uint64_t>(at), 4, value, true, ordered)); }
uint32_t exchange(uint32_t* at, uint32_t value) { return uint32_t(modify(reinterpret_cast<uint64_t>(at), 4, value, false, false)); }

void acquire(const void* p) {
  Memory& m = world.memory;
  const uint32_t place = map.lookup(reinterpret_cast<uint64_t>(p));
  Id id = m.newest[place];
  if (map.places[place].contended) {
    const uint32_t floor = m.view(running().knows.now)[map.places[place].column];
    while (m.messages[id].at > floor && m.messages[id].older != kNoId) id = m.messages[id].older;
  }
  m.learn(running().knows, m.messages[id].view);
  if (tracing) trace("acquires  %s", name_of(map.places[place].at).c_str());
}

void load(const void* p, void* to, uint32_t bytes) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  const Region& region = find_region(at, bytes, "reads");
  plain(region, at, bytes, false);
  uint16_t halves[8];
  for (uint32_t i = 0; i < bytes / 2; i++) halves[i] = world.memory.cells[region.cell + (at - region.at) / 2 + i].value;
  memcpy(to, halves, bytes);
  for (uint32_t i = 0; i < bytes / 2; i++) remember(halves[i]);
  world.steps++;
  if (tracing && !quiet()) trace("loads     %s, %u bytes", name_of(at).c_str(), bytes);
}

void store(void* p, const void* from, uint32_t bytes) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  const Region& region = find_region(at, bytes, "writes");
  plain(region, at, bytes, true);
  uint16_t halves[8];
  memcpy(halves, from, bytes);
  for (uint32_t i = 0; i < bytes / 2; i++) {
    const uint32_t c = region.cell + uint32_t(at - region.at) / 2 + i;
    Cell& cell = world.memory.cells[c];
    world.memory.content ^= cell_hash(c, cell.value) ^ cell_hash(c, halves[i]);
    cell.value = halves[i];
  }
  world.steps++;
  no_poll();
  if (tracing && !quiet()) trace("stores    %s, %u bytes", name_of(at).c_str(), bytes);
}

void release_wave() {
  if (!by_waves) return;
  Knowledge& k = running().knows;
  world.memory.join(k.offered, own_view(k));
  if (tracing) trace("releases what its wave has stored");
}

// ---- What the compiler calls at the kernels' own loads and stores, since they are built for a race detector: those of a block's
// shared memory are looked at.

static void shared_access(const void* p, uint32_t bytes, bool writes) {
  const unsigned char* const at = static_cast<const unsigned char*>(p);
  if (at < shared_bytes[0] || at >= shared_bytes[0] + sizeof shared_bytes) return;
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  if (const Region* const region = map.region(address, bytes)) plain(*region, address, bytes, writes);
}

extern "C" {
#define SIGNAL_MODEL_ACCESS(bytes)                                                            \
  void __tsan_read##bytes(void* p) { shared_access(p, bytes, false); }                        \
  void __tsan_write##bytes(void* p) { shared_access(p, bytes, true); }                        \
  void __tsan_unaligned_read##bytes(void* p) { shared_access(p, bytes, false); }              \
  void __tsan_unaligned_write##bytes(void* p) { shared_access(p, bytes, true); }              \
  void __tsan_read_write##bytes(void* p) { shared_access(p, bytes, true); }                   \
  void __tsan_unaligned_read_write##bytes(void* p) { shared_access(p, bytes, true); }
SIGNAL_MODEL_ACCESS(1)
SIGNAL_MODEL_ACCESS(2)
SIGNAL_MODEL_ACCESS(4)
SIGNAL_MODEL_ACCESS(8)
SIGNAL_MODEL_ACCESS(16)
#undef SIGNAL_MODEL_ACCESS
void __tsan_read_range(void* p, size_t bytes) { shared_access(p, uint32_t(bytes), false); }
void __tsan_write_range(void* p, size_t bytes) { shared_access(p, uint32_t(bytes), true); }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) { return memcpy(to, from, bytes); }
void* __tsan_memmove(void* to, const void* from, size_t bytes) { return memmove(to, from, bytes); }
void* __tsan_memset(void* to, int value, size_t bytes) { return memset(to, value, bytes); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}

// ---- What hosts call.

// Sets a rank's memory to its first state, but for what is to be kept: it must be ordered with all that anybody does there.
void fill(uint32_t rank, bool (*keeps)(uint64_t at)) {
  Memory& m = world.memory;
  running().must_stop = true;
  stop_before(0);
  Knowledge& k = running().knows;
  m.touch(k, slot());
  for (uint32_t p = 0; p < m.newest.size(); p++) {
    if (map.places[p].rank != rank || m.newest[p] == kNoId || keeps(map.places[p].at)) continue;
    for (uint32_t u = 0; u < map.slots; u++) {
      const uint32_t known = m.known(k.now, u);
      if (u == slot() || (m.accesses[p * 2 * map.slots + u] <= known && m.accesses[(p * 2 + 1) * map.slots + u] <= known)) continue;
      fail("race: rank %u's memory is set to its first state, and %s touches %s, without an order between the two", rank,
           name_of_thread(u).c_str(), name_of(map.places[p].at).c_str());
    }
    const Id id = m.new_message();
    m.messages[id] = Message{map.initial(map.places[p].at, map.places[p].bytes), m.messages[m.newest[p]].at + kApart, m.newest[p],
                             now_copy(k), lenient ? now_copy(k) : Id(0), 0, uint8_t(slot()), false, ++world.steps};
    m.newest[p] = id;
    if (map.places[p].contended) {
      m.view(k.now)[map.places[p].column] = m.messages[id].at;
      m.view(k.acquired)[map.places[p].column] = m.messages[id].at;
      if (by_waves) m.view(k.system)[map.places[p].column] = m.messages[id].at;
    }
  }
  k.now_copy = kNoId;
  m.fills[rank * 2] = slot();
  m.fills[rank * 2 + 1] = m.epoch(k, slot());
  running().must_stop = true;
  if (tracing) trace("sets the memory of rank %u to its first state", rank);
}

uint64_t read_acquire(const void* at, uint32_t bytes) {
  const uint64_t value = read(at, bytes);
  acquire(at);
  return value;
}

uint64_t peek(uint64_t at, uint32_t bytes) {
  const uint32_t place = map.find(at, bytes);
  return world.memory.latest(place).value;
}

}  // namespace model
