// The scenarios. What is not explored completely is run at random, as all others are too.
#include "scenario.h"

namespace model {

namespace {

Call barrier(uint32_t blocks, uint32_t threads, uint32_t domain = 0) {
  return Call{Kind::kBarrier, 'f', 0, false, false, domain, blocks, threads};
}
Call probe(uint32_t rounds, uint32_t threads) { return Call{Kind::kProbe, 'f', rounds, false, false, 0, 1, threads}; }
Call check(uint32_t threads) { return Call{Kind::kCheck, 'f', 0, false, false, 0, 1, threads}; }
Call lamport(uint32_t count, char type, uint32_t blocks, uint32_t threads) {
  return Call{Kind::kLamport, type, count, false, false, 0, blocks, threads};
}
Call one_stage(uint32_t count, uint32_t blocks, uint32_t threads) {
  return Call{Kind::kOneStage, 'f', count, false, false, 0, blocks, threads};
}
Call two_stage(uint32_t count, uint32_t blocks, uint32_t threads) {
  return Call{Kind::kTwoStage, 'f', count, false, false, 0, blocks, threads};
}
Call staged(Call c) { return c.staged = true, c; }
Call in_place(Call c) { return c.in_place = true, c; }
Call on_domain(uint32_t domain, Call c) { return c.domain = domain, c; }

struct List {
  std::vector<Scenario> all;
  bool relaxed = false;

  Scenario& add(const char* name, uint32_t world, std::vector<Call> calls) {
    all.push_back(Scenario{});
    Scenario& s = all.back();
    s.name = std::string(name) + (relaxed ? "-relaxed" : "");
    s.world = world;
    s.calls = std::move(calls);
    s.relaxed = relaxed;
    return s;
  }
  Scenario& at_random(const char* name, uint32_t world, std::vector<Call> calls) {
    Scenario& s = add(name, world, std::move(calls));
    s.exhaustive = false;
    return s;
  }
  // With the paths behind the first polls; packs and lines land whole, which others look at.
  Scenario& faulty(const char* name, Story story, std::vector<Call> calls, uint32_t expiries = 0) {
    Scenario& s = add(name, 2, std::move(calls));
    s.story = story;
    s.expiries = expiries;
    s.watch_polls = true;
    s.atoms = 1;
    return s;
  }
};

// Two ranks, blocks of two threads.
void add_barriers(List& l) {
  l.add("barrier", 2, {barrier(1, 2), barrier(1, 2), barrier(1, 2)}).counters = 0xfffffffe;
  l.add("barrier-blocks", 2, {barrier(2, 2), barrier(2, 2)});
  l.add("probe", 2, {probe(3, 2)}).counters = 0xfffffffd;
  l.add("domains", 2, {barrier(1, 2, 0), barrier(1, 2, 1), barrier(1, 2, 0), barrier(1, 2, 1)});
  l.add("mismatch", 2, {check(2)}).story = Story::kMismatch;
}

void add_stages(List& l) {
  const Call one = one_stage(8, 1, 2), two = two_stage(8, 1, 2);
  l.add("one-stage", 2, {one, one, one}).counters = 0xfffffffd;
  l.add("one-stage-staged", 2, {staged(one), staged(one)});
  l.add("one-stage-mixed", 2, {one, staged(one), in_place(one)});
  l.add("one-stage-windows", 2, {staged(one_stage(10, 1, 2)), one_stage(10, 1, 2)}).scratch = 32;
  l.add("one-stage-blocks", 2, {one_stage(16, 2, 2), one_stage(16, 2, 2)}).exhaustive = !l.relaxed;
  l.add("one-stage-ragged", 2, {one_stage(5, 1, 2), one_stage(7, 1, 2)}).shift = 4;
  l.add("two-stage", 2, {two, two});
  l.add("two-stage-in-place", 2, {in_place(two), in_place(two)});
  l.add("two-stage-staged", 2, {staged(two_stage(10, 1, 2)), staged(two)}).scratch = 48;
  l.add("two-stage-blocks", 2, {two_stage(16, 2, 2), staged(two_stage(32, 2, 2))}).exhaustive = !l.relaxed;
}

void add_lamport(List& l) {
  const Call large = lamport(8, 'f', 1, 2), small = lamport(4, 'f', 1, 2), halves = lamport(8, 'b', 1, 2);
  l.add("lamport", 2, {large, small, large});
  l.add("lamport-types", 2, {large, halves, large, large}).extent = false;
  l.add("lamport-wrap", 2, {small, small, small, small}).flag = 0xfffffffd;
  l.add("lamport-zeros", 2, {large, halves}).zeros = true;
  l.add("lamport-empty", 2, {small, lamport(0, 'f', 1, 2), lamport(0, 'f', 1, 2), small});
  l.add("lamport-ragged", 2, {lamport(5, 'f', 1, 2), lamport(3, 'b', 1, 2), lamport(7, 'f', 1, 2)}).shift = 4;
  // More packs than a call leaves to the next one to clear.
  Scenario& more = l.add("lamport-more", 2, {lamport(16, 'f', 1, 2), small, lamport(16, 'f', 1, 2), lamport(16, 'f', 1, 2)});
  more.atoms = 1;
  l.add("lamport-blocks", 2, {lamport(8, 'f', 2, 1), lamport(4, 'f', 1, 1), lamport(8, 'f', 2, 1)}).atoms = 2;
}

void add_mixed(List& l) {
  const Call one = one_stage(8, 1, 2), small = lamport(4, 'f', 1, 2);
  l.add("mixed", 2, {small, one_stage(4, 1, 2), barrier(1, 2), small});
  l.add("init", 2, {small, one}).story = Story::kInit;
  l.add("early", 2, {small, small, small}).early = true;
  l.add("early-mixed", 2, {small, one, small}).early = true;
}

// One thread stands for all ranks, or each for one.
void add_three(List& l) {
  const uint32_t each = l.relaxed ? 3 : 1;
  const Call one = one_stage(4, 1, each), two = two_stage(8, 1, each);
  l.add("barrier-3", 3, {barrier(1, each), barrier(1, each), barrier(1, each)});
  l.add("probe-3", 3, {probe(2, each)});
  if (l.relaxed) {
    l.add("one-stage-3", 3, {one}).atoms = 1;
    l.add("two-stage-3", 3, {two}).atoms = 1;
    l.add("two-stage-3-staged", 3, {staged(two), staged(two)});
  } else {
    l.add("one-stage-3", 3, {one, one});
    l.add("two-stage-3", 3, {two, staged(two_stage(12, 1, each))});
  }
  l.add("lamport-3", 3, {lamport(4, 'f', 1, 1), lamport(4, 'f', 1, 1), lamport(4, 'f', 1, 1)}).atoms = 2;
}

void add_faults(List& l) {
  const Call one = one_stage(8, 1, 2), two = two_stage(8, 1, 2), small = lamport(4, 'f', 1, 2), meet = barrier(1, 2);
  l.faulty("absent-barrier", Story::kAbsent, {meet, meet}, 1);
  l.faulty("absent-one-stage", Story::kAbsent, {one, one}, 1).exhaustive = !l.relaxed;
  l.faulty("absent-lamport", Story::kAbsent, {small, small}, 1);
  l.faulty("late-barrier-once", Story::kLate, {meet}, 1);
  l.faulty("late-one-stage-once", Story::kLate, {staged(one)}, 1);
  l.faulty("late-lamport-once", Story::kLate, {small}, 1);
  l.faulty("abort-barrier", Story::kAbort, {meet, meet});
  l.faulty("abort-one-stage-once", Story::kAbort, {one}).exhaustive = !l.relaxed;
  l.faulty("abort-lamport", Story::kAbort, {small, small});
  l.faulty("late-barrier", Story::kLate, {meet, meet}, 2).exhaustive = false;
  l.faulty("late-one-stage", Story::kLate, {staged(one), staged(one)}, 2).exhaustive = false;
  l.faulty("late-two-stage", Story::kLate, {two, two}, 2).exhaustive = false;
  l.faulty("late-lamport", Story::kLate, {small, small}, 2).exhaustive = false;
  l.faulty("abort-one-stage", Story::kAbort, {one, staged(one)}).exhaustive = false;
  // More blocks than packs: the last block to arrive may have nothing to wait for.
  l.faulty("late-lamport-blocks", Story::kLate, {lamport(4, 'f', 2, 1), lamport(4, 'f', 2, 1), lamport(4, 'f', 2, 1)}, 2).exhaustive = false;
  Scenario& early = l.faulty("late-early", Story::kLate, {small, small, small}, 2);
  early.early = true;
  early.exhaustive = false;
  // Two kernels of a rank that leave at once, of which one reports.
  l.faulty("late-domains", Story::kLate, {staged(one), on_domain(1, staged(one))}, 2).exhaustive = false;
  l.faulty("abort-domains", Story::kAbort, {staged(one), on_domain(1, staged(one))}).exhaustive = false;
}

void add_larger(List& l) {
  const uint32_t t = l.relaxed ? 4 : 1;
  l.at_random("barrier-4", 4, {barrier(2, t), barrier(1, t), barrier(2, t)}).counters = 0xfffffffe;
  l.at_random("one-stage-4", 4, {one_stage(20, 2, t), staged(one_stage(32, 2, t)), in_place(one_stage(7, 1, t))});
  l.at_random("two-stage-4", 4, {two_stage(40, 2, t), staged(two_stage(56, 2, t))}).scratch = 160;
  Scenario& calls = l.at_random("lamport-4", 4, {lamport(24, 'f', 2, t), lamport(8, 'b', 1, t), lamport(32, 'f', 2, t),
                                                 lamport(4, 'f', 1, t), lamport(24, 'b', 2, t), lamport(32, 'f', 2, t)});
  calls.flag = 0xfffffffb;
  calls.runs = 100;
  l.at_random("mixed-3", 3, {lamport(16, 'f', 1, t), one_stage(16, 2, t), barrier(1, t), lamport(24, 'b', 2, t),
                             two_stage(24, 2, t), lamport(4, 'f', 1, t)});
  l.at_random("early-3", 3, {lamport(8, 'f', 2, t), lamport(12, 'f', 1, t), one_stage(8, 1, t), lamport(8, 'f', 2, t),
                             lamport(8, 'b', 1, t)})
      .early = true;
  l.at_random("domains-3", 3, {barrier(1, t), on_domain(1, staged(two_stage(24, 2, t))), lamport(8, 'f', 1, t),
                               on_domain(1, one_stage(8, 1, t)), one_stage(12, 1, t), barrier(1, t, 1)});
  Scenario& late = l.at_random("late-3", 3, {lamport(8, 'f', 1, t), staged(two_stage(12, 1, t)), barrier(1, t)});
  late.story = Story::kLate;
  late.watch_polls = true;
  late.expiries = 2;
}

}  // namespace

std::vector<Scenario> scenarios() {
  List list;
  for (const bool relaxed : {false, true}) {
    list.relaxed = relaxed;
    add_barriers(list);
    add_stages(list);
    add_lamport(list);
    add_mixed(list);
    add_three(list);
    add_faults(list);
    add_larger(list);
  }
  return list.all;
}

}  // namespace model
