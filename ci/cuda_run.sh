#!/usr/bin/env bash
# Runs what ci/cuda.sh has packed beside this script, on a machine with an NVIDIA driver. Prints a short table; whole logs
# go to $OUT (logs/). Every program has a deadline of its own.
#
#   bash run.sh [STEP...]   all steps, or those named: doctor suite rocm call behind bounded norm minilm bias_gelu memcheck floor bench
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
# Streams beyond a process's queues, of which there are 8 by default, may wait for each other though nothing orders them. With 8, cases of many
# domains with all ranks on one device have timed out in the whole suite; with 32 they have not (benches/results).
export CUDA_DEVICE_MAX_CONNECTIONS=32
chosen=" ${*:-doctor suite rocm call behind bounded norm minilm bias_gelu memcheck floor bench} "
wanted() { [[ $chosen == *" $1 "* ]]; }
OUT=${OUT:-logs}
mkdir -p "$OUT"
failed=0

gpus=$(nvidia-smi --list-gpus | grep -c '^GPU')
[ "$gpus" -gt 0 ] || { echo "the driver lists no GPU"; exit 1; }
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
echo "$gpus x $name, driver $driver, $(date -u +%F), commit $(cat commit)" | tee "$OUT/machine.txt"
share=()
[ "$gpus" -ge 2 ] || share=(--share-devices)

# step NAME SECONDS COMMAND...: the last line of a step that passes, more of one that does not.
step() {
  local name=$1 seconds=$2 start=$SECONDS
  shift 2
  wanted "${name%%-*}" || return 0
  if timeout "$seconds" "$@" >"$OUT/$name.txt" 2>&1; then
    printf '%-22s %4d s  passed  %s\n' "$name" $((SECONDS - start)) "$(grep -v '^$' "$OUT/$name.txt" | tail -1 | cut -c1-150)"
  else
    printf '%-22s %4d s  FAILED  (%d)\n' "$name" $((SECONDS - start)) $?
    tail -25 "$OUT/$name.txt"
    failed=1
  fi
}

step doctor 60 ./signal doctor
step suite 240 ./suite --test-threads=1 --nocapture
step rocm 300 env LD_LIBRARY_PATH="$PWD/lib" ./rocm --test-threads=1 --nocapture
step call 60 ./call
step behind 60 ./behind
step bounded 120 ./bounded unbounded.cubin
step norm 60 ./norm
step norm-floor 60 ./norm_floor
for ranks in 2 4; do
  example=(--ranks "$ranks")
  [ "$gpus" -ge "$ranks" ] || example+=(--share-devices)
  step "minilm-$ranks" 60 ./tensor_parallel --backend cuda "${example[@]}" minilm.safetensors
  step "bias_gelu-$ranks" 60 ./bias_gelu --backend cuda "${example[@]}"
done
if command -v compute-sanitizer >/dev/null; then
  SIGNAL_TEST_SCALE=0.02 step memcheck 120 compute-sanitizer --tool memcheck --error-exitcode 9 \
    ./suite --test-threads=1 all_reduce_matches_small all_reduce_special_pairs barrier_every lamport_sizes
else
  echo "memcheck: no compute-sanitizer here"
fi

# Floors and benchmark in one job: absolute times of different jobs do not compare.
step floor 120 ./floor --brief
step floor-copies 60 ./floor --copies
if wanted bench; then
  # Kind, memory, algorithm, largest message, sets of buffers, and how calls are timed.
  while read -r kind memory algorithm most sets how; do
    # shellcheck disable=SC2086 # `how` is several words or none
    timeout 100 ./signal bench all-reduce --backend cuda --ranks 2 "${share[@]}" -d bf16 --sets "$sets" $how \
      --memory "$memory" --algo "$algorithm" -b 2K -e "$most" -f 2 --json "$OUT/$kind.json" >"$OUT/$kind.txt" 2>&1 ||
      { echo "bench $kind FAILED"; tail -5 "$OUT/$kind.txt"; failed=1; }
  done <<'KINDS'
one-stage symmetric one-stage 64M 1 --graph 50
staged local one-stage 64M 1 --graph 50
two-stage symmetric two-stage 64M 1 --graph 50
lamport local lamport 1M 1 --graph 50
lamport-5-sets local lamport 1M 5 --graph 50
lamport-no-graph local lamport 1M 5
KINDS
  echo
  echo "two ranks, bf16, graphs of 50, us per call on the slower rank: median (p99), and the median's ratio to a bare kernel,"
  echo "pull for the first four, push with early launch for lamport"
  printf '%9s %7s %25s %9s %8s %25s %25s %7s %25s\n' bytes pull one-stage "in place" "" staged two-stage push lamport
  for bytes in 2048 16384 65536 262144 1048576 4194304 67108864; do
    awk -v bytes=$bytes '
      function cell(file, floor,   line, f) {
        while ((getline line < file) > 0) {
          split(line, f)
          if (f[1] == bytes) return sprintf("%7.2f (%7.2f) %6.3fx", f[6], f[7], f[6] / floor) SUBSEP f[12]
        }
        return "-" SUBSEP "-"
      }
      $1 == bytes {
        pull = $2; push = $4
        split(cell(out "/one-stage.txt", pull), one, SUBSEP)
        split(cell(out "/staged.txt", pull), staged, SUBSEP)
        split(cell(out "/two-stage.txt", pull), two, SUBSEP)
        split(cell(out "/lamport.txt", push + 1e-9), lamport, SUBSEP)
        printf "%9d %7s %25s %9s %7.3fx %25s %25s %7s %25s\n", bytes, pull, one[1], one[2], one[2] / pull, staged[1], two[1], push, lamport[1]
      }' out="$OUT" "$OUT/floor.txt"
  done | tee "$OUT/ratios.txt"
  echo
  echo "lamport, us per call: in graphs over 5 sets of buffers, and called one by one"
  for bytes in 2048 16384 65536 262144 1048576; do
    awk -v bytes=$bytes '
      FILENAME != was { was = FILENAME; n++ }
      $1 == bytes { us[n] = $6; in_place[n] = $12 }
      END { printf "%9d %7.2f (in place %.2f) %7.2f (in place %.2f)\n", bytes, us[1], in_place[1], us[2], in_place[2] }
    ' "$OUT/lamport-5-sets.txt" "$OUT/lamport-no-graph.txt"
  done | tee "$OUT/lamport-more.txt"
  grep -h "Wrong elements" "$OUT"/*.txt | sort | uniq -c
fi
exit $failed
