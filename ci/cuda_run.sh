#!/usr/bin/env bash
# Runs what ci/cuda.sh has packed beside this script, on a machine with an NVIDIA driver. Prints a short table; whole logs
# go to $OUT (logs/). Every program has a deadline of its own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
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
  if timeout "$seconds" "$@" >"$OUT/$name.txt" 2>&1; then
    printf '%-22s %4d s  passed  %s\n' "$name" $((SECONDS - start)) "$(grep -v '^$' "$OUT/$name.txt" | tail -1 | cut -c1-150)"
  else
    printf '%-22s %4d s  FAILED  (%d)\n' "$name" $((SECONDS - start)) $?
    tail -25 "$OUT/$name.txt"
    failed=1
  fi
}

step doctor 60 ./signal doctor
step suite 240 ./suite --test-threads=1
step call 60 ./call
for ranks in 2 4; do
  example=(--ranks "$ranks")
  [ "$gpus" -ge "$ranks" ] || example+=(--share-devices)
  step "minilm-$ranks" 60 ./tensor_parallel --backend cuda "${example[@]}" minilm.safetensors
done
if command -v compute-sanitizer >/dev/null; then
  SIGNAL_TEST_SCALE=0.02 step memcheck 120 compute-sanitizer --tool memcheck --error-exitcode 9 \
    ./suite --test-threads=1 all_reduce_matches_small all_reduce_special_pairs barrier_every
else
  echo "memcheck: no compute-sanitizer here"
fi

# Floors and benchmark in one job: absolute times of different jobs do not compare.
step floor 120 ./floor --brief
bench() {
  local bytes=$1 memory=$2 algorithm=$3
  timeout 60 ./signal bench all-reduce --backend cuda --ranks 2 "${share[@]}" -d bf16 --graph 50 --sets 1 --memory "$memory" \
    --algo "$algorithm" -b "$bytes" -e "$bytes" 2>&1 | tee -a "$OUT/bench.txt" |
    awk -v bytes="$bytes" '/^ *[0-9]/ { print $5, $6, $11, $9 + $15 }'
}
echo
echo "two ranks, bf16, graphs of 50, us per call on the slower rank: median (p99), and the median's ratio to the bare pull"
printf '%9s %8s %28s %18s %28s %28s\n' bytes floor one-stage "in place" "staged" two-stage
for bytes in 2048 65536 4194304 67108864; do
  floor=$(awk -v bytes=$bytes '$1 == bytes { print $2 }' "$OUT/floor.txt")
  line=$(printf '%9d %8s' $bytes "$floor")
  read -r time p99 in_place wrong <<<"$(bench $bytes symmetric one-stage)"
  line+=$(awk -v f="$floor" -v t="$time" -v p="$p99" -v i="$in_place" 'BEGIN { printf " %9.2f (%8.2f) %6.3fx %10.2f %6.3fx", t, p, t / f, i, i / f }')
  for kind in "local one-stage" "symmetric two-stage"; do
    # shellcheck disable=SC2086 # two words
    read -r time p99 in_place more <<<"$(bench $bytes $kind)"
    line+=$(awk -v f="$floor" -v t="$time" -v p="$p99" 'BEGIN { printf " %9.2f (%8.2f) %6.3fx", t, p, t / f }')
    wrong=$((wrong + more))
  done
  echo "$line"
  [ "$wrong" = 0 ] || { echo "$wrong elements are wrong"; failed=1; }
done | tee "$OUT/ratios.txt"
grep -q "are wrong" "$OUT/ratios.txt" && failed=1
exit $failed
