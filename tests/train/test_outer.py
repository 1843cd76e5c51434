"""Replicas that meet less often than in every step, in the trainer: alone and beside every other axis, from
checkpoints, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from pathlib import Path

import pytest
import torch

from pyruntime.comm import PeerLost
from pyruntime.nn.cut import memory_of
from pyruntime.train import checkpoint, checkpoint_folder, validate
from pyruntime.train.config import DataParallel, Parallel, RunConfig, Train
from pyruntime.train.errors import ConfigError, TrainingError
from tests.train import jobs

SEQUENCES = {"batch_size": 8, "micro_batch_size": 1, "seq_len": 32}
CO2 = {"method": "co2", "tau": 3, "outer_momentum": 0.3}


def job(folder: Path, data_parallel: dict, parallel: dict, **train) -> RunConfig:
    config = jobs.job(folder, **{"steps": 8, "val_every": 0, **SEQUENCES, **train})
    config = jobs.changed(config, "model", num_hidden_layers=2)
    config = jobs.changed(config, "data_parallel", **data_parallel)
    return jobs.changed(config, "parallel", **parallel)


def run(ranks, function, world: int, *arguments) -> list:
    """On the pool's four ranks, or on fresh ones: a mesh with several axes is over all ranks of a job."""
    if world == 4:
        return ranks.run(function, 4, *arguments)
    outcomes = ranks.launch(function, world, *arguments, timeout=120.0)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.exit_code == 0, outcome.output
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """A job of two replicas of one rank each, and what it makes."""
    config = job(tmp_path_factory.mktemp("alone"), CO2, {"dp": 2})
    jobs.prepare(config)
    return config, run(ranks, jobs.history, 2, config)[0]


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp": 2},
        {"dp": 4, "dp_replicate": 2, "zero": 1},
        {"dp": 4, "dp_replicate": 2, "zero": 2},
        {"dp": 4, "dp_replicate": 2, "zero": 0},
        {"dp": 2, "cp": 2},
    ],
    ids=["tp 2", "zero 1 inside", "zero 2 inside", "zero 0 inside", "cp 2"],
)
@pytest.mark.second_tier(but=["zero 0 inside"])
def test_a_replica_of_several_ranks_is_one_of_one_rank(ranks, alone, parallel):
    config, expected = alone
    config = jobs.changed(config, "parallel", **parallel)
    found = run(ranks, jobs.history, 4, config)
    jobs.check_curves(found, expected)


def test_a_pipeline_of_replicas_is_one_rank_each(ranks, alone):
    config, expected = alone
    config = jobs.changed(config, "parallel", dp=2, pp=2)
    jobs.check_curves(run(ranks, jobs.history, 4, config), expected)


@pytest.mark.parametrize(
    "data_parallel",
    [
        {"method": "local_sgd", "tau": 2},
        {"method": "diloco", "tau": 3},
        {"method": "streaming_diloco", "tau": 4, "fragments": 2, "delay": 1},
        {"method": "co2", "tau": "auto"},
    ],
    ids=lambda settings: settings["method"],
)
@pytest.mark.second_tier(but=["local_sgd"])
def test_every_method_learns_and_ends_with_one_model(ranks, tmp_path, data_parallel):
    config = job(tmp_path, data_parallel, {"dp": 3}, batch_size=6, steps=20)
    jobs.prepare(config)
    results = run(ranks, ended, 3, config)
    for curves, weights, _ in results:
        assert curves[-1].val_loss < curves[0].loss - 0.3
        assert curves[-1].val_loss == results[0][0][-1].val_loss
        assert all(torch.equal(weights[name], results[0][1][name]) for name in weights)


def ended(group, config, resume=None):
    """Metrics of every step, weights at the end, and how the outer optimizer describes itself."""
    made = jobs.trainer(group, config)
    if resume:
        made.resume(resume)
    curves = list(made.fit())
    weights = {name: memory_of(p).clone() for name, p in made.model.named_parameters()}
    sentence = made.outer.describe()
    made.close()
    return curves, weights, sentence


@pytest.mark.second_tier
def test_metrics_say_what_meetings_cost_and_hide(ranks, alone):
    config, _ = alone
    for curves, weights, sentence in run(ranks, ended, 2, config):
        assert sentence == "co2: 2 replica(s), tau 3"
        assert [metrics.step for metrics in curves] == list(range(1, 9))
        # Of a round's displacement a rank reads half of the other's, and the other half's sums. Two rounds
        # have ended; a step's figure is that of the rank that read more, which may differ.
        whole = 4 * sum(tensor.numel() for tensor in weights.values())
        assert whole <= sum(metrics.outer_bytes for metrics in curves) <= 4.1 * whole
        assert not any(metrics.outer_bytes for metrics in curves[:2])
        for metrics in curves:
            assert 0 <= metrics.outer_exposed_s <= metrics.exposed_comm_s


def waited_for(group, config):
    """Metrics of every step, of which rank 0 takes longer for the first of a round."""
    made = jobs.trainer(group, config)
    late = made.model.layers[0].register_forward_pre_hook(
        lambda *_: time.sleep(0.1 * (group.rank() == 0 and made.step % config.data_parallel.tau == 0))
    )
    steps = list(made.fit())
    late.remove()
    made.close()
    return steps


def test_what_a_replica_waits_for_another_is_a_share_of_the_step(ranks, tmp_path):
    """Of that of the one that waits for most of its time, whose step takes longer than the other's."""
    config = job(tmp_path, {"method": "diloco", "tau": 3}, {"dp": 2}, steps=6)
    jobs.prepare(config)
    for steps in run(ranks, waited_for, 2, config):
        for step in steps:
            assert 0 <= step.outer_exposed_s <= step.exposed_comm_s < step.step_time_s
        assert steps[5].outer_exposed_s > 0.5 * steps[5].step_time_s


def taken(group, *configs):
    """Of each job, the metrics of every step, and the bytes that this rank took from other replicas after the
    first: which step they come in may differ between ranks, and metrics have the most of a step."""
    found = []
    for config in configs:
        made = jobs.trainer(group, config)
        running = made.fit()
        steps = [next(running)]
        before = made.outer.stats()[1]
        steps += running
        found.append((steps, made.outer.stats()[1] - before))
        made.close()
    return found


@pytest.mark.second_tier
def test_quantised_displacements_are_fewer_bytes_and_learn_alike(ranks, alone):
    config, _ = alone
    quantised = jobs.changed(config, "data_parallel", compression="quantize")
    of_ranks = run(ranks, taken, 2, config, quantised)
    for (plain, plainly), (found, few) in of_ranks:
        assert jobs.curve(found, "loss") == jobs.curve(of_ranks[0][1][0], "loss")
        assert found[-1].val_loss == pytest.approx(plain[-1].val_loss, abs=0.02)
        assert 0 < few < 0.15 * plainly
        assert sum(jobs.curve(found, "outer_bytes")) > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("data_parallel", "parallel"),
    [
        (CO2, {"dp": 2}),
        (
            {"method": "streaming_diloco", "tau": 4, "fragments": 2, "delay": 2, "compression": "quantize"},
            {"dp": 4, "dp_replicate": 2},
        ),
    ],
    ids=["co2 with tp", "streaming_diloco with zero, quantised"],
)
@pytest.mark.second_tier(but=["co2 with tp-fp32"])
def test_a_run_goes_on_bitwise_from_the_midst_of_a_round(ranks, tmp_path, data_parallel, parallel, dtype):
    config = job(tmp_path, data_parallel, parallel, dtype=dtype)
    config = jobs.changed(config, "checkpoint", every_steps=5)
    folder = jobs.prepare(config)
    whole = run(ranks, ended, 4, config)
    saved = checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)[0]
    assert checkpoint_folder.step_of(saved) == 5
    again = run(ranks, ended, 4, config, saved)
    for (curves, weights, _), (resumed, weights_again, _) in zip(whole, again, strict=True):
        for name in ("loss", "grad_norm", "val_loss"):
            assert jobs.curve(curves, name)[5:] == jobs.curve(resumed, name)
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


@pytest.mark.parametrize(
    ("data_parallel", "others"),
    [
        (CO2, [{"dp": 2, "pp": 2}, {"dp": 4, "dp_replicate": 2, "zero": 2}]),
        ({"method": "co2", "tau": "auto"}, [{"dp": 2, "cp": 2}]),
    ],
    ids=["co2", "co2, tau measured"],
)
@pytest.mark.second_tier("co2")
def test_a_run_goes_on_with_replicas_that_are_cut_otherwise(ranks, tmp_path, data_parallel, others):
    config = job(tmp_path, data_parallel, {"dp": 2})
    config = jobs.changed(config, "checkpoint", every_steps=5)
    folder = jobs.prepare(config)
    (whole, _, sentence), *_ = run(ranks, ended, 4, config)
    saved = checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)[0]
    config = jobs.changed(config, "output", run_dir=str(tmp_path / "again"))
    jobs.prepare(config)
    for parallel in others:
        for found, _, again in run(ranks, ended, 4, jobs.changed(config, "parallel", **parallel), saved):
            assert re.findall(r"tau \d+", again) == re.findall(r"tau \d+", sentence)
            for name in ("loss", "grad_norm"):
                expected = jobs.curve(whole[5:], name)
                assert jobs.curve(found, name) == pytest.approx(expected, rel=1e-4), (parallel, name)
            assert found[-1].val_loss == pytest.approx(whole[-1].val_loss, rel=1e-4)


def loaded_weights(group, config, saved):
    made = jobs.trainer(group, dataclasses.replace(config, data_parallel=DataParallel()))
    checkpoint.load_weights(saved, made.model, group)
    return {name: memory_of(p).clone() for name, p in made.model.named_parameters()}


@pytest.mark.second_tier
def test_a_checkpoint_has_the_weights_that_replicas_have_in_common(ranks, tmp_path):
    """Those of the last step are the model; any number of ranks loads them."""
    config = job(tmp_path, CO2, {"dp": 2}, dtype="bf16", steps=4)
    folder = jobs.prepare(config)
    (_, weights, _), _ = run(ranks, ended, 2, config)
    (found,) = ranks.run(
        loaded_weights, 1, jobs.changed(config, "parallel", dp=1), checkpoint_folder.newest(folder)
    )
    assert all(torch.equal(weights[name], found[name]) for name in weights)


@pytest.mark.parametrize(
    "other",
    [DataParallel(), DataParallel(method="diloco", tau=3)],
    ids=lambda settings: settings.method,
)
@pytest.mark.second_tier("every_step")
def test_a_checkpoint_of_another_method_is_refused(ranks, tmp_path, other):
    config = job(tmp_path, CO2, {"dp": 2}, steps=3)
    folder = jobs.prepare(config)
    run(ranks, ended, 2, config)
    facts = jobs.resolved(dataclasses.replace(config, data_parallel=other)).facts
    with pytest.raises(ConfigError, match=r"data_parallel\.method=co2 of 2 replicas, but"):
        checkpoint_folder.read_matching(checkpoint_folder.newest(folder), facts)


def raises_on_nan(group, config):
    made = jobs.trainer(group, config)
    if group.rank() == 1:
        made.model.norm.weight.register_hook(lambda grad: grad * math.nan)
    try:
        list(made.fit())
    except (TrainingError, PeerLost) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_gradient_that_is_not_finite_on_one_replica_ends_all(ranks, tmp_path):
    config = job(tmp_path, CO2, {"dp": 2})
    jobs.prepare(config)
    outcomes = ranks.launch(raises_on_nan, 2, config)
    (other, heard), (own, said) = (outcome.value for outcome in outcomes)
    assert own == "TrainingError" and "norm.weight" in said and "Step 1" in said
    assert other == "PeerLost" and "rank 1 reports: Step 1" in heard


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"data_parallel": DataParallel(tau=3)},
            "data_parallel.tau=3 needs replicas that do not synchronize in every step",
        ),
        ({"data_parallel": DataParallel(method="co2")}, "parallel.dp=1; set parallel.dp to their number."),
        (
            {"data_parallel": DataParallel(method="co2"), "parallel": Parallel(dp=2, zero=3)},
            "data_parallel.method=co2 with parallel.zero=3, which keeps no whole weights",
        ),
        (
            {
                "data_parallel": DataParallel(method="co2", compression="power_sgd"),
                "parallel": Parallel(dp=2),
            },
            "data_parallel.compression=power_sgd, which needs matrices, but displacements are sent as",
        ),
        (
            {
                "data_parallel": DataParallel(method="co2", compression="quantize", error_feedback=False),
                "parallel": Parallel(dp=2),
            },
            "data_parallel.error_feedback=false: what a round loses would never be sent",
        ),
        (
            {
                "data_parallel": DataParallel(
                    method="slowmo", tau=4, compression="quantize", members="host:1"
                ),
                "train": Train(micro_batch_size=4, steps=8),
            },
            "data_parallel.members, whose replicas send displacements uncompressed",
        ),
        (
            {"data_parallel": DataParallel(method="diloco", tau=8, clip=1.0), "parallel": Parallel(dp=2)},
            "data_parallel.clip is not a setting of data_parallel.method=diloco; leave it out.",
        ),
        (
            {"data_parallel": DataParallel(method="diloco"), "parallel": Parallel(dp=2)},
            r'\[data_parallel\]: tau="auto" finds the shortest round',
        ),
        (
            {
                "data_parallel": DataParallel(method="slowmo", tau=8, outer_momentum=2.0),
                "parallel": Parallel(dp=2),
            },
            "momentum=2.0 must be at least 0 and below 1",
        ),
    ],
)
@pytest.mark.second_tier("changes8-momentum=2.0 must be at least 0 and below 1")
def test_what_does_not_go_together_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence) as refusal:
        validate.check(
            dataclasses.replace(RunConfig(train=Train(micro_batch_size=4)), **changes), world_size=2
        )
    assert "\n" not in str(refusal.value)
