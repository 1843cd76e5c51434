"""Activations that are computed again in the backward pass: the same training, less memory."""

import os
from pathlib import Path

import pytest
import torch

from pyruntime.llama import Llama
from pyruntime.llama.presets import preset
from pyruntime.train.config import Grid
from tests.train import jobs


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = jobs.job(
        tmp_path_factory.mktemp("job"), steps=2, val_every=2, batch_size=8, micro_batch_size=1, seq_len=32
    )
    config = jobs.changed(config, "model", num_hidden_layers=4)
    jobs.prepare(config)
    return config


@pytest.mark.parametrize(
    ("pipeline", "parallel"),  # and the rest tensor parallel
    [
        ({}, {}),
        ({}, {"tp": Grid(2, 2)}),
        ({}, {"dp": 2, "zero": 0}),
        ({}, {"dp": 2, "zero": 1}),
        ({}, {"dp": 4, "zero": 3}),
        ({}, {"dp": 2, "zero": 3}),
        ({}, {"cp": 2}),
        ({}, {"tp_slices": 3}),
        ({"kind": "1f1b"}, {"pp": 2}),
        ({"kind": "1f1b"}, {"pp": 2, "tp_slices": 4}),
        ({"kind": "zb-v"}, {"pp": 2, "dp": 2, "zero": 2}),
        ({"kind": "terapipe", "slices": 3}, {"pp": 4}),
        ({"kind": "seq1f1b", "slices": 2}, {"pp": 2}),
        ({"kind": "seq1f1b", "slices": 2}, {"pp": 2, "cp": 2}),
        ({"kind": "zb-h1"}, {"pp": 2, "dp": 2, "zero": 3}),
    ],
)
@pytest.mark.second_tier(but=["pipeline10-parallel10"])
def test_training_is_bitwise_the_same(ranks, config, pipeline, parallel):
    config = jobs.changed(jobs.changed(config, "parallel", **parallel), "pipeline", **pipeline)
    world = 4 if parallel else 2

    def curves(how):
        # One of the three enters what it does in the ledger.
        train = {"activation_checkpointing": how, "ledger": how == "selective"}
        found = ranks.run(jobs.history, world, jobs.changed(config, "train", **train))[0]
        return [jobs.curve(found, name) for name in ("loss", "grad_norm", "val_loss")]

    assert curves("none") == curves("selective") == curves("full")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_left_of_a_backward_pass():
    """The second forward pass ends in the midst of an op, which must not keep what it has saved by then."""
    config = preset("debug", num_hidden_layers=2, hidden_size=128)
    model = Llama(config, recompute="full")
    ids = torch.randint(config.vocab_size, (4, 256))

    def step():
        model(ids, ids).backward()
        model.zero_grad()

    for _ in range(3):
        step()
    grown = []
    for _ in range(2):  # what else the process takes once, an arena or a stack, is not taken twice
        before = resident_bytes()
        for _ in range(30):
            step()
        grown.append(resident_bytes() - before)
    of_one_layer = ids.numel() * config.hidden_size * 4
    assert min(grown) < 30 * of_one_layer / 2
