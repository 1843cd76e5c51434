"""Fixtures of all tests: ranks (tests/ranks.py), builds (tests/builds.py), and hypothesis's settings."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
os.environ.setdefault(
    "MPLCONFIGDIR", os.path.expanduser("~/.cache/matplotlib")
)  # its fonts take seconds to find
CACHE = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="pyruntime-tests-")  # not the user's own

from collections.abc import Iterator

import pytest

from tests.builds import BUILDS, Builds
from tests.ranks import Ranks

# Tests on GPUs run on machines that may not have hypothesis, and do not need it.
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis

    # The first tier has the same data in every run, the second tier fresh data; a failure there prints the
    # line that repeats it. No deadline: CI is slow.
    hypothesis.settings.register_profile("first tier", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("second tier", deadline=None, print_blob=True)

pytest_plugins = ["tests.beside", "tests.costs", "tests.skips", "tests.tiers"]
RANKS = pytest.StashKey[Ranks]()
OF_BUILDS = {"built", "host_kernels", "host_programs", "simulated"}
"""Fixtures of tests that need a build; such tests come last, when it has ended."""


def pytest_sessionstart(session: pytest.Session) -> None:
    if hypothesis := sys.modules.get("hypothesis"):
        second = session.config.option.second_tier
        hypothesis.settings.load_profile("second tier" if second else "first tier")
    session.config.stash[BUILDS] = Builds()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not OF_BUILDS.isdisjoint(getattr(item, "fixturenames", ())))


@pytest.hookimpl(trylast=True)  # the folders' own conftest.py have named the builds that they need by then
def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        session.config.stash[BUILDS].start()
    gc.freeze()  # these objects live to the end, so the garbage collector need not visit them


def pytest_sessionfinish(session: pytest.Session) -> None:
    builds = session.config.stash.get(BUILDS, None)
    if builds is not None:  # None if the session ended before its start
        builds.stop()
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Processes to run a function on: ranks.run(function, world_size, *args), ranks.launch(...)."""
    made = request.config.stash[RANKS] = Ranks(request.config.option.seed)
    yield made
    made.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if RANKS in item.config.stash:
        ranks = item.config.stash[RANKS]
        ranks.end_test()
        if nextitem is None or nextitem.path != item.path:
            ranks.end_file()
