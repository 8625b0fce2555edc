#include "memory.h"

#include <stdio.h>
#include <stdlib.h>

#include "machine.h"

namespace model {

Map map;
bool lenient = false;
bool by_waves = false;

static size_t spot(uint64_t at, size_t mask) { return (at * 0x9e3779b97f4a7c15u >> 32) & mask; }

uint32_t Map::find(uint64_t at, uint32_t bytes) {
  if (table_.size() < places.size() * 2 + 64) {
    table_.assign(table_.empty() ? 1024 : table_.size() * 4, 0);
    for (uint32_t i = 0; i < places.size(); i++) {
      size_t s = spot(places[i].at, table_.size() - 1);
      while (table_[s] != 0) s = (s + 1) & (table_.size() - 1);
      table_[s] = i + 1;
    }
  }
  size_t s = spot(at, table_.size() - 1);
  for (; table_[s] != 0; s = (s + 1) & (table_.size() - 1)) {
    const Place& place = places[table_[s] - 1];
    if (place.at != at) continue;
    if (place.bytes != bytes) fail("%s is accessed by %u bytes and by %u", name_of(at).c_str(), place.bytes, bytes);
    return table_[s] - 1;
  }
  if (region(at, 1) != nullptr) fail("%s is accessed atomically, and plainly elsewhere", name_of(at).c_str());
  places.push_back(Place{at, bytes, rank_of(at), 0, false});
  table_[s] = uint32_t(places.size());
  return uint32_t(places.size() - 1);
}

uint32_t Map::lookup(uint64_t at) const {
  size_t s = spot(at, table_.size() - 1);
  while (places[table_[s] - 1].at != at) s = (s + 1) & (table_.size() - 1);
  return table_[s] - 1;
}

const Region* Map::region(uint64_t at, uint32_t bytes) const {
  static size_t last = 0;  // most accesses go to the same again
  const auto holds = [&](size_t i) { return at >= regions[i].at && at + bytes <= regions[i].at + regions[i].bytes; };
  if (last < regions.size() && holds(last)) return &regions[last];
  for (size_t i = 0; i < regions.size(); i++) {
    if (holds(i)) return &regions[last = i];
  }
  return nullptr;
}

void Map::clear() { *this = Map(); }

void Memory::reset(uint32_t ranks) {
  newest.clear();
  messages.clear();
  free_messages.clear();
  views.clear();
  free_views.clear();
  cells.assign(map.cells, Cell{0xa5a5, 0, 0});
  cell_reads.assign(size_t(map.cells) * map.slots, 0);
  accesses.clear();
  fills.assign(ranks * 2, 0);
  content = 0;
  new_view();  // number 0: knows nothing
}

Id Memory::new_view() {
  Id id;
  if (!free_views.empty()) {
    id = free_views.back();
    free_views.pop_back();
  } else {
    const size_t count = views.size() / map.view_words();
    if (count >= kNoId) fail("the model has no room for more views");
    id = Id(count);
    views.resize(views.size() + map.view_words());
  }
  uint32_t* const v = view(id);
  for (uint32_t i = 0; i < map.view_words(); i++) v[i] = 0;
  return id;
}

Id Memory::copy_view(Id of) {
  const Id id = new_view();
  uint32_t* const to = view(id);
  const uint32_t* const from = view(of);
  for (uint32_t i = 0; i < map.view_words(); i++) to[i] = from[i];
  return id;
}

void Memory::join(Id to, Id from) {
  if (to == from || from == 0) return;
  uint32_t* const a = view(to);
  const uint32_t* const b = view(from);
  for (uint32_t i = 0; i < map.view_words(); i++) a[i] = a[i] < b[i] ? b[i] : a[i];
}

Id Memory::new_message() {
  if (!free_messages.empty()) {
    const Id id = free_messages.back();
    free_messages.pop_back();
    return id;
  }
  if (messages.size() >= kNoId) fail("the model has no room for more messages");
  messages.push_back(Message{});
  return Id(messages.size() - 1);
}

Message& Memory::latest(uint32_t place) {
  if (place >= newest.size()) {
    newest.resize(map.places.size(), kNoId);
    accesses.resize(map.places.size() * 2 * map.slots, 0);
  }
  if (newest[place] == kNoId) {
    const Id id = new_message();
    messages[id] = Message{map.initial(map.places[place].at, map.places[place].bytes), 0, kNoId, 0, 0, 0, 0xff, false, 0};
    newest[place] = id;
  }
  return messages[newest[place]];
}

void Memory::start(Knowledge& k, Id view_id, uint32_t slot) {
  k.now = copy_view(view_id);
  k.acquired = copy_view(view_id);
  k.released = copy_view(view_id);
  k.before = copy_view(view_id);
  k.system = k.offered = 0;
  if (by_waves) {
    k.system = copy_view(view_id);
    k.offered = new_view();
  }
  k.now_copy = kNoId;
  k.released_copy = k.before;
  k.published = true;
  touch(k, slot);
}

void Memory::learn(Knowledge& k, Id view_id) {
  join(k.now, view_id);
  join(k.acquired, view_id);
  if (by_waves) join(k.system, view_id);
  k.now_copy = kNoId;
}

void Memory::touch(Knowledge& k, uint32_t slot) {
  if (!k.published) return;
  k.published = false;
  k.now_copy = kNoId;
  const uint32_t next = ++view(k.now)[map.contended + slot];
  view(k.acquired)[map.contended + slot] = next;
}

}  // namespace model
