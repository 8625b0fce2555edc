// The scenarios. What is not explored completely is run at random.
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
Call by_user(Call c) {
  c.user = true;
  return c;
}
// Of so many packs, in windows of so many.
Call two_shot(uint32_t packs, uint32_t window, uint32_t blocks, uint32_t threads) {
  Call c{Kind::kTwoShot, 'f', packs * 4, false, false, 0, blocks, threads};
  c.window = window;
  return c;
}
// So many rows of so many packs.
Call norm(uint32_t rows, uint32_t packs, uint32_t blocks, uint32_t threads) {
  Call c{Kind::kNorm, 'f', rows * packs * 4, false, false, 0, blocks, threads};
  c.window = packs;
  return c;
}
// The same in two stages, so many rows of a shard at a time.
Call two_stage_norm(uint32_t rows, uint32_t packs, uint32_t window_rows, uint32_t blocks, uint32_t threads) {
  Call c = norm(rows, packs, blocks, threads);
  c.push = true;
  c.room = window_rows;
  return c;
}
Call one_stage(uint32_t count, uint32_t blocks, uint32_t threads) {
  return Call{Kind::kOneStage, 'f', count, false, false, 0, blocks, threads};
}
Call two_stage(uint32_t count, uint32_t blocks, uint32_t threads) {
  return Call{Kind::kTwoStage, 'f', count, false, false, 0, blocks, threads};
}
Call exchange(Kind kind, Pieces pieces, uint32_t count, uint32_t blocks, uint32_t threads) {
  Call c{kind, 'f', count, false, false, 0, blocks, threads};
  c.pieces = pieces;
  return c;
}
Call move(Pieces pieces, uint32_t count, uint32_t blocks, uint32_t threads) {
  return exchange(Kind::kMove, pieces, count, blocks, threads);
}
Call reduce_scatter(uint32_t count, uint32_t blocks, uint32_t threads) {
  return exchange(Kind::kReduceScatter, Pieces::kEach, count, blocks, threads);
}
Call reduce_to_first(uint32_t count, uint32_t blocks, uint32_t threads) {
  return exchange(Kind::kReduceScatter, Pieces::kToFirst, count, blocks, threads);
}
Call lines_move(Pieces pieces, uint32_t count, uint32_t blocks, uint32_t threads) {
  return exchange(Kind::kLinesMove, pieces, count, blocks, threads);
}
Call lines_reduce(Pieces pieces, uint32_t count, uint32_t blocks, uint32_t threads) {
  return exchange(Kind::kLinesReduce, pieces, count, blocks, threads);
}
// Counts of as many elements as pieces would have, and room for so many.
Call counted(Pieces pieces, uint32_t count, uint32_t room, uint32_t blocks, uint32_t threads) {
  Call c = exchange(Kind::kMoveCounted, pieces, count, blocks, threads);
  c.room = room;
  return c;
}
Call pushed(Call c) { return c.push = true, c; }
Call staged(Call c) { return c.staged = true, c; }
Call staged_but_at(uint32_t rank, Call c) { return c.direct |= 1u << rank, staged(c); }
Call in_place(Call c) { return c.in_place = true, c; }
Call on_domain(uint32_t domain, Call c) { return c.domain = domain, c; }
Call without(uint32_t rank, Call c) { return c.without |= 1u << rank, c; }
Call of_halves(Call c) { return c.type = 'b', c; }

constexpr uint32_t kLastLines = 0xfffffffd;  // calls by lines, behind which the count starts anew

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
  l.add("user-pull", 2, {by_user(staged(one)), staged(one), by_user(staged(one))});
  l.add("one-stage-mixed", 2, {one, staged(one), in_place(one)});
  l.add("one-stage-windows", 2, {staged(one_stage(10, 1, 2)), one_stage(10, 1, 2)}).scratch = 32;
  l.add("one-stage-blocks", 2, {one_stage(16, 2, 2), one_stage(16, 2, 2)}).exhaustive = !l.relaxed;
  l.add("one-stage-ragged", 2, {one_stage(5, 1, 2), one_stage(7, 1, 2)}).shift = 4;
  l.add("two-stage", 2, {two, two});
  l.add("two-stage-in-place", 2, {in_place(two), in_place(two)});
  const uint32_t for_peers = l.relaxed ? 2 : 1;  // threads: each stands for one rank
  l.add("norm-two-stage", 2, {two_stage_norm(2, 1, 1, 1, for_peers), two_stage_norm(4, 1, 1, 1, for_peers), one});
  l.add("norm-two-stage-blocks", 2, {two_stage_norm(3, 1, 2, 2, for_peers)}).exhaustive = !l.relaxed;
  l.add("two-stage-staged", 2, {staged(two_stage(10, 1, 2)), staged(two)}).scratch = 48;
  l.add("two-stage-blocks", 2, {two_stage(16, 2, 2), staged(two_stage(32, 2, 2))}).exhaustive = !l.relaxed;
}

void add_lamport(List& l) {
  const Call large = lamport(8, 'f', 1, 2), small = lamport(4, 'f', 1, 2), halves = lamport(8, 'b', 1, 2);
  l.add("lamport", 2, {large, small, large});
  l.add("lamport-types", 2, {large, halves, large, large}).extent = false;
  const Call users = by_user(large), small_of_user = by_user(small);
  l.add("user", 2, {users, small, users});
  l.add("user-types", 2, {users, by_user(halves), large, users}).extent = false;
  l.add("user-zeros", 2, {users, by_user(halves)}).zeros = true;
  l.add("user-ragged", 2, {by_user(lamport(5, 'f', 1, 2)), lamport(3, 'b', 1, 2), by_user(lamport(7, 'f', 1, 2))}).shift = 4;
  l.add("user-blocks", 2, {by_user(lamport(8, 'f', 2, 1)), small_of_user, by_user(lamport(8, 'f', 2, 1))}).atoms = 2;
  l.add("norm", 2, {norm(1, 2, 1, 2), large, norm(1, 2, 1, 2)});
  l.add("norm-rows", 2, {norm(2, 2, 1, 2), norm(2, 2, 1, 2)});
  l.add("norm-wide", 2, {norm(1, 4, 1, 2), in_place(norm(2, 1, 1, 2))});
  l.add("norm-blocks", 2, {norm(2, 1, 2, 1), norm(1, 1, 1, 1), norm(2, 1, 2, 1)}).atoms = 2;
  l.add("lamport-wrap", 2, {small, small, small, small}).flag = 0xfffffffd;
  l.add("lamport-zeros", 2, {large, halves}).zeros = true;
  l.add("lamport-empty", 2, {small, lamport(0, 'f', 1, 2), lamport(0, 'f', 1, 2), small});
  l.add("lamport-ragged", 2, {lamport(5, 'f', 1, 2), lamport(3, 'b', 1, 2), lamport(7, 'f', 1, 2)}).shift = 4;
  // More packs than a call leaves to the next one to clear.
  Scenario& more = l.add("lamport-more", 2, {lamport(16, 'f', 1, 2), small, lamport(16, 'f', 1, 2), lamport(16, 'f', 1, 2)});
  more.atoms = 1;
  l.add("lamport-blocks", 2, {lamport(8, 'f', 2, 1), lamport(4, 'f', 1, 1), lamport(8, 'f', 2, 1)}).atoms = 2;
  l.all.back().exhaustive = !l.relaxed;
}

// Windows of as many packs as a rank has threads, or of more rounds; two-shot calls in each order with Lamport calls, which leave packs.
void add_two_shot(List& l) {
  // Where one thread has one peer, it takes as many.
  const uint32_t t = l.relaxed ? 2 : 1;
  const auto whole = [&](const std::string& name, std::vector<Call> calls) -> Scenario& {
    Scenario& s = l.add(name.c_str(), 2, std::move(calls));
    s.atoms = 1;
    s.runs = 100;
    return s;
  };
  const auto windows = [&](uint32_t n, uint32_t rounds = 1) { return two_shot(n * rounds * t, rounds * t, 1, t); };
  const Call small = lamport(4, 'f', 1, t), large = lamport(20, 'f', 1, t);
  whole("two-shot", {windows(1), windows(2), windows(3), windows(4), windows(5)}).counters = 0xfffffffe;
  whole("two-shot-down", {windows(5), windows(4), windows(3), windows(2), windows(1)});
  whole("two-shot-same", {windows(4), windows(4)}).atoms = 2;
  whole("two-shot-lamport", {large, windows(1), large, windows(2), large, windows(3), large, windows(4), large});
  whole("two-shot-small", {small, windows(3), small, windows(2), small, windows(1), large, windows(5), small});
  whole("two-shot-rounds", {windows(1, 2), windows(2, 2), windows(3, 2)});
  whole("two-shot-rounds-down", {windows(4, 2), windows(2, 3)}).exhaustive = !l.relaxed;
  whole("two-shot-rounds-lamport", {large, windows(2, 2), large, windows(4, 2), small, windows(1, 3), small}).exhaustive = !l.relaxed;
  // The last window is shorter, by whole rounds and by threads, and its last pack is not whole.
  whole("two-shot-short", {two_shot(7 * t, 3 * t, 1, t), small, two_shot(5 * t - 1, 2 * t, 1, t), two_shot(3, 2, 1, t)}).shift = 4;
  Call halves = of_halves(windows(3, 2));
  halves.count = halves.count * 2 - 3;
  whole("two-shot-zeros", {halves, small, windows(3)}).zeros = true;
  for (uint32_t before = 0; before < 4; before++) {
    whole("two-shot-wrap-" + std::to_string(before), {windows(1), large, windows(4), windows(2)}).flag = 0xfffffffe - before * 2;
  }
  whole("two-shot-early", {windows(3), small, windows(2)}).early = true;
  whole("two-shot-init", {windows(3), small}).story = Story::kInit;
  const auto by_two = [&](uint32_t packs, uint32_t window) { return two_shot(packs * t, window * t, 2, t); };
  if (!l.relaxed) {
    const Call by_waves = two_shot(6, 2, 1, 2);
    whole("two-shot-waves", {by_waves, lamport(20, 'f', 1, 2), by_waves});
  }
  const Call blocks = by_two(6, 2), two_rounds = by_two(8, 4);
  if (!l.relaxed) whole("two-shot-blocks", {blocks, small});
  l.at_random("two-shot-blocks-mixed", 2, {by_two(10, 2), large, two_rounds, windows(2), by_two(15, 4), small, by_two(3, 4), blocks});
}

// With sums that are sent on.
void add_two_shot_of_three(List& l) {
  const auto whole = [&](const std::string& name, std::vector<Call> calls) -> Scenario& {
    Scenario& s = l.add(name.c_str(), 3, std::move(calls));
    s.atoms = 1;
    s.runs = 100;
    return s;
  };
  const uint32_t u = l.relaxed ? 3 : 1;
  const auto windows = [&](uint32_t n) { return two_shot(n * 3 * u, 3 * u, 1, u); };
  const Call small = lamport(4, 'f', 1, u), large = lamport(20, 'f', 1, u);
  const auto short_rounds = [&](uint32_t packs) { return two_shot(packs, 4 * u, 1, u); };  // rounds that not all threads have a pack in
  if (!l.relaxed) {
    whole("two-shot-3", {windows(1), windows(1), windows(1), windows(1)});
    whole("two-shot-up-3", {windows(1), small, windows(2)});
    whole("two-shot-down-3", {windows(3), windows(2)});
    whole("two-shot-many-3", {windows(4)});
    whole("two-shot-large-3", {windows(3), large});
    whole("two-shot-rounds-3", {short_rounds(8 * u), large});
    whole("two-shot-wrap-3", {small, windows(2)}).flag = 0xfffffffe;
  }
  Scenario& more = l.at_random("two-shot-more-3", 3, {large, windows(5), windows(3), large, short_rounds(15 * u), small,
                                                      short_rounds(13 * u), windows(1), windows(4)});
  more.flag = 0xfffffff6;
  more.runs = 25;
}

void add_mixed(List& l) {
  const Call one = one_stage(8, 1, 2), small = lamport(4, 'f', 1, 2);
  l.add("mixed", 2, {small, one_stage(4, 1, 2), barrier(1, 2), small});
  l.add("init", 2, {small, one}).story = Story::kInit;
  l.add("early", 2, {small, small, small}).early = true;
  l.add("early-mixed", 2, {small, one, small}).early = true;
}

void add_exchange(List& l) {
  const Call each = move(Pieces::kEach, 4, 1, 2), same = move(Pieces::kSame, 4, 1, 2), ragged = move(Pieces::kRagged, 4, 1, 2);
  const Call sums = reduce_scatter(4, 1, 2);
  l.add("move", 2, {each, each, each}).counters = 0xfffffffd;
  l.add("move-staged", 2, {staged(each), staged(same), staged(each)});
  // One way, then the other.
  l.add("move-ragged", 2, {ragged, move(Pieces::kRagged, 2, 1, 2), staged(ragged)});
  l.add("move-windows", 2, {staged(move(Pieces::kRagged, 5, 1, 2)), move(Pieces::kSame, 10, 1, 2)}).scratch = 32;
  const uint32_t t = l.relaxed ? 2 : 1;
  l.add("move-blocks", 2, {move(Pieces::kEach, 8, 2, t), staged(move(Pieces::kEach, 8, 2, t))}).exhaustive = !l.relaxed;
  l.add("move-misaligned", 2, {move(Pieces::kSame, 5, 1, 2), of_halves(move(Pieces::kEach, 3, 1, 2))}).shift = 4;
  l.add("reduce-scatter", 2, {sums, staged(sums), in_place(sums)});
  l.add("reduce-scatter-windows", 2, {staged(reduce_scatter(10, 1, 2)), reduce_scatter(5, 1, 2)}).scratch = 32;
  l.add("reduce", 2, {reduce_to_first(4, 1, 2), staged(reduce_to_first(8, 1, 2))});
  l.add("mismatch-move", 2, {each}).story = Story::kMismatch;
  l.add("mismatch-move-staged", 2, {staged(each)}).story = Story::kMismatch;
  // One may be told of it before it looks.
  l.faulty("mismatch-move-told", Story::kMismatch, {each});
  l.faulty("mismatch-move-blocks", Story::kMismatch, {staged(move(Pieces::kEach, 8, 2, t))}).exhaustive = false;
}

void add_pushes(List& l) {
  const uint32_t t = l.relaxed ? 2 : 1;
  const auto move_of = [&](Pieces pieces, uint32_t count, uint32_t blocks = 1) { return move(pieces, count, blocks, t); };
  const Call each = pushed(move_of(Pieces::kEach, 4)), ragged = pushed(move_of(Pieces::kRagged, 4));
  const Call sums = pushed(reduce_scatter(4, 1, t)), two = pushed(two_stage(8, 1, t));
  l.add("push", 2, {each, each, each}).counters = 0xfffffffd;
  // One way, then the other.
  l.add("push-ragged", 2, {ragged, staged(pushed(move_of(Pieces::kRagged, 2))), ragged});
  l.add("push-windows", 2, {staged(pushed(move_of(Pieces::kEach, 12))), staged_but_at(1, pushed(move_of(Pieces::kSame, 7)))}).scratch = 32;
  l.add("push-waves", 2, {staged(pushed(move(Pieces::kEach, 8, 1, 2))), staged(pushed(move(Pieces::kEach, 8, 1, 2)))});
  l.add("push-misaligned", 2, {pushed(move_of(Pieces::kSame, 5)), staged(pushed(of_halves(move_of(Pieces::kEach, 3))))}).shift = 4;
  l.add("push-reduce", 2, {sums, in_place(sums), pushed(reduce_scatter(9, 1, t))}).scratch = 32;
  // Each overwrites the scratch that the call before was read from, or was pushed to.
  const Call pull = staged(move_of(Pieces::kSame, 4)), push = staged(each);
  l.add("push-mixed", 2, {push, pull, push, in_place(sums), pull});
  l.add("two-stage-push", 2, {two, two}).counters = 0xfffffffd;
  l.add("two-stage-push-in-place", 2, {in_place(two), staged(in_place(two))});
  l.add("two-stage-push-windows", 2, {staged(pushed(two_stage(22, 1, t))), staged_but_at(0, two)}).scratch = 64;
  l.add("two-stage-push-mixed", 2, {staged(one_stage(8, 1, t)), staged(two), staged(two_stage(8, 1, t)), two});
  if (!l.relaxed) {
    l.add("push-blocks", 2, {pushed(move_of(Pieces::kEach, 8, 2)), staged(pushed(move_of(Pieces::kEach, 8, 2)))});
    l.add("push-domains", 2, {each, on_domain(1, each)});
    // The second window is shorter than the first one.
    l.add("two-stage-push-blocks", 2, {staged(pushed(two_stage(24, 2, 1)))}).scratch = 128;
  }
  l.add("push-early", 2, {each, staged(each)}).early = true;
  l.add("mismatch-push", 2, {each}).story = Story::kMismatch;
}

void add_counted(List& l) {
  const uint32_t t = l.relaxed ? 2 : 1;
  const auto of = [&](Pieces pieces, uint32_t count, uint32_t room) { return counted(pieces, count, room, 1, t); };
  const Call fits = of(Pieces::kEach, 4, 4), ragged = of(Pieces::kRagged, 2, 4), more = of(Pieces::kEach, 7, 6), none = of(Pieces::kEach, 0, 4);
  l.add("counted", 2, {fits, ragged, none, fits}).counters = 0xfffffffb;
  l.add("counted-more", 2, {more, staged(of(Pieces::kRagged, 5, 6))});
  l.add("counted-staged", 2, {staged(fits), none, staged(ragged), staged(fits)});
  l.add("counted-windows", 2, {staged(of(Pieces::kRagged, 4, 8)), staged_but_at(1, of(Pieces::kRagged, 5, 14))}).scratch = 32;
  l.add("counted-mixed", 2, {staged(fits), staged(pushed(move(Pieces::kEach, 4, 1, t))), none, lines_move(Pieces::kEach, 2, 1, 1), ragged});
  l.add("counted-early", 2, {ragged, fits}).early = true;
  l.add("mismatch-counted", 2, {fits}).story = Story::kMismatch;
  if (!l.relaxed) l.add("counted-waves", 2, {staged(counted(Pieces::kEach, 8, 8, 1, 2))});
}

void add_lines(List& l) {
  const Call each = lines_move(Pieces::kEach, 2, 1, 1), sum = lines_reduce(Pieces::kSame, 2, 1, 1);
  const Call two_lines = lines_move(Pieces::kSame, 4, 1, 2), empty_one_way = lines_move(Pieces::kRagged, 1, 1, 1);
  l.add("lines", 2, {each, each, each, each}).lines = 4;
  l.add("lines-sizes", 2, {two_lines, lines_move(Pieces::kEach, 3, 1, 2), two_lines});
  l.add("lines-tokens", 2, {empty_one_way, empty_one_way, empty_one_way, empty_one_way}).lines = 4;
  l.add("lines-reduce", 2, {sum, in_place(sum), sum}).lines = 5;
  l.add("lines-mixed", 2, {each, one_stage(4, 1, 2), lamport(4, 'f', 1, 1), sum});
  l.add("lines-blocks", 2, {lines_move(Pieces::kEach, 4, 2, 1), each, lines_move(Pieces::kEach, 4, 2, 1)}).lines = 4;
  Scenario& wrap = l.add("lines-wrap", 2, {each, each, lines_move(Pieces::kEach, 4, 1, 1), lines_move(Pieces::kEach, 4, 1, 1)});
  wrap.lines = kLastLines - 1;
  wrap.old_lines = true;
  // In place, with blocks that have loaded what another then overwrites.
  const Call by_two = in_place(lines_reduce(Pieces::kSame, 4, 2, 1));
  Scenario& wrap_blocks = l.add("lines-reduce-wrap-blocks", 2, {by_two});
  wrap_blocks.lines = kLastLines;
  wrap_blocks.old_lines = true;
  Scenario& wrap_of_sums = l.add("lines-reduce-wrap", 2, {sum, sum, sum});
  wrap_of_sums.lines = kLastLines;
  wrap_of_sums.old_lines = true;
}

void add_exchange_of_three(List& l, uint32_t each) {
  const Call all = move(Pieces::kEach, 4, 1, each), next = move(Pieces::kNext, 4, 1, each);
  const Call ragged = move(Pieces::kRagged, 2, 1, each), sums = reduce_scatter(4, 1, each);
  l.add("move-staged-3", 3, {staged(all), staged(ragged)});
  // Two ranks exchange while the third is somewhere else, with one of them or with none.
  l.add("move-pairs-staged-3", 3, {without(2, staged(all)), without(0, staged(all)), staged(all)});
  l.add("move-next-staged-3", 3, {staged(next), staged(move(Pieces::kFromFirst, 4, 1, each)), staged(next)});
  l.add("move-next-blocks-3", 3, {staged(move(Pieces::kNext, 8, 2, each))}).exhaustive = !l.relaxed;
  l.add("reduce-scatter-3", 3, {staged(sums), staged(reduce_to_first(4, 1, each))});
  if (l.relaxed) {
    l.at_random("move-3", 3, {all, sums});  // by the same barriers as one-stage-3
    l.add("move-pairs-3", 3, {without(2, all), without(0, all)}).atoms = 1;
    l.add("move-next-3", 3, {next}).atoms = 1;
  } else {
    l.add("move-3", 3, {all, sums, ragged});
    l.add("move-pairs-3", 3, {without(2, all), without(0, all), all});
    l.add("move-next-3", 3, {next, move(Pieces::kFromFirst, 4, 1, each), next});
  }
  // The second rank makes the same call as both others.
  Scenario& other = l.faulty("mismatch-move-3", Story::kMismatch, {all});
  other.world = 3;
  other.exhaustive = false;

  const Call lines = lines_move(Pieces::kEach, 2, 1, 1), tokens = lines_move(Pieces::kRagged, 1, 1, 1);
  const Call line_sums = in_place(lines_reduce(Pieces::kSame, 4, 1, 2));
  l.add("lines-3", 3, {lines, lines, lines}).lines = 4;
  l.add("lines-tokens-3", 3, {tokens, tokens, tokens}).lines = 4;
  l.add("lines-reduce-3", 3, {line_sums, line_sums}).lines = 4;
  Scenario& wrap = l.add("lines-wrap-3", 3, {lines, lines, lines});
  wrap.lines = kLastLines;
  wrap.old_lines = true;
  // As many blocks as peers: each would have the only line for one of them.
  const Call by_two = lines_move(Pieces::kEach, 2, 2, 1);
  Scenario& wrap_blocks = l.add("lines-wrap-blocks-3", 3, {by_two, by_two});
  wrap_blocks.lines = kLastLines;
  wrap_blocks.exhaustive = false;
  l.add("lines-reduce-blocks-3", 3, {in_place(lines_reduce(Pieces::kSame, 2, 2, 1))}).lines = 4;
}

void add_pushes_of_three(List& l, uint32_t each) {
  const Call all = pushed(move(Pieces::kEach, 4, 1, each)), next = pushed(move(Pieces::kNext, 4, 1, each));
  const Call sums = pushed(reduce_scatter(4, 1, each)), two = pushed(two_stage(8, 1, each));
  const Call from_first = pushed(move(Pieces::kFromFirst, 4, 1, each));
  const auto some = [&](const char* name, std::vector<Call> calls) -> Scenario& {
    Scenario& s = l.add(name, 3, std::move(calls));
    s.exhaustive = !l.relaxed;
    return s;
  };
  some("push-3", {staged(all), sums, all});
  some("push-next-3", {next, staged(from_first), staged(next)});
  // What one rank has pushed into a scratch is not what another one reads there.
  some("push-pairs-3", {without(2, staged(all)), staged(move(Pieces::kFromFirst, 4, 1, each)), without(0, staged(all))});
  some("push-next-blocks-3", {staged(pushed(move(Pieces::kNext, 8, 2, each)))});
  some("two-stage-push-3", {staged(two), in_place(two)});
  some("counted-3", {staged(counted(Pieces::kRagged, 3, 4, 1, each)), counted(Pieces::kNext, 5, 4, 1, each)});
}

// One thread stands for all ranks, or each for one.
void add_three(List& l) {
  const uint32_t each = l.relaxed ? 3 : 1;
  add_pushes_of_three(l, each);
  add_exchange_of_three(l, each);
  add_two_shot_of_three(l);
  const Call one = one_stage(4, 1, each), two = two_stage(8, 1, each);
  l.add("barrier-3", 3, {barrier(1, each), barrier(1, each), barrier(1, each)});
  l.add("probe-3", 3, {probe(2, each)});
  if (l.relaxed) {
    l.add("one-stage-3", 3, {one}).atoms = 1;
    l.at_random("two-stage-3", 3, {two, two});
    l.add("two-stage-3-staged", 3, {staged(two), staged(two)});
  } else {
    l.add("one-stage-3", 3, {one, one});
    l.add("two-stage-3", 3, {two, staged(two_stage(12, 1, each))});
  }
  const Call user = by_user(lamport(4, 'f', 1, 1));
  l.add("user-3", 3, {user, user, user}).atoms = 2;
  l.add("lamport-3", 3, {lamport(4, 'f', 1, 1), lamport(4, 'f', 1, 1), lamport(4, 'f', 1, 1)}).atoms = 2;
}

void add_faults(List& l) {
  const Call one = one_stage(8, 1, 2), two = two_stage(8, 1, 2), small = lamport(4, 'f', 1, 2), meet = barrier(1, 2);
  const uint32_t t = l.relaxed ? 2 : 1;
  l.faulty("absent-barrier", Story::kAbsent, {meet, meet}, 1);
  l.faulty("absent-one-stage", Story::kAbsent, {one, one}, 1).exhaustive = !l.relaxed;
  l.faulty("absent-lamport", Story::kAbsent, {small, small}, 1);
  l.faulty("late-barrier-once", Story::kLate, {meet}, 1);
  l.faulty("late-one-stage-once", Story::kLate, {staged(one_stage(8, 1, t))}, 1).exhaustive = !l.relaxed;
  l.faulty("late-lamport-once", Story::kLate, {small}, 1);
  l.faulty("abort-barrier", Story::kAbort, {barrier(1, t), barrier(1, t)}).exhaustive = !l.relaxed;
  l.faulty("abort-barrier-once", Story::kAbort, {meet});
  l.faulty("abort-one-stage-once", Story::kAbort, {one}).exhaustive = !l.relaxed;
  l.faulty("abort-lamport", Story::kAbort, {small, small});
  const Call user = by_user(small);
  l.faulty("absent-user", Story::kAbsent, {user, user}, 1);
  l.faulty("late-user-once", Story::kLate, {user}, 1);
  l.faulty("abort-user", Story::kAbort, {user, user});
  const Call pull = by_user(staged(one));
  l.faulty("late-user-pull", Story::kLate, {pull, pull}, 1).exhaustive = false;
  l.faulty("abort-user-pull", Story::kAbort, {pull, pull}).exhaustive = false;
  const Call row = norm(1, 1, 1, 1), shared_row = norm(1, 2, 1, 2);
  l.faulty("absent-norm", Story::kAbsent, {row, row}, 1);
  l.faulty("late-norm-once", Story::kLate, {row}, 1);
  l.faulty("abort-norm", Story::kAbort, {row, row});
  l.faulty("late-norm-threads", Story::kLate, {shared_row, shared_row}, 1).exhaustive = false;
  l.faulty("abort-norm-threads", Story::kAbort, {shared_row, shared_row}).exhaustive = false;
  const Call all = move(Pieces::kEach, 4, 1, 2), lines = lines_move(Pieces::kEach, 2, 1, 1);
  l.faulty("absent-move", Story::kAbsent, {all, all}, 1).exhaustive = !l.relaxed;
  l.faulty("late-move-once", Story::kLate, {staged(move(Pieces::kEach, 4, 1, t))}, 1).exhaustive = !l.relaxed;
  l.faulty("abort-move-once", Story::kAbort, {all}).exhaustive = !l.relaxed;
  // Of two deadlines one may pass before the wait that counts it begins.
  l.faulty("absent-lines", Story::kAbsent, {lines, lines}, 2);
  l.faulty("late-lines-once", Story::kLate, {lines}, 1);
  l.faulty("abort-lines", Story::kAbort, {lines, lines});
  l.faulty("abort-lines-reduce", Story::kAbort, {lines_reduce(Pieces::kSame, 2, 1, 1), lines});
  l.faulty("late-move", Story::kLate, {staged(all), staged(all)}, 2).exhaustive = false;
  Scenario& windows = l.faulty("late-move-windows", Story::kLate, {staged(move(Pieces::kEach, 8, 1, 2)), staged(all)}, 2);
  windows.scratch = 32;
  windows.exhaustive = false;
  l.faulty("late-lines", Story::kLate, {lines, lines, lines}, 2).exhaustive = false;
  // More blocks than lines: one that has nothing to wait for may advance the state of a call that another gives up.
  const Call by_two = lines_move(Pieces::kEach, 2, 2, 1);
  l.faulty("late-lines-blocks", Story::kLate, {by_two, lines_reduce(Pieces::kSame, 2, 2, 1), lines}, 2).exhaustive = false;
  l.faulty("late-barrier", Story::kLate, {meet, meet}, 2).exhaustive = false;
  l.faulty("late-one-stage", Story::kLate, {staged(one), staged(one)}, 2).exhaustive = false;
  l.faulty("late-two-stage", Story::kLate, {two, two}, 2).exhaustive = false;
  l.faulty("late-lamport", Story::kLate, {small, small}, 2).exhaustive = false;
  l.faulty("late-user", Story::kLate, {user, user}, 2).exhaustive = false;
  l.faulty("abort-one-stage", Story::kAbort, {one, staged(one)}).exhaustive = false;
  // More blocks than packs: the last block to arrive may have nothing to wait for.
  l.faulty("late-lamport-blocks", Story::kLate, {lamport(4, 'f', 2, 1), lamport(4, 'f', 2, 1), lamport(4, 'f', 2, 1)}, 2).exhaustive = false;
  Scenario& early = l.faulty("late-early", Story::kLate, {small, small, small}, 2);
  early.early = true;
  early.exhaustive = false;
  // Two kernels of a rank that leave at once, of which one reports.
  l.faulty("late-domains", Story::kLate, {staged(one), on_domain(1, staged(one))}, 2).exhaustive = false;
  l.faulty("late-domains-behind", Story::kLate, {meet, on_domain(1, staged(one)), on_domain(1, staged(one))}, 2).exhaustive = false;
  l.faulty("abort-domains", Story::kAbort, {staged(one), on_domain(1, staged(one))}).exhaustive = false;
}

// Pushes that land when their receiver has given up, and calls behind.
void add_push_faults(List& l) {
  const uint32_t t = l.relaxed ? 2 : 1;
  const Call all = pushed(move(Pieces::kEach, 8, 1, t)), two = pushed(two_stage(16, 1, t)), sums = pushed(reduce_scatter(8, 1, t));
  const Call some = counted(Pieces::kRagged, 3, 4, 1, t), pull = staged(move(Pieces::kSame, 4, 1, t));
  const auto at_random = [&](const char* name, Story story, std::vector<Call> calls, uint32_t expiries = 0) -> Scenario& {
    Scenario& s = l.faulty(name, story, std::move(calls), expiries);
    s.exhaustive = false;
    s.scratch = 64;
    return s;
  };
  l.faulty("absent-push", Story::kAbsent, {all, all}, 1).exhaustive = !l.relaxed;
  l.faulty("late-push-once", Story::kLate, {all}, 1).exhaustive = !l.relaxed;
  l.faulty("abort-push-once", Story::kAbort, {all}).exhaustive = !l.relaxed;
  at_random("late-push", Story::kLate, {staged(all), pull, staged(all), all}, 2);
  at_random("late-push-reduce", Story::kLate, {sums, pull, in_place(sums)}, 2);
  at_random("late-two-stage-push", Story::kLate, {two, pull, staged(in_place(two))}, 2);
  at_random("abort-two-stage-push", Story::kAbort, {two, staged(two), pull});
  at_random("late-counted", Story::kLate, {staged(some), staged(some), some}, 2);
  at_random("abort-counted", Story::kAbort, {staged(some), some, staged(all)});
  // A domain's call is left while the other domain's has yet to raise the rank's abort word, and a call is behind it.
  at_random("late-push-domains", Story::kLate, {staged(all), on_domain(1, staged(all)), on_domain(1, pull)}, 2);
  const uint32_t u = l.relaxed ? 3 : 1;
  const Call of_three = staged(pushed(move(Pieces::kEach, 8, 1, u)));
  Scenario& three = at_random("late-push-3", Story::kLate, {without(2, of_three), staged(move(Pieces::kFromFirst, 4, 1, u)),
                                                           pushed(two_stage(12, 1, u)), of_three}, 2);
  three.world = 3;
  three.scratch = 96;
  // A thread that stands for no rank learns of the other domain's fault; counts come before anything is staged.
  const Call wide = staged(counted(Pieces::kEach, 4, 4, 1, 4));
  at_random("late-counted-domains", Story::kLate, {wide, on_domain(1, wide)}, 1);
}

// A stop within a call of windows, and calls behind it that find the abort word raised.
void add_two_shot_faults(List& l) {
  const uint32_t t = l.relaxed ? 2 : 1;
  const auto windows = [&](uint32_t n, uint32_t rounds = 1) { return two_shot(n * rounds * t, rounds * t, 1, t); };
  const Call small = lamport(4, 'f', 1, t);
  const auto blocks = [&](uint32_t n) { return two_shot(n * 2 * t, 2 * t, 2, t); };
  const auto at_random = [&](const char* name, Story story, std::vector<Call> calls, uint32_t expiries = 0) -> Scenario& {
    Scenario& s = l.faulty(name, story, std::move(calls), expiries);
    s.exhaustive = false;
    return s;
  };
  l.faulty("absent-two-shot", Story::kAbsent, {windows(2), small}, t + 1).exhaustive = !l.relaxed;
  l.faulty("late-two-shot-once", Story::kLate, {windows(1), small}, 1).exhaustive = !l.relaxed;
  l.faulty("abort-two-shot-once", Story::kAbort, {windows(1), small}).exhaustive = !l.relaxed;
  at_random("absent-two-shot-many", Story::kAbsent, {windows(5), windows(2)}, 4);
  at_random("late-two-shot", Story::kLate, {windows(3), windows(1), small}, 2);
  at_random("late-two-shot-rounds", Story::kLate, {small, windows(2, 2), windows(4), windows(2)}, 2);
  at_random("late-two-shot-blocks", Story::kLate, {blocks(4), windows(3), windows(1), small}, 2);
  at_random("late-two-shot-blocks-one", Story::kLate, {blocks(3), blocks(1), windows(1), blocks(2)}, 2);
  at_random("abort-two-shot", Story::kAbort, {windows(4), small, windows(2)});
  at_random("abort-two-shot-blocks", Story::kAbort, {blocks(2), windows(1), blocks(4)});
  // A block gives up windows that a peer has all packs of and has not read, another one does not.
  at_random("late-two-shot-behind", Story::kLate, {blocks(3), lamport(8 * t, 'f', 1, t), small}, 1);
  at_random("late-two-shot-behind-one", Story::kLate, {blocks(3), windows(1), blocks(1)}, 1);
  const uint32_t u = l.relaxed ? 3 : 1;
  const auto of_three = [&](uint32_t n) { return two_shot(n * 3 * u, 3 * u, 1, u); };
  Scenario& three = at_random("late-two-shot-3", Story::kLate, {of_three(4), of_three(1), lamport(4, 'f', 1, u), of_three(2)}, 2);
  three.world = 3;
  three.runs = 200;
}

void add_larger(List& l) {
  const size_t before = l.all.size();
  const uint32_t t = l.relaxed ? 4 : 1;
  l.at_random("barrier-4", 4, {barrier(2, t), barrier(1, t), barrier(2, t)}).counters = 0xfffffffe;
  l.at_random("one-stage-4", 4, {one_stage(20, 2, t), staged(one_stage(32, 2, t)), in_place(one_stage(7, 1, t))});
  l.at_random("two-stage-4", 4, {two_stage(40, 2, t), staged(two_stage(56, 2, t))}).scratch = 160;
  Scenario& calls = l.at_random("lamport-4", 4, {lamport(24, 'f', 2, t), lamport(8, 'b', 1, t), lamport(32, 'f', 2, t),
                                                 lamport(4, 'f', 1, t), lamport(24, 'b', 2, t), lamport(32, 'f', 2, t)});
  calls.flag = 0xfffffffb;
  calls.runs = 60;
  l.at_random("mixed-3", 3, {lamport(16, 'f', 1, t), one_stage(16, 2, t), barrier(1, t), lamport(24, 'b', 2, t),
                             two_stage(24, 2, t), lamport(4, 'f', 1, t)});
  l.at_random("early-3", 3, {lamport(8, 'f', 2, t), lamport(12, 'f', 1, t), one_stage(8, 1, t), lamport(8, 'f', 2, t),
                             lamport(8, 'b', 1, t)})
      .early = true;
  l.at_random("domains-3", 3, {barrier(1, t), on_domain(1, staged(two_stage(24, 2, t))), lamport(8, 'f', 1, t),
                               on_domain(1, one_stage(8, 1, t)), one_stage(12, 1, t), barrier(1, t, 1)});
  const Call moves = move(Pieces::kEach, 14, 2, t), next = move(Pieces::kNext, 8, 2, t), sums = reduce_scatter(8, 1, t);
  l.at_random("move-4", 4, {moves, staged(move(Pieces::kSame, 14, 2, t)), move(Pieces::kRagged, 7, 2, t), staged(next),
                            staged(reduce_scatter(13, 2, t)), without(1, without(3, moves))})
      .scratch = 128;
  l.at_random("push-4", 4, {pushed(moves), staged(pushed(move(Pieces::kSame, 14, 2, t))), staged(move(Pieces::kSame, 14, 2, t)),
                            pushed(reduce_scatter(13, 2, t)), staged(pushed(next)), counted(Pieces::kRagged, 5, 12, 2, t),
                            staged(pushed(two_stage(56, 2, t)))})
      .scratch = 160;
  l.at_random("push-domains-3", 3, {staged(pushed(next)), on_domain(1, pushed(two_stage(24, 2, t))), on_domain(1, staged(sums)),
                                    in_place(pushed(sums)), lamport(8, 'f', 1, t), on_domain(1, counted(Pieces::kRagged, 4, 6, 1, t))});
  const Call line_sums = lines_reduce(Pieces::kSame, 8, 2, 2), lines = lines_move(Pieces::kEach, 4, 1, t);
  Scenario& lines_4 = l.at_random("lines-4", 4, {lines_move(Pieces::kEach, 8, 2, 2), line_sums, lines_move(Pieces::kRagged, 4, 1, 3),
                                                 lines_reduce(Pieces::kEach, 5, 2, 1), lines_move(Pieces::kNext, 7, 2, 2), lines});
  lines_4.lines = kLastLines - 2;
  lines_4.old_lines = true;
  Scenario& early = l.at_random("lines-early-3", 3, {lines_move(Pieces::kRagged, 2, 2, 1), lamport(8, 'f', 1, t), staged(next),
                                                     in_place(line_sums), lines_move(Pieces::kFromFirst, 6, 1, 2)});
  early.early = true;
  early.lines = kLastLines - 1;
  l.at_random("exchange-domains-3", 3, {lines, on_domain(1, lines), on_domain(1, staged(next)), move(Pieces::kEach, 8, 1, t),
                                        on_domain(1, line_sums), line_sums});
  Scenario& late = l.at_random("late-3", 3, {lamport(8, 'f', 1, t), staged(two_stage(12, 1, t)), barrier(1, t)});
  late.story = Story::kLate;
  late.watch_polls = true;
  late.expiries = 2;
  const Call by_two = lines_move(Pieces::kEach, 2, 2, 1);
  Scenario& late_lines = l.at_random("late-lines-3", 3, {by_two, by_two, in_place(lines_reduce(Pieces::kSame, 2, 2, 1)), by_two});
  late_lines.story = Story::kLate;
  late_lines.watch_polls = true;
  late_lines.expiries = 2;
  late_lines.lines = kLastLines - 1;
  // Threads of a block, also ones that stand for no rank, that learn of a fault between others while two ranks exchange.
  const Call pair = staged(move(Pieces::kEach, 8, 1, 4));
  Scenario& late_pairs = l.at_random("late-pairs-3", 3, {without(2, pair), without(0, pair)});
  late_pairs.story = Story::kLate;
  late_pairs.watch_polls = true;
  late_pairs.expiries = 1;
  const Call wide = staged(one_stage(8, 1, 4));
  Scenario& late_domains = l.at_random("late-domains-3", 3, {wide, on_domain(1, wide)});
  late_domains.story = Story::kLate;
  late_domains.watch_polls = true;
  late_domains.expiries = 1;
  Scenario& late_moves = l.at_random("late-move-3", 3, {without(2, staged(next)), staged(next), staged(sums), by_two});
  late_moves.story = Story::kLate;
  late_moves.watch_polls = true;
  late_moves.expiries = 2;
  late_moves.scratch = 96;
  for (size_t i = before; i < l.all.size(); i++) {
    if (l.all[i].runs == Scenario().runs) l.all[i].runs = 150;  // each takes long
  }
}

}  // namespace

std::vector<Scenario> scenarios() {
  List list;
  for (const bool relaxed : {false, true}) {
    list.relaxed = relaxed;
    add_barriers(list);
    add_stages(list);
    add_lamport(list);
    add_two_shot(list);
    add_mixed(list);
    add_exchange(list);
    add_pushes(list);
    add_counted(list);
    add_lines(list);
    add_three(list);
    add_faults(list);
    add_push_faults(list);
    add_two_shot_faults(list);
    add_larger(list);
  }
  return list.all;
}

}  // namespace model
