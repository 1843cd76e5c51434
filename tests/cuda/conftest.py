"""Compiles the kernels once for all tests that run them, while other tests run."""

from __future__ import annotations

import pytest

from tests.builds import BUILDS
from tests.cuda import build, cuda_like


def pytest_collection_finish(session: pytest.Session) -> None:
    for fixture, recipe in (
        ("host_kernels", build.library_recipe),
        ("host_programs", build.recipe),
        ("cuda_like_memory", cuda_like.recipe),
    ):
        if any(fixture in getattr(item, "fixturenames", ()) for item in session.items):
            session.config.stash[BUILDS].want(recipe())


@pytest.fixture(scope="session")
def host_kernels(request: pytest.FixtureRequest) -> None:
    """The library of the host dialect (tests/cuda/build.py)."""
    request.config.stash[BUILDS].finish(build.library_recipe())


@pytest.fixture(scope="session")
def host_programs(request: pytest.FixtureRequest) -> None:
    """The programs of the host dialect, and its library."""
    request.config.stash[BUILDS].finish(build.recipe())


@pytest.fixture(scope="session")
def cuda_like_memory(request: pytest.FixtureRequest) -> None:
    """The library of tests/cuda/cuda_like.py."""
    request.config.stash[BUILDS].finish(cuda_like.recipe())
