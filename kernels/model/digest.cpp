// The state as a number that is the same for equal states, and the removal of what nobody can reach any more.
#include <string.h>

#include "machine.h"

namespace model {

namespace {

// What every thread that goes on, or begins later, knows at least.
std::vector<uint32_t> least;
// Contended places of which more than the newest write can still be seen, or not everybody knows that one.
std::vector<uint32_t> open_places;

void find_least() {
  Memory& m = world.memory;
  least.assign(map.view_words(), ~0u);
  const auto take = [&](Id id) {
    const uint32_t* const v = m.view(id);
    for (uint32_t i = 0; i < map.view_words(); i++) least[i] = least[i] < v[i] ? least[i] : v[i];
  };
  bool hosts = false;
  for (uint32_t s = 0; s < world.threads.size(); s++) {
    const Thread& t = world.threads[s];
    if (t.state == State::kFree || t.state == State::kDone) continue;
    hosts |= s < setup.ranks;
    take(t.knows.now);
  }
  for (const Stream& s : world.streams) {
    if (hosts || s.begun < s.enqueued) take(s.view);
  }
}

uint32_t newer_than(uint32_t place, uint32_t at) {
  const Memory& m = world.memory;
  uint32_t count = 0;
  for (Id i = m.newest[place]; i != kNoId && m.messages[i].at > at; i = m.messages[i].older) count++;
  return count;
}

uint64_t hash_view(Id id, bool clocks_only = false) {
  Memory& m = world.memory;
  const uint32_t* const v = m.view(id);
  uint64_t h = 7;
  if (!clocks_only) {
    for (const uint32_t place : open_places) {
      const uint32_t c = map.places[place].column;
      h = mix(h, newer_than(place, v[c] < least[c] ? least[c] : v[c]));
    }
  }
  for (uint32_t u = 0; u < map.slots; u++) {
    const uint32_t c = map.contended + u;
    const uint32_t known = v[c] < least[c] ? least[c] : v[c];
    const uint32_t reads = v[c + map.slots] < known ? known : v[c + map.slots];
    h = mix(h, uint64_t(known) << 32 | reads);
  }
  return h;
}

}  // namespace

void collect() {
  Memory& m = world.memory;
  find_least();
  open_places.clear();
  for (uint32_t p = 0; p < m.newest.size(); p++) {
    if (m.newest[p] == kNoId) continue;
    // Messages older than the one that everybody knows are out of reach.
    Id last = m.newest[p];
    if (map.places[p].contended) {
      const uint32_t floor = least[map.places[p].column];
      if (m.messages[last].at > floor) open_places.push_back(p);
      while (m.messages[last].at > floor && m.messages[last].older != kNoId) last = m.messages[last].older;
    }
    for (Id old = m.messages[last].older; old != kNoId;) {
      const Id next = m.messages[old].older;
      m.free_messages.push_back(old);
      old = next;
    }
    m.messages[last].older = kNoId;
  }

  std::vector<bool> used(m.views.size() / map.view_words());
  used[0] = true;
  const auto use = [&](Id id) {
    if (id != kNoId) used[id] = true;
  };
  for (Thread& t : world.threads) {
    if (t.state == State::kFree || t.state == State::kDone) continue;
    const Knowledge& k = t.knows;
    for (const Id id : {k.now, k.acquired, k.released, k.before, k.system, k.offered, k.now_copy, k.released_copy}) use(id);
  }
  for (const Stream& s : world.streams) {
    use(s.view);
    for (const Instance& i : s.running) {
      if (i.launch != kNoId) use(i.view);
    }
    for (uint32_t i = s.begun; i < s.enqueued; i++) use(world.launches[s.queue[i]].view);
  }
  for (const Block& b : world.blocks) {
    use(b.view);
    use(b.offered);
  }
  use(world.meeting);
  for (uint32_t p = 0; p < m.newest.size(); p++) {
    for (Id i = m.newest[p]; i != kNoId; i = m.messages[i].older) {
      for (const Id id : {m.messages[i].view, m.messages[i].now, m.messages[i].before}) use(id);
    }
  }
  m.free_views.clear();
  for (uint32_t i = uint32_t(used.size()); i-- > 1;) {
    if (!used[i]) m.free_views.push_back(Id(i));
  }
  while (!m.free_views.empty() && m.free_views.front() == m.views.size() / map.view_words() - 1) {
    m.free_views.erase(m.free_views.begin());
    m.views.resize(m.views.size() - map.view_words());
  }
}

uint64_t digest() {
  collect();
  Memory& m = world.memory;
  uint64_t h = mix(world.expiries, world.met);
  for (uint32_t s = 0; s < world.threads.size(); s++) {
    const Thread& t = world.threads[s];
    if (t.state == State::kFree || t.state == State::kDone) continue;
    h = mix(h, s << 8 | uint32_t(t.state));
    uint64_t bits = 0;
    for (const bool bit : {t.early, t.must_stop, t.just_relaxed, t.allowed, t.vote}) bits = bits << 1 | uint64_t(bit);
    h = mix(h, bits);
    h = mix(h, uint64_t(t.launch) << 32 | t.ids.thread << 16 | t.ids.block);
    h = mix(h, t.history);
    if (polls_per_check != kForever) h = mix(mix(h, t.interval), t.last_interval);
    h = mix(h, hash_view(t.knows.now));
    h = mix(h, hash_view(t.knows.acquired));
    h = mix(h, hash_view(t.knows.released));
    if (lenient) h = mix(h, hash_view(t.knows.before, true));
    if (by_waves) h = mix(mix(h, hash_view(t.knows.system)), hash_view(t.knows.offered));
  }
  for (const Stream& s : world.streams) {
    h = mix(h, uint64_t(s.begun) << 32 | s.ended << 16 | s.enqueued);
    h = mix(h, hash_view(s.view));
    for (const Instance& i : s.running) {
      if (i.launch != kNoId) h = mix(mix(h, uint64_t(i.left) << 16 | i.not_allowed), hash_view(i.view));
    }
    for (uint32_t i = s.begun; i < s.enqueued; i++) h = mix(h, hash_view(world.launches[s.queue[i]].view));
  }
  for (uint32_t n = 0; n < world.blocks.size(); n++) {
    const Block& b = world.blocks[n];
    if (b.threads == 0) continue;
    h = mix(h, uint64_t(n) << 32 | b.here << 16 | uint32_t(b.vote));
    if (b.view != 0) h = mix(h, hash_view(b.view));
    if (b.offered != 0) h = mix(h, hash_view(b.offered));
    for (uint32_t i = 0; i < kSharedBytes; i += 8) {
      uint64_t word;
      memcpy(&word, shared_bytes[n] + i, 8);
      h = mix(h, word);
    }
  }
  if (world.met != 0) h = mix(h, hash_view(world.meeting));
  for (uint32_t r = 0; r < setup.ranks; r++) h = mix(h, world.notes[r]);

  h = mix(h, m.content);
  const uint32_t* const clock = &least[map.contended];
  for (uint32_t c = 0; c < m.cells.size(); c++) {
    const Cell& cell = m.cells[c];
    if (cell.epoch > clock[cell.writer]) h = mix(h, uint64_t(c) << 40 | uint64_t(cell.writer) << 32 | cell.epoch);
    const uint32_t* const reads = &m.cell_reads[size_t(c) * map.slots];
    for (uint32_t u = 0; u < map.slots; u++) {
      if (reads[u] > clock[u]) h = mix(h, uint64_t(c) << 41 | uint64_t(u) << 32 | reads[u]);
    }
  }
  for (uint32_t p = 0; p < m.newest.size(); p++) {
    if (m.newest[p] == kNoId) continue;
    for (Id i = m.newest[p]; i != kNoId; i = m.messages[i].older) {
      const Message& message = m.messages[i];
      h = mix(h, uint64_t(p) << 8 | message.joined);
      h = mix(h, message.value);
      // Of a place without contention everybody who reads it knows all that it could carry.
      if (!map.places[p].contended) continue;
      h = mix(h, hash_view(message.view));
      if (lenient) h = mix(mix(h, hash_view(message.now, true)), hash_view(message.before, true));
    }
    const uint32_t* const of = &m.accesses[p * 2 * map.slots];
    for (uint32_t u = 0; u < 2 * map.slots; u++) {
      if (of[u] > clock[u % map.slots]) h = mix(h, uint64_t(p) << 40 | uint64_t(u) << 32 | of[u]);
    }
  }
  for (const uint32_t fill : m.fills) h = mix(h, fill);
  return h;
}

}  // namespace model
