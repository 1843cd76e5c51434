#!/usr/bin/env bash
# Installs tools that tests need beside the environment. From the distribution's packages, as root on Debian or Ubuntu:
#
#     tools/get_tool.sh hipcc     for `make test-hip` (80 MB to download, 0.7 GB on disk)
#     tools/get_tool.sh clang-19  for the part of it that compiles for gfx942 (260 MB, with hipcc's device library)
#     tools/get_tool.sh spin      for `make test-model` (0.5 MB)
#     tools/get_tool.sh chromium  for the test that opens the page of `python -m pyruntime report` (100 MB)
#
# By pip, into the environment:
#
#     tools/get_tool.sh clang-21  for the part of `make test-hip` that compiles for gfx950, with clang-19's headers and
#                                 hipcc's device library: the clang within Zig (100 MB)
#
# Nothing else is changed. Exit code 1 and a sentence if a tool cannot be installed; 2 for another name.
set -euo pipefail

case "$*" in
    hipcc) packages=(hipcc libamdhip64-dev rocm-device-libs) without="the kernels for AMD GPUs are not compiled" ;;
    clang-19) packages=(clang-19 libamdhip64-dev rocm-device-libs) without="nothing is compiled for gfx942" ;;
    clang-21) packages=() without="nothing is compiled for gfx950" ;;
    chromium) packages=(chromium) without="a run's report is not opened in a browser" ;;
    spin) packages=(spin) without="the models of the protocol are not checked" ;;
    *) echo "usage: tools/get_tool.sh chromium|clang-19|clang-21|hipcc|spin; found '$*'." >&2; exit 2 ;;
esac

cannot() {
    echo "$1 was not found and cannot be installed: $2. So $without." >&2
    exit 1
}

command -v "$1" >/dev/null || [ -x "/opt/rocm/bin/$1" ] && exit 0
if [ "$1" = clang-21 ]; then
    scripts=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
    [ -x "$scripts/clang-21" ] && exit 0
    [ -x "$scripts/python" ] || cannot "$1" "there is no environment; run 'make build'"
    timeout 600 "$scripts/python" -m pip install --quiet --no-deps ziglang==0.16.0 >&2 || cannot "$1" "pip failed"
    printf '#!/bin/sh\nexec "%s" -m ziglang clang "$@"\n' "$scripts/python" >"$scripts/clang-21"
    chmod +x "$scripts/clang-21"
    echo "$scripts/clang-21"
    exit 0
fi
command -v apt-get >/dev/null || cannot "$1" "there is no apt-get here"
[ "$(id -u)" = 0 ] || cannot "$1" "that takes root; run 'sudo apt-get install ${packages[*]}'"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
options=(-y -q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
export DEBIAN_FRONTEND=noninteractive
if ! { timeout 120 apt-get "${options[@]}" update && timeout 600 apt-get "${options[@]}" install "${packages[@]}"; } \
    >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    cannot "$1" "apt-get failed"
fi
command -v "$1"
