"""What all tests share: ranks (tests/ranks.py), builds (tests/builds.py) and how hypothesis works."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
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

# The tests on GPUs run where hypothesis may not be installed, and do without it.
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis

    # Fresh random data in every run; a failure prints the line that repeats it. No deadline: CI is slow.
    hypothesis.settings.register_profile("pyruntime", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("pyruntime")

pytest_plugins = ["tests.beside", "tests.costs", "tests.skips"]
RANKS = pytest.StashKey[Ranks]()
OF_BUILDS = {"built", "host_kernels"}
"""Fixtures of tests that need a build; such tests come last, when it has ended."""


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BUILDS] = Builds()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not OF_BUILDS.isdisjoint(getattr(item, "fixturenames", ())))


@pytest.hookimpl(trylast=True)  # what is needed has been named by then, in the folders' own conftest.py
def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        session.config.stash[BUILDS].start()
    gc.freeze()  # what is here now stays to the end: no search for garbage needs to go through it


def pytest_sessionfinish(session: pytest.Session) -> None:
    builds = session.config.stash.get(BUILDS, None)
    if builds is not None:  # the session may have ended before it began
        builds.stop()
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(scope="module")
def pool_as_it_was(ranks: Ranks) -> Iterator[None]:
    """After the module the groups of the pool are open as other tests want them."""
    yield
    from tests.transports import take  # not before pyruntime is wanted

    for world_size in (2, 3, 4):
        ranks.run(take, world_size, "symmetric_memory")


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Processes to run a function on: ranks.run(function, world_size, *args), ranks.launch(...)."""
    made = request.config.stash[RANKS] = Ranks()
    yield made
    made.close()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if RANKS in item.config.stash:
        item.config.stash[RANKS].end_test()
