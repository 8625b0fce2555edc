#!/usr/bin/env bash
# Everything that must hold before a change lands. As root on Debian or Ubuntu it installs what it needs; elsewhere it
# uses what it finds, and what it cannot run fails it, unless --allow-missing.
#
#   ci/test.sh [--allow-missing] [--full] [STAGE...]
#
# Stages: fmt clippy docs images machine_code rocm hip_sys tests quickstart example tsan model mutants; --full adds the long forms: archs rocm_long long asan bindings
# package browser.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

STAGES=(fmt clippy docs images machine_code rocm hip_sys tests quickstart example tsan model mutants)
LONG_STAGES=(archs rocm_long long asan bindings package browser)
# Of the short stages together.
LIMIT=$((30 * 60))

# Each is built once.
export CARGO_INCREMENTAL="${CARGO_INCREMENTAL:-0}"

# Members with the features host, cuda and rocm, and members without.
FEATURED=(signal-comm signal-cli bias-gelu)
PLAIN=(signal-core signal-host signal-cuda signal-rocm signal-conformance signal-hip-abi signal-nccl signal-nccl-abi)

stage_fmt() {
  cargo fmt --all --check
  cargo fmt --manifest-path tests/hip-sys/Cargo.toml --check
}

# With folders of their own, so that they run beside `images`.
stage_clippy() {
  unset SIGNAL_REQUIRE_IMAGES
  export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/check
  export SIGNAL_SKIP_IMAGES=1
  local package features
  # One package at a time: together they would share each other's features.
  for package in "${FEATURED[@]}"; do
    for features in "" host cuda rocm host,cuda,rocm; do
      say "clippy: $package [$features]"
      cargo clippy --quiet -p "$package" --all-targets --no-default-features --features "$features" -- -D warnings
    done
  done
  # The suites that need a GPU are no part of --all-targets.
  cargo clippy --quiet -p signal-comm --test cuda --no-default-features --features cuda -- -D warnings
  for package in "${PLAIN[@]}"; do
    say "clippy: $package"
    cargo clippy --quiet -p "$package" --all-targets --all-features -- -D warnings
  done
}

stage_docs() {
  unset SIGNAL_REQUIRE_IMAGES
  export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/check
  SIGNAL_SKIP_IMAGES=1 RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --all-features
}

stage_images() {
  cargo build --workspace --no-default-features --features "$FEATURES"
}

# The AMD image in disassembly, and builds of it that were weakened on purpose.
stage_machine_code() {
  cargo test -p signal-comm --no-default-features --features "$FEATURES" --test machine_code
}

# The ROCm backend's host code, on a library that stands for the HIP runtime (tests/hip-abi). $1: features of that library; $2: which
# tests; what follows goes to them.
run_rocm() {
  local features=$1 root=target/hip-abi${1:+-$1} test=$2
  shift 2
  cargo build -p signal-hip-abi --features "$features"
  mkdir -p "$root/lib"
  cp "${CARGO_TARGET_DIR:-target}/debug/libamdhip64.so" "$root/lib/libamdhip64.so.7"
  # By that path alone: a runtime that is installed is found by its name.
  LD_LIBRARY_PATH=$PWD/$root/lib cargo test -p signal-comm --no-default-features --features "$FEATURES" --test "$test" -- "$@"
}

# Cases that between them call all of the backend; rocm_long runs the whole suite.
ROCM_CASES=(
  abort_ all_reduce_matches_small_sizes counted_all_to_all_in_graphs exchanges_in_graphs graph_ input_freed layout_ lines_count_wraps misuse_capture
  misuse_grids misuse_shared_stream misuse_wrong_device norm_windows pinned_ processes_leave processes_recover processes_replay processes_two prove_peer random_programs
  split_rows streams_buffers streams_drop streams_second timeout_ends_a_graph trace_tells tuning_gives two_shot_and_lamport user_kernels_
)

stage_rocm() {
  run_rocm "" rocm "${ROCM_CASES[@]}"
  run_rocm "" rocm_refusals
  # The bench's comparison, on a library that stands for RCCL too (tests/nccl-abi).
  cargo build -p signal-nccl-abi
  cp "${CARGO_TARGET_DIR:-target}/debug/librccl.so" target/hip-abi/lib/librccl.so.1
  LD_LIBRARY_PATH=$PWD/target/hip-abi/lib cargo test -p signal-cli --no-default-features --features "$FEATURES" --test compare -- --include-ignored
}

# The backend's list of the HIP interface against an independent one, which wants the headers and the library.
stage_hip_sys() {
  HIP_PATH=${HIP_PATH:-/usr} cargo test --manifest-path tests/hip-sys/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}/hip-sys"
}

stage_rocm_long() {
  run_rocm "" rocm
  # As ROCm 5.2 was: no graphs.
  run_rocm old rocm all_reduce_matches exchanges_match processes_two_groups
}

# With the default features: the suites of the GPU backends need GPUs. What a user meets without one is tried too.
stage_tests() {
  cargo test --workspace
  cargo test -p signal-comm --no-default-features --features "$FEATURES" --test unavailable
}

# The first command of the README, as it stands there.
stage_quickstart() {
  local command
  command=$(sed -n '/^## Quick start/,/^## [^Q]/s/^ *\(cargo run .*\)/\1/p' README.md | head -n 1)
  [ -n "$command" ] || die "README.md has no first command"
  say "$command"
  bash -euc "$command"
}

stage_example() {
  local ranks fixture
  fixture=$(find_fixture)
  for ranks in 1 2 3 4 6; do
    cargo run --quiet --release --example tensor_parallel -- --backend host --ranks "$ranks" "$fixture"
  done
  # A user's kernel; how long it is, the documentation says.
  [ "$(wc -l <examples/bias_gelu/src/bias_gelu.cu)" -lt 60 ] || die "examples/bias_gelu/src/bias_gelu.cu has 60 lines or more"
  for ranks in 1 2 5; do cargo run --quiet --release -p bias-gelu -- --backend host --ranks "$ranks"; done
}

# Cases that between them run each kernel, each way of waiting and each hand-over between threads of the library; --full runs all
# but those whose ranks are processes, of which it sees one at a time.
TSAN_CASES=(
  barrier_probe_ all_reduce_matches_small_sizes all_reduce_matches_with_a_thread_a_rank input_overwritten_ lamport_words lamport_waits
  norm_windows two_shot_and_lamport lines_count_wraps exchanges_match_small_sizes exchanges_inputs exchanges_in_graphs counted_all_to_all_in_graphs
  check_lets graph_mixes random_programs domains_on_threads domains_share split_beside streams_second streams_two streams_fast
  streams_domains recover_with_a_thread trace_tells
)

stage_tsan() {
  cargo_test_tsan --target-dir target/tsan -- --skip processes_ "${TSAN_CASES[@]}"
}

# The kernels and the models of the protocol, all schedules of small cases.
stage_model() {
  ci/model.sh
}

stage_mutants() {
  ci/mutants.sh
}

# The images as users get them; the short stages make do with one architecture each.
stage_archs() {
  export SIGNAL_CUDA_ARCHS='' AMDGPU_TARGETS=''
  cargo build --workspace --no-default-features --features "$FEATURES"
  cargo test -p signal-comm --no-default-features --features "$FEATURES" --test machine_code -- every_kernel
}

stage_long() {
  SIGNAL_TEST_SCALE=10 cargo test --release -p signal-comm --test host --test fuzz
  SIGNAL_TIMEOUT=1 cargo run --release -p signal-cli -- soak --backend host --ranks 4 --minutes 2 --faults
  # As where devices do not reach each other.
  SIGNAL_P2P=0 cargo test --release -p signal-comm --test host
  # A thousand calls behind each fault.
  SIGNAL_TEST_SCALE=50 cargo test --release -p signal-comm --test host -- recover_after_a_stop_at_every_point
  ci/model.sh --mutants
  ci/mutants.sh --all
  CXX=clang++-19 cargo_test_tsan --target-dir target/tsan -- --skip processes_
}

stage_asan() {
  cargo_test_asan --target-dir target/asan
}

# The CUDA backend against the oldest bindings, some in between and the newest.
stage_bindings() {
  local version
  for version in 12000 12080 13000; do
    say "bindings: $version"
    CUDARC_CUDA_VERSION=$version cargo clippy --quiet -p signal-cuda --target-dir target/bindings --all-targets -- -D warnings
  done
}

# A published package must hold all that its build needs.
stage_package() {
  local listing file
  listing=$(cargo package --list --allow-dirty -p signal-comm)
  for file in $(git ls-files build.rs build include kernels src 'LICENSE-*' README.md CHANGELOG.md); do
    grep -qxF "$file" <<<"$listing" || die "the package lacks $file"
  done
}

# The report's page, as a browser shows it.
stage_browser() {
  if can_install; then ci/install.sh browser; fi
  SIGNAL_BROWSER=$(command -v chromium || command -v chromium-browser || command -v google-chrome) \
    cargo test -p signal-cli --test report -- --include-ignored
}

if [ "${1:-}" = --stage ]; then
  "stage_$2"
  exit
fi

allow_missing=no full=no chosen=()
for argument in "$@"; do
  case $argument in
    --allow-missing) allow_missing=yes ;;
    --full) full=yes ;;
    -h | --help) sed -n '2,/^\. /{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
    -*) die "unknown option $argument" ;;
    *) [[ " ${STAGES[*]} ${LONG_STAGES[*]} " == *" $argument "* ]] || die "unknown stage $argument"; chosen+=("$argument") ;;
  esac
done
if [ ${#chosen[@]} -eq 0 ]; then
  chosen=("${STAGES[@]}")
  if [ $full = yes ]; then chosen+=("${LONG_STAGES[@]}"); fi
fi

begin=$SECONDS
rows=() not_run=()
passed=0 failed=0

if can_install; then
  ci/install.sh
  # It may have brought nvcc.
  . ci/env.sh
  rows+=("$(printf '%-12s %7d  %s' install $((SECONDS - begin)) passed)")
fi

# What there is, and so which images can be asked for.
missing() { not_run+=("$1 ($2)"); }
images=() features=()
if have "${CXX:-c++}"; then images+=(host) features+=(host); else missing "the host image and all that runs on it" "no C++ compiler"; fi
if find_nvcc >/dev/null; then images+=(cuda) features+=(cuda); else missing "the cuda image" "no nvcc"; fi
if [ -n "${HIPCC:-}${SIGNAL_CLANG:-}" ] || have clang++-19 || have clang++ || have hipcc; then
  images+=(hip) features+=(rocm)
else
  missing "the hip image" "no hipcc and no clang++"
fi
join() { local IFS=,; say "$*"; }
SIGNAL_REQUIRE_IMAGES=$(join "${images[@]}")
FEATURES=$(join "${features[@]}")
# Each takes a minute or two.
SIGNAL_CUDA_ARCHS=${SIGNAL_CUDA_ARCHS-90} AMDGPU_TARGETS=${AMDGPU_TARGETS-gfx942}
export SIGNAL_REQUIRE_IMAGES FEATURES SIGNAL_CUDA_ARCHS AMDGPU_TARGETS

# Why a stage cannot run here; nothing if it can.
obstacle() {
  case $1 in
    fmt) cargo fmt --version >/dev/null 2>&1 || say "no rustfmt" ;;
    clippy) cargo clippy --version >/dev/null 2>&1 || say "no clippy" ;;
    rocm | rocm_long)
      have "${CXX:-c++}" || say "no C++ compiler"
      [[ ",$FEATURES," == *,rocm,* ]] || say "no hip image" ;;
    browser) can_install || have chromium || have chromium-browser || have google-chrome || say "no Chromium" ;;
    hip_sys) [ -e "${HIP_PATH:-/usr}/include/hip/hip_runtime_api.h" ] || say "no hip/hip_runtime_api.h" ;;
    tests | quickstart | tsan | mutants | long) have "${CXX:-c++}" || say "no C++ compiler" ;;
    machine_code)
      have clang++-19 || have clang++ || { say "no clang++" && return; }
      have llvm-objdump-19 || have llvm-objdump || say "no llvm-objdump" ;;
    model)
      have "${CXX:-c++}" || { say "no C++ compiler" && return; }
      have spin || say "no spin" ;;
    example)
      have "${CXX:-c++}" || { say "no C++ compiler" && return; }
      find_fixture >/dev/null || say "no fixture, and none could be made" ;;
  esac
}

child= ahead=
stop() {
  kill -TERM $child $ahead 2>/dev/null || true
  exit 130
}
trap stop INT TERM

# The AMD image takes one core for minutes, while clippy and docs want no image.
ahead_log=$(mktemp)
trap 'rm -f "$ahead_log"' EXIT
if [[ " ${chosen[*]} " == *" images "* ]]; then
  timeout -k 10 $LIMIT bash "$0" --stage images </dev/null >"$ahead_log" 2>&1 &
  ahead=$!
fi

for stage in "${chosen[@]}"; do
  why=$(obstacle "$stage")
  if [ -n "$why" ]; then
    missing "$stage" "$why"
    continue
  fi
  say "=== $stage"
  start=$SECONDS
  limit=()
  if [[ " ${STAGES[*]} " == *" $stage "* ]]; then
    left=$((begin + LIMIT - SECONDS))
    limit=(timeout -k 10 $((left > 1 ? left : 1)))
  fi
  if [ "$stage" = images ]; then
    child=$ahead ahead=
  else
    "${limit[@]}" bash "$0" --stage "$stage" </dev/null &
    child=$!
  fi
  if wait "$child"; then
    result=passed passed=$((passed + 1))
  else
    result="FAILED" failed=$((failed + 1))
    if [ ${#limit[@]} -gt 0 ] && [ $((SECONDS - begin)) -ge $LIMIT ]; then result="FAILED: over the limit of $LIMIT s"; fi
  fi
  child=
  if [ "$stage" = images ]; then cat "$ahead_log"; fi
  rows+=("$(printf '%-12s %7d  %s' "$stage" $((SECONDS - start)) "$result")")
done

say
say "stage        seconds"
printf '%s\n' "${rows[@]}"
printf '%-12s %7d\n' total $((SECONDS - begin))
for what in "${not_run[@]}"; do say "not run: $what"; done
say
say "stages: $passed passed, $failed failed, ${#not_run[@]} skipped"
[ $failed -eq 0 ] || exit 1
if [ ${#not_run[@]} -gt 0 ] && [ $allow_missing = no ]; then
  say "something was not run; --allow-missing lets that pass"
  exit 1
fi
