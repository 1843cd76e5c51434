"""Models of other families than Llama learn on simulated devices what they learn on a CPU rank."""

from __future__ import annotations

import pytest
import torch

from tests.device import sim
from tests.device.test_training import job, learned
from tests.train import jobs
from tests.train.test_families import written

MESHES = {
    "qwen2": {"parallel": {"tp": 2, "cp": 2}},
    "mistral": {"parallel": {"tp": 1, "pp": 2}},
    "olmo2": {"parallel": {"tp": 2, "dp": 2, "zero": 3}},
}


@pytest.mark.second_tier
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("family", MESHES)
def test_a_mesh_of_devices_learns_what_one_cpu_rank_learns(ranks, tmp_path, family):
    config = job(tmp_path, **MESHES[family], data={"tokenizer": "bytes"})
    model = dict.fromkeys(vars(config.model)) | {
        "preset": "",
        "init_from": str(written(tmp_path / "model", family)),
    }
    config = jobs.changed(config, "model", **model)
    alone = jobs.changed(config, "parallel", tp=1, dp=1, cp=1, pp=1)
    expected = learned(ranks, alone, "cpu", str(tmp_path / "cpu"))
    found = learned(ranks, config, sim.DEVICE, str(tmp_path / "sim"), delays=3)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)
