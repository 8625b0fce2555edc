// A Lamport all-reduce of rows and the norm of its sums in one kernel: a block has whole rows, whose packs lie in the mail one behind
// the other, each row from a pack of its own on. The protocol is that of lamport.h, but for how a block ends: its threads meet in every row, so
// one that gives up tells the others there, and all leave.
#pragma once

#include "lamport.h"
#include "row_forms.h"

namespace signal_comm {

// The fault of a call that found an abort word raised; its block leaves as a whole, so it goes on.
SIGNAL_COLD void report_norm_stopped(const GroupParams& g, flag_t flag) {
  report_fault(Member(g, kOpAllReduceNorm), kPhaseExchange, 0, [&](uint32_t) { return Seen{flag + 1, flag}; });
}

// What all threads of a call do before they wait for their peers, and behind that.
template <class T, uint32_t N, bool kExact>
struct NormCall {
  const NormParams& p;
  Mail<T, N, kExact> mail;
  Member m;
  flag_t flag = kNoFlag;
  uint32_t left = 0;  // packs of the call before, to clear
  uint32_t arrived_before = kNoFlag;

  SIGNAL_DEVICE explicit NormCall(const NormParams& params)
      : p(params), mail(params.all_reduce, 0), m(params.all_reduce.group, kOpAllReduceNorm) {}

  SIGNAL_DEVICE const GroupParams& group() const { return p.all_reduce.group; }

  // False where an earlier call was given up.
  SIGNAL_DEVICE bool read_state() {
    const Pack state = platform::poll_pack(at<Pack>(group().own, kLamportState));
    m.read();
    flag = state.word[0];
    left = state.word[1];
    if (flag == kNoFlag) {
      if (platform::thread_id() == 0) report_stopped(group(), kOpAllReduceNorm, flag, kNoFlag);
      return false;
    }
    mail.use(flag % kGenerations);
    test_delay(m, kPhaseStart);
    return true;
  }

  // The pack's number in the mail.
  SIGNAL_DEVICE uint32_t in_mail(uint32_t row, uint32_t k) const { return in_slots<N>(row * p.row_packs + k, mail.world()); }
  SIGNAL_DEVICE void send(uint32_t row, uint32_t k, const Pack& own) const { mail.send(uint64_t(in_mail(row, k)) * kPackBytes, own); }

  // Behind all that this thread sends: clears what the call before has left, and gives whether this thread has found an abort word raised. What
  // was sent belongs to a call that the peers may be in.
  SIGNAL_DEVICE bool arrive() {
    platform::block_sync();  // the whole block has read the state
    if (platform::thread_id() == 0) {
      arrived_before = platform::arrive(at<uint32_t>(group().own, kLamportState + offsetof(LamportState, arrival)));
      if (platform::block_id() == 0) m.count_call();
    }
    const uint64_t back = bytes_to_generation_before(flag);
    const Stride stride;
    for (uint32_t i = stride.first; i < left; i += stride.step) mail.clear(back + uint64_t(i) * kPackBytes);
    if (m.abort == 0) return false;
    report_norm_stopped(group(), flag);
    return true;
  }

  // All ranks' packs, of which this rank's own is `mine`; false where the wait for them has ended in a fault.
  SIGNAL_DEVICE bool receive(uint32_t row, uint32_t k, const Pack& mine, Pack (&packs)[N]) const {
    const uint64_t bytes = uint64_t(in_mail(row, k)) * kPackBytes;
    SIGNAL_NO_UNROLL
    for (uint32_t polls = 0; !mail.look(bytes, mine, packs); polls++) {  // nothing but the polls, as in a barrier
      if (kBounded && polls >= platform::kPollsPerCheck && !wait_for_packs(group(), kOpAllReduceNorm, flag, in_mail(row, k), kEveryone)) {
        return false;
      }
      platform::relax();
    }
    return true;
  }
  // What was received of a large call is cleared at once.
  SIGNAL_DEVICE void clear_received(uint32_t row, uint32_t k) const {
    if (row * p.row_packs + k >= kMostLeftToClear) mail.clear(uint64_t(in_mail(row, k)) * kPackBytes);
  }

  // The sum of a pack, with NaNs as the platform has them; false as above.
  SIGNAL_DEVICE bool sum(uint32_t row, uint32_t k, const Pack& mine, Pack& x) const {
    Pack packs[N] = {};
    if (!receive(row, k, mine, packs)) return false;
    x = mail.raw_sum(packs);
    clear_received(row, k);
    return true;
  }
  SIGNAL_DEVICE bool sum(uint32_t row, uint32_t k, const Pack& mine, Values<T>& x) const {
    Pack packs[N] = {};
    if (!receive(row, k, mine, packs)) return false;
    x = values_of(mail.fold(packs));
    clear_received(row, k);
    return true;
  }

  SIGNAL_DEVICE void leave(bool failed) const {
    test_delay(m, kPhaseExchange);
    // A call that was given up leaves no count with which another sends anything.
    leave_state(group(), arrived_before, failed ? kNoFlag : next_flag(flag), failed ? 0 : left_to_clear<T>(p.all_reduce));
  }
};

// Rows of any kind, of which anything may become.
template <class T, uint32_t N>
SIGNAL_DEVICE void lamport_norm_wide(const NormParams& p) {
  SIGNAL_SHARED(NormShared, shared);
  RowFolds folds(shared);
  NormCall<T, N, false> call(p);
  begin_call(call.group());
  if (!call.read_state()) return;
  for (uint32_t r = platform::block_id(); r < p.rows; r += platform::grid_dim()) {
    const Row<T, false> row(p, r);
    for (uint32_t k = platform::thread_id(); k < p.row_packs; k += platform::block_dim()) call.send(r, k, row.own(k));
  }
  bool failed = call.arrive();
  for (uint32_t r = platform::block_id(); r < p.rows; r += platform::grid_dim()) {
    const WideRow<T> row(p, r, folds);
    if (!row.norm(failed, [&](uint32_t k, Values<T>& x) SIGNAL_INLINE { return call.sum(r, k, row.own(k), x); })) {
      failed = true;
      break;
    }
  }
  call.leave(failed);
}

// Sends a block's rows behind its first one, by itself, so that the path of few rows is short: code that has not run on a multiprocessor for some
// microseconds comes slowly.
template <class T, uint32_t N, bool kExact>
SIGNAL_COLD void send_more_rows(const NormParams& p, flag_t flag) {
  NormCall<T, N, kExact> call(p);
  call.mail.use(flag % kGenerations);
  SIGNAL_NO_UNROLL
  for (uint32_t r = platform::block_id() + platform::grid_dim(); r < p.rows; r += platform::grid_dim()) {
    const Row<T, true> row(p, r);
    SIGNAL_NO_UNROLL
    for (uint32_t k = platform::thread_id(); k < p.row_packs; k += platform::block_dim()) call.send(r, k, row.own(k));
  }
}

// What becomes of whole rows, of which each thread has one pack at most: RMSNorm, exact, in the rows' own type or e4m3 with one scale for all. Kernels of
// their own: a choice between the two, with the codes out of line, made the first 0.07 us slower.
template <class T, Codes kCodes>
struct PlainNorm {
  Soon<T, 1> soon;
  Given given;
  NormShared& shared;
  uint32_t turn = 0;

  SIGNAL_DEVICE PlainNorm(const NormParams& p, NormShared& s) : soon(p), given(p, kCodes != Codes::kNever), shared(s) {}

  template <class Sum>
  SIGNAL_DEVICE bool norm(const NormParams& p, uint32_t r, bool failed, Sum sum) {
    return norm_narrow<1, kCodes>(Row<T, true>(p, r), turn++, failed, soon, given, shared, [&](uint32_t, uint32_t k, Pack& x) SIGNAL_INLINE { return sum(k, x); });
  }
};

// The same, anything.
template <class T>
struct AnyNorm {
  Soon<T, 1> soon;
  Given given;
  RowFolds folds;

  SIGNAL_DEVICE AnyNorm(const NormParams& p, NormShared& s) : soon(p), given(p), folds(s) {}

  template <class Sum>
  SIGNAL_DEVICE bool norm(const NormParams& p, uint32_t r, bool failed, Sum sum) {
    return NarrowRow<T, 1>(p, r).norm(folds, failed, soon, given, [&](uint32_t, uint32_t k, Values<T>& x) SIGNAL_INLINE { return sum(k, x); });
  }
};

// Rows that are whole, of which each thread has one pack at most: the host has seen to that. With two, what does not fit the registers costs more
// than a kernel of its own for the norm.
template <class T, uint32_t N, bool kExact, class Norm>
SIGNAL_DEVICE void lamport_norm_narrow(const NormParams& p) {
  if (!has_threads_for<1>(p)) return lamport_norm_wide<T, (N < 4 ? 4 : N)>(p);
  SIGNAL_SHARED(NormShared, shared);
  const uint32_t block = platform::block_id(), blocks = platform::grid_dim(), thread = platform::thread_id();
  NormCall<T, N, kExact> call(p);
  Norm norm(p, shared);
  auto from = norm.soon.addresses(p, block);
  if constexpr (N == 2) {  // of more ranks there are no registers left for it
    from.own = platform::opaque(from.own);
    from.residual = platform::opaque(from.residual);
    call.mail.in = platform::opaque(call.mail.in);
    call.mail.out = platform::opaque(call.mail.out);
  }
  begin_call(call.group());
  norm.soon.load_from(p, block, from);  // before the state: its way is as long
  if (!call.read_state()) return;
  if (block < p.rows) {
    if (thread < p.row_packs) call.send(block, thread, norm.soon.own[0]);
    if (blocks < p.rows - block) send_more_rows<T, N, kExact>(p, call.flag);
  }
  bool failed = call.arrive();
  SIGNAL_NO_UNROLL
  for (uint32_t r = block; r < p.rows; r += blocks) {
    if (r != block) norm.soon.load(p, r);
    if (!norm.norm(p, r, failed, [&](uint32_t k, auto& x) SIGNAL_INLINE { return call.sum(r, k, norm.soon.own[0], x); })) {
      failed = true;
      break;
    }
  }
  call.leave(failed);
}

// Of five to eight ranks.
template <class T>
SIGNAL_DEVICE void all_reduce_rms_norm(const NormParams& p) {
  lamport_norm_narrow<T, 8, false, PlainNorm<T, Codes::kNever>>(p);
}

// Of four, three or one.
template <class T>
SIGNAL_DEVICE void all_reduce_rms_norm_small(const NormParams& p) {
  lamport_norm_narrow<T, 4, false, PlainNorm<T, Codes::kNever>>(p);
}

// Of two.
template <class T>
SIGNAL_DEVICE void all_reduce_rms_norm_pair(const NormParams& p) {
  lamport_norm_narrow<T, 2, true, PlainNorm<T, Codes::kNever>>(p);
}

// The same three to e4m3.
template <class T>
SIGNAL_DEVICE void all_reduce_rms_norm_e4m3(const NormParams& p) {
  lamport_norm_narrow<T, 8, false, PlainNorm<T, Codes::kAlways>>(p);
}

template <class T>
SIGNAL_DEVICE void all_reduce_rms_norm_e4m3_small(const NormParams& p) {
  lamport_norm_narrow<T, 4, false, PlainNorm<T, Codes::kAlways>>(p);
}

template <class T>
SIGNAL_DEVICE void all_reduce_rms_norm_e4m3_pair(const NormParams& p) {
  lamport_norm_narrow<T, 2, true, PlainNorm<T, Codes::kAlways>>(p);
}

// With any norm and any output. A wave of one thread knows no partners: where all are such, wide rows serve.
template <class T, uint32_t N, bool kExact>
SIGNAL_DEVICE void lamport_norm_any(const NormParams& p) {
  if constexpr (platform::kSumLanes == 1) return lamport_norm_wide<T, (N < 4 ? 4 : N)>(p);
  lamport_norm_narrow<T, N, kExact, AnyNorm<T>>(p);
}

template <class T>
SIGNAL_DEVICE void all_reduce_norm(const NormParams& p) {
  lamport_norm_any<T, 8, false>(p);
}

template <class T>
SIGNAL_DEVICE void all_reduce_norm_small(const NormParams& p) {
  lamport_norm_any<T, 4, false>(p);
}

template <class T>
SIGNAL_DEVICE void all_reduce_norm_pair(const NormParams& p) {
  lamport_norm_any<T, 2, true>(p);
}

// Rows of any kind, of more than four ranks, and of at most four. Kernels of their own: what the paths beside each other ask of registers, none of
// them asks alone.
template <class T>
SIGNAL_DEVICE void all_reduce_norm_wide(const NormParams& p) {
  lamport_norm_wide<T, 8>(p);
}

template <class T>
SIGNAL_DEVICE void all_reduce_norm_wide_small(const NormParams& p) {
  lamport_norm_wide<T, 4>(p);
}

}  // namespace signal_comm
