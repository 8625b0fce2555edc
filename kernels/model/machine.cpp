#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fibre.h"
#include "inside.h"

namespace model {

World world;
Setup setup;
Ids self;
uint32_t polls_per_check = kForever;
std::string failure;
bool tracing = false;
alignas(64) unsigned char stacks[kMaxSlots][kStackBytes];
alignas(64) unsigned char shared_bytes[kMaxSlots][kSharedBytes];

uint32_t polled_at[kMaxSlots][kMostPolled];

namespace {

void* main_stack;
Why why;
Question asked;
uint32_t answered;
std::vector<uint32_t> stopped;  // slots to choose from

}  // namespace

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

std::string shown(uint64_t value) {
  char text[32];
  snprintf(text, sizeof text, "%#llx", (unsigned long long)value);
  return text;
}

namespace {

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
    m.join(t.knows.now, b.view);
    m.join(t.knows.acquired, b.view);
    if (by_waves) m.join(t.knows.system, b.offered);
    t.knows.now_copy = kNoId;
    t.knows.published = true;
    t.must_stop = true;
    t.vote = b.result;
    t.history = mix(t.history, seen);
    t.state = State::kRun;
  }
  b.view = b.offered = 0;
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
    world.blocks[first] = Block{uint16_t(launch.threads), 0, 0, false, false, 0, 0};
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
      for (uint32_t s = 0; s < world.streams.size(); s++) {
        idle &= (t.about >> s & 1) == 0 || world.streams[s].ended == world.streams[s].enqueued;
      }
      if (!idle) continue;
      for (uint32_t s = 0; s < world.streams.size(); s++) {
        if ((t.about >> s & 1) != 0) m.learn(t.knows, world.streams[s].view);
      }
      t.state = State::kRun;
    }
  }
}

bool polled_changed(uint32_t s) {
  const Thread& t = world.threads[s];
  for (uint32_t i = 0; i < t.polls; i++) {
    if (world.memory.messages[world.memory.newest[t.polled[i]]].at != polled_at[s][i]) return true;
  }
  return false;
}

}  // namespace

// ---- What platform.h calls.

void* shared_memory(size_t bytes) {
  unsigned char* const at = shared_bytes[running().block];
  if (map.region(reinterpret_cast<uint64_t>(at), uint32_t(bytes)) == nullptr) fail("a block asks for %zu bytes of shared memory", bytes);
  return at;
}

bool block_any(bool vote) {
  Thread& t = running();
  Block& b = world.blocks[t.block];
  if (b.view == 0) b.view = world.memory.new_view();
  world.memory.join(b.view, t.knows.now);
  if (by_waves) {
    if (b.offered == 0) b.offered = world.memory.new_view();
    world.memory.join(b.offered, t.knows.offered);
  }
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
  t.must_stop = true;
  no_poll();
}

void end_thread() { finish(); }

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
        const bool may_expire = world.expiries > 0 && polls_per_check != kForever;
        if (t.state == State::kStopped || (t.state == State::kRelaxed && (may_expire || polled_changed(s)))) stopped.push_back(s);
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

std::string short_name_of_thread(uint32_t s) {
  if (s < setup.ranks) return "host of rank " + std::to_string(s);
  const Thread& t = world.threads[s];
  const Stream& stream = world.streams[(s - setup.ranks) / (setup.slots * (setup.two_kernels ? 2 : 1))];
  std::string name = "r" + std::to_string(stream.rank) + " b" + std::to_string(t.ids.block) + " t" + std::to_string(t.ids.thread);
  return name;
}

std::string name_of_thread(uint32_t s) {
  const Thread& t = world.threads[s];
  if (s < setup.ranks || t.launch >= world.launches.size()) return short_name_of_thread(s);
  return short_name_of_thread(s) + " " + world.launches[t.launch].name;
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
