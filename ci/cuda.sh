#!/usr/bin/env bash
# What a runner with NVIDIA GPUs executes: the suite, `doctor` and a benchmark on the CUDA backend. It needs Rust, a C++
# compiler and the driver; nvcc is used where it is found, else installed below .tools/.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

have nvidia-smi || die "no nvidia-smi: this machine has no NVIDIA driver"
gpus=$(nvidia-smi --list-gpus | grep -c '^GPU' || true)
[ "$gpus" -gt 0 ] || die "the driver lists no GPU"
nvidia-smi --list-gpus
find_nvcc >/dev/null || { ci/install.sh nvcc && . ci/env.sh; }
export SIGNAL_REQUIRE_IMAGES=host,cuda

cargo run --release --features cuda -- doctor
cargo test --features cuda --test cuda
ranks=$((gpus < 8 ? gpus : 8))
if [ "$ranks" -eq 1 ]; then bench=(--ranks 2 --share-devices); else bench=(--ranks "$ranks"); fi
cargo run --release --features cuda -- bench all-reduce --backend cuda "${bench[@]}"
