#!/usr/bin/env bash
# Installs hipcc, so that `make test-hip` has something to compile with: from the distribution's packages, where
# this is Debian or Ubuntu and the caller is root (80 MB to download, 0.7 GB on disk). Nothing else is changed.
# Exit code 1, and a sentence, where that is not possible.
set -euo pipefail

packages=(hipcc libamdhip64-dev rocm-device-libs)

cannot() {
    echo "hipcc was not found and cannot be installed: $1. The kernels for GPUs of AMD are not compiled." >&2
    exit 1
}

command -v hipcc >/dev/null || [ -x /opt/rocm/bin/hipcc ] && exit 0
command -v apt-get >/dev/null || cannot "there is no apt-get here"
[ "$(id -u)" = 0 ] || cannot "that takes root; run 'sudo apt-get install ${packages[*]}'"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
options=(-y -q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
export DEBIAN_FRONTEND=noninteractive
if ! { timeout 120 apt-get "${options[@]}" update && timeout 600 apt-get "${options[@]}" install "${packages[@]}"; } \
    >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    cannot "apt-get failed"
fi
hipcc --version | head -n 1
