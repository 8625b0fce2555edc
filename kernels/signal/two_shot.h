// All-reduce by pushing through the Lamport region, for messages of any size: no barrier that data waits for, the data tells that
// it is there (DESIGN P5 to P9, P12).
//
// Each rank reduces a shard: it gets the others' packs of it in the lower half of its slots, and pushes the sums to the upper
// half of its slot at every peer. With two ranks each reduces all instead, which takes as many bytes and a hop less.
//
// A message runs through the region in windows, each of which counts as a call and takes the next generation. What a thread
// has read it clears at once, so a call leaves nothing to clear. Window w + 2 is sent while window w is reduced; its
// places were those of window w - 1. That peers have cleared those, in this same kernel, only a release can tell: block b
// of each rank tells block b of the others by a counter of its barriers, a window ahead of when they wait for it. The places of a
// call's first window are clear because this rank has heard from every peer in the call before; those of the second and third
// once number 0 tells that each peer is in this kernel, behind what it had left to clear.
#pragma once

#include "lamport.h"

namespace signal_comm {

constexpr uint32_t kSumsAt = kLamportSlotBytes / 2;  // from the start of a slot

// `by` windows later, as if each were a call.
SIGNAL_DEVICE flag_t flag_after(flag_t flag, uint64_t by) { return flag_t((uint64_t(flag) + by) % kNoFlag); }

// What the blocks of all ranks tell each other about the windows they have cleared: each number is signalled once it holds,
// and awaited later, so that nobody stands still for it. Barriers in two parts, by their counters.
struct Cleared {
  using Kind = CounterBarrier;
  const Member& m;
  Pair first = {};

  SIGNAL_DEVICE explicit Cleared(const Member& member) : m(member) {}

  SIGNAL_DEVICE void read() {
    if (platform::thread_id() < m.group.world) first = read_pair<Kind>(m.group, platform::thread_id());
  }

  template <class Visit>
  SIGNAL_DEVICE void for_each_pair(Visit visit) {
    const uint32_t thread = platform::thread_id();
    if constexpr (platform::kMinBlockThreads >= kMaxGpus) {
      if (thread < m.group.world && thread != m.group.rank) visit(thread, first);
    } else {
      for (uint32_t peer = thread; peer < m.group.world; peer += platform::block_dim()) {
        if (peer == m.group.rank) continue;
        Pair pair = read_pair<Kind>(m.group, peer);
        visit(peer, pair);
      }
    }
  }

  // Behind a block barrier that follows what all threads of the block have cleared.
  SIGNAL_DEVICE void signal() {
    for_each_pair([&](uint32_t, Pair& pair) {
      pair.count += 1;
      // Release: pairs with the acquire in `await`. The peer writes again, once it has seen the number, what this block cleared before.
#ifdef SIGNAL_MUTANT_TWO_SHOT_CLEARED_RELAXED
      Kind::send(pair, 0, false);
#else
      Kind::send(pair, 0, true);
#endif
      platform::store_relaxed(pair.counter, pair.count);
    });
  }

  // False: a peer did not come, which has been reported. The caller puts a block barrier between this and what it allows.
  SIGNAL_DEVICE bool await(uint32_t phase) {
    bool came = true;
    for_each_pair([&](uint32_t peer, Pair& pair) {
      bool seen = false;
      SIGNAL_NO_UNROLL
      for (uint32_t polls = 0; !seen && (!kBounded || polls < platform::kPollsPerCheck); polls++) {
        seen = Kind::look(pair).is(pair.count);
        if (!seen) platform::relax();
      }
      came = came && (seen || came_late(phase, peer));
      if (came) Kind::acquire(pair);
    });
    return came;
  }

  SIGNAL_COLD bool came_late(uint32_t phase, uint32_t peer) const {
    const Pair pair = read_pair<Kind>(m.group, peer);
    if (wait_until(Member(m.group, m.operation), [&] { return Kind::look(pair).is(pair.count); })) return true;
    report_fault(Member(m.group, m.operation), phase, 1u << peer, [&](uint32_t rank) {
      const Pair other = read_pair<Kind>(m.group, rank);
      return Seen{other.count, Kind::look(other).value()};
    });
    return false;
  }
};

// A call, as one thread sees it.
template <class T, uint32_t N>
struct TwoShot {
  static constexpr bool kTwoHops = N > 2;

  const AllReduceParams& p;
  const uint32_t rank;
  const Stride stride;
  const bool aligned;
  const uint64_t slots;  // offset of the first slot's place for this thread's first pack
  flag_t flag;

  SIGNAL_DEVICE explicit TwoShot(const AllReduceParams& params)
      : p(params), rank(params.group.rank), stride(), aligned(is_aligned(params.input | params.output)),
        slots(kLamportRegion + uint64_t(stride.first) * kPackBytes), flag(0) {}

  // A window, and where the shards in it are: of equal size, but that the first ones may have a pack more.
  struct Window {
    uint64_t first;  // pack of the message
    uint32_t packs;
    uint32_t generation;  // offset of its slots from the first generation's

    SIGNAL_DEVICE uint32_t shard_first(uint32_t r) const {
      const uint32_t more = packs % N;
      return kTwoHops ? r * (packs / N) + (r < more ? r : more) : 0;
    }
    SIGNAL_DEVICE uint32_t shard_packs(uint32_t r) const { return kTwoHops ? shard_first(r + 1) - shard_first(r) : packs; }
  };

  SIGNAL_DEVICE Window window(uint32_t w) const {
    const uint64_t first = w * p.window_packs;
    const uint64_t left = p.packs - first;
    return Window{first, uint32_t(left < p.window_packs ? left : p.window_packs),
                  (flag % kGenerations + w) % kGenerations * uint32_t(kMaxGpus * kLamportSlotBytes)};
  }

  // Of this rank's memory, a pack of the message.
  SIGNAL_DEVICE Pack load(uint64_t pack) const {
    if (aligned && pack < p.whole_packs) return load_whole<From::kOwn>(p.input + pack * kPackBytes);
    return load_any<From::kOwn>(p.input, pack, p.bytes);
  }
  SIGNAL_DEVICE void store(uint64_t pack, const Pack& value) const {
    if (aligned && pack < p.whole_packs) return store_whole(p.output + pack * kPackBytes, value);
    store_any(p.output, pack, p.bytes, value);
  }

  // The place, at rank `at`, of what `sender` sends: `bytes` behind this thread's first pack.
  SIGNAL_DEVICE Pack* place(uint32_t at, const Window& w, uint32_t sender, uint64_t bytes) const {
    return reinterpret_cast<Pack*>(p.group.base[at] + slots + w.generation + sender * kLamportSlotBytes + bytes);
  }

  // Pushes to each peer the packs that it reduces.
  SIGNAL_DEVICE void send(const Window& w) const {
    if constexpr (!kTwoHops) {
      uint64_t bytes = 0;
      for (uint32_t i = stride.first; i < w.packs; i += stride.step, bytes += uint64_t(stride.step) * kPackBytes) {
        const Pack pack = sendable(load(w.first + i));
        for_each_peer<N>(rank, [&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(place(peer, w, rank, bytes), pack); });
      }
    } else {
      for (uint32_t k = 1; k < N; k++) {
        const uint32_t peer = rank_after(p.group, k);
        const uint32_t packs = w.shard_packs(peer);
        const uint64_t first = w.first + w.shard_first(peer);
        uint64_t bytes = 0;
        for (uint32_t i = stride.first; i < packs; i += stride.step, bytes += uint64_t(stride.step) * kPackBytes) {
          platform::send_pack(place(peer, w, rank, bytes), sendable(load(first + i)));
        }
      }
    }
  }

  SIGNAL_DEVICE void clear(const Window& w, uint64_t bytes) const {
#ifndef SIGNAL_MUTANT_TWO_SHOT_LEAVES_SHARDS
    for_each_peer<N>(rank, [&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(place(rank, w, peer, bytes), not_ready()); });
#endif
  }

  // Reduces this rank's shard and pushes the sums. False: a peer's pack did not come, which has been reported.
  SIGNAL_DEVICE bool reduce(const Window& w, uint32_t number) const {
    const uint32_t packs = w.shard_packs(rank);
    const uint64_t first = w.first + w.shard_first(rank);
    uint64_t bytes = 0;
    for (uint32_t i = stride.first; i < packs; i += stride.step, bytes += uint64_t(stride.step) * kPackBytes) {
      const Pack own = load(first + i);
      Pack arrived[N];
      const auto look = [&]() SIGNAL_INLINE {
        bool all = true;
        SIGNAL_UNROLL
        for (uint32_t r = 0; r < N; r++) {
          arrived[r] = r == rank ? own : platform::poll_pack(place(rank, w, r, bytes));
          all = all && (r == rank || is_ready(arrived[r]));
        }
        return all;
      };
      bool all = false;
      SIGNAL_NO_UNROLL
      for (uint32_t polls = 0; !all && (!kBounded || polls < platform::kPollsPerCheck); polls++) {
        all = look();
        if (!all) platform::relax();
      }
      if (!all) {
        if (!wait_for_packs(p.group, kOpAllReduceTwoShot, flag_after(flag, number), i, kEveryone)) return false;
        look();
      }
      // Changes no bit: of these types no sum is -0.0, since it starts from +0.0 and none is so small that it rounds to nothing.
      const Pack sum = sendable(sum_ranks<T, N>(p.op, N, rank, [&](uint32_t r) { return arrived[r]; }));
      store(first + i, sum);
      if constexpr (kTwoHops) {
        for_each_peer<N>(rank, [&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(place(peer, w, rank, bytes + kSumsAt), sum); });
      }
      clear(w, bytes);
    }
    return true;
  }

  // Takes the sums of the peers' shards. False as in `reduce`.
  SIGNAL_DEVICE bool gather(const Window& w, uint32_t number) const {
    if constexpr (!kTwoHops) return true;
    for (uint32_t k = 1; k < N; k++) {
      const uint32_t from = rank_after(p.group, k);
      const uint32_t packs = w.shard_packs(from);
      const uint64_t first = w.first + w.shard_first(from);
      uint64_t bytes = kSumsAt;
      for (uint32_t i = stride.first; i < packs; i += stride.step, bytes += uint64_t(stride.step) * kPackBytes) {
        Pack* const at = place(rank, w, from, bytes);
        Pack sum = platform::poll_pack(at);
        SIGNAL_NO_UNROLL
        for (uint32_t polls = 1; !is_ready(sum) && (!kBounded || polls < platform::kPollsPerCheck); polls++) {
          platform::relax();
          sum = platform::poll_pack(at);
        }
        if (!is_ready(sum)) {
          if (!wait_for_packs(p.group, kOpAllReduceTwoShot, flag_after(flag, number), kSumsAt / kPackBytes + i, 1u << from)) return false;
          sum = platform::poll_pack(at);
        }
        store(first + i, sum);
#ifndef SIGNAL_MUTANT_TWO_SHOT_LEAVES_SUMS
        platform::send_pack(at, not_ready());
#endif
      }
    }
    return true;
  }

  SIGNAL_DEVICE void run() {
    Member m(p.group, kOpAllReduceTwoShot);
    Cleared cleared(m);
    const uint64_t state_at = platform::opaque(p.group.own + kLamportState);
    const uint32_t windows = uint32_t((p.packs + p.window_packs - 1) / p.window_packs);
    begin_call(p.group);
    const Pack state = platform::poll_pack(reinterpret_cast<const Pack*>(state_at));
    m.read();
    cleared.read();
    flag = state.word[0];
    if (flag == kNoFlag) {
      if (platform::thread_id() == 0) report_stopped(p.group, kOpAllReduceTwoShot, flag, kNoFlag);
      return;
    }
    test_delay(m, kPhaseStart);

    // What the call before left, in the generation of the third window.
    const Window third = {0, 0, (flag % kGenerations + kGenerations - 1) % kGenerations * uint32_t(kMaxGpus * kLamportSlotBytes)};
    uint64_t bytes = 0;
    for (uint32_t i = stride.first; i < state.word[1]; i += stride.step, bytes += uint64_t(stride.step) * kPackBytes) {
      for_each_peer<N>(rank, [&](uint32_t peer) SIGNAL_INLINE { platform::send_pack(place(rank, third, peer, bytes), not_ready()); });
    }

    // Behind it the whole block has read the state, and cleared. Nothing is sent with a fault known: the peers may be in the call that failed.
    platform::release_wave();
    const bool stop = platform::block_any(m.abort != 0);
    uint32_t arrived_before = kNoFlag;
    if (platform::thread_id() == 0) {
      arrived_before = platform::arrive(at<uint32_t>(p.group.own, kLamportState + offsetof(LamportState, arrival)));
      if (platform::block_id() == 0) m.count_call();
    }
    if (stop) {
      if (platform::thread_id() == 0) report_stopped(p.group, kOpAllReduceTwoShot, flag, arrived_before);
      return;
    }

    bool alive = true;
    if (windows > 1) cleared.signal();
    send(window(0));
    if (windows > 1) {
#ifndef SIGNAL_MUTANT_TWO_SHOT_SENDS_AT_ONCE
      alive = cleared.await(kPhaseStart);
      if (platform::block_any(!alive)) return leave(arrived_before, kNoFlag);
#endif
      send(window(1));
    }
    for (uint32_t w = 0; w < windows; w++) {
      alive = alive && reduce(window(w), w) && (w == 0 || gather(window(w - 1), w - 1));
      test_delay(m, kPhaseMiddle);
      if (w + 2 >= windows) continue;
#ifndef SIGNAL_MUTANT_TWO_SHOT_NEVER_AWAITS
      if (w > 0) alive = cleared.await(kPhaseMiddle) && alive;
#endif
      platform::release_wave();
      if (platform::block_any(!alive)) return leave(arrived_before, kNoFlag);
      if (w + 3 < windows) cleared.signal();
      send(window(w + 2));
    }
    alive = alive && gather(window(windows - 1), windows - 1);
    test_delay(m, kPhaseExchange);
    leave(arrived_before, alive ? flag_after(flag, windows) : kNoFlag);
  }

  SIGNAL_DEVICE void leave(uint32_t arrived_before, flag_t next) const { leave_state(p.group, arrived_before, next, 0); }
};

template <class T>
SIGNAL_DEVICE void all_reduce_two_shot(const AllReduceParams& p) {
  with_world(p.group.world, [&](auto world) SIGNAL_INLINE { TwoShot<T, decltype(world)::value>(p).run(); });
}

}  // namespace signal_comm
