"""Runs whose tensor-parallel ranks hold parts by their speed train as one rank does, on every mesh, and their
checkpoints fit any other cut."""

from __future__ import annotations

import dataclasses
import json
import time
from unittest.mock import patch

import pytest
import torch

from pyruntime.cli import dry_run
from pyruntime.llama.tensor_shards import TensorCuts
from pyruntime.train import checkpoint_folder, planned, resolved
from pyruntime.train import run as run_module
from pyruntime.train.config import Checkpoint, Grid, RunConfig
from pyruntime.train.errors import ConfigError
from pyruntime.train.loop import Trainer
from pyruntime.train.signals import StopRequest
from tests.train import jobs

SPEEDS = (1.0, 0.5)
SLEEP_S = 0.08
"""For a whole layer: far more than it takes on a busy machine."""


@pytest.fixture(scope="module")
def job(request, tmp_path_factory) -> RunConfig:
    """A job of which a rank of half the speed gets 2 of 8 units of MLP features, 1 of 4 groups of heads, and
    1 of 4 units of the vocabulary."""
    config = jobs.job(tmp_path_factory.mktemp("job"), steps=6, val_every=3)
    config = jobs.changed(config, "model", num_attention_heads=8, num_key_value_heads=4)
    config = dataclasses.replace(config, checkpoint=Checkpoint(keep=10, every_steps=3))
    jobs.prepare(config)
    return config


@pytest.fixture(scope="module")
def alone(request, job):
    ranks = request.getfixturevalue("ranks")
    return ranks.run(jobs.history, 1, jobs.changed(job, "parallel", tp=1))[0]


def in_folder(config: RunConfig, folder) -> RunConfig:
    made = jobs.changed(config, "output", run_dir=str(folder / "run"))
    jobs.prepare(made)
    return made


def by_speed(config: RunConfig, folder, micro_batches=3, speeds=SPEEDS, **sizes) -> RunConfig:
    config = jobs.on_mesh(in_folder(config, folder), micro_batches, **{"tp": 2} | sizes)
    return jobs.changed(config, "parallel", tp_speeds=speeds)


MESHES = {
    "tp2": {},
    "zero0": {"dp": 2, "zero": 0, "micro_batches": 1},
    "zero1": {"dp": 2, "zero": 1, "micro_batches": 3},
    "zero2": {"dp": 2, "zero": 2, "micro_batches": 1},
    "zero3": {"dp": 2, "zero": 3, "micro_batches": 3},
    "pipeline": {"pp": 2},
    "context": {"cp": 2},
    "slices": {"tp_slices": 2},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.second_tier("zero0", "zero1", "pipeline", "context", "slices")
def test_losses_are_those_of_one_rank(ranks, tmp_path, job, alone, mesh):
    sizes = dict(MESHES[mesh])
    if mesh == "context":
        job = jobs.changed(job, "train", seq_len=32)
        alone = ranks.run(jobs.history, 1, in_folder(jobs.changed(job, "parallel", tp=1), tmp_path / "one"))[
            0
        ]
    config = by_speed(job, tmp_path, **sizes)
    size = 2 * sizes.get("dp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    jobs.check_curves(ranks.run(jobs.history, size, config), alone)


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel": {"method": "diloco", "tau": 2}},
        {"data_parallel": {"compression": "quantize", "compression_bits": 8}, "parallel": {"zero": 1}},
        {"lora": {"rank": 4, "targets": ("q_proj", "o_proj", "up_proj", "down_proj")}},
        {"train": {"check_types": True}},
        {"optimizer": {"offload": "states"}},
    ],
    ids=["rare", "compressed", "adapters", "types", "offload"],
)
def test_other_options_take_the_steps_of_equal_parts(ranks, tmp_path, job, options):
    runs = []
    for name, speeds in (("equal", ()), ("unequal", SPEEDS)):
        config = by_speed(job, tmp_path / name, speeds=speeds, dp=2)
        for section, values in options.items():
            config = jobs.changed(config, section, **values)
        runs.append(ranks.run(jobs.history, 4, config))
    equal, unequal = runs
    assert jobs.curve(unequal[0], "loss") == pytest.approx(jobs.curve(equal[0], "loss"), abs=1e-3)
    last = checkpoint_folder.find(tmp_path / "unequal" / "run")
    assert checkpoint_folder.read(last).step == 6


def test_a_checkpoint_fits_any_cut_and_resumes_to_the_same_bits(ranks, tmp_path, job):
    config = by_speed(job, tmp_path, dp=2, zero=1)
    steps = ranks.run(jobs.history, 4, config)[0]
    first = checkpoint_folder.complete(tmp_path / "run" / "checkpoints")[0]
    again = in_folder(config, tmp_path / "again")
    resumed = ranks.run(jobs.history, 4, again, first)[0]
    for name in ("loss", "grad_norm", "val_loss"):
        assert jobs.curve(resumed, name) == jobs.curve(steps, name)[3:]

    last = checkpoint_folder.find(tmp_path / "run")
    wholes = {
        "same cut": (4, config),
        "other cut": (2, by_speed(job, tmp_path / "other", speeds=(0.6, 1.0))),
        "zero 3": (4, by_speed(job, tmp_path / "zero", speeds=(0.4, 1.0), dp=2, zero=3)),
        "equal": (2, by_speed(job, tmp_path / "equal", speeds=())),
        "one rank": (1, by_speed(job, tmp_path / "one", speeds=(), tp=1)),
    }
    found = {
        name: ranks.run(jobs.full_state, size, loading, last)[0] for name, (size, loading) in wholes.items()
    }
    found["resumed"] = ranks.run(
        jobs.full_state, 4, config, checkpoint_folder.find(tmp_path / "again" / "run")
    )[0]
    expected = found.pop("one rank")
    assert len(expected) > 30
    for name, state in found.items():
        assert state.keys() == expected.keys(), name
        for key, value in expected.items():
            assert torch.equal(state[key], value), f"{key} of {name}"


def test_equal_speeds_are_the_same_run_bit_for_bit(ranks, tmp_path, job):
    plain, equal = (
        ranks.run(jobs.history, 2, by_speed(job, tmp_path / name, speeds=speeds))[0]
        for name, speeds in (("plain", ()), ("equal", (0.7, 0.7)))
    )
    for name in ("loss", "grad_norm", "val_loss"):
        assert jobs.curve(plain, name) == jobs.curve(equal, name)


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ((1.0, 1.0, 1.0), r"parallel.tp_speeds=\[1.0, 1.0, 1.0\] are 3 numbers for 2 tensor-parallel ranks"),
        ((1.0, 0.0), "must be positive numbers"),
        ((1.0, float("nan")), "must be positive numbers"),
        ((1.0, 0.01), "leave rank 1 without any of the 128 MLP features"),
    ],
)
def test_speeds_that_cut_nothing_are_refused(job, speeds, message):
    with pytest.raises(ConfigError, match=message):
        resolved.check(jobs.changed(job, "parallel", tp=2, tp_speeds=speeds), 2)


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ("parallel", {"tp": Grid(2, 2)}, "parallel.tp={x = 2, y = 2} needs equal parts"),
        ("optimizer", {"name": "muon"}, "optimizer.name=muon needs equal parts"),
        ("model", {"experts": 4}, r"parallel.tp_speeds=\[1.0, 0.5\] do not support a model with experts"),
    ],
)
def test_what_knows_only_equal_parts_is_refused(job, section, options, message):
    config = jobs.changed(job, "parallel", tp=2, tp_speeds=SPEEDS)
    with pytest.raises(ConfigError, match=message):
        resolved.check(jobs.changed(config, section, **options), 4 if "tp" in options else 2)


def test_the_rank_with_most_counts_for_the_estimate(job):
    equal, unequal = (
        resolved.check(jobs.changed(job, "parallel", tp=2, tp_speeds=speeds), 2) for speeds in ((), SPEEDS)
    )
    assert unequal.cuts.groups == (3, 1)
    few, most = planned.estimate(equal), planned.estimate(unequal)
    assert most.weights == pytest.approx(few.weights * 1.5, rel=0.02)
    assert most.activations > few.activations


def slowed_run(group, config: RunConfig):
    """The cuts of the models that a run makes, one after the other. A rank sleeps in every layer for as long
    as its part of it takes: rank 1 twice as long as the other for as large a part."""
    made = jobs.runtime(group, config)
    cuts = []

    class Slowed(Trainer):
        def __init__(self, *args):
            super().__init__(*args)
            cuts.append(self.model.cuts)
            for block in self.model.layers:
                part = block.down.weight.shape[1] / block.down.in_features
                seconds = (1 + made.rank) * SLEEP_S * part
                block.register_forward_pre_hook(lambda *_, seconds=seconds: time.sleep(seconds))

    with patch.object(run_module, "Trainer", Slowed):
        run_module.run(config, "slow", made, StopRequest())
    return cuts


@pytest.mark.alone
def test_parts_leave_a_slow_rank_at_a_checkpoint(ranks, tmp_path, job):
    config = in_folder(jobs.changed(job, "train", steps=20, slow_every=6, val_every=0), tmp_path)
    stayed = ranks.run(jobs.history, 1, jobs.changed(config, "parallel", tp=1))[0]
    config = in_folder(jobs.changed(config, "parallel", tp=2, rebalance="on"), tmp_path / "moved")
    config = dataclasses.replace(config, checkpoint=Checkpoint(every_steps=18, keep=3))
    before, after = ranks.run(slowed_run, 2, config)[1]
    assert before == TensorCuts() and after.groups == (3, 1)
    run_dir = tmp_path / "moved" / "run"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ((step, moved),) = [(line["step"], line["moved"]) for line in lines if "moved" in line]
    assert (step, moved["before"]) == (18, [1000, 1000])
    assert "parts of the tensor-parallel ranks, in thousandths of an equal one, go from" in moved["sentence"]
    assert [line["loss"] for line in lines] == pytest.approx(jobs.curve(stayed, "loss"), abs=1e-4)
    facts = checkpoint_folder.read(run_dir / "checkpoints" / "step-000020")
    assert list(facts.tp_parts) == moved["after"] and sum(moved["after"]) == 2000
    # Who goes on has the parts of the checkpoint, and without rebalance equal ones.
    config = jobs.changed(jobs.changed(config, "train", steps=21), "checkpoint", resume=str(run_dir))
    assert ranks.run(slowed_run, 2, config)[0] == [after]
    config = jobs.changed(jobs.changed(config, "train", steps=22), "parallel", rebalance="off")
    assert ranks.run(slowed_run, 2, config)[0] == [TensorCuts()]


def test_a_dry_run_shows_the_largest_rank(job):
    shown, _ = dry_run.report(jobs.changed(job, "parallel", tp=2, tp_speeds=SPEEDS), 2)
    for line in (
        "tp=2, cp=1, pp=1, dp=1 by speed (96+32 MLP features, 3+1 groups of heads, 192+64 rows of the vocab",
        "[96, 64]",  # queries, keys and values of 3 of 4 groups
        "[192, 64]",  # gate and up
        "[64, 96]",
    ):
        assert line in shown
