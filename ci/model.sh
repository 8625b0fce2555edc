#!/usr/bin/env bash
# Runs the kernels under the model checker (kernels/model), and the spin models (docs/models).
#
#   ci/model.sh [NAME...]              all schedules of the small scenarios, a fixed number of random ones of each, the spin models
#   ci/model.sh --minutes M [NAME...]  random schedules for so long, with seeds of their own
#   ci/model.sh --mutants [NAME...]    breaks kernels, host and models on purpose: each mutant must be caught
#
# NAME: a scenario, a mutant, or a spin model. With VERBOSE=1 --mutants prints the trace that caught each.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

CXX=${CXX:-c++}
OUT=target/model
SOURCES=(fibre memory access machine digest explore names scenario cases litmus main)
# Of one scenario in one mode, so that a search that grew too large ends.
SECONDS_LIMIT=60

# Name (a define of kernels/), scenario, mode in which the scenario shows it.
MUTANTS=(
  "SIGNAL_MUTANT_ONE_COUNTER_SET               barrier              all"
  "SIGNAL_MUTANT_ONE_LINE_SET                  one-stage            all"
  "SIGNAL_MUTANT_LAMPORT_TWO_GENERATIONS       lamport              all"
  "SIGNAL_MUTANT_LAMPORT_CLEARS_ELEMENTS       lamport-types        all"
  "SIGNAL_MUTANT_LAMPORT_CLEARS_NEXT           lamport              all"
  "SIGNAL_MUTANT_LAMPORT_FLAG_WRAPS_LATE       lamport-wrap         all"
  "SIGNAL_MUTANT_LAMPORT_CLEARS_BY_FLAG        lamport-wrap         all"
  "SIGNAL_MUTANT_LAMPORT_ADVANCES_AT_ONCE      lamport-blocks       all"
  "SIGNAL_MUTANT_LAMPORT_POLLS_ONE_WORD        lamport              all"
  "SIGNAL_MUTANT_LAMPORT_SENDS_ANY_WORD        lamport-zeros        all"
  "SIGNAL_MUTANT_LAMPORT_READS_INPUT_FIRST     early                all"
  "SIGNAL_MUTANT_LAMPORT_GIVES_UP_AS_IS        late-lamport         random"
  "SIGNAL_MUTANT_USER_DOES_NOT_END              late-user            random"
  "SIGNAL_MUTANT_USER_DOES_NOT_LEAVE            user-pull            all"
  "SIGNAL_MUTANT_NORM_LEAVES_ALONE             late-norm-threads    random"
  "SIGNAL_MUTANT_NORM_PARTS_OF_TWO_ROWS        norm-rows            all"
  "SIGNAL_MUTANT_SHARDS_NOT_AWAITED            norm-two-stage       all"
  "SIGNAL_MUTANT_PUSHES_NOT_AWAITED            norm-two-stage       all"
  "SIGNAL_MUTANT_EARLY_LAUNCH_WITHOUT_WAIT     early                all"
  "SIGNAL_MUTANT_NO_EXIT_BARRIER               one-stage            all"
  "SIGNAL_MUTANT_RELAXED_MIDDLE_BARRIER        two-stage-relaxed    all"
  "SIGNAL_MUTANT_RELAXED_RELEASE               two-stage            all"
  "SIGNAL_MUTANT_RELAXED_ACQUIRE               two-stage            all"
  "SIGNAL_MUTANT_NO_RELEASE_OF_THE_WAVE        two-stage            all"
  "SIGNAL_MUTANT_NO_BLOCK_BARRIER_BEHIND_PLACES  one-stage-relaxed  all"
  "SIGNAL_MUTANT_READS_ANOTHER_BLOCKS_SUMS     two-stage-blocks     all"
  "SIGNAL_MUTANT_SELF_COUNTER_BUMPED_LATE      barrier-3            all"
  "SIGNAL_MUTANT_LINE_CHECKED_IN_ONE_HALF      one-stage            all"
  "SIGNAL_MUTANT_LOCAL_FIRST_ORDER             lamport-3            all"
  "SIGNAL_MUTANT_STAGES_AFTER_A_FAULT          late-one-stage       random"
  "SIGNAL_MUTANT_ABORT_NOT_RAISED_AT_ITSELF     late-lines-once      all"
  "SIGNAL_MUTANT_LEAVES_WITHOUT_A_WORD         late-domains         random"
  "SIGNAL_MUTANT_MEETS_BEFORE_THE_FILL         init                 all"
  "SIGNAL_MUTANT_GRIDS_DIFFER                  barrier-blocks       all"
  "SIGNAL_MUTANT_GRID_OF_LOCAL_OCCUPANCY       barrier-blocks       all"
  "SIGNAL_MUTANT_RECOVER_WITHOUT_MEETING       late-barrier         random"
  "SIGNAL_MUTANT_RECOVER_LEAVES_SLOTS          abort-lamport        all"
  "SIGNAL_MUTANT_EMPTY_CALL_ADVANCES           lamport-empty        all"
  "SIGNAL_MUTANT_NO_EXIT_BARRIER               move                 all"
  "SIGNAL_MUTANT_NO_BLOCK_BARRIER_BEHIND_PLACES  move-relaxed       all"
  "SIGNAL_MUTANT_STAGES_AFTER_A_FAULT          late-move            random"
  "SIGNAL_MUTANT_PUBLISHES_UNSTAGED            late-pairs-3         random"
  "SIGNAL_MUTANT_PUBLISHES_UNSTAGED            late-domains-3       random"
  "SIGNAL_MUTANT_SEAL_NOT_COMPARED             mismatch-move        all"
  "SIGNAL_MUTANT_MISMATCH_NOT_TOLD             mismatch-move-3      random"
  "SIGNAL_MUTANT_LINE_CHECKED_IN_ONE_HALF      lines                all"
  "SIGNAL_MUTANT_LINES_ONE_BANK                lines                all"
  "SIGNAL_MUTANT_LINES_ADVANCE_AT_ONCE         lines-blocks         all"
  "SIGNAL_MUTANT_LINES_WITHOUT_TOKENS          lines-tokens         all"
  "SIGNAL_MUTANT_LINES_SENT_PIECE_BY_PIECE     lines-reduce-blocks-3 all"
  "SIGNAL_MUTANT_LINES_NEVER_CLEARED           lines-wrap           all"
  "SIGNAL_MUTANT_LINES_CLEARED_ONCE            lines-wrap           all"
  "SIGNAL_MUTANT_LINES_COUNT_WRAPS_LATE        lines-wrap           all"
  "SIGNAL_MUTANT_LINES_WRAP_RELAXED            lines-wrap           all"
  "SIGNAL_MUTANT_LINES_WRAP_BY_ALL_BLOCKS      lines-wrap-blocks-3  random"
  "SIGNAL_MUTANT_LINES_WRAP_ARRIVES_RELAXED    lines-reduce-wrap-blocks  all"
  "SIGNAL_MUTANT_LINES_GIVE_UP_AS_IS           late-lines           random"
  "SIGNAL_MUTANT_LINE_LOOKED_AT_AGAIN          late-lines-blocks    random"
  "SIGNAL_MUTANT_TWO_SHOT_CLEARED_RELAXED         two-shot             all"
  "SIGNAL_MUTANT_TWO_SHOT_NEVER_AWAITS            two-shot             all"
  "SIGNAL_MUTANT_TWO_SHOT_LEAVES_SHARDS           two-shot             all"
  "SIGNAL_MUTANT_TWO_SHOT_LEAVES_SUMS             two-shot-3           all"
  "SIGNAL_MUTANT_TWO_SHOT_SECOND_WINDOW_UNHEARD   two-shot-rounds      all"
  "SIGNAL_MUTANT_TWO_SHOT_LAST_NUMBER_NOT_AWAITED two-shot-down        all"
  "SIGNAL_MUTANT_TWO_SHOT_LAST_SUMS_NOT_AWAITED   two-shot-large-3     all"
  "SIGNAL_MUTANT_TWO_SHOT_SIGNALS_AT_ONCE         two-shot-waves       all"
  "SIGNAL_MUTANT_TWO_SHOT_SENDS_TOO_EARLY         two-shot             all"
  "SIGNAL_MUTANT_TWO_SHOT_FLAG_ADVANCES_BY_ONE    two-shot             all"
  "SIGNAL_MUTANT_TWO_SHOT_LEAVES_WHAT_IS_LEFT     two-shot-small       all"
  "SIGNAL_MUTANT_TWO_SHOT_FIRST_NUMBER_AT_ONCE    two-shot-small       all"
  "SIGNAL_MUTANT_TWO_SHOT_ARRIVES_AT_ONCE         late-two-shot-behind random"
  "SIGNAL_MUTANT_TWO_SHOT_ADVANCES_AFTER_A_FAULT  late-two-shot        random"
  "SIGNAL_MUTANT_NO_RELEASE_OF_THE_WAVE           two-shot-waves       all"
  "SIGNAL_MUTANT_RELAXED_ACQUIRE                  two-shot-down        all"
  "SIGNAL_MUTANT_PUSHES_RELAXED                   push-relaxed         all"
  "SIGNAL_MUTANT_PUSHES_RELAXED                   two-stage-push-relaxed all"
  "SIGNAL_MUTANT_PUSHES_NOT_AWAITED               push                 all"
  "SIGNAL_MUTANT_PUSHES_NOT_AWAITED               two-stage-push       all"
  "SIGNAL_MUTANT_PUSHES_WINDOWS_UNASKED           push-windows         all"
  "SIGNAL_MUTANT_PUSHES_BY_ALL_BLOCKS             push-next-blocks-3   all"
  "SIGNAL_MUTANT_SHARDS_NOT_AWAITED               two-stage-push       all"
  "SIGNAL_MUTANT_SHARDS_OF_EACH_WINDOW            two-stage-push-blocks all"
  "SIGNAL_MUTANT_RELAXED_MIDDLE_BARRIER           two-stage-push-relaxed all"
  "SIGNAL_MUTANT_START_BARRIER_UNACQUIRED         push-windows         all"
  "SIGNAL_MUTANT_RELAXED_RELEASE                  push                 all"
  "SIGNAL_MUTANT_NO_RELEASE_OF_THE_WAVE           push-waves           all"
  "SIGNAL_MUTANT_NO_BLOCK_BARRIER_BEHIND_PLACES   push-relaxed         all"
  "SIGNAL_MUTANT_NO_BLOCK_BARRIER_BEHIND_SLOTS    push-reduce-relaxed  all"
  "SIGNAL_MUTANT_EARLY_LAUNCH_WITHOUT_WAIT        push-early           all"
  "SIGNAL_MUTANT_SEAL_NOT_COMPARED                mismatch-push        all"
  "SIGNAL_MUTANT_LEAVES_WITHOUT_RAISING           late-push-domains    random"
  "SIGNAL_MUTANT_LEAVES_WITHOUT_RAISING           late-domains-behind  random"
  "SIGNAL_MUTANT_COUNTS_READ_EARLY                counted-early        all"
  "SIGNAL_MUTANT_COUNTS_UNBOUNDED                 counted-more         all"
  "SIGNAL_MUTANT_SEAL_NOT_COMPARED                mismatch-counted     all"
  "SIGNAL_MUTANT_PUBLISHES_UNSTAGED               late-counted-domains-relaxed random"
)

# Model of docs/models, whether it must pass or fail, defines.
SPIN=(
  "barrier  pass  -DN=2"
  "barrier  pass  -DN=3 -DW=4"
  "barrier  pass  -DSETS=1 -DGE"
  "barrier  fail  -DSETS=1"
  "barrier  fail  -DSETS=1 -DN=3"
  "barrier  fail  -DNO_END"
  "barrier  fail  -DRELAXED"
  "barrier  fail  -DW=7"
  "lamport  pass  -DP=2"
  "lamport  pass  -DP=2 -DMOST=1"
  "lamport  pass  -DN=3 -DP=1"
  "lamport  fail  -DP=2 -DGENS=2"
  "lamport  fail  -DP=2 -DMOST=1 -DGENS=2"
  "lamport  fail  -DP=2 -DFW=11"
  "lamport  fail  -DP=2 -DCLEAR_CUR"
  "lamport  fail  -DBCAST"
  "lamport  fail  -DN=3 -DP=1 -DZERO"
  "lamport  fail  -DLAZYCLEAR"
  "advance  pass  -DADV=4"
  "advance  fail  -DADV=1"
  "advance  fail  -DADV=3"
  "advance  fail  -DADV=4 -DPDL"
  "advance  fail  -DADV=4 -DCAP=1 -DANYORDER"
  "recover  pass"
  "recover  fail  -DNO_MEETING"
  "recover  fail  -DCARRY_ON"
)

FLAGS=(-std=c++17 -Wall -Wextra -DSIGNAL_MODEL_LEFT_TO_CLEAR=3 -DSIGNAL_MODEL_SLOT_PACKS=4 -DSIGNAL_MODEL_LANES=4)
# The kernels are compiled for a race detector, so that the compiler calls the model at each access to shared memory; and the
# compiler sees a first poll that may not happen, which would leave a value undefined.
KERNEL_FLAGS=(-O1 -fsanitize=thread -Wno-maybe-uninitialized -Wno-unknown-warning-option)

# compile OBJECT SOURCE FLAG...: only where something is newer than the object.
compile() {
  local object=$1 source=$2
  shift 2
  if [ -e "$object" ] && [ -z "$(find kernels/model kernels/signal ci/model.sh -type f -newer "$object" -print -quit)" ]; then return; fi
  "$CXX" "${FLAGS[@]}" "$@" -c "kernels/model/$source.cpp" -o "$object"
}

compile_kernels() {
  local folder=$1 form=$2
  shift 2
  local flags=("${KERNEL_FLAGS[@]}" "$@")
  if [ "$form" = relaxed ]; then flags+=(-DSIGNAL_MODEL_RELAXED); fi
  compile "$folder/kernels_$form.o" kernels "${flags[@]}"
}

build() {
  have "$CXX" || die "no C++ compiler"
  mkdir -p "$OUT"
  local source pid pids=()
  compile_kernels "$OUT" ordered & pids+=($!)
  compile_kernels "$OUT" relaxed & pids+=($!)
  for source in "${SOURCES[@]}"; do compile "$OUT/$source.o" "$source" -O2 & pids+=($!); done
  for pid in "${pids[@]}"; do wait "$pid" || die "the model does not compile"; done
  "$CXX" "$OUT"/*.o -o "$OUT/model"
}

# build_mutant NAME SCENARIO: the part that has the define in it, compiled anew, with the rest.
build_mutant() {
  local name=$1 scenario=$2 folder="$OUT/$1" source objects=()
  mkdir -p "$folder"
  rm -f "$folder"/*.o
  if grep -qw "$name" kernels/model/scenario.cpp; then
    compile "$folder/scenario.o" scenario -O0 "-D$name"
  elif [[ $scenario = *-relaxed ]]; then
    compile_kernels "$folder" relaxed -O0 "-D$name"
  else
    compile_kernels "$folder" ordered -O0 "-D$name"
  fi
  for source in "${SOURCES[@]}" kernels_ordered kernels_relaxed; do
    if [ -e "$folder/$source.o" ]; then objects+=("$folder/$source.o"); else objects+=("$OUT/$source.o"); fi
  done
  "$CXX" "${objects[@]}" -o "$folder/model"
}

chosen() { [ ${#names[@]} -eq 0 ] || [[ " ${names[*]} " == *" $1 "* ]]; }

run_mutants() {
  local row name scenario mode start survivors=0 found=0 arguments
  for row in "${MUTANTS[@]}"; do
    read -r name scenario mode <<<"$row"
    chosen "$name" || continue
    start=$SECONDS
    build_mutant "$name" "$scenario"
    arguments=(--exhaustive)
    if [ "$mode" = random ]; then arguments=(--random 5000); fi
    # Status 1 and a trace: whatever else goes wrong is not the mutant that was caught.
    local rc=0
    timeout -k 10 $((SECONDS_LIMIT * 2)) "$OUT/$name/model" "${arguments[@]}" --seconds $SECONDS_LIMIT "$scenario" >"$OUT/$name/log" 2>&1 || rc=$?
    if [ $rc -eq 1 ] && grep -q "^again by: " "$OUT/$name/log" && ! grep -q "did not fail again" "$OUT/$name/log"; then
      found=$((found + 1))
      say "found:    $name by $scenario ($mode) in $((SECONDS - start)) s: $(sed -n "s/^$scenario: //p" "$OUT/$name/log" | head -n 1)"
      [ "${VERBOSE:-0}" = 0 ] || cat "$OUT/$name/log"
    else
      survivors=$((survivors + 1))
      tail -n 20 "$OUT/$name/log"
      say "SURVIVED: $name by $scenario ($mode), exit status $rc"
    fi
  done
  [ $((found + survivors)) -gt 0 ] || [ ${#names[@]} -gt 0 ] || die "no mutants"
  say "mutants: $found found, $survivors survived"
  [ $survivors -eq 0 ]
}

# One process a scenario, as many at a time as there are processors; what each prints stays together.
run_scenarios() {
  # shellcheck disable=SC2016 # for the shell within
  printf '%s\n' "${scenarios[@]}" | xargs -P "$(nproc)" -I{} bash -c '
    printed=$("$0" --exhaustive --random 0 --seconds "$1" "$2" 2>&1) || failed=1
    printf "%s\n" "$printed" | sed "/^scenario /d"
    exit ${failed:-0}' "$OUT/model" $SECONDS_LIMIT {}
}

# run_spin_model KIND MODEL EXPECTED DEFINES
run_spin_model() {
  local kind=$1 model=$2 expected=$3 defines=$4 start=$SECONDS result states folder log
  folder="$OUT/spin/$model${defines//[^A-Za-z0-9_=]/}"
  log="$folder/log"
  rm -rf "$folder"
  mkdir -p "$folder"
  (
    model_file="$PWD/docs/models/$model.pml"
    cd "$folder"
    # shellcheck disable=SC2046,SC2086 # none or several defines
    spin -a $defines "$model_file" >/dev/null
    "${CC:-cc}" -w $([ "$kind" = pass ] && say -O2 || say -O0) -DSAFETY -DCOLLAPSE -DMEMLIM=3000 -o pan pan.c
    ./pan -m2000000 -w24 >log 2>&1 || true
  )
  result=incomplete
  if grep -q "errors: 1" "$log"; then
    result=fail
  elif grep -q "errors: 0" "$log" && ! grep -qiE "depth too small|memory limit|out of memory" "$log"; then
    result=pass
  fi
  states=$(sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' "$log" | head -n 1)
  if [ $result = "$expected" ]; then
    say "spin: $model $defines: ${expected}, as it should, $states states, $((SECONDS - start)) s"
  else
    tail -n 5 "$log"
    say "SPIN: $model $defines should $expected: $result, $states states"
    return 1
  fi
}

# run_spin KIND: the models that must pass, or those that must fail, as many at a time as there are processors.
run_spin() {
  local kind=$1 row model expected defines running=0 failed=0
  for row in "${SPIN[@]}"; do
    read -r model expected defines <<<"$row"
    if [ "$expected" != "$kind" ] || ! chosen "$model"; then continue; fi
    have spin || die "spin is not installed (ci/install.sh brings it)"
    if [ $running -ge "$(nproc)" ]; then
      wait -n || failed=1
      running=$((running - 1))
    fi
    run_spin_model "$kind" "$model" "$expected" "$defines" &
    running=$((running + 1))
  done
  while [ $running -gt 0 ]; do
    wait -n || failed=1
    running=$((running - 1))
  done
  [ $failed -eq 0 ]
}

mutants=no minutes= names=()
while [ $# -gt 0 ]; do
  case $1 in
    --mutants) mutants=yes ;;
    --minutes) minutes=$2; shift ;;
    -h | --help) sed -n '2,/^\. /{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
    -*) die "unknown option $1" ;;
    *) names+=("$1") ;;
  esac
  shift
done

begin=$SECONDS
build
failed=0
if [ $mutants = yes ]; then
  run_mutants || failed=1
  run_spin fail || failed=1
elif [ -n "$minutes" ]; then
  seed=$(date +%s)
  end=$((SECONDS + minutes * 60))
  while [ $SECONDS -lt $end ] && [ $failed -eq 0 ]; do
    say "seed $seed"
    "$OUT/model" --random 100000000 --seconds 10 --seed "$seed" "${names[@]}" || failed=1
    seed=$((seed + 1000000000))
  done
else
  mapfile -t all < <("$OUT/model" --list)
  scenarios=()
  for name in "${all[@]}"; do
    if chosen "$name"; then scenarios+=("$name"); fi
  done
  if [ ${#names[@]} -eq 0 ]; then "$OUT/model" --litmus || failed=1; fi
  if [ ${#scenarios[@]} -gt 0 ]; then run_scenarios || failed=1; fi
  run_spin pass || failed=1
fi
say "model: $((SECONDS - begin)) s"
[ $failed -eq 0 ] || die "something is wrong"
