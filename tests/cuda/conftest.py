"""The kernels are compiled once for all tests that run them, while other tests run."""

from __future__ import annotations

import pytest

from tests.conftest import BUILDS
from tests.cuda import build


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("host_kernels" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[BUILDS].want(build.recipe())


@pytest.fixture(scope="session")
def host_kernels(request: pytest.FixtureRequest) -> None:
    """The programs and the library of the host dialect (tests/cuda/build.py)."""
    request.config.stash[BUILDS].finish(build.recipe())
