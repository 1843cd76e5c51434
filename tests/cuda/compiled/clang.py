"""Compiles the kernels for AMD's GPUs with any clang that knows them, because hipcc may not."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

from tools import build_cuda, build_hip

BITCODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
"""The device library of ROCm 5.2 in Debian's rocm-device-libs."""
WRAPPER = "__clang_hip_runtime_wrapper.h"
NEWEST = 1000
"""The version of a clang whose name has none."""
STANDS_IN = {
    "oclc_isa_version_942.bc": "oclc_isa_version_940.bc",
    "oclc_isa_version_950.bc": "oclc_isa_version_940.bc",
}
"""Files that this library lacks; apart from a constant they equal those of gfx940."""

HIP_HEADERS = sorted(
    {found.parent for found in Path("/usr/lib").glob(f"llvm-*/lib/clang/*/include/{WRAPPER}")}
)
"""Clang's headers for HIP, for a clang without them (Zig's)."""


def clangs() -> list[Path]:
    """Returns every clang on PATH, in the environment and in ROCm, the oldest first."""
    folders = [*map(Path, os.get_exec_path()), Path(sys.executable).parent, Path("/opt/rocm/llvm/bin")]
    found = {
        path: int(match[1] or NEWEST)
        for folder in folders
        if folder.is_dir()
        for path in folder.iterdir()
        if (match := re.fullmatch(r"clang(?:-(\d+))?", path.name)) and os.access(path, os.X_OK)
    }
    return sorted(found, key=lambda path: found[path])


@functools.cache
def clang_for(architecture: str) -> Path | None:
    """Returns the oldest clang that compiles HIP for that GPU; None without it or a device library."""
    asked = ["-x", "hip", f"--offload-arch={architecture}", "--cuda-device-only", "-nogpuinc", "-nogpulib"]
    for clang in clangs() if BITCODE.is_dir() else []:
        ran = subprocess.run([clang, *asked, "-E", os.devnull], capture_output=True)
        if ran.returncode == 0:
            return clang
    return None


def why_none(architecture: str) -> str:
    """Returns the reason why clang_for() returns None."""
    if not BITCODE.is_dir():
        return f"no device library in {BITCODE}; `tools/get_tool.sh clang-19` installs one"
    names = ", ".join(dict.fromkeys(path.name for path in clangs())) or "none"
    return (
        f"no clang here compiles HIP for {architecture} (found: {names}); gfx942 takes clang 17, which "
        "`tools/get_tool.sh clang-19` has, and gfx950 clang 20, which `tools/get_tool.sh clang-21` has"
    )


def listing_for(architecture: str, name: str) -> str:
    """Returns the assembly of one object of tools/build_cuda.py."""
    folder = build_hip.BUILD / "clang"
    library = folder / "device-library"
    library.mkdir(parents=True, exist_ok=True)
    for path in [*BITCODE.glob("*.bc"), *(library / missing for missing in STANDS_IN)]:
        link = library / path.name
        if not link.is_symlink():
            link.symlink_to(BITCODE / STANDS_IN.get(path.name, path.name))
    made = folder / f"{name}-{architecture}.s"
    (source, macros) = next(found[1:] for found in build_cuda.sources() if found[0] == name)
    command = [
        clang_for(architecture),
        "-x",
        "hip",
        f"--offload-arch={architecture}",
        "--cuda-device-only",
        "-S",
    ]
    command += ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", *macros]
    # Newer versions need newer device libraries.
    command += ["-mcode-object-version=5"]
    command += [f"-I{build_hip.ROOT}/csrc", f"-I{build_hip.ROOT}/hip", "--rocm-path=/usr"]
    for bitcode in ("hip.bc", "opencl.bc"):  # ROCm 5.2's headers call them, newer clangs do not link them
        command += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", f"{library}/{bitcode}"]
    command += [f"--rocm-device-lib-path={library}", str(source), "-o", str(made)]
    command += [f"-idirafter{folder}" for folder in HIP_HEADERS]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return made.read_text()
