"""Micro-batches that skip stages of the pipeline train as on one rank that skips the same layers."""

import pytest
import torch

from pyruntime.train import validate
from pyruntime.train.errors import ConfigError
from pyruntime.train.planned import estimate
from pyruntime.train.watching.heading import skipped_in_words
from tests.train import jobs

JOB = {"batch_size": 8, "micro_batch_size": 1, "seq_len": 32}


def skipping_job(folder, **model):
    config = jobs.job(folder, steps=3, val_every=3, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=7, **model)
    config = jobs.changed(config, "optimizer", lr=3e-4)
    return config, jobs.changed(config, "pipeline", skip=1)


def on_axes(config, **sizes):
    return jobs.changed(config, "parallel", **{"pp": 4, "tp": 1} | sizes)


def on_one_rank(group, config, layers):
    """The steps of a trainer that takes micro-batch i of a step through layers[i % len(layers)]; and the
    first moments after them."""
    made = jobs.trainer(group, config)
    run, step = made.model.run, made._passes.step
    turn = iter(())

    def through(x, numbers, *rest, **options):
        return run(x, next(turn, numbers), *rest, **options)

    def taken(micro_batches, *rest):
        nonlocal turn
        turn = iter([layers[number % len(layers)] for number in range(len(micro_batches))])
        return step(micro_batches, *rest)

    made.model.run, made._passes.step = through, taken
    return list(made.fit()), moments(made)


def moments(made):
    states = made.optimizer.state_dict()
    return {name: state.full_tensor() for name, state in states.items() if name.startswith("exp_avg.")}


def piped(group, config):
    made = jobs.trainer(group, config)
    return list(made.fit()), moments(made)


@pytest.mark.parametrize(
    ("axes", "model"),
    [
        ({}, {}),
        ({}, {"tie_word_embeddings": True}),
        ({"dp": 2, "zero": 3}, {}),
        ({"dp": 2, "zero": 2}, {}),
        ({"tp": 2}, {}),
        ({"cp": 2}, {}),
    ],
    ids=["alone", "tied", "dp2 zero3", "dp2 zero2", "tp2", "cp2"],
)
@pytest.mark.second_tier(but=["alone", "tied"])
def test_losses_and_gradients_are_those_of_one_rank_that_skips_the_same_layers(ranks, tmp_path, axes, model):
    config, skipping = skipping_job(tmp_path, **model)
    jobs.prepare(config)
    skipping = on_axes(skipping, **axes)
    world = 4 * max(axes.get(axis, 1) for axis in ("dp", "tp", "cp"))
    run = jobs.resolved(skipping, world)
    paths = run.schedule.paths
    layers = [[number for stage in path for number in run.layers[stage]] for path in paths]
    assert len({*map(tuple, layers)}) == 2 and all(len(each) < 7 for each in layers)
    expected, of_one = ranks.run(on_one_rank, 1, config, layers)[0]
    results = ranks.run(piped, world, skipping)
    jobs.check_curves([steps for steps, _ in results], expected)
    found: dict[str, torch.Tensor] = {}
    for _, part in results:
        found |= part
    assert found.keys() == of_one.keys()
    for name, moment in of_one.items():
        assert (found[name] - moment).abs().max() <= 1e-4 * moment.abs().max(), name
    again = ranks.run(piped, world, skipping)
    for (_, first), (_, second) in zip(results, again, strict=True):
        assert all(torch.equal(moment, second[name]) for name, moment in first.items())


def test_the_run_says_what_it_skips_and_counts_what_it_computes(tmp_path):
    config, skipping = skipping_job(tmp_path)
    whole, run = (jobs.resolved(on_axes(each), 4) for each in (config, skipping))
    assert skipped_in_words(whole) == "" and whole.layer_shares == ()
    # Stages between the first and the last, which half of the micro-batches meet, hold more layers.
    assert [len(layers) for layers in run.layers] == [1, 3, 2, 1]
    assert run.layer_shares == (1.0, *[0.5] * 5, 1.0)
    assert skipped_in_words(run) == (
        ", each micro-batch skips 1 of 4 stages: on average 4.5 of 7 layers train"
    )
    head = 6 * run.shape.vocab_size * run.shape.hidden_size
    assert run.flops_per_token - head == pytest.approx((whole.flops_per_token - head) * 4.5 / 7)
    assert estimate(run).total > 0


@pytest.mark.parametrize(
    ("section", "values", "sentence"),
    [
        ("parallel", {"pp": 1}, "pipeline.skip=1 without a pipeline; set parallel.pp."),
        ("parallel", {"pp": 2}, r"\[pipeline\]: skip=1 of 2 stages"),
        ("pipeline", {"skip": -1}, "pipeline.skip must not be negative"),
        ("pipeline", {"kind": "zb-v"}, r"\[pipeline\]: zb-v takes every micro-batch through all stages"),
        ("pipeline", {"kind": "seq1f1b", "slices": 2}, r"\[pipeline\]: seq1f1b takes every micro-batch"),
        ("train", {"micro_batch_size": 8}, r"\[pipeline\]: 1 micro-batch.* skip 1 of the 2 stages"),
        ("parallel", {"rebalance": "on"}, "pipeline.skip=1 does not go with parallel.rebalance=on"),
        ("dpo", {"beta": 0.1}, "pipeline.skip=1 does not go with dpo.beta=0.1: the reference's"),
        ("model", {"experts": 4}, "pipeline.skip=1 with experts: "),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path, section, values, sentence):
    _, config = skipping_job(tmp_path)
    config = jobs.changed(jobs.changed(on_axes(config), "checkpoint", every_steps=2), section, **values)
    pp = config.parallel.pp
    with pytest.raises(ConfigError, match=sentence):
        validate.check(config, pp)
        jobs.resolved(config, pp)
