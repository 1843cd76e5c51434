"""The simulated devices are compiled once for all tests that run on them, while other tests run."""

from __future__ import annotations

import pytest

from pyruntime.clock import device_build
from tests.builds import BUILDS, Recipe
from tests.cuda import build as kernels
from tests.device import sim


def recipe() -> Recipe:
    return Recipe("the simulated devices", device_build.build_folder(), device_build.recipe())


def pytest_collection_finish(session: pytest.Session) -> None:
    if sim.DEVICE == "sim" and any(
        "simulated" in getattr(item, "fixturenames", ()) for item in session.items
    ):
        session.config.stash[BUILDS].want(recipe())
        session.config.stash[BUILDS].want(kernels.library_recipe())


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest) -> None:
    """The devices of tests/device/sim.py, and the kernels of csrc/cuda in the host dialect; or GPUs."""
    if sim.DEVICE != "sim":
        return
    request.config.stash[BUILDS].finish(recipe())
    request.config.stash[BUILDS].finish(kernels.library_recipe())
