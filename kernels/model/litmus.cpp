#include "litmus.h"

#include <stdio.h>

#include <set>
#include <string>
#include <vector>

#include "explore.h"
#include "places.h"

namespace model {

namespace {

void* place(uint32_t n) { return reinterpret_cast<void*>(base_of(0) + n * 4); }
void set(uint32_t n, uint32_t value) { write(place(n), 4, value, false); }
void release(uint32_t n, uint32_t value) { write(place(n), 4, value, true); }
uint64_t get(uint32_t n) { return read(place(n), 4); }
uint64_t get_acquire(uint32_t n) { return read_acquire(place(n), 4); }
// What a thread saw, in the order in which it did.
void saw(uint32_t thread, uint64_t value) { world.notes[thread] = world.notes[thread] * 10 + value; }

constexpr uint32_t kX = 0, kY = 1;

struct Test {
  const char* name;
  uint32_t threads;
  void (*run)(uint32_t thread);
  // What each thread saw, and after a `/` what x and y are at the end.
  std::set<std::string> outcomes;
  std::vector<uint32_t> digits;  // by thread: values seen
  bool finals;
};

const Test* test;
std::set<std::string> found;

void ended() {
  std::string text;
  for (uint32_t t = 0; t < test->threads; t++) {
    std::string part = std::to_string(world.notes[t]);
    while (part.size() < test->digits[t]) part = "0" + part;
    if (test->digits[t] != 0) text += part;
  }
  if (test->finals) text += "/" + std::to_string(peek(base_of(0), 4)) + std::to_string(peek(base_of(0) + 4, 4));
  found.insert(text);
}

uint64_t zero(uint64_t, uint32_t) { return 0; }

// Kernels for the test of their boundaries: thread 0's rank writes x in one and y in the next, thread 1's reads y in one and x
// in the next.
void write_x(const void*) { set(kX, 1); }
void write_y(const void*) { set(kY, 1); }
void read_y(const void*) { saw(1, get(kY)); }
void read_x(const void*) { saw(1, get(kX)); }
void write_x_and_y(const void*) { set(kX, 1), set(kY, 1); }

const std::vector<Test>& tests() {
  static const std::vector<Test> all = {
      {"message passing, relaxed", 2, [](uint32_t t) {
         if (t == 0) set(kX, 1), set(kY, 1);
         if (t == 1) saw(1, get(kY)), saw(1, get(kX));
       }, {"00", "01", "10", "11"}, {0, 2}, false},
      {"message passing, released and acquired", 2, [](uint32_t t) {
         if (t == 0) set(kX, 1), release(kY, 1);
         if (t == 1) saw(1, get_acquire(kY)), saw(1, get(kX));
       }, {"00", "01", "11"}, {0, 2}, false},
      {"message passing, released and not acquired", 2, [](uint32_t t) {
         if (t == 0) set(kX, 1), release(kY, 1);
         if (t == 1) saw(1, get(kY)), saw(1, get(kX));
       }, {"00", "01", "10", "11"}, {0, 2}, false},
      {"message passing, acquired and not released", 2, [](uint32_t t) {
         if (t == 0) set(kX, 1), set(kY, 1);
         if (t == 1) saw(1, get_acquire(kY)), saw(1, get(kX));
       }, {"00", "01", "10", "11"}, {0, 2}, false},
      {"store buffering", 2, [](uint32_t t) {
         release(t == 0 ? kX : kY, 1);
         saw(t, get_acquire(t == 0 ? kY : kX));
       }, {"00", "01", "10", "11"}, {1, 1}, false},
      // Reads wait for writes in this model, never the other way about.
      {"load buffering", 2, [](uint32_t t) {
         saw(t, get(t == 0 ? kX : kY));
         set(t == 0 ? kY : kX, 1);
       }, {"00", "01", "10"}, {1, 1}, false},
      {"one place is coherent", 2, [](uint32_t t) {
         if (t == 0) set(kX, 1), set(kX, 2);
         if (t == 1) saw(1, get(kX)), saw(1, get(kX));
       }, {"00", "01", "02", "11", "12", "22"}, {0, 2}, false},
      {"two readers agree on one place", 4, [](uint32_t t) {
         if (t < 2) set(kX, t + 1);
         if (t >= 2) saw(t, get(kX)), saw(t, get(kX));
       }, {"0000", "0001", "0002", "0011", "0012", "0021", "0022", "0100", "0101", "0102", "0111", "0112", "0121", "0122", "0200", "0201",
           "0202", "0211", "0212", "0221", "0222", "1100", "1101", "1102", "1111", "1112", "1121", "1122", "1200", "1201", "1202", "1211",
           "1212", "1222", "2100", "2101", "2102", "2111", "2121", "2122", "2200", "2201", "2202", "2211", "2212", "2221", "2222",
           "2111", "1222"}, {0, 0, 2, 2}, false},
      {"writes land late", 2, [](uint32_t t) {
         if (t == 0) set(kX, 1), set(kY, 2);
         if (t == 1) set(kY, 1), set(kX, 2);
       }, {"/11", "/12", "/21", "/22"}, {0, 0}, true},
      {"writes land late, relaxed behind what was read", 2, [](uint32_t t) {
         if (t == 0) set(kX, 2), set(kY, 1);
         if (t == 1) saw(1, get(kY)), set(kX, 1);
       }, {"0/11", "0/21", "1/11", "1/21"}, {0, 1}, true},
      {"a write lands behind what was acquired", 2, [](uint32_t t) {
         if (t == 0) set(kX, 2), release(kY, 1);
         if (t == 1) saw(1, get_acquire(kY)), set(kX, 1);
       }, {"0/11", "0/21", "1/11"}, {0, 1}, true},
      {"what was acquired is released again", 3, [](uint32_t t) {
         if (t == 0) release(kX, 1);
         if (t == 1) saw(1, get_acquire(kX)), release(kY, 1);
         if (t == 2) saw(2, get_acquire(kY)), saw(2, get(kX));
       }, {"000", "001", "010", "011", "100", "101", "111"}, {0, 1, 2}, false},
      {"two readers may disagree on two places", 4, [](uint32_t t) {
         if (t < 2) release(t, 1);
         if (t == 2) saw(2, get_acquire(kX)), saw(2, get(kY));
         if (t == 3) saw(3, get_acquire(kY)), saw(3, get(kX));
       }, {"0000", "0001", "0010", "0011", "0100", "0101", "0110", "0111", "1000", "1001", "1010", "1011", "1100", "1101", "1110", "1111"},
       {0, 0, 2, 2}, false},
      {"read-modify-writes follow each other", 2, [](uint32_t t) {
         saw(t, add(static_cast<uint32_t*>(place(kX)), 1));
       }, {"01/20", "10/20"}, {1, 1}, true},
      {"a read-modify-write joins what it read, be that old", 2, [](uint32_t t) {
         if (t == 0) set(kX, 5), set(kY, 1);
         if (t == 1) saw(1, get(kY)), saw(1, add(static_cast<uint32_t*>(place(kX)), 1));
       }, {"00/51", "05/61", "10/51", "15/61"}, {0, 2}, true},
      {"kernels that follow each other are ordered", 2, [](uint32_t t) {
         const uint32_t stream = t;
         launch(stream, t == 0 ? write_x : read_y, nullptr, 0, "first", 1, 1, false);
         launch(stream, t == 0 ? write_y : read_x, nullptr, 0, "second", 1, 1, false);
         wait_for(uint64_t(1) << stream);
       }, {"00", "01", "11"}, {0, 2}, false},
      {"writes of one kernel are not", 2, [](uint32_t t) {
         const uint32_t stream = t;
         launch(stream, t == 0 ? write_x_and_y : read_y, nullptr, 0, "first", 1, 1, false);
         if (t == 1) launch(stream, read_x, nullptr, 0, "second", 1, 1, false);
         wait_for(uint64_t(1) << stream);
       }, {"00", "01", "10", "11"}, {0, 2}, false},
  };
  return all;
}

std::string list(const std::set<std::string>& outcomes, const std::set<std::string>& but) {
  std::string text;
  for (const std::string& o : outcomes) {
    if (but.count(o) == 0) text += " " + o;
  }
  return text;
}

}  // namespace

bool run_litmus() {
  bool good = true;
  uint64_t runs = 0;
  for (const Test& t : tests()) {
    test = &t;
    map.clear();
    map.initial = zero;
    lenient = by_waves = false;
    polls_per_check = kForever;
    Setup s{};
    s.ranks = t.threads;
    s.streams = s.slots = 1;
    s.atoms = 4;
    s.host = t.run;
    s.ended = ended;
    for (const bool random : {false, true}) {
      found.clear();
      const Result r = random ? explore_at_random(s, 20000, 1, 60) : explore(s, 60);
      runs += r.runs;
      if (!r.failed && r.complete && found == t.outcomes) continue;
      good = false;
      printf("litmus: %s, %s: not seen:%s; seen and not possible:%s\n", t.name, random ? "at random" : "all schedules",
             list(t.outcomes, found).c_str(), list(found, t.outcomes).c_str());
      if (r.failed) printf("%s\n", r.what.c_str());
    }
  }
  printf("litmus: %zu programs, all schedules and random ones, %llu runs: %s\n", tests().size(), (unsigned long long)runs,
         good ? "ok" : "FAILED");
  return good;
}

}  // namespace model
