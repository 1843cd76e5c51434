"""Builds the core or the kernels for gpu_check, under build/gpu_check: `python -m tools.gpu.build WHAT MARK`.

WHAT is core, portable (the kernels without those for Hopper) or hopper (with them). Another compiler than
ours may warn about more, so warnings are no errors here, and a kernel that does not compile is left out. MARK
is stored beside a finished build; a later call with the same mark skips it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools import build_cuda

ROOT = build_cuda.ROOT
FOLDER = ROOT / "build" / "gpu_check"
SOURCES = ("csrc/**/*", "hip/**/*", "setup.py", "tools/build_*.py")
"""Files whose changes must change the mark."""


def library(what: str) -> Path:
    """Returns the path of the "portable" or "hopper" library of kernels."""
    return FOLDER / what / build_cuda.LIBRARY.name


def is_built(what: str, mark: str, root: Path = ROOT) -> bool:
    """Whether the build is there and has this mark."""
    made = root / FOLDER.relative_to(ROOT) / f"{what}.built"
    there = any((root / "pyruntime").glob("_C*.so")) if what == "core" else library(what).exists()
    return there and made.exists() and made.read_text() == mark


def build_core() -> int:
    """Builds the core in place. Hides nvcc from setup.py: the kernels are built separately, so that one can
    fail without the other."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--lenient"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"CUDA_HOME": "/nonexistent"}).returncode


def build_kernels(what: str) -> int:
    try:
        build_cuda.build(
            library(what),
            strict=False,
            keep_going=True,
            hopper=what == "hopper",
            folder=FOLDER / "kernels",
        )
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main(what: str, mark: str) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = FOLDER / f"{what}.built"
    made.unlink(missing_ok=True)
    code = build_core() if what == "core" else build_kernels(what)
    if code == 0:
        made.write_text(mark)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
