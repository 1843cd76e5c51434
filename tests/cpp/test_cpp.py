"""Runs the C++ tests, each under sanitizers; what needs the thread sanitizer is apart (marker threads)."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.cpp.build import PROGRAMS, ROOT, builds, program

TIMEOUT_S = 120


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=[pytest.mark.threads] if variant == "threads" else [])
        for name, variant in builds()
    ],
)
def test_program(built: None, name: str, variant: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    ran = subprocess.run(
        [program(name, variant)], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert " tests, 0 failed" in ran.stderr


def test_every_cpp_test_is_built() -> None:
    folder = ROOT / "tests" / "cpp"
    found = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("test_*.cpp")}
    assert found == set(PROGRAMS)
