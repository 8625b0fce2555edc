#!/usr/bin/env bash
# What a runner with AMD GPUs executes: the suite, `doctor` and a benchmark on the ROCm backend. It needs Rust, a C++
# compiler, and ROCm with hipcc.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

rocm=${ROCM_PATH:-/opt/rocm}
have rocminfo || PATH="$rocm/bin:$PATH"
have rocminfo || die "no rocminfo: this machine has no ROCm"
gpus=$(rocminfo | grep -c '^ *Name: *gfx' || true)
[ "$gpus" -gt 0 ] || die "ROCm lists no GPU"
export SIGNAL_REQUIRE_IMAGES=host,hip

cargo run --release --features rocm -- doctor
cargo test --features rocm --test rocm
cargo run --release --features rocm -- bench all-reduce --backend rocm --ranks $((gpus < 8 ? gpus : 8))
