"""Builds what is tested and measured, under build/gpu_check: `python -m tools.gpu.build WHAT MARK`.

WHAT is core, portable (the kernels without those for Hopper) or hopper (with them). A compiler that is not
ours may warn of more, so warnings are no errors here; and a kernel that does not compile is left out.
What has been built is marked with MARK, by which a later call knows that it need not ask.
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
"""What the mark must change with."""


def library(what: str) -> Path:
    """Of the kernels: "portable" or "hopper"."""
    return FOLDER / what / build_cuda.LIBRARY.name


def is_built(what: str, mark: str, root: Path = ROOT) -> bool:
    """Whether it is there, and made of what the mark stands for."""
    made = root / FOLDER.relative_to(ROOT) / f"{what}.built"
    there = any((root / "pyruntime").glob("_C*.so")) if what == "core" else library(what).exists()
    return there and made.exists() and made.read_text() == mark


def build_core() -> int:
    """In place. Without nvcc for setup.py: the kernels are built beside it, and one may fail without the
    other."""
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
