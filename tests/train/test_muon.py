"""Training with Muon: on every mesh as on one rank, from any checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from pyruntime.train import checkpoint_folder
from pyruntime.train.assembly import optimizer_of
from pyruntime.train.config import Optimizer, RunConfig, Train
from pyruntime.train.errors import ConfigError
from pyruntime.train.validate import _check_optimizer, check
from tests.train import jobs

MESHES = [
    {"tp": 4},
    {"dp": 4, "zero": 0},
    {"dp": 4, "zero": 3},
    {"tp": 2, "dp": 2, "zero": 2},
    {"pp": 2, "dp": 2, "zero": 1},
    {"tp": 2, "pp": 2, "zero": 1},
    {"dp": 4, "dp_replicate": 2, "zero": 1},
]


def job(folder, **train):
    config = jobs.job(folder, batch_size=8, micro_batch_size=2, **train)
    return jobs.changed(config, "optimizer", name="muon")


def on(config, mesh):
    return jobs.changed(config, "parallel", **{"tp": None, **mesh})


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    config = job(tmp_path_factory.mktemp("whole"), steps=8, val_every=4)
    jobs.prepare(config)
    return config, ranks.run(jobs.history, 1, config)[0]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.second_tier(but=["{'dp': 4, 'dp_replicate': 2, 'zero': 1}"])
def test_curves_equal_those_of_one_rank(ranks, whole, mesh):
    config, expected = whole
    jobs.check_curves(ranks.run(jobs.history, 4, on(config, mesh)), expected)


@pytest.mark.parametrize("method", ["quantize", "top_k", "power_sgd"])
@pytest.mark.second_tier(but=["top_k"])
def test_it_takes_gradients_that_were_compressed(ranks, whole, method):
    config, expected = whole
    settings = {"compression": method, "compression_bits": 8, "compression_density": 0.25}
    found = ranks.run(
        jobs.history, 4, on(jobs.changed(config, "data_parallel", **settings), {"dp": 4, "zero": 2})
    )
    plain = ranks.run(jobs.history, 4, on(config, {"dp": 4, "zero": 2}))[0]
    assert jobs.curve(found[0], "loss") == jobs.curve(found[-1], "loss")
    assert sum(jobs.curve(found[0], "dp_bytes")) < sum(jobs.curve(plain, "dp_bytes"))
    fell = expected[0].loss - expected[-1].loss
    assert found[0][0].loss - found[0][-1].loss > 0.8 * fell > 0


def test_replicas_that_seldom_meet_move_by_its_steps(ranks, tmp_path):
    """The same over any mesh of two replicas, also on from the midst of a round."""
    config = job(tmp_path, steps=7, val_every=0)
    config = jobs.changed(config, "data_parallel", method="co2", tau=3, outer_momentum=0.3)
    config = jobs.changed(config, "checkpoint", every_steps=4)
    folder = jobs.prepare(config)
    expected = ranks.run(jobs.history, 4, on(config, {"dp": 4, "dp_replicate": 2, "zero": 2}))[0]
    assert expected[-1].loss < expected[0].loss
    config = on(config, {"tp": 2, "dp": 2})
    found = ranks.run(jobs.history, 4, config)
    jobs.check_curves(found, expected)
    saved = checkpoint_folder.complete(folder / "checkpoints")[0]
    rest = ranks.run(jobs.history, 4, config, saved)[0]
    assert jobs.curve(rest, "loss") == jobs.curve(found[0], "loss")[4:]


@pytest.mark.second_tier
def test_learns_more_than_adamw_in_as_many_steps(ranks, tmp_path):
    config = job(tmp_path, steps=40, dtype="bf16", val_every=0)
    jobs.prepare(config)
    muon = ranks.run(jobs.history, 1, config)[0][-1].val_loss
    adamw = ranks.run(jobs.history, 1, jobs.changed(config, "optimizer", name="adamw"))[0][-1].val_loss
    assert muon < adamw


def test_a_checkpoint_is_taken_up_on_any_mesh_and_by_no_other_optimizer(ranks, tmp_path):
    config = job(tmp_path, steps=3, dtype="bf16", val_every=0)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 4, on(config, {"tp": 2, "dp": 2, "zero": 2}))
    saved = checkpoint_folder.find(folder)
    states = [ranks.run(jobs.full_state, 1, on(config, {}), saved)[0]]
    states.append(ranks.run(jobs.full_state, 4, on(config, {"dp": 4, "zero": 3}), saved)[0])
    states.append(ranks.run(jobs.full_state, 4, on(config, {"pp": 2, "tp": 2}), saved)[0])
    momenta = {name for name in states[0] if name.startswith("momentum.")}
    assert momenta and not {name.replace("momentum", "exp_avg") for name in momenta} & states[0].keys()
    for state in states[:2]:
        assert state.keys() == states[0].keys()
    for state in states:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    adamw = jobs.changed(config, "optimizer", name="adamw")
    (error,) = ranks.run(jobs.history, 1, adamw, saved, expect_errors=True)
    assert "was saved with optimizer.name=muon, but the configuration asks for" in str(error)


def test_going_on_is_as_never_having_stopped(ranks, tmp_path):
    config = job(tmp_path, steps=6, dtype="bf16", val_every=0)
    config = on(jobs.changed(config, "checkpoint", every_steps=3), {"dp": 4, "zero": 2})
    folder = jobs.prepare(config)
    whole = ranks.run(jobs.history, 4, config)[0]
    (third,) = [each for each in checkpoint_folder.complete(folder / "checkpoints") if "03" in each.name]
    rest = ranks.run(jobs.history, 4, config, third)[0]
    for name in ("loss", "grad_norm"):
        assert jobs.curve(rest, name) == jobs.curve(whole, name)[3:]


@pytest.mark.parametrize(
    ("optimizer", "train", "words"),
    [
        (Optimizer(momentum=0.9), Train(), "momentum=0.9 applies only to Muon; set optimizer.name=muon"),
        (Optimizer(name="muon", rounding="stochastic"), Train(), "keeps fp32 master weights"),
    ],
)
def test_what_does_not_go_together_is_refused(optimizer, train, words):
    with pytest.raises(ConfigError, match=words):
        check(RunConfig(optimizer=optimizer, train=train), 1)


def test_an_optimizer_that_no_branch_makes_is_an_error():
    """Rather than AdamW for a name that only pyruntime/choices.py knows."""
    config = RunConfig(optimizer=Optimizer(name="lion"))
    with pytest.raises(AssertionError, match="lion"):
        optimizer_of(SimpleNamespace(config=config), None, None, None, None)
    with pytest.raises(AssertionError, match="lion"):
        _check_optimizer(config)
