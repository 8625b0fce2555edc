#include "explore.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fibre.h"

namespace model {

namespace {

// For a replay: the number of contended places that the run was made with; a search ends as soon as it knows as many.
uint32_t enough = ~0u;

double now() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);  // other programs do not count
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

// A state that the search comes back to: the world, and what the fibres have on their stacks.
struct Copy {
  World world;
  Question question;
  std::vector<unsigned char> stacks;
  std::vector<unsigned char> shared;
};

template <class Visit>
void for_each_stack(const World& of, Visit visit) {
  for (uint32_t s = 0; s < of.threads.size(); s++) {
    const Thread& t = of.threads[s];
    if (t.state == State::kFree || t.state == State::kDone) continue;
    unsigned char* const top = stacks[s] + kStackBytes;
    unsigned char* const from = static_cast<unsigned char*>(t.stack);
    visit(from, size_t(top - from));
  }
}

void save(Copy& copy) {
  copy.world = world;
  copy.stacks.clear();
  for_each_stack(world, [&](unsigned char* at, size_t bytes) { copy.stacks.insert(copy.stacks.end(), at, at + bytes); });
  copy.shared.clear();
  for (uint32_t n = 0; n < world.blocks.size(); n++) {
    if (world.blocks[n].threads != 0) copy.shared.insert(copy.shared.end(), shared_bytes[n], shared_bytes[n] + kSharedBytes);
  }
}

void put_back(const Copy& copy) {
  world = copy.world;
  const unsigned char* from = copy.stacks.data();
  for_each_stack(world, [&](unsigned char* at, size_t bytes) {
    memcpy(at, from, bytes);
    from += bytes;
  });
  from = copy.shared.data();
  for (uint32_t n = 0; n < world.blocks.size(); n++) {
    if (world.blocks[n].threads == 0) continue;
    memcpy(shared_bytes[n], from, kSharedBytes);
    from += kSharedBytes;
  }
}

// Hashes of states.
class Seen {
 public:
  Seen() : table_(1 << 16) {}
  // True when it is new.
  bool add(uint64_t hash) {
    hash |= hash == 0;
    if (count_ * 2 > table_.size()) grow();
    size_t i = hash & (table_.size() - 1);
    for (; table_[i] != 0; i = (i + 1) & (table_.size() - 1)) {
      if (table_[i] == hash) return false;
    }
    table_[i] = hash;
    count_++;
    return true;
  }
  uint64_t count() const { return count_; }

 private:
  void grow() {
    std::vector<uint64_t> old(table_.size() * 2);
    old.swap(table_);
    for (const uint64_t hash : old) {
      if (hash == 0) continue;
      size_t i = hash & (table_.size() - 1);
      while (table_[i] != 0) i = (i + 1) & (table_.size() - 1);
      table_[i] = hash;
    }
  }
  std::vector<uint64_t> table_;
  uint64_t count_ = 0;
};

// Schedules as text: `x` for the exhaustive search or `r` and the seed, how many contended places were known, and one digit of base
// 62 for each answer.
const char kDigits[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
char digit(uint32_t option) { return option < 62 ? kDigits[option] : '?'; }
uint32_t option_of(char c) { return uint32_t(strchr(kDigits, c) - kDigits); }

std::string stuck() { return "deadlock: nobody gets further, not even by what is newest\n" + waiting(); }

struct Node {
  Copy copy;
  uint32_t taken = 0;  // the option that is being followed
  uint32_t options = 0;
  bool schedules = false;
  bool progress = false;  // of a kSchedule: some thread gets further by what is newest
};

}  // namespace

Result explore(const Setup& s, double seconds_limit) {
  Result result;
  const double began = now();
  std::vector<Node> nodes;  // never shrinks, so that the copies keep their memory
  Setup exhaustive = s;
  exhaustive.exhaustive = true;
restart:
  if (map.contended == enough) return result;
  Seen seen;
  size_t depth = 0;
  const auto path = [&](size_t length) {
    std::string text = "x" + std::to_string(map.contended) + ".";
    for (size_t i = 0; i < length; i++) text += digit(nodes[i].taken);
    return text;
  };
  const auto finish = [&] {
    result.states = seen.count();
    result.seconds = now() - began;
    return result;
  };
  begin(exhaustive);
  for (uint64_t rounds = 1;; rounds++) {
    const uint32_t before = world.steps;
    const Question q = go();
    result.steps += world.steps - before;
    bool on = false;
    const bool may_expire = world.expiries > 0 && polls_per_check != kForever;
    if (q.ask == Ask::kSchedule || q.ask == Ask::kEnd || q.ask == Ask::kStuck || (q.ask == Ask::kTurnBack && may_expire)) {
      // The step from the last kSchedule is complete, or its thread would find in the next round that its deadline has passed.
      if (world.fresh) {
        for (size_t i = depth; i-- > 0;) {
          if (!nodes[i].schedules) continue;
          nodes[i].progress = true;
          break;
        }
      }
    }
    switch (q.ask) {
      case Ask::kAgain: goto restart;
      case Ask::kSchedule: on = seen.add(digest()); break;
      case Ask::kRead:
      case Ask::kWrite:
      case Ask::kExpire: on = true; break;
      case Ask::kEnd:
        if (s.ended != nullptr) s.ended();
        break;
      case Ask::kTurnBack: break;
      case Ask::kStuck:
      case Ask::kFail:
        result.failed = true;
        result.what = q.ask == Ask::kFail ? failure : stuck();
        result.schedule = path(depth);
        return finish();
    }
    if (on) {
      if (depth == nodes.size()) nodes.emplace_back();
      Node& node = nodes[depth++];
      node.taken = 0;
      node.options = q.options;
      node.schedules = q.ask == Ask::kSchedule;
      node.progress = false;
      node.copy.question = q;
      save(node.copy);
    } else {
      result.runs++;
      for (;; depth--) {
        if (depth == 0) {
          result.complete = true;
          return finish();
        }
        Node& node = nodes[depth - 1];
        if (++node.taken < node.options) break;
        if (!node.schedules || node.progress) continue;
        put_back(node.copy);
        result.failed = true;
        result.what = stuck();
        result.schedule = path(depth - 1);
        return finish();
      }
      put_back(nodes[depth - 1].copy);
      // `go` finds the threads that can be chosen, and asks again.
      if (nodes[depth - 1].schedules) go();
    }
    ask_again(nodes[depth - 1].copy.question);
    answer(nodes[depth - 1].taken);
    if (rounds % 1024 == 0 && now() - began > seconds_limit) return finish();
  }
}

namespace {

uint64_t random_state;
uint64_t random_word() {
  random_state += 0x9e3779b97f4a7c15u;
  uint64_t x = random_state;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}
uint32_t random_below(uint32_t n) { return uint32_t(random_word() % n); }

}  // namespace

Result explore_at_random(const Setup& s, uint64_t runs, uint64_t seed, double seconds_limit) {
  Result result;
  const double began = now();
  Setup random = s;
  random.exhaustive = false;
  for (result.runs = 0; result.runs < runs; result.runs++) {
    if (now() - began > seconds_limit) break;
    const uint64_t run_seed = seed + result.runs;
  again:
    if (map.contended == enough) return result;
    random_state = run_seed * 0x9e3779b97f4a7c15u;
      begin(random);
    uint32_t priority[kMaxSlots], lowest = 0;
    for (uint32_t i = 0; i < kMaxSlots; i++) priority[i] = 1000000 + random_below(1000000);
    // How often the first becomes the last, and how often a read sees what is old, differs from run to run.
    const uint32_t changes = 4 + random_below(60), stale = 2 + random_below(14);
    std::string schedule = "r" + std::to_string(seed) + "." + std::to_string(map.contended) + ".";
    for (;;) {
      const Question q = go();
      uint32_t option = 0;
      if (q.ask == Ask::kSchedule) {
        for (uint32_t i = 1; i < q.options; i++) {
          if (priority[slot_of(i)] > priority[slot_of(option)]) option = i;
        }
        const uint32_t chosen = slot_of(option);
        // A thread that polled in vain lets the others go first.
        if (random_below(changes) == 0 || world.threads[chosen].state == State::kRelaxed) priority[chosen] = 1000000 - ++lowest;
      } else if (q.ask == Ask::kRead || q.ask == Ask::kWrite) {
        if (random_below(stale) == 0) option = 1 + random_below(q.options - 1);
      } else if (q.ask == Ask::kExpire) {
        option = random_below(16) == 0;
      } else if (q.ask == Ask::kAgain) {
        goto again;
      } else {
        result.steps += world.steps;
        if (q.ask == Ask::kEnd) {
          if (s.ended != nullptr) s.ended();
          break;
        }
        result.failed = true;
        result.what = q.ask == Ask::kFail ? failure : stuck();
        result.schedule = schedule;
        result.runs++;
        result.seconds = now() - began;
        return result;
      }
      schedule += digit(option);
      answer(option);
    }
  }
  result.complete = result.runs == runs;
  result.seconds = now() - began;
  return result;
}

Result replay(const Setup& s, const std::string& schedule) {
  Result result;
  Setup as = s;
  as.exhaustive = schedule[0] == 'x';
  result.schedule = schedule;
  // The same search finds the same contended places in the same order.
  const size_t last = schedule.rfind('.');
  const char* text = schedule.c_str() + 1;
  char* end;
  const uint64_t first = strtoull(text, &end, 10);
  enough = as.exhaustive ? uint32_t(first) : uint32_t(strtoul(end + 1, nullptr, 10));
  if (map.contended != enough) {
    if (as.exhaustive) {
      explore(s, 1e9);
    } else {
      explore_at_random(s, ~0ull, first, 1e9);
    }
  }
  enough = ~0u;
  tracing = true;
  begin(as);
  for (size_t next = last + 1;; next++) {
    const Question q = go();
    if (q.ask == Ask::kEnd || q.ask == Ask::kTurnBack || q.ask == Ask::kAgain) break;
    if (q.ask == Ask::kStuck || q.ask == Ask::kFail || next == schedule.size()) {
      result.failed = true;
      result.what = q.ask == Ask::kFail ? failure : stuck();
      break;
    }
    answer(option_of(schedule[next]));
  }
  tracing = false;
  result.steps = world.steps;
  return result;
}

}  // namespace model
