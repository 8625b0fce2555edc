# Sourced by the scripts beside it: goes to the repository's root and finds the tools that ci/install.sh put there.
# shellcheck shell=bash

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# PTX from a newer nvcc is refused by the drivers of CUDA 13.0.
CUDA_VERSION=13.0
CUDA_TOOLS="$PWD/.tools/cuda-$CUDA_VERSION"
# Holds the place of bin/nvcc's parent below it; written when everything else is there.
CUDA_COMPLETE="$CUDA_TOOLS/complete"
if [ -e "$CUDA_COMPLETE" ]; then
  CUDA_HOME="$CUDA_TOOLS/$(cat "$CUDA_COMPLETE")"
  export CUDA_HOME
fi

have() { command -v "$1" >/dev/null 2>&1; }

say() { printf '%s\n' "$*"; }

die() {
  say "$0: $*" >&2
  exit 1
}

# The nvcc that build.rs will find, if any.
find_nvcc() {
  local candidate
  for candidate in "${NVCC:-}" "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    if [ -n "$candidate" ] && [ -x "$candidate" ]; then
      say "$candidate"
      return
    fi
  done
  return 1
}

# The fixture's path; makes it where there is none.
find_fixture() {
  local name=minilm_l6_f16.safetensors folder
  for folder in "${SIGNAL_FIXTURES:-}" ../shared/data .tools/fixtures; do
    if [ -n "$folder" ] && [ -f "$folder/$name" ]; then
      say "$folder/$name"
      return
    fi
  done
  python3 tests/fixtures/make_minilm.py --out ".tools/fixtures/$name" >&2
  say ".tools/fixtures/$name"
}

# As root on Debian or Ubuntu what is missing is installed.
can_install() { [ "$(id -u)" = 0 ] && have apt-get; }

# cargo_test_sanitized KIND ARGUMENT...: runs cargo on the host suite, Rust under a sanitizer, which finds what it finds within few
# rounds, and multiplies their time. `-Z` is for nightly compilers; RUSTC_BOOTSTRAP lets a stable one take it. A sanitizer sees what is
# mapped and unmapped where libc does it, not by rustix's own system calls: else what lay at an address before counts as touched.
cargo_test_sanitized() {
  local kind=$1
  shift
  RUSTC_BOOTSTRAP=1 \
    RUSTFLAGS="-Zsanitizer=$kind -Cunsafe-allow-abi-mismatch=sanitizer --cfg rustix_use_libc" \
    SIGNAL_TEST_SCALE="${SIGNAL_TEST_SCALE:-0.2}" \
    cargo test -p signal-comm --test host --target "$(rustc -vV | sed -n 's/^host: //p')" "$@"
}

# What is allocated, freed and handed to kernels and peers. The pool's threads and what they hold live as long as the program,
# which would count as leaks.
cargo_test_asan() {
  ASAN_OPTIONS=detect_leaks=0 cargo_test_sanitized address "$@"
}

# Rust and kernels, ended with status 66 if it has reported. Captured output is handed over through an Arc, which ThreadSanitizer
# does not see through.
cargo_test_tsan() {
  SIGNAL_SANITIZE=thread \
    RUST_TEST_NOCAPTURE=1 \
    TSAN_OPTIONS="halt_on_error=0 exitcode=66 suppressions=$PWD/ci/tsan.supp" \
    cargo_test_sanitized thread "$@"
}
