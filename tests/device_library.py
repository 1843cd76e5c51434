"""The host dialect of the device kernels as a library, so that ranks on the CPU move chunks as devices do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pyruntime.comm.core import _C
from tests.transports import take

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build" / "device_tests" / "libpyruntime_host.so"
PORTABLE = ("checks", "chunks", "reduce", "workspace")
# As in tests/cuda: blocks are fibers of one thread, and kernels read what is 16-bit as 16 bytes.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"]
FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]


def build() -> None:
    """Builds the library where a source is newer. Raises CalledProcessError with the compiler's output."""
    sources = [ROOT / "csrc/cuda/portable" / f"{name}.cu" for name in PORTABLE]
    sources += [ROOT / "csrc/core/chunk_plan.cpp", ROOT / "hip/host/grid.cpp"]
    headers = [*(ROOT / "csrc/cuda").rglob("*.*h"), *(ROOT / "hip").rglob("*.h")]
    newest = max(path.stat().st_mtime for path in (*sources, *headers))
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > newest:
        return
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    made = LIBRARY.with_suffix(".new")
    compiler = [os.environ.get("CXX", "c++"), *FLAGS]
    compiler += [f"-I{ROOT / folder}" for folder in ("csrc", "hip")]
    subprocess.run([*compiler, "-x", "c++", *map(str, sources), "-o", str(made)], check=True)
    made.rename(LIBRARY)


def on_device(group, case, *arguments):
    """`case(group, *arguments)` while the group's chunks travel as those of devices."""
    _C.use_device_library("cpu", str(LIBRARY))
    take(group, "device")
    return case(group, *arguments)
