"""The kernels' instructions by a newer clang than hipcc's, for GPUs that hipcc may not know."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tools import build_cuda, build_hip

BITCODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
"""Where Debian's rocm-device-libs puts the device library of ROCm 5.2."""
STANDS_IN = {"oclc_isa_version_942.bc": "oclc_isa_version_940.bc"}
"""What that library has no file for: a constant, and all else of gfx940 is gfx942's."""


def clang_19() -> str | None:
    return shutil.which("clang-19") if BITCODE.is_dir() else None


def listing_for(architecture: str, name: str) -> str:
    """The assembly of one object of tools/build_cuda.py."""
    folder = build_hip.BUILD / "clang"
    library = folder / "device-library"
    library.mkdir(parents=True, exist_ok=True)
    for path in [*BITCODE.glob("*.bc"), *(library / missing for missing in STANDS_IN)]:
        link = library / path.name
        if not link.is_symlink():
            link.symlink_to(BITCODE / STANDS_IN.get(path.name, path.name))
    made = folder / f"{name}-{architecture}.s"
    (source, macros) = next(found[1:] for found in build_cuda.sources() if found[0] == name)
    command = [clang_19(), "-x", "hip", f"--offload-arch={architecture}", "--cuda-device-only", "-S"]
    command += ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", *macros]
    command += [f"-I{build_hip.ROOT}/csrc", f"-I{build_hip.ROOT}/hip", "--rocm-path=/usr"]
    command += [f"--rocm-device-lib-path={library}", str(source), "-o", str(made)]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return made.read_text()
