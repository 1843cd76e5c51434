"""Training over data-parallel ranks is training on one: in replicas (the rest is in test_parity.py), ahead of
norms, and from any checkpoint."""

import contextlib
import math
from unittest.mock import patch

import pytest
import torch

from pyruntime.data_parallel import NonFiniteGradient, ShardedAdamW
from pyruntime.train import checkpoint, checkpoint_folder
from pyruntime.train.config import Grid, with_pieces
from tests.train import jobs

SEQUENCES = {"batch_size": 8, "micro_batch_size": 1}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.second_tier("1")
def test_loss_curves_of_replicas_equal_those_of_one_rank(ranks, tmp_path, zero):
    config = jobs.job(tmp_path, steps=4, val_every=2, **SEQUENCES)
    jobs.prepare(config)
    expected = ranks.run(jobs.history, 1, config)[0]
    config = jobs.changed(config, "parallel", dp=4, dp_replicate=2, zero=zero)
    jobs.check_curves(ranks.run(jobs.history, 4, config), expected)


def test_a_second_run_is_bitwise_the_same(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=4, dtype="bf16", **SEQUENCES)
    config = jobs.changed(config, "parallel", dp=2, zero=2)
    jobs.prepare(config)
    first, second = (ranks.run(jobs.history, 4, config)[0] for _ in range(2))
    for name in ("loss", "grad_norm", "val_loss"):
        assert jobs.curve(first, name) == jobs.curve(second, name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.second_tier("fp32")
def test_a_checkpoint_is_taken_up_at_any_stage_and_number_of_ranks(ranks, tmp_path, dtype):
    config = jobs.job(tmp_path, steps=3, dtype=dtype, val_every=0, **SEQUENCES)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 4, jobs.changed(config, "parallel", dp=2, zero=2))
    saved = checkpoint_folder.find(folder)
    layouts = [(1, 1, 1), (2, 1, 2), (2, 1, 3), (2, 1, 0), (4, 2, 1)]
    states, losses = [], []
    for dp, replicate, zero in layouts:
        one = jobs.changed(config, "parallel", dp=dp, dp_replicate=replicate, zero=zero)
        world = 4 if dp > 1 else 1
        states.append(ranks.run(jobs.full_state, world, one, saved)[0])
        longer = jobs.changed(jobs.changed(one, "train", steps=4), "checkpoint", every_steps=0)
        losses.append(ranks.run(next_loss, world, longer, saved)[0])
    assert any(name.startswith("exp_avg.") for name in states[0])
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state)
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    assert all(loss == pytest.approx(losses[0], abs=tolerance) for loss in losses)


@pytest.mark.second_tier
def test_a_checkpoint_of_a_grid_is_taken_up_over_any_other(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=3, val_every=0, **SEQUENCES)
    folder = jobs.prepare(config)
    grids = [Grid(2, 2), Grid(1, 4), Grid(1, 2, 2), Grid(2, 1, 2), Grid(1, 1, 4), 4]
    configs = [with_pieces(jobs.changed(config, "parallel", tp=grid)) for grid in grids]
    ranks.run(jobs.history, 4, configs[2])
    saved = checkpoint_folder.find(folder)
    expected = ranks.run(jobs.full_state, 1, config, saved)[0]
    losses = []
    for each in configs:
        state = ranks.run(jobs.full_state, 4, each, saved)[-1]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)
        longer = jobs.changed(jobs.changed(each, "train", steps=4), "checkpoint", every_steps=0)
        losses += ranks.run(next_loss, 4, longer, saved)[:1]
    assert all(loss == pytest.approx(losses[0], abs=1e-5) for loss in losses)


def clipped_at(group, config, steps, after_norm=False, resume=None):
    """Loss and norm of every step, of which only `steps` are clipped; the whole state at the end; how often a
    step was taken back. after_norm: none is taken ahead of its norm."""
    made, taken_back = jobs.trainer(group, config), []
    if resume:
        made.resume(resume)
    forget = ShardedAdamW._forget_ahead

    def forgotten(optimizer):
        taken_back.append(made.step + 1)
        forget(optimizer)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(ShardedAdamW, "_forget_ahead", forgotten))
        if after_norm:
            patches.enter_context(patch.object(ShardedAdamW, "_goes_ahead", lambda *_: False))
        made.optimizer.max_norm = 1e-3 if made.step + 1 in steps else 1e9
        curves = []
        for metrics in made.fit():
            curves.append((metrics.step, metrics.loss, metrics.grad_norm, metrics.val_loss))
            made.optimizer.max_norm = 1e-3 if metrics.step + 1 in steps else 1e9
    state = checkpoint.state_of(made.sharded)
    whole = {name: value.full_tensor() for part in state.values() for name, value in part.items()}
    return curves, whole, taken_back


@pytest.mark.parametrize(
    ("parallel", "pipeline"),
    [
        ({"dp": 4, "zero": 1}, {}),
        ({"dp": 2, "zero": 3}, {}),  # beside tensor parallelism
        ({"dp": 4, "dp_replicate": 2, "zero": 2}, {}),
        ({"dp": 2, "pp": 2, "zero": 1}, {"kind": "interleaved", "virtual": 2}),
        ({"dp": 2, "pp": 2, "zero": 2}, {"kind": "zb-h1"}),
    ],
)
@pytest.mark.second_tier(but=["parallel4-pipeline4"])
def test_steps_ahead_of_their_norm_are_those_after_it(ranks, tmp_path, parallel, pipeline):
    """Bit by bit, also from a checkpoint that was taken right after a step was taken back."""
    config = jobs.job(tmp_path, steps=6, dtype="bf16", val_every=3, **SEQUENCES)
    config = jobs.changed(jobs.changed(config, "parallel", **parallel), "checkpoint", every_steps=3)
    config = jobs.changed(jobs.changed(config, "pipeline", **pipeline), "model", num_hidden_layers=4)
    folder = jobs.prepare(config)
    found = ranks.run(clipped_at, 4, config, [3, 6])
    saved = checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)[0]
    assert checkpoint_folder.step_of(saved) == 3
    resumed = ranks.run(clipped_at, 4, config, [3, 6], False, saved)
    expected = ranks.run(clipped_at, 4, config, [3, 6], True)
    for one, again, other in zip(found, resumed, expected, strict=True):
        assert (one[2], again[2], other[2]) == ([3, 6], [6], [])
        assert one[0] == other[0] and again[0] == other[0][3:]
        for name, tensor in other[1].items():
            assert torch.equal(one[1][name], tensor) and torch.equal(again[1][name], tensor), name


def next_loss(group, config, saved):
    made = jobs.trainer(group, config)
    made.resume(saved)
    [metrics], _ = made._train_step(made.step + 1)
    return metrics.loss


def raises_on_nan(group, config):
    made = jobs.trainer(group, config)
    if group.rank() == 2:
        made.model.layers[0].down.weight.register_hook(lambda grad: grad)  # keeps autograd's gradient in use
        made.model.norm.weight.register_hook(lambda grad: grad * math.nan)
    try:
        list(made.fit())
    except Exception as error:
        return type(error.__cause__).__name__, str(error)
    return "", ""


def test_a_gradient_that_is_not_finite_is_named_on_every_rank(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=2, **SEQUENCES)
    jobs.prepare(config)
    outcomes = ranks.run(raises_on_nan, 4, jobs.changed(config, "parallel", dp=4, zero=2))
    assert outcomes == outcomes[:1] * 4
    kind, sentence = outcomes[0]
    assert kind == NonFiniteGradient.__name__
    assert sentence.startswith("Step 1: the loss is ") and "(that of norm.weight is not finite)" in sentence


def final_weights(group, config):
    made = jobs.trainer(group, config)
    steps = list(made.fit())
    state = checkpoint.state_of(made.sharded)
    whole = {name: value.full_tensor() for name, value in state["model"].items()}
    return whole, list(state["optimizer"]), steps[-1].loss


def test_stochastic_rounding_is_the_same_at_every_stage_and_keeps_no_masters(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=3, dtype="bf16", val_every=0, **SEQUENCES)
    config = jobs.changed(config, "optimizer", rounding="stochastic")
    jobs.prepare(config)
    found = []
    for zero in (0, 1, 2, 3):
        staged = jobs.changed(config, "parallel", dp=4, zero=zero)
        found.append(ranks.run(final_weights, 4, staged)[0])
    first, names, _ = found[0]
    assert names and not any(name.startswith("master.") for name in names)
    for weights, _, _ in found[1:]:
        assert all(torch.equal(weights[name], value) for name, value in first.items())


@pytest.mark.second_tier
def test_stochastic_rounding_learns_as_with_master_weights(ranks, tmp_path):
    """At a learning rate whose steps are below half the last bit of many weights."""
    config = jobs.job(tmp_path, steps=60, dtype="bf16", val_every=0, **SEQUENCES)
    config = jobs.changed(config, "optimizer", lr=3e-4, min_lr_fraction=1.0)
    jobs.prepare(config)
    with_masters = ranks.run(final_weights, 1, config)[0][2]
    stochastic = jobs.changed(config, "optimizer", rounding="stochastic")
    assert ranks.run(final_weights, 1, stochastic)[0][2] == pytest.approx(with_masters, rel=0.02)


def test_a_checkpoint_without_masters_is_not_taken_up_with_them(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1, dtype="bf16", val_every=0, **SEQUENCES)
    config = jobs.changed(config, "optimizer", rounding="stochastic", warmup_steps=1)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 1, config)
    config = jobs.changed(config, "optimizer", rounding="nearest")
    (error,) = ranks.run(jobs.history, 1, config, checkpoint_folder.find(folder), expect_errors=True)
    assert "was saved with optimizer.rounding=stochastic, but the configuration asks for" in str(error)
