#!/usr/bin/env bash
# The CUDA backend on real GPUs, in two steps, since the machine that has them may have no Rust:
#
#   ci/cuda.sh pack [DIR]   builds suite, CLI, examples and benchmarks, and packs them with the fixture into DIR (.carry),
#                           stripped, under 64 MiB. Needs Rust and a C++ compiler; nvcc is used where it is found, else
#                           installed below .tools/.
#   bash DIR/run.sh         runs all of it. Needs the driver and nothing else.
#   ci/cuda.sh              both.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# built FEATURES COMMAND...: what a cargo command reports as built.
built() {
  local features=$1
  shift
  cargo "$@" --release --features "$features" --message-format=json-render-diagnostics |
    python3 -c 'import json, sys
found = [m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable")]
print(found[-1])'
}

pack() {
  local dir=$1 nvcc program
  find_nvcc >/dev/null || { ci/install.sh nvcc && . ci/env.sh; }
  nvcc=$(find_nvcc)
  export SIGNAL_REQUIRE_IMAGES=host,cuda
  rm -rf "$dir"
  mkdir -p "$dir"
  cp "$(built cuda build -p signal-cli)" "$dir/signal"
  cp "$(built cuda test --test cuda --no-run)" "$dir/suite"
  cp "$(built cuda build --example tensor_parallel)" "$dir/tensor_parallel"
  cp "$(built cuda build -p bias-gelu)" "$dir/bias_gelu"
  cp "$(built cuda build --bench call)" "$dir/call"
  cp "$(built cuda build --bench behind)" "$dir/behind"
  cp "$(built cuda build --bench bounded)" "$dir/bounded"
  cp "$(built cuda build --bench norm)" "$dir/norm"
  # The ROCm backend on the CUDA driver (tests/hip-abi), which says that it is a gfx942.
  cp "$(SIGNAL_REQUIRE_IMAGES=hip AMDGPU_TARGETS=gfx942 built rocm test --test rocm --no-run)" "$dir/rocm"
  cargo build --release -p signal-hip-abi --features cuda
  mkdir "$dir/lib"
  cp "${CARGO_TARGET_DIR:-target}/release/libamdhip64.so" "$dir/lib/libamdhip64.so.7"
  "$nvcc" -std=c++17 -O3 -fmad=false -arch=sm_90 -cubin -DSIGNAL_UNBOUNDED_WAITS -o "$dir/unbounded.cubin" kernels/cuda/kernels.cu
  "$nvcc" -std=c++17 -O3 -arch=sm_90 -L"$(dirname "$nvcc")/../lib" -o "$dir/floor" benches/floor.cu
  "$nvcc" -std=c++17 -O3 -arch=sm_90 -L"$(dirname "$nvcc")/../lib" -o "$dir/norm_floor" benches/norm_floor.cu
  for program in signal suite rocm lib/libamdhip64.so.7 tensor_parallel bias_gelu call behind bounded norm floor norm_floor; do strip "$dir/$program"; done
  cp "$(find_fixture)" "$dir/minilm.safetensors"
  cp ci/cuda_run.sh "$dir/run.sh"
  local commit
  commit=$(git rev-parse --short HEAD 2>/dev/null || say unknown)
  [ -z "$(git status --porcelain 2>/dev/null)" ] || commit="$commit, changed"
  say "$commit" >"$dir/commit"
  local size
  size=$(du -sm "$dir" | cut -f1)
  say "$dir: $size MiB"
  [ "$size" -lt 64 ] || die "$dir is too large"
}

case ${1:-} in
  pack) pack "${2:-.carry}" ;;
  '') pack .carry && bash .carry/run.sh ;;
  *) die "unknown part $1" ;;
esac
