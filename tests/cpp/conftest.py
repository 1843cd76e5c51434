"""The programs are compiled while other tests run, and only those variants of which something runs."""

from __future__ import annotations

import pytest

from tests.builds import BUILDS
from tests.cpp import build


def pytest_collection_finish(session: pytest.Session) -> None:
    items = (item for item in session.items if "built" in getattr(item, "fixturenames", ()))
    for variant in sorted({item.callspec.params["variant"] for item in items}):
        session.config.stash[BUILDS].want(build.recipe(variant))


@pytest.fixture
def built(request: pytest.FixtureRequest, variant: str) -> None:
    """The programs of the test's variant (tests/cpp/build.py)."""
    request.config.stash[BUILDS].finish(build.recipe(variant))
