"""The scripts that build the kernels take no arguments, and say so instead of building."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run_script(tmp_path):
    """Runs a script where there is no compiler for it: what begins to build ends with exit code 1."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"CUDA_HOME": str(tmp_path), "ROCM_PATH": str(tmp_path)}
        command = [sys.executable, str(ROOT / "tools" / name), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    return run


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("build_cuda.py", ("libpyruntime_cuda.so", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS")),
        ("build_hip.py", ("libpyruntime_hip.so", "PYTORCH_ROCM_ARCH", "MAX_JOBS")),
    ],
)
def test_help_says_what_is_built_and_what_chooses_how(run_script, name, words):
    done = run_script(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: {name} [-h]" in done.stdout
    assert all(word in done.stdout for word in words)


@pytest.mark.parametrize("name", ["build_cuda.py", "build_hip.py"])
@pytest.mark.parametrize("argument", ["--arch=9.0", "sm_90"])
def test_an_argument_that_is_not_known_is_refused_by_name(run_script, name, argument):
    done = run_script(name, argument)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name}: error: unrecognized arguments: {argument}" in done.stderr


@pytest.mark.parametrize(("name", "compiler"), [("build_cuda.py", "nvcc"), ("build_hip.py", "hipcc")])
def test_without_arguments_they_build_or_say_in_a_sentence_why_not(run_script, name, compiler):
    done = run_script(name)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"need {compiler}, which was not found on PATH" in done.stderr
    assert "Traceback" not in done.stderr
