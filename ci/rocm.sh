#!/usr/bin/env bash
# What a runner with AMD GPUs executes: `doctor` and the tests of the ROCm backend, and with ROCm's own hipcc. It needs
# Rust, a C++ compiler, and ROCm.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

rocm=${ROCM_PATH:-/opt/rocm}
have rocminfo || PATH="$rocm/bin:$PATH"
have rocminfo || die "no rocminfo: this machine has no ROCm"
gpus=$(rocminfo | grep -c '^ *Name: *gfx' || true)
[ "$gpus" -gt 0 ] || die "ROCm lists no GPU"
export SIGNAL_REQUIRE_IMAGES=host,hip

cargo run --release --features rocm -- doctor
cargo test --features rocm --test rocm
