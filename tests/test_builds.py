"""Builds during a session: tests wait for them, get their errors, and no build outlives the session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import builds
from tests.builds import BUILDS, NICENESS, ROOT, Builds, Recipe
from tests.cpp import conftest as of_cpp
from tests.cuda import conftest as of_cuda


def recipe(folder: Path, command: str) -> Recipe:
    """Returns a recipe that makes `made` in `folder` by a ninja command."""
    text = f"rule run\n  command = {command}\nbuild made: run\n"
    return Recipe("what is tested", folder, text)


@pytest.fixture
def begin():
    """Starts the builds of recipes, and stops them after the test."""
    begun: list[Builds] = []

    def start(*recipes: Recipe) -> Builds:
        begun.append(Builds())
        for one in recipes:
            begun[-1].want(one)
        begun[-1].start()
        return begun[-1]

    yield start
    for one in begun:
        one.stop()


def soon(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pid_in(file: Path) -> int:
    assert soon(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_what_was_wanted_is_there_when_it_is_finished_and_tests_come_first(begin, tmp_path):
    wanted = recipe(tmp_path, "sleep 0.3 && nice > $out")
    begun = begin(wanted)
    assert not (tmp_path / "made").exists()
    begun.finish(wanted)
    assert int((tmp_path / "made").read_text()) == min(19, os.nice(0) + NICENESS)
    begun.finish(wanted)


def test_a_target_is_built_alone_and_the_rest_by_the_recipe_of_all(begin, tmp_path):
    all_of_it = recipe(tmp_path, "touch $out")
    all_of_it = replace(all_of_it, text=all_of_it.text + "build other: run\n")
    one = replace(all_of_it, target="made")
    begin(one).finish(one)
    assert (tmp_path / "made").exists() and not (tmp_path / "other").exists()
    both = begin(one, all_of_it)
    both.finish(one)
    both.finish(all_of_it)
    assert (tmp_path / "other").exists()


def test_a_build_that_fails_is_told_with_its_output_and_others_succeed(begin, tmp_path):
    bad, good = recipe(tmp_path / "bad", "echo no such header && false"), recipe(tmp_path, "touch $out")
    begun = begin(bad, good)
    for _ in range(2):  # every test that needs it gets the error
        with pytest.raises(RuntimeError, match=r"(?s)^what is tested cannot be built:\n.*no such header"):
            begun.finish(bad)
    begun.finish(good)
    assert (tmp_path / "made").exists()


def test_without_ninja_only_those_fail_that_need_it(begin, tmp_path, monkeypatch):
    def find_ninja() -> str:
        raise RuntimeError("ninja was not found")

    monkeypatch.setattr(builds, "find_ninja", find_ninja)
    wanted = recipe(tmp_path, "touch $out")
    begun = begin(wanted)
    with pytest.raises(RuntimeError, match="cannot be built:\nninja was not found"):
        begun.finish(wanted)


def test_a_session_that_ends_early_ends_its_compilers(begin, tmp_path):
    begun = begin(recipe(tmp_path, "echo $$$$ > pid && exec sleep 60"))
    compiler = pid_in(tmp_path / "pid")
    assert runs(compiler)
    begun.stop()
    assert not runs(compiler)


def test_a_killed_session_leaves_no_compiler(tmp_path):
    program = """
import sys, time
from pathlib import Path
from tests.builds import Build, Recipe
Build(Recipe("", Path(sys.argv[1]), sys.argv[2]), 1)
time.sleep(60)
"""
    text = recipe(tmp_path, "echo $$$$ > pid && exec sleep 60").text
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), text], cwd=ROOT)
    try:
        compiler = pid_in(tmp_path / "pid")
        assert runs(compiler)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert soon(lambda: not runs(compiler))


def wanted_by(*items: SimpleNamespace) -> list[str]:
    """Returns what a session of these tests builds."""
    begun: list[str] = []
    collected = SimpleNamespace(want=lambda recipe: begun.append(recipe.what))
    session = SimpleNamespace(items=items, config=SimpleNamespace(stash={BUILDS: collected}))
    of_cpp.pytest_collection_finish(session)
    of_cuda.pytest_collection_finish(session)
    return begun


def test_a_session_builds_what_its_tests_need_and_no_more():
    plain = SimpleNamespace(fixturenames=["ranks"])
    threads = SimpleNamespace(fixturenames=["built"], callspec=SimpleNamespace(params={"variant": "threads"}))
    kernels = SimpleNamespace(fixturenames=["host_kernels", "ranks"])
    assert wanted_by(plain) == []
    assert wanted_by(plain, threads, threads) == ["the C++ tests (threads)"]
    assert wanted_by(kernels, plain, kernels) == ["the kernels' library in the host dialect"]
    programs = SimpleNamespace(fixturenames=["host_programs"])
    assert wanted_by(programs) == ["the kernels in the host dialect"]
