#!/usr/bin/env bash
# Installs what the tests need: compilers by apt (as root on Debian or Ubuntu) and nvcc by pip, below .tools/. What is
# there already is left alone.
#
#   ci/install.sh [packages|nvcc|browser]
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# The last one is the HIP runtime itself, which says what a user without an AMD GPU hears, with its headers.
PACKAGES=(g++ clang-19 lld-19 llvm-19 libclang-rt-19-dev spin libamdhip64-dev)
CUDA_PACKAGES=(nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl)

install_packages() {
  local package absent=()
  python3 -m pip --version >/dev/null 2>&1 || PACKAGES+=(python3-pip)
  for package in "${PACKAGES[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || absent+=("$package")
  done
  [ ${#absent[@]} -gt 0 ] || return 0
  say "installing ${absent[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  if ! apt-get install -y -qq --no-install-recommends "${absent[@]}" >/dev/null; then
    # One that this distribution does not have must not keep the others away; ci/test.sh names what it then misses.
    for package in "${absent[@]}"; do
      apt-get install -y -qq --no-install-recommends "$package" >/dev/null || say "could not install $package"
    done
  fi
}

install_nvcc() {
  [ ! -e "$CUDA_COMPLETE" ] || return 0
  python3 -m pip --version >/dev/null 2>&1 || die "nvcc comes by pip, which is not there"
  say "installing nvcc $CUDA_VERSION"
  rm -rf "$CUDA_TOOLS"
  python3 -m pip install --quiet --no-deps --disable-pip-version-check --root-user-action=ignore \
    --target "$CUDA_TOOLS" "${CUDA_PACKAGES[@]/%/==$CUDA_VERSION.*}"
  local nvcc
  nvcc=$(cd "$CUDA_TOOLS" && find . -path '*/bin/nvcc' -print -quit)
  [ -n "$nvcc" ] || die "the packages hold no nvcc"
  "$CUDA_TOOLS/$nvcc" --version >/dev/null
  say "${nvcc%/bin/nvcc}" >"$CUDA_COMPLETE"
}

case ${1:-all} in
  packages) install_packages ;;
  browser) PACKAGES=(chromium) && install_packages ;;
  nvcc) install_nvcc ;;
  all)
    if can_install; then install_packages; fi
    install_nvcc
    ;;
  *) die "unknown part $1" ;;
esac
