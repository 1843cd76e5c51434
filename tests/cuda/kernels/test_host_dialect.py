"""The CUDA kernels' own source, executed without a GPU: every program of tests/cuda/build.py."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.cuda.build import builds, program

TIMEOUT_S = 120


@pytest.mark.parametrize(("name", "variant"), builds())
def test_program(host_programs: None, name: str, variant: str) -> None:
    ran = subprocess.run(
        [program(name, variant)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        # Results live as long as a program's main(), which is what leaks are judged by.
        env=os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1", "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert " tests, 0 failed" in ran.stderr
