"""What all tests share: ranks (tests/ranks.py) and how hypothesis works."""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks

# The tests on GPUs run where hypothesis may not be installed, and do without it.
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis

    # Fresh random data in every run; a failure prints the line that repeats it. No deadline: CI is slow.
    hypothesis.settings.register_profile("pyruntime", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("pyruntime")

RANKS = pytest.StashKey[Ranks]()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Processes to run a function on: ranks.run(function, world_size, *args), ranks.launch(...)."""
    made = request.config.stash[RANKS] = Ranks()
    yield made
    made.close()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if RANKS in item.config.stash:
        item.config.stash[RANKS].end_test()
