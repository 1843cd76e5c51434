"""Training a model with latent attention on a mesh is training it on one rank."""

from __future__ import annotations

import dataclasses

import pytest

from pyruntime.train.config import Model
from tests.llama.test_mixture import FAMILIES, written
from tests.train import jobs
from tests.train.test_experts import steps_of
from tools import check_parity as parity


@pytest.fixture(scope="module")
def config(ranks, tmp_path_factory):
    """A job that goes on from a folder, whose queries have latent features too."""
    folder = tmp_path_factory.mktemp("latent")
    config = parity.job(folder)
    ranks.run(
        written,
        1,
        dataclasses.replace(FAMILIES["deepseek_v3"], vocab_size=259, num_hidden_layers=5),
        folder / "model",
    )
    config = jobs.changed(config, "model", **vars(Model(init_from=str(folder / "model"))))
    config = jobs.changed(config, "data", tokenizer="bytes")
    jobs.prepare(config)
    return config


MESHES = {
    "tp2 dp2 zero3 ep4": (1, {"tp": 2, "dp": 2, "zero": 3, "ep": 4}),
    "tp2 cp2 zero2": (2, {"tp": 2, "cp": 2, "zero": 2}),
    "tp2 pp2 zb-v": (2, {"tp": 2, "pp": 2, "schedule": "zb-v"}),
    "dp4 zero1 ep2": (1, {"dp": 4, "zero": 1, "ep": 2}),
    "tp2 dp2 zero1 selective": (1, {"tp": 2, "dp": 2, "zero": 1, "recompute": "selective"}),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.second_tier(
    but=["adamw-tp2 dp2 zero3 ep4", "adamw-tp2 cp2 zero2", "muon-tp2 dp2 zero1 selective"]
)
def test_losses_and_norms_are_those_of_one_rank(ranks, config, optimizer, name):
    config = jobs.changed(config, "optimizer", name=optimizer, lr=1e-3)
    micro_batches, sizes = MESHES[name]
    expected = ranks.run(steps_of, 1, jobs.on_mesh(config, micro_batches))[0]
    found = ranks.run(steps_of, 4, jobs.on_mesh(config, micro_batches, **sizes))
    assert found[0] == found[-1]
    assert parity.difference(found[0], expected) <= parity.TOLERANCE
