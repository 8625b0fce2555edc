#!/usr/bin/env bash
# Breaks the kernels on purpose and checks that the tests notice: a mutant that survives fails this script.
#
#   ci/mutants.sh [--all] [NAME...]
#
# Without --all those alone that only the tests of the library find: the others break the protocol, and the model checker finds them
# sooner (ci/model.sh --mutants).
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Name (a define of kernels/), how it is found, test filter; + before those that the model checker finds too, - before others.
#   plain: a test with the filter in its name fails
#   tsan:  ThreadSanitizer reports a data race in the kernels while the tests with that filter run
MUTANTS=(
  "- SIGNAL_MUTANT_RELAXED_RELEASE            tsan   barrier_probe_worlds"
  "+ SIGNAL_MUTANT_RELAXED_ACQUIRE            tsan   barrier_probe_worlds"
  "+ SIGNAL_MUTANT_NO_EXIT_BARRIER            plain  input_overwritten"
  "+ SIGNAL_MUTANT_ONE_COUNTER_SET            plain  barrier_probe"
  "+ SIGNAL_MUTANT_LOCAL_FIRST_ORDER          plain  all_reduce_matches"
  "+ SIGNAL_MUTANT_LAMPORT_FLAG_WRAPS_LATE    plain  lamport_flag"
  "+ SIGNAL_MUTANT_LAMPORT_CLEARS_BY_FLAG     plain  lamport_flag"
  "+ SIGNAL_MUTANT_LAMPORT_CLEARS_NEXT        plain  lamport_sizes"
  "+ SIGNAL_MUTANT_LAMPORT_SENDS_ANY_WORD     plain  lamport_words"
  "+ SIGNAL_MUTANT_LAMPORT_ADVANCES_AT_ONCE   plain  lamport_ten"
  "+ SIGNAL_MUTANT_STAGES_AFTER_A_FAULT       plain  timeout_leaves_staged"
)
# Seconds for one run of the filtered tests. A mutant has to be noticed by a test, not by this.
RUN_LIMIT=180

# Waits that a mutant makes hopeless end soon, unless a test says otherwise.
export SIGNAL_TIMEOUT="${SIGNAL_TIMEOUT:-20}"
export SIGNAL_REQUIRE_IMAGES=host
LOG=$(mktemp)
trap 'rm -f "$LOG"' EXIT

# host_suite MODE ARGUMENT...
host_suite() {
  local mode=$1
  shift
  case $mode in
    plain) cargo test -p signal-comm --test host "$@" ;;
    tsan) cargo_test_tsan --target-dir target/tsan "$@" ;;
    *) die "unknown mode $mode" ;;
  esac
}

# For the shell that runs it under a limit.
export -f host_suite cargo_test_tsan cargo_test_sanitized die say

# Says why the mutant counts as found; fails if it survived.
noticed() {
  local mode=$1 filter=$2 rc=$3
  [ "$rc" -ne 124 ] && [ "$rc" -ne 0 ] || return 1
  case $mode in
    plain) grep -m 1 -E "^test .*$filter.* FAILED" "$LOG" ;;
    tsan) grep -q "WARNING: ThreadSanitizer: data race" "$LOG" && grep -m 1 -E "^ +#[0-9]+ .*kernels/(signal|host)/" "$LOG" ;;
  esac
}

all=no
if [ "${1:-}" = --all ]; then all=yes; shift; fi
survivors=0 found=0
for row in "${MUTANTS[@]}"; do
  read -r by_model name mode filter <<<"$row"
  if [ $# -gt 0 ]; then
    [[ " $* " == *" $name "* ]] || continue
  elif [ "$by_model" = + ] && [ $all = no ]; then
    continue
  fi
  start=$SECONDS
  export SIGNAL_KERNEL_DEFINES=$name
  if ! host_suite "$mode" --no-run >"$LOG" 2>&1; then
    cat "$LOG"
    die "$name does not compile"
  fi
  rc=0
  timeout -k 10 $RUN_LIMIT bash -c 'host_suite "$@"' host_suite "$mode" -- "$filter" >"$LOG" 2>&1 || rc=$?
  if how=$(noticed "$mode" "$filter" $rc); then
    found=$((found + 1))
    say "found:    $name by $mode $filter in $((SECONDS - start)) s: $how"
  else
    survivors=$((survivors + 1))
    tail -n 40 "$LOG"
    say "SURVIVED: $name by $mode $filter (exit status $rc)"
  fi
done
[ $((found + survivors)) -gt 0 ] || die "no such mutant"
say "mutants: $found found, $survivors survived"
[ $survivors -eq 0 ]
