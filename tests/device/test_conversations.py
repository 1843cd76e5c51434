"""Devices learn from conversations what one CPU rank learns."""

from __future__ import annotations

import pytest
import torch

from tests.device import sim
from tests.device.test_training import MESHES, learned
from tests.train import jobs
from tests.train.test_conversations import job

pytestmark = pytest.mark.usefixtures("simulated")


@pytest.mark.parametrize("name", ["tp", "zero 3"])
@pytest.mark.second_tier
def test_a_mesh_of_devices_learns_what_one_cpu_rank_learns(ranks, tmp_path, name):
    alone = job(tmp_path, val_every=3)
    config = alone
    for section, values in MESHES[name].items():
        config = jobs.changed(config, section, **values)
    alone = jobs.changed(alone, "parallel", tp=1)
    expected = learned(ranks, alone, "cpu", str(tmp_path / "cpu"))
    found = learned(ranks, config, sim.DEVICE, str(tmp_path / "sim"), delays=len(name))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)
