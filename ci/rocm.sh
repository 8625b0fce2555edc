#!/usr/bin/env bash
# What a runner with AMD GPUs executes: build, doctor, conformance, benchmark. It needs Rust, a C++ compiler, and ROCm.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

rocm=${ROCM_PATH:-/opt/rocm}
have rocminfo || PATH="$rocm/bin:$PATH"
have rocminfo || die "no rocminfo: this machine has no ROCm"
gpus=$(rocminfo | grep -c '^ *Name: *gfx' || true)
[ "$gpus" -gt 0 ] || die "ROCm lists no GPU"
export SIGNAL_REQUIRE_IMAGES=host,hip

share=()
[ "$gpus" -ge 2 ] || share=(--share-devices)
cargo run --release --features rocm -- doctor
cargo test --release --no-default-features --features rocm --test rocm -- --test-threads=1
# Its image has code for one architecture.
AMDGPU_TARGETS=$(rocminfo | sed -n 's/^ *Name: *\(gfx[0-9a-f]*\).*/\1/p' | head -1) cargo run --release -p bias-gelu --features rocm -- --backend rocm --ranks 2 "${share[@]}"
for collective in all-reduce reduce-scatter all-gather; do
  cargo run --release --features rocm -- bench "$collective" --backend rocm --ranks 2 "${share[@]}" -d bf16 --graph 50 -b 2K -e 64M -f 4
done
