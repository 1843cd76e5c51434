"""Runs other processes with a torch that claims to be for ROCm, and a C++ compiler that compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.test_sdist import COMPILER
from tools.build_cuda import ROOT

HIP = "5.2.21153"
"""The claimed torch.version.hip: that of Debian's hipcc."""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Returns variables under which Python's torch claims to be for ROCm. Its files are in `folder`."""
    (folder / "sitecustomize.py").write_text(f'import torch\n\ntorch.version.hip = "{HIP}"\n')
    return {**os.environ, "PYTHONPATH": str(folder), **more}


def run_setup(folder: Path, **more: str) -> tuple[Path, str]:
    """Runs `setup.py build_ext` under that torch, as an installation does. Returns the package, in which only
    the kernels are real, and the output."""
    compiler = folder / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    compilers = dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), str(compiler))
    built = folder / "lib"
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", built, "--build-temp", folder / "temp"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(folder, CCACHE_DISABLE="1", **compilers, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return built / "pyruntime", done.stdout
