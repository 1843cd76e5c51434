"""The random numbers of a test do not depend on those before it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def seed() -> None:
    torch.manual_seed(0)
