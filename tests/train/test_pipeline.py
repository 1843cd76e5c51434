"""Training over the stages of a pipeline is training on one rank, however layers and sequences are shared
out; other schedules and axes: test_parity.py."""

import functools
import json
from unittest.mock import patch

import pytest
import torch

from pyruntime.data_parallel import reducer, shard
from pyruntime.data_parallel.weight_gathers import GatherPerUse
from pyruntime.train import assembly, checkpoint_folder
from pyruntime.train.errors import ConfigError
from pyruntime.train.model_of_run import slices_of
from tests.train import jobs
from tests.transports import take

JOB = {"batch_size": 8, "micro_batch_size": 1, "seq_len": 32}


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A job, and what one rank makes of it."""
    config = jobs.job(tmp_path_factory.mktemp("whole"), steps=3, val_every=3, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=7)
    config = jobs.changed(config, "optimizer", lr=3e-4)  # at which seven layers are steady
    jobs.prepare(config)
    return config, ranks.run(jobs.history, 1, config)[0]


def layers_held(group, config):
    return jobs.trainer(group, config).model.part.layers


def test_every_layer_is_on_one_stage(ranks, whole):
    config, _ = whole
    held = ranks.run(layers_held, 4, with_pipeline(config, 2, "interleaved", virtual=3))
    assert held == [(0, 1, 3, 5), (0, 1, 3, 5), (2, 4, 6), (2, 4, 6)]


def test_layers_may_be_given_to_stages_by_hand(ranks, whole):
    config, _ = whole
    config = jobs.changed(with_pipeline(config, 2, "1f1b"), "pipeline", layers=(5, 2))
    assert ranks.run(layers_held, 4, config) == 2 * [(0, 1, 2, 3, 4)] + 2 * [(5, 6)]


def costs_file(folder, **changes):
    """Of the jobs' model."""
    model = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "dtype": "fp32",
    }
    parts = {"layer": 1.0, "embedding": 0.5, "head": 3.2}
    costs = {"seq_len": 32, "stages": 4, "slices": [15, 9, 8], "model": model, **parts} | changes
    file = folder / "costs.json"
    file.write_text(json.dumps(costs))
    return str(file)


def test_layers_are_shared_out_by_measured_costs_and_sequences_cut_as_was_found_best(ranks, whole, tmp_path):
    config, expected = whole
    config = with_pipeline(config, 4, "terapipe", slices=0)
    config = jobs.changed(config, "pipeline", costs=costs_file(tmp_path))
    # 7 layers and the head's 3.2 make 2.6 a stage; the last has the head and one layer.
    assert ranks.run(layers_held, 4, config) == [(0, 1), (2, 3), (4, 5), (6,)]
    assert jobs.resolved(config, 4).slices == (15, 9, 8)
    jobs.check_curves(ranks.run(jobs.history, 4, config), expected)


def test_measured_costs_count_by_the_share_of_micro_batches_that_a_stage_meets(tmp_path):
    config = jobs.changed(jobs.job(tmp_path, **JOB), "model", num_hidden_layers=7)
    config = jobs.changed(with_pipeline(config, 4, "1f1b"), "pipeline", costs=costs_file(tmp_path, head=0.1))
    assert [len(layers) for layers in jobs.resolved(config, 4).layers] == [1, 2, 2, 2]
    config = jobs.changed(config, "pipeline", skip=1)
    assert [len(layers) for layers in jobs.resolved(config, 4).layers] == [1, 3, 2, 1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seq_len": 40, "slices": [40]}, "was measured with seq_len=40, and this run has seq_len=32"),
        ({"stages": 2}, "was measured with stages=2, and this run has stages=4"),
        ({"model": {"hidden_size": 64}}, "was measured with intermediate_size=None, and this run has"),
        ({"slices": [32, 1]}, "cannot be used: slices=.* add up to seq_len=32"),
    ],
)
def test_costs_of_something_else_are_refused(tmp_path, changes, sentence):
    config = with_pipeline(jobs.job(tmp_path, **JOB), 4, "terapipe", slices=0)
    config = jobs.changed(config, "model", num_hidden_layers=4)
    config = jobs.changed(config, "pipeline", costs=costs_file(tmp_path, **changes))
    with pytest.raises(ConfigError, match=rf"^pipeline.costs: .*{sentence}"):
        jobs.resolved(config, 4)


def with_pipeline(config, pp, kind, virtual=1, slices=1, **parallel):
    config = jobs.changed(config, "pipeline", kind=kind, virtual=virtual, slices=slices)
    return jobs.changed(config, "parallel", pp=pp, **parallel)


@pytest.mark.parametrize(
    ("pp", "kind", "virtual", "slices"),
    [
        (4, "gpipe", 1, 1),
        (4, "terapipe", 1, 3),
        (2, "terapipe", 1, 2),  # times tp = 2
        (4, "seq1f1b", 1, 2),
        (2, "seq1f1b", 1, 5),
    ],
)
@pytest.mark.second_tier(but=["4-gpipe-1-1"])
def test_loss_curves_equal_those_of_one_rank(ranks, whole, pp, kind, virtual, slices):
    config, expected = whole
    jobs.check_curves(ranks.run(jobs.history, 4, with_pipeline(config, pp, kind, virtual, slices)), expected)


@pytest.mark.parametrize(
    ("world", "slices", "axes", "kind"),
    [
        (2, 2, {}, "1f1b"),
        (4, 2, {"dp": 2, "zero": 2}, "1f1b"),
        (4, 3, {"pp": 2}, "1f1b"),
        (8, 2, {"pp": 2, "dp": 2, "zero": 1}, "zb-h1"),
    ],
)
@pytest.mark.second_tier(but=["4-2-axes1-1f1b"])
def test_with_slices_inside_the_tensor_parallel_group(ranks, whole, world, slices, axes, kind):
    config, expected = whole
    config = jobs.changed(with_pipeline(config, kind=kind, **{"pp": 1} | axes), "parallel", tp_slices=slices)
    found = ranks.run(jobs.history, world, config)
    jobs.check_curves(found, expected)
    if world == 2:
        again = ranks.run(jobs.history, world, config)
        assert jobs.curve(again[0], "grad_norm") == jobs.curve(found[0], "grad_norm")


def slices_chosen(group, config, transport):
    take(group, transport)
    return slices_of(jobs.resolved(config, group.size()), jobs.runtime(group, config))


def test_auto_slices_are_two_where_rows_travel_between_hosts(ranks, whole):
    config = jobs.changed(whole[0], "parallel", tp_slices="auto")
    assert ranks.run(slices_chosen, 2, config, "process_group") == [2, 2]
    assert ranks.run(slices_chosen, 2, config, "symmetric_memory") == [1, 1]  # and so the group is left
    assert ranks.run(slices_chosen, 1, config, "process_group") == [1]


def first_moments(group, config):
    """Of every parameter: a sum of its gradients in all steps. Weight gradients leave as they are multiplied,
    however small they are here."""
    least, reducer.LEAST_GEMM = reducer.LEAST_GEMM, 0
    assembly.shard = functools.partial(shard, bucket_bytes=2048)
    try:
        made = jobs.trainer(group, config)
        for _ in made.fit():
            pass
    finally:
        reducer.LEAST_GEMM, assembly.shard = least, shard
    states = made.optimizer.state_dict()
    return {name: state.full_tensor() for name, state in states.items() if name.startswith("exp_avg.")}


@pytest.mark.parametrize(
    ("kind", "virtual", "slices"),
    [
        ("gpipe", 1, 1),
        ("1f1b", 1, 1),
        ("interleaved", 2, 1),
        ("zb-h1", 1, 1),
        ("zb-v", 1, 1),
        ("terapipe", 1, 3),
        ("seq1f1b", 1, 2),
    ],
)
@pytest.mark.second_tier(but=["interleaved-2-1"])
def test_every_gradient_with_all_axes_is_that_of_one_rank(ranks, tmp_path, kind, virtual, slices):
    # In the first step nothing leaves early; weights hardly move, so that gradients stay comparable.
    config = jobs.job(tmp_path, steps=3, val_every=2, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=5)
    config = jobs.changed(config, "optimizer", clip_grad_norm=0.0, warmup_steps=0, lr=1e-12)
    jobs.prepare(config)
    expected = ranks.run(first_moments, 1, config)[0]
    found: dict[str, torch.Tensor] = {}
    config = with_pipeline(config, 2, kind, virtual, slices, tp=2, dp=2, zero=2)
    for part in ranks.run(first_moments, 8, config):
        for name, moment in part.items():
            assert torch.equal(found.setdefault(name, moment), moment), name
    assert found.keys() == expected.keys()
    for name, moment in expected.items():
        assert (found[name] - moment).abs().max() <= 2e-6 * moment.abs().max(), name


@pytest.mark.parametrize(
    ("world", "pp", "dp", "zero", "kind"),
    [
        (4, 2, 1, 0, "1f1b"),  # times tp = 2
        (4, 4, 1, 0, "zb-h1"),
        (4, 2, 1, 0, "zb-v"),  # embedding and head on one rank
        (4, 2, 2, 0, "1f1b"),
        (4, 2, 2, 1, "zb-h1"),
        (4, 2, 2, 2, "zb-v"),
        (8, 2, 2, 1, "1f1b"),  # times tp = 2
    ],
)
@pytest.mark.second_tier(but=["4-2-2-2-zb-v"])
def test_tied_embeddings_on_two_stages_train_as_one_weight(ranks, tmp_path, world, pp, dp, zero, kind):
    config = jobs.job(tmp_path, steps=3, val_every=2, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=4, tie_word_embeddings=True)
    folder = jobs.prepare(config)
    expected = ranks.run(jobs.history, 1, config)[0]
    piped = with_pipeline(config, pp, kind, dp=dp, zero=zero)
    jobs.check_curves(ranks.run(jobs.history, world, piped), expected)
    saved = checkpoint_folder.find(folder)
    state = ranks.run(jobs.full_state, 1, config, saved)[0]
    for part in ranks.run(jobs.full_state, world, piped, saved):
        assert all(torch.equal(value, state[name]) for name, value in part.items())


def buckets_that_left(group, config):
    """How many of this rank's buckets had left when the optimizer's turn came, by step; how many it has."""
    made = jobs.trainer(group, config)
    inboxes, left = made.sharded._gradients._inboxes, []
    reduce = made.optimizer.squared_norm

    def counted():
        left.append(sum(inbox.left for inbox in inboxes))
        return reduce()

    made.optimizer.squared_norm = counted
    for _ in made.fit():
        pass
    return left, len(inboxes)


@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("interleaved", 1), ("zb-h1", 1), ("zb-v", 1)])
@pytest.mark.second_tier(but=["zb-h1-1"])
def test_gradients_leave_in_the_backward_passes(ranks, tmp_path, kind, virtual):
    config = jobs.job(tmp_path, steps=2, val_every=0, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=4)
    jobs.prepare(config)
    for left, buckets in ranks.run(buckets_that_left, 4, with_pipeline(config, 2, kind, virtual, dp=2)):
        assert left == [0, buckets]  # the first step finds out in which order they come


def weights_held(group, config):
    """Of weights that are cut: how many were whole at once after the first step, at most, and how many there
    are; and the losses."""
    most, bring = 0, GatherPerUse._before

    def counted(gatherer, module, read):
        nonlocal most
        bring(gatherer, module, read)
        if gatherer._is_agreed:
            sizes = [each.bucket.parameters[0].untyped_storage().nbytes() for each in gatherer._order]
            most = max(most, sum(size > 0 for size in sizes))

    small = functools.partial(shard, bucket_bytes=2048)
    with patch.object(assembly, "shard", small), patch.object(GatherPerUse, "_before", counted):
        made = jobs.trainer(group, config)
        losses = [step.loss for step in made.fit()]
        made.close()
    return most, len(made.sharded.buckets), losses


@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
@pytest.mark.second_tier(but=["zb-h1-1"])
def test_zero_3_holds_few_weights_whole_and_is_bitwise_repeatable(ranks, tmp_path, kind, virtual):
    config = jobs.job(tmp_path, steps=3, val_every=2, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=12)
    jobs.prepare(config)
    config = with_pipeline(config, 2, kind, virtual, dp=2, zero=3)
    first, second = (ranks.run(weights_held, 4, config) for _ in range(2))
    assert first == second
    for most, weights, _ in first:
        assert weights > 20 and most <= 10


def with_frozen_layers(group, config, frozen):
    made = jobs.make_model

    def make(*arguments):
        model = made(*arguments)
        for number in set(frozen) & set(model.part.layers):
            model.layer(number).requires_grad_(False)
        return model

    with patch.object(jobs, "make_model", make):
        return jobs.history(group, config)[-1].loss


def test_a_rank_whose_stages_are_frozen_is_told_to_all_at_once(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1, val_every=0, **JOB)
    config = jobs.changed(config, "model", num_hidden_layers=6)
    jobs.prepare(config)
    config = jobs.changed(with_pipeline(config, 4, "1f1b"), "pipeline", layers=(2, 1, 2, 1))
    errors = ranks.run(with_frozen_layers, 4, config, [3, 4], expect_errors=True)
    assert [str(error) for error in errors] == 4 * [
        "No parameter of layers 3, 4, which pipeline rank 2 has, requires a gradient, and every pipeline "
        "rank must train some; leave one unfrozen, or give the rank other layers with pipeline.layers."
    ]
    losses = ranks.run(with_frozen_layers, 4, config, [0, 1, 3])
    assert losses == losses[:1] * 4


def test_a_second_run_is_bitwise_the_same(ranks, tmp_path):
    config = with_pipeline(jobs.job(tmp_path, steps=4, dtype="bf16", **JOB), 2, "zb-h1")
    jobs.prepare(config)
    first, second = (ranks.run(jobs.history, 4, config)[0] for _ in range(2))
    assert jobs.curve(first, "loss") == jobs.curve(second, "loss")


def test_a_checkpoint_goes_on_with_other_ranks(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=3, val_every=0, **JOB)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 4, with_pipeline(config, 2, "zb-h1"))
    saved = checkpoint_folder.find(folder)
    state = ranks.run(jobs.full_state, 1, config, saved)[0]
    found: dict[str, torch.Tensor] = {}
    for part in ranks.run(jobs.full_state, 4, with_pipeline(config, 2, "1f1b", dp=2, zero=1), saved):
        found |= part
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "interleaved", "virtual": 2, "pp": 3}, r"\[pipeline\]: "),
        ({"kind": "1f1b", "slices": 2, "pp": 2}, r"\[pipeline\]: "),
        ({"kind": "1f1b", "pp": 4}, "parallel.pp: 2 layers cannot be cut into 4 stages"),
        ({"kind": "1f1b", "pp": 2, "layers": (2, 1)}, r"pipeline.layers=\[2, 1\] must be 2 numbers"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, changes, sentence):
    layers = changes.pop("layers", ())
    config = with_pipeline(jobs.job(tmp_path, **JOB), **changes)
    config = jobs.changed(config, "pipeline", layers=layers)
    with pytest.raises(ConfigError, match=sentence):
        jobs.resolved(config, 4)
