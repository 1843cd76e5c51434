"""Optimizer states of simulated devices on the host: the steps of resident states, bit by bit."""

from __future__ import annotations

import pytest
import torch

from pyruntime.overlap.files import read
from tests.device.test_training import job, learned
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")


@pytest.mark.parametrize("parallel", [{"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
@pytest.mark.second_tier(but=["{'dp': 2, 'zero': 1}"])
def test_steps_are_bitwise_those_of_resident_states(ranks, tmp_path, parallel):
    config = job(tmp_path, train={"dtype": "bf16", "ledger": True}, parallel={"tp": 1} | parallel)
    config = jobs.changed(config, "model", hidden_size=128, intermediate_size=256)
    expected = learned(ranks, config, "sim", str(tmp_path / "resident"), delays=5)
    config = jobs.changed(config, "optimizer", offload="states")
    found = learned(ranks, config, "sim", str(tmp_path / "host"), delays=5)
    assert torch.equal(found, expected)
    for ledger in read(tmp_path / "host"):
        axis = ledger.account.axes["offload"]
        assert axis.bytes_read > 0 and axis.bytes_sent > 0
    assert "offload" not in read(tmp_path / "resident")[0].account.axes


@pytest.mark.second_tier
def test_a_run_on_devices_goes_on_from_its_checkpoint(ranks, tmp_path):
    """Saved and loaded on the host, where the states lie."""
    config = job(tmp_path, train={"dtype": "bf16", "steps": 4}, optimizer={"offload": "states"})
    config = jobs.changed(config, "model", hidden_size=128, intermediate_size=256)
    config = jobs.changed(config, "parallel", tp=1, dp=2, zero=2)
    config = jobs.changed(config, "checkpoint", every_steps=2)
    expected = learned(ranks, config, "sim", str(tmp_path / "whole"))
    resumed = jobs.changed(config, "checkpoint", resume=str(tmp_path / "whole/checkpoints/step-000002"))
    found = learned(ranks, resumed, "sim", str(tmp_path / "rest"))
    assert torch.equal(found, expected[2:])
