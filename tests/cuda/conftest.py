"""The kernels are built once for all tests that run them."""

from __future__ import annotations

import pytest

from tests.cuda import build


@pytest.fixture(scope="session")
def host_kernels() -> None:
    """The programs and the library of the host dialect (tests/cuda/build.py)."""
    build.build()
