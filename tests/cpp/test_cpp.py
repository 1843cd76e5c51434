"""Runs the C++ tests, each under sanitizers; what needs the thread sanitizer is apart (marker threads)."""

from __future__ import annotations

import functools
import os
import subprocess

import pytest

from tests.cpp.build import PROGRAMS, ROOT, build, builds, program

TIMEOUT_S = 120


build_once = functools.cache(build)  # only those variants of which something runs


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=[pytest.mark.threads] if variant == "threads" else [])
        for name, variant in builds()
    ],
)
def test_program(name: str, variant: str) -> None:
    build_once(variant)
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
