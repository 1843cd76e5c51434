"""Micro-batches that are routed among replicas of pipeline stages train as on one rank."""

import pytest
import torch

from pyruntime.train import validate
from pyruntime.train.errors import ConfigError
from pyruntime.train.validate.watching import why_not_predicted
from tests.train import jobs

JOB = {"batch_size": 10, "micro_batch_size": 1, "seq_len": 32}
SPEEDS = (1.0, 0.5, 0.6, 1.0)


def routed(config, **sizes):
    config = jobs.changed(config, "parallel", **{"pp": 2, "dp": 2, "tp": 1} | sizes)
    return jobs.changed(config, "pipeline", speeds=SPEEDS)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A job, and the steps and first moments that one rank makes of it."""
    config = jobs.job(tmp_path_factory.mktemp("whole"), steps=3, val_every=3, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=3)
    config = jobs.changed(config, "optimizer", lr=3e-4)
    jobs.prepare(config)
    return config, ranks.run(fitted, 1, config)[0]


def fitted(group, config, resume=None):
    made = jobs.trainer(group, config)
    if resume:
        made.resume(resume)
    steps = list(made.fit())
    states = made.optimizer.state_dict()
    moments = {name: state.full_tensor() for name, state in states.items() if name.startswith("exp_avg.")}
    made.close()
    return steps, moments


def check_alike(results, expected):
    steps, moments = expected
    jobs.check_curves([each for each, _ in results], steps)
    found: dict[str, torch.Tensor] = {}
    for _, part in results:
        found |= part
    assert found.keys() == moments.keys()
    for name, moment in moments.items():
        assert (found[name] - moment).abs().max() <= 1e-4 * moment.abs().max(), name


@pytest.mark.parametrize(
    "axes",
    [{"zero": 1}, {"zero": 0}, {"zero": 2, "dp_replicate": 2}, {"tp": 2}, {"cp": 2}],
    ids=["zero1", "zero0", "zero2 replicated", "tp2", "cp2"],
)
@pytest.mark.second_tier(but=["zero1"])
def test_losses_and_gradients_are_those_of_one_rank(ranks, whole, axes):
    config, expected = whole
    config = routed(config, **axes)
    world = 4 * axes.get("tp", 1) * axes.get("cp", 1)
    run = jobs.resolved(config, world)
    # The second rank of the first stage takes a third, the first of the second a little more.
    counts = [len(run.micro_batches_at(pp, dp)) for pp in range(2) for dp in range(2)]
    assert counts == [7, 3, 4, 6]
    results = ranks.run(fitted, world, config)
    check_alike(results, expected)
    again = ranks.run(fitted, world, config)
    for (_, first), (_, second) in zip(results, again, strict=True):
        assert all(torch.equal(moment, second[name]) for name, moment in first.items())


@pytest.mark.second_tier
def test_a_deep_pipeline_trains_as_one_rank(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=3, val_every=3, **JOB | {"batch_size": 16})
    config = jobs.changed(config, "model", num_hidden_layers=5)
    config = jobs.changed(config, "optimizer", lr=3e-4)
    jobs.prepare(config)
    expected = ranks.run(fitted, 1, config)[0]
    speeds = (1.0, 0.5, 0.6, 1.0, 1.0, 0.7, 0.5, 0.5)
    deep = jobs.changed(routed(config, pp=4), "pipeline", speeds=speeds)
    check_alike(ranks.run(fitted, 8, deep), expected)


def test_a_replica_whose_first_micro_batch_comes_late_keeps_none_waiting(ranks, tmp_path):
    """The last stage's second rank gets its first micro-batch when its first rank has sent gradients back, so
    that one's forwards must not wait for weights from the second."""
    config = jobs.job(tmp_path, steps=3, val_every=3, **JOB | {"batch_size": 16})
    config = jobs.changed(config, "model", num_hidden_layers=2)
    config = jobs.changed(config, "optimizer", lr=3e-4, clip_grad_norm=0.1)  # so that no weights leave ahead
    jobs.prepare(config)
    expected = ranks.run(fitted, 1, config)[0]
    late = jobs.changed(routed(config, zero=1), "pipeline", speeds=(1.0, 1.0, 4.0, 1.0))
    assert next(iter(jobs.resolved(late, 4).micro_batches_at(1, 1))) > 2
    check_alike(ranks.run(fitted, 4, late), expected)


def test_tied_embeddings_are_those_of_one_rank(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=2, val_every=2, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=2, tie_word_embeddings=True)
    jobs.prepare(config)
    expected = ranks.run(fitted, 1, config)[0]
    check_alike(ranks.run(fitted, 4, routed(config)), expected)


def test_a_checkpoint_goes_on_at_the_same_routing_and_at_others(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=4, val_every=4, **JOB)
    config = jobs.changed(jobs.changed(config, "model", num_hidden_layers=2), "checkpoint", every_steps=2)
    folder = jobs.prepare(config)
    whole = ranks.run(fitted, 4, routed(config))
    saved = folder / "checkpoints" / "step-000002"
    again = ranks.run(fitted, 4, routed(config), saved)
    for (steps, moments), (after, resumed) in zip(whole, again, strict=True):
        assert jobs.curve(after, "loss") == jobs.curve(steps, "loss")[2:]
        assert all(torch.equal(moment, resumed[name]) for name, moment in moments.items())
    others = jobs.changed(routed(config), "pipeline", speeds=(0.5, 1.0, 1.0, 1.0))
    columns = jobs.changed(routed(config), "pipeline", speeds=())
    for other in (others, columns):
        found = ranks.run(fitted, 4, other, saved)
        jobs.check_curves([steps for steps, _ in found], whole[0][0][2:])


def test_the_planner_does_not_predict_it(tmp_path):
    config = routed(jobs.job(tmp_path, **JOB | {"dtype": "bf16"}))
    assert why_not_predicted(config).startswith("the planner does not know pipeline.speeds=(1.0, 0.5")


def test_equal_speeds_are_fixed_columns(tmp_path):
    config = routed(jobs.job(tmp_path, **JOB))
    equal = jobs.resolved(jobs.changed(config, "pipeline", speeds=(2.0, 2.0, 1.0, 1.0)), 4)
    columns = jobs.resolved(jobs.changed(config, "pipeline", speeds=()), 4)
    assert equal.speeds == columns.speeds == () and equal.schedule == columns.schedule
    assert equal.sequences_at(0, 1) == equal.sequences_at(1, 1) == [5, 6, 7, 8, 9]
    run = jobs.resolved(config, 4)
    taken = [run.sequences_at(1, dp) for dp in range(2)]
    assert sorted(taken[0] + taken[1]) == list(range(10)) and list(map(len, taken)) == [4, 6]


@pytest.mark.parametrize(
    ("section", "values", "sentence"),
    [
        (
            "parallel",
            {"pp": 1},
            r"pipeline.speeds=\[1.0, 0.5, 0.6, 1.0\] without a pipeline; set parallel.pp",
        ),
        (
            "parallel",
            {"dp": 1},
            "pipeline.speeds=.* among data-parallel ranks, and there is one; set parallel.dp",
        ),
        ("pipeline", {"speeds": (1.0, 2.0)}, r"pipeline.speeds=\[1.0, 2.0\] must be 4 positive numbers: "),
        (
            "pipeline",
            {"speeds": (1.0, 0.0, 1.0, 1.0)},
            "must be 4 positive numbers: parallel.dp=2 for the first",
        ),
        (
            "pipeline",
            {"speeds": (1.0, 0.01, 1.0, 1.0)},
            r"pipeline.speeds \[1.0, 0.01\] .* stage 0 leave replica 1",
        ),
        ("pipeline", {"kind": "gpipe"}, "does not go with pipeline.kind=gpipe: only 1f1b routes"),
        ("pipeline", {"skip": 1}, "does not go with pipeline.skip=1: paths"),
        ("train", {"micro_batches": (6, 4)}, r"does not go with train.micro_batches=\[6, 4\]: speeds say"),
        ("parallel", {"rebalance": "on"}, "does not go with parallel.rebalance=on: "),
        ("parallel", {"zero": 3}, "does not go with parallel.zero=3"),
        ("data_parallel", {"method": "diloco"}, "does not go with data_parallel.method=diloco"),
        ("data_parallel", {"members": "host:1"}, "does not go with data_parallel.members=host:1"),
        ("model", {"experts": 4}, r"pipeline.speeds=.* with experts: "),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path, section, values, sentence):
    config = routed(jobs.job(tmp_path, **JOB))
    config = jobs.changed(jobs.changed(config, "checkpoint", every_steps=2), section, **values)
    with pytest.raises(ConfigError, match=sentence):
        validate.check(config, config.parallel.pp * config.parallel.dp)
        jobs.resolved(config, 4)
