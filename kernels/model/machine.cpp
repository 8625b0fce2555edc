#include "machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fibre.h"

namespace model {

World world;
Setup setup;
Ids self;
uint32_t polls_per_check = kForever;
std::string failure;
bool tracing = false;
alignas(64) unsigned char stacks[kMaxSlots][kStackBytes];
alignas(64) unsigned char shared_bytes[kMaxSlots][kSharedBytes];

namespace {

void* main_stack;
enum class Why { kWaits, kAsks, kEnds } why;  // a fibre gives the processor back
Question asked;
uint32_t answered;
std::vector<uint32_t> stopped;  // slots to choose from

uint32_t slot() { return uint32_t(world.running); }
Thread& running() { return world.threads[slot()]; }

void give_back(Why reason) {
  why = reason;
  model_switch(&running().stack, main_stack);
}

uint32_t ask(Ask what, uint32_t options) {
  if (options == 1) return 0;
  asked = Question{what, options};
  give_back(Why::kAsks);
  return answered;
}

// Ends the run, from a fibre or from the main stack; on a fibre it does not return.
void end_run(Ask how) {
  asked = Question{how, 0};
  if (world.running >= 0) give_back(Why::kAsks);
}

void remember(uint64_t value) {
  Thread& t = running();
  t.history = mix(t.history, value);
}

void stop_before(uint64_t at) {
  Thread& t = running();
  if (!t.must_stop) return;
  t.about = at;
  t.state = State::kStopped;
  give_back(Why::kWaits);
}

// What feeds load and store is the same in every run: it would fill the trace.
bool quiet() { return world.launches[running().launch].name[0] == 'f'; }

// What the polls of a thread saw last, by the places in Thread::polled; for random schedules.
uint32_t polled_at[kMaxSlots][kMostPolled];

// What the thread just did is no part of a poll.
void no_poll() {
  Thread& t = running();
  t.interval = mix(t.history, 3);
  t.last_interval = 0;
  t.polls = 0;
}

void contend(uint32_t place) {
  map.places[place].contended = true;
  map.places[place].column = map.contended++;
}

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
    uint32_t& acquired = m.view(k.acquired)[p.column];
    if (acquired < message.at) acquired = message.at;
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



std::string shown(uint64_t value) {
  char text[32];
  snprintf(text, sizeof text, "%#llx", (unsigned long long)value);
  return text;
}

std::string source(const Message& m) {
  if (m.writer == 0xff) return "its first state";
  return "by " + name_of_thread(m.writer) + " in step " + std::to_string(m.step);
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
  if (!lenient) message.now = message.before = 0;
  const Id id = m.new_message();
  m.messages[id] = message;
  if (above == kNoId) m.newest[place] = id;
  if (above != kNoId) m.messages[above].older = id;
  if (p.contended) {
    m.view(k.now)[p.column] = at;
    if (m.view(k.acquired)[p.column] < at) m.view(k.acquired)[p.column] = at;
    running().must_stop = true;
  }
  remember(place);
  no_poll();
  if (tracing) {
    trace("%s %s = %s%s", release ? "releases " : "writes   ", name_of(p.at).c_str(), shown(value).c_str(),
          pick != 0 ? " (it lands before a write that is there already)" : "");
  }
}

uint64_t modify(uint64_t at, uint32_t bytes, uint64_t operand, bool adds) {
  Memory& m = world.memory;
  m.touch(running().knows, slot());
  const uint32_t place = map.find(at, bytes);
  if (map.places[place].contended) stop_before(at);
  note(place, false);
  note(place, true);
  const Id below = m.newest[place];
  const Message found = m.messages[below];
  apply_read(place, found);
  Knowledge& k = running().knows;
  Message message{adds ? uint32_t(found.value + operand) : operand, found.at + kApart, below, 0, 0, 0, uint8_t(slot()), true, ++world.steps};
  message.view = m.copy_view(released_copy(k));
  m.join(message.view, found.view);
  if (lenient) message.now = now_copy(k), message.before = k.before;
  const Id id = m.new_message();
  m.messages[id] = message;
  m.newest[place] = id;
  if (map.places[place].contended) {
    m.view(k.now)[map.places[place].column] = message.at;
    m.view(k.acquired)[map.places[place].column] = message.at;
    k.now_copy = kNoId;
    running().must_stop = true;
  }
  remember(found.value);
  no_poll();
  running().just_relaxed = false;
  if (tracing) trace("%s %s: %s to %s", adds ? "adds to  " : "exchanges", name_of(at).c_str(), shown(found.value).c_str(), shown(message.value).c_str());
  return found.value;
}

const Region& find_region(uint64_t at, uint32_t bytes, const char* how) {
  const Region* const region = map.region(at, bytes);
  if (region == nullptr) fail("%s %s %u bytes at %s, which is no part of any buffer", name_of_thread(slot()).c_str(), how, bytes, name_of(at).c_str());
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

// The thread leaves its block's next barrier.
void open_barrier(Block& b, uint32_t block) {
  Memory& m = world.memory;
  b.result = b.vote;
  b.vote = false;
  b.here = 0;
  b.turn++;
  // What the block's threads saw of their shared memory is part of what they go on with.
  uint64_t seen = b.result;
  for (uint32_t i = 0; i < kSharedBytes; i += 8) {
    uint64_t word;
    memcpy(&word, shared_bytes[block] + i, 8);
    seen = mix(seen, word);
  }
  for (Thread& t : world.threads) {
    if (t.state != State::kBarrier || t.block != block) continue;
    m.learn(t.knows, b.view);
    t.knows.published = true;
    t.must_stop = true;
    t.vote = b.result;
    t.history = mix(t.history, seen);
    t.state = State::kRun;
  }
  b.view = 0;
}

void check_barrier(uint32_t block) {
  Block& b = world.blocks[block];
  if (b.here != 0 && b.here == b.threads) open_barrier(b, block);
}

Instance* instance_of(uint32_t launch) {
  for (Stream& s : world.streams) {
    for (Instance& i : s.running) {
      if (i.launch == launch) return &i;
    }
  }
  return nullptr;
}

[[noreturn]] void finish() {
  Thread& t = running();
  Instance& i = *instance_of(t.launch);
  world.memory.join(i.view, t.knows.acquired);
  i.left--;
  if (!t.allowed) i.not_allowed--;
  t.state = State::kDone;
  if (lenient) {
    // CUDA's block barrier does not wait for threads that have left; what such a thread did counts as done before it, which the
    // PTX model does not say in so many words.
    Block& b = world.blocks[t.block];
    if (b.view == 0) b.view = world.memory.new_view();
    world.memory.join(b.view, t.knows.now);
    b.threads--;
    check_barrier(t.block);
  }
  if (tracing) trace("leaves the kernel");
  give_back(Why::kEnds);
  abort();
}

void device_main() {
  unsigned char params[sizeof(Launch::params)] __attribute__((aligned(16)));
  const Launch& launch = world.launches[running().launch];
  memcpy(params, launch.params, sizeof params);
  launch.run(params);
  finish();
}

void host_main() {
  setup.host(slot());
  running().state = State::kDone;
  give_back(Why::kEnds);
  abort();
}

void begin_kernel(Stream& s, uint32_t stream) {
  Memory& m = world.memory;
  const Id id = s.queue[s.begun];
  const Launch& launch = world.launches[id];
  Instance& i = s.running[s.running[0].launch == kNoId ? 0 : 1];
  const bool parity = s.two && s.begun % 2 == 1;
  const bool early = s.running[0].launch != kNoId;
  i = Instance{id, uint16_t(launch.grid * launch.threads), uint16_t(launch.grid * launch.threads), m.copy_view(s.view), parity};
  m.join(i.view, launch.view);
  s.begun++;
  for (uint32_t b = 0; b < launch.grid; b++) {
    const uint32_t first = s.slot + parity * s.slots + b * launch.threads;
    world.blocks[first] = Block{uint16_t(launch.threads), 0, 0, false, false, 0};
    memset(shared_bytes[first], 0xa5, kSharedBytes);
    for (uint32_t t = 0; t < launch.threads; t++) {
      Thread& thread = world.threads[first + t];
      thread = Thread{};
      thread.state = State::kRun;
      thread.must_stop = true;
      thread.early = early;
      thread.stream = uint8_t(stream);
      thread.launch = id;
      thread.block = Id(first);
      thread.ids = Ids{t, b, launch.threads, launch.grid};
      thread.history = mix(id, 1);
      m.start(thread.knows, i.view, first + t);
      thread.stack = new_fibre(stacks[first + t] + kStackBytes, device_main);
    }
  }
  if (tracing) printf("        %s begins, rank %u\n", launch.name, s.rank);
}

// Begins and ends what can begin and end: kernels, waits of hosts.
void settle() {
  Memory& m = world.memory;
  for (bool again = true; again;) {
    again = false;
    for (uint32_t n = 0; n < world.streams.size(); n++) {
      Stream& s = world.streams[n];
      // An early kernel comes before the one ahead of it counts as ended: it knows what that one did behind its own wait alone.
      if (s.begun < s.enqueued && s.running[1].launch == kNoId) {
        const bool early = s.two && world.launches[s.queue[s.begun]].early && s.running[0].not_allowed == 0;
        if (s.running[0].launch == kNoId || early) {
          begin_kernel(s, n);
          again = true;
        }
      }
      if (s.running[0].launch != kNoId && s.running[0].left == 0) {
        m.join(s.view, s.running[0].view);
        s.ended++;
        s.running[0] = s.running[1];
        s.running[1].launch = kNoId;
        again = true;
      }
    }
  }
  for (uint32_t n = 0; n < world.threads.size(); n++) {
    Thread& t = world.threads[n];
    if (t.state == State::kEarlier && world.streams[t.stream].running[0].launch == t.launch) t.state = State::kRun;
    if (t.state == State::kStream) {
      bool idle = true;
      for (uint32_t s = 0; s < world.streams.size(); s++) idle &= (t.about >> s & 1) == 0 || world.streams[s].ended == world.streams[s].enqueued;
      if (!idle) continue;
      for (uint32_t s = 0; s < world.streams.size(); s++) {
        if ((t.about >> s & 1) != 0) m.learn(t.knows, world.streams[s].view);
      }
      t.state = State::kRun;
    }
  }
}

bool watched_changed(uint32_t s) {
  const Thread& t = world.threads[s];
  for (uint32_t i = 0; i < t.polls; i++) {
    if (world.memory.messages[world.memory.newest[t.polled[i]]].at != polled_at[s][i]) return true;
  }
  return false;
}

}  // namespace

// ---- What platform.h calls.

void* shared_memory(size_t bytes) {
  if (bytes > kSharedBytes) fail("a block asks for %zu bytes of shared memory", bytes);
  return shared_bytes[running().block];
}

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

uint32_t add(uint32_t* at, uint32_t value) { return uint32_t(modify(reinterpret_cast<uint64_t>(at), 4, value, true)); }
uint32_t exchange(uint32_t* at, uint32_t value) { return uint32_t(modify(reinterpret_cast<uint64_t>(at), 4, value, false)); }

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

void release_wave() {}

bool block_any(bool vote) {
  Thread& t = running();
  Block& b = world.blocks[t.block];
  if (b.view == 0) b.view = world.memory.new_view();
  world.memory.join(b.view, t.knows.now);
  b.vote |= vote;
  b.here++;
  world.steps++;
  t.state = State::kBarrier;
  no_poll();
  if (tracing) trace("is at the block's barrier");
  check_barrier(t.block);
  if (running().state != State::kRun) give_back(Why::kWaits);
  return running().vote;
}

void relax() {
  Thread& t = running();
  const uint64_t interval = mix(t.interval, reinterpret_cast<uint64_t>(__builtin_return_address(0)));
  const bool closed = polls_per_check == kForever || interval == t.last_interval;
  t.last_interval = interval;
  t.interval = 0;
  t.just_relaxed = true;
  // What a thread polls in vain, somebody has yet to write.
  bool again = false;
  for (uint32_t i = 0; i < t.polls; i++) {
    if (map.places[t.polled[i]].contended) continue;
    contend(t.polled[i]);
    again = true;
  }
  if (again) return end_run(Ask::kAgain);
  if (closed && setup.exhaustive) return end_run(Ask::kTurnBack);
  if (closed) {
    t.state = State::kRelaxed;
    give_back(Why::kWaits);
  } else {
    remember(interval);
    t.must_stop = true;
  }
  running().polls = 0;
}

uint64_t clock() {
  if (running().just_relaxed && world.expiries > 0 && ask(Ask::kExpire, 2) == 1) {
    world.expiries--;
    running().time += uint64_t(1) << 40;
    if (tracing) trace("finds that its deadline has passed");
  }
  remember(running().time);
  return running().time;
}

void wait_for_earlier() {
  if (!running().early) return;
  if (world.streams[running().stream].running[0].launch != running().launch) {
    running().state = State::kEarlier;
    give_back(Why::kWaits);
  }
  Memory& m = world.memory;
  Thread& t = running();
  m.learn(t.knows, world.streams[t.stream].view);
  t.knows.released = m.copy_view(t.knows.now);
  t.knows.before = t.knows.released_copy = m.copy_view(t.knows.now);
  t.knows.published = true;
  t.must_stop = true;
  t.early = false;
}

void allow_next() {
  Thread& t = running();
  if (t.allowed) return;
  t.allowed = true;
  instance_of(t.launch)->not_allowed--;
  no_poll();
}

void end_thread() { finish(); }

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

void launch(uint32_t stream, void (*run)(const void*), const void* params, uint32_t bytes, const char* name, uint32_t grid,
            uint32_t threads, bool early) {
  Launch l{};
  l.run = run;
  if (bytes > sizeof l.params) fail("parameters of %u bytes", bytes);
  memcpy(l.params, params, bytes);
  snprintf(l.name, sizeof l.name, "%s", name);
  l.grid = grid;
  l.threads = threads;
  l.stream = uint8_t(stream);
  l.early = early;
  l.view = world.memory.copy_view(running().knows.now);
  running().knows.published = true;
  Stream& s = world.streams[stream];
  if (s.enqueued == sizeof s.queue / sizeof s.queue[0] || grid * threads > s.slots) fail("a stream has no room for %s", name);
  s.queue[s.enqueued++] = Id(world.launches.size());
  world.launches.push_back(l);
  remember(world.launches.size());
}

void pause() {
  running().must_stop = true;
  stop_before(0);
  running().must_stop = true;
}

void wait_for(uint64_t streams) {
  running().about = streams;
  running().state = State::kStream;
  give_back(Why::kWaits);
  running().must_stop = true;
  remember(streams);
}

void meet() {
  Memory& m = world.memory;
  if (world.meeting == 0) world.meeting = m.new_view();
  m.join(world.meeting, running().knows.now);
  running().state = State::kMeeting;
  if (tracing) trace("meets the others");
  if (++world.met == setup.ranks) {
    for (uint32_t r = 0; r < setup.ranks; r++) {
      Thread& t = world.threads[r];
      m.learn(t.knows, world.meeting);
      t.knows.published = true;
      t.must_stop = true;
      t.history = mix(t.history, 2);
      t.state = State::kRun;
    }
    world.met = 0;
    world.meeting = 0;
    return;
  }
  give_back(Why::kWaits);
}

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

void preset(uint64_t at, const void* from, uint32_t bytes) {
  const Region* const region = map.region(at, bytes);
  const unsigned char* const b = static_cast<const unsigned char*>(from);
  for (uint32_t i = 0; i < bytes / 2; i++) memcpy(&world.memory.cells[region->cell + (at - region->at) / 2 + i].value, b + i * 2, 2);
}

// ---- What the explorer calls.

void begin(const Setup& s) {
  setup = s;
  world = World();
  const uint32_t of_stream = s.slots * (s.two_kernels ? 2 : 1);
  map.slots = s.ranks + s.ranks * s.streams * of_stream;
  if (map.slots > kMaxSlots) {
    fprintf(stderr, "a scenario of %u threads\n", map.slots);
    exit(2);
  }
  world.memory.reset(s.ranks);
  world.threads.resize(map.slots);
  world.blocks.resize(map.slots);
  world.expiries = s.expiries;
  world.running = -1;
  failure.clear();
  for (uint32_t r = 0; r < s.ranks; r++) {
    Thread& t = world.threads[r];
    t.state = State::kRun;
    t.must_stop = true;
    world.memory.start(t.knows, 0, r);
    t.stack = new_fibre(stacks[r] + kStackBytes, host_main);
    for (uint32_t n = 0; n < s.streams; n++) {
      Stream stream{};
      stream.rank = uint8_t(r);
      stream.slot = uint8_t(s.ranks + world.streams.size() * of_stream);
      stream.slots = uint8_t(s.slots);
      stream.two = s.two_kernels;
      stream.running[0].launch = stream.running[1].launch = kNoId;
      stream.view = world.memory.new_view();
      world.streams.push_back(stream);
    }
  }
}

Question go() {
  for (;;) {
    if (world.running < 0) {
      settle();
      stopped.clear();
      for (uint32_t s = 0; s < world.threads.size(); s++) {
        Thread& t = world.threads[s];
        if (t.state == State::kRun) {
          world.running = int(s);
          break;
        }
        if (t.state == State::kRelaxed && (watched_changed(s) || (world.expiries > 0 && polls_per_check != kForever))) stopped.push_back(s);
        if (t.state == State::kStopped) stopped.push_back(s);
      }
      if (world.running < 0) {
        if (world.memory.views.size() > 4000 * map.view_words()) collect();
        if (!stopped.empty()) return Question{Ask::kSchedule, uint32_t(stopped.size())};
        for (const Thread& t : world.threads) {
          if (t.state != State::kDone && t.state != State::kFree) return Question{Ask::kStuck, 0};
        }
        return Question{Ask::kEnd, 0};
      }
    }
    self = running().ids;
    model_switch(&main_stack, running().stack);
    if (why == Why::kAsks) return asked;
    world.running = -1;
  }
}

void answer(uint32_t option) {
  if (world.running >= 0) {
    answered = option;
    if (asked.ask == Ask::kRead && option != 0) world.fresh = false;
    return;
  }
  world.running = int(stopped[option]);
  if (setup.exhaustive) running().polls = 0;
  running().state = State::kRun;
  running().must_stop = false;
  world.fresh = true;
}

void ask_again(const Question& q) { asked = q; }

uint32_t slot_of(uint32_t option) { return stopped[option]; }

void fail(const char* format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  failure = text;
  if (world.running < 0) {
    fprintf(stderr, "%s\n", text);
    exit(2);
  }
  end_run(Ask::kFail);
  abort();
}

void trace(const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  printf("%6u  %-24s %s\n", world.steps, name_of_thread(slot()).c_str(), text);
}

std::string name_of_thread(uint32_t s) {
  if (s < setup.ranks) return "host of rank " + std::to_string(s);
  const Thread& t = world.threads[s];
  const Stream& stream = world.streams[(s - setup.ranks) / (setup.slots * (setup.two_kernels ? 2 : 1))];
  std::string name = "r" + std::to_string(stream.rank) + " b" + std::to_string(t.ids.block) + " t" + std::to_string(t.ids.thread);
  if (t.launch < world.launches.size()) name += std::string(" ") + world.launches[t.launch].name;
  return name;
}

std::string waiting() {
  std::string text;
  for (uint32_t s = 0; s < world.threads.size(); s++) {
    const Thread& t = world.threads[s];
    const char* what = nullptr;
    std::string more;
    switch (t.state) {
      case State::kFree:
      case State::kDone: continue;
      case State::kRun: what = "runs"; break;
      case State::kStopped: {
        if (t.about == 0) {
          what = "has yet to go on";
          break;
        }
        what = "polls from ";
        more = name_of(t.about);
        const uint32_t place = map.lookup(t.about);
        if (place < world.memory.newest.size() && world.memory.newest[place] != kNoId) {
          more += " on, where the newest is " + shown(world.memory.latest(place).value);
        }
        break;
      }
      case State::kRelaxed: {
        what = "polls";
        for (uint32_t i = 0; i < t.polls; i++) {
          const uint32_t place = t.polled[i];
          more += " " + name_of(map.places[place].at) + " = " + shown(world.memory.latest(place).value);
        }
        break;
      }
      case State::kBarrier: what = "is at its block's barrier"; break;
      case State::kEarlier: what = "waits for the stream's earlier kernel"; break;
      case State::kStream: what = "waits for its stream"; break;
      case State::kMeeting: what = "waits for the other hosts"; break;
    }
    text += "        " + name_of_thread(s) + " " + what + more + "\n";
  }
  return text;
}

}  // namespace model
