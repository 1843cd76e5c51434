"""Training a model with experts on a mesh is training it on one rank, losses of routers included."""

from __future__ import annotations

import collections
import contextlib
import re
from unittest.mock import patch

import pytest
import torch

from pyruntime.llama import load_hf
from pyruntime.nn import RouterLosses, SigmoidRouter, router
from pyruntime.nn.router import counts_of, moved_bias
from pyruntime.train import model_of_run
from pyruntime.train.config import Grid, Model
from pyruntime.train.errors import ConfigError
from pyruntime.train.resolved import check
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.train import jobs
from tests.train.test_checkpoint import through_torch
from tools import check_parity as parity

MODEL = Model(
    preset="debug",
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=6,
    vocab_size=259,
    experts=7,
    experts_per_token=2,
    expert_size=40,
    shared_expert_size=48,
    dense_layers=1,
)
"""Seven experts are ragged over 2 ranks and over 3."""
SIGMOID = {
    "qk_norm": True, "sigmoid_router": True, "experts": 8, "expert_size": 24, "expert_groups": 4,
    "expert_groups_per_token": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
"""The options of a model with routers by sigmoid."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A job for one rank, with losses of routers that weigh as much as the main one."""
    config = parity.job(tmp_path_factory.mktemp("experts"))
    config = jobs.changed(config, "model", **vars(MODEL))
    config = jobs.changed(config, "train", balance_loss=0.5, router_z_loss=0.1)
    jobs.prepare(config)
    return config


@pytest.fixture(scope="module")
def whole(ranks, config):
    """Figures of one rank, in steps of one and of two micro-batches."""
    return {count: ranks.run(steps_of, 1, jobs.on_mesh(config, count))[0] for count in (1, 2)}


def steps_of(group, config):
    return parity.steps_of(jobs.runtime(group, config), config)


def test_one_rank_repeats_itself(ranks, config, whole):
    again = ranks.run(steps_of, 1, jobs.on_mesh(config, 2))[0]
    assert again == whole[2]
    assert again[-1][0] < again[0][0]


# The data-parallel ranks of a micro-batch have other sequences together than one rank, if there are several.
MESHES = {
    "tp2": (2, {"tp": 2}),
    "tp3": (2, {"tp": 3}),
    "tp2 full recomputation": (2, {"tp": 2, "recompute": "full"}),
    "tp2 selective recomputation": (2, {"tp": 2, "recompute": "selective"}),
    "dp4 zero2 hybrid": (1, {"dp": 4, "zero": 2, "dp_replicate": 2}),
    "dp4 zero1": (1, {"dp": 4, "zero": 1}),
    "dp4 zero3": (1, {"dp": 4, "zero": 3}),
    "tp2 dp2 zero0": (1, {"tp": 2, "dp": 2, "zero": 0}),
    "tp2 dp2 zero3": (1, {"tp": 2, "dp": 2, "zero": 3}),
    "tp2 cp2 zero2": (2, {"tp": 2, "cp": 2, "zero": 2}),
    "cp2 dp2 zero3": (1, {"cp": 2, "dp": 2, "zero": 3}),
    "pp4 zb-h1": (2, {"pp": 4, "schedule": "zb-h1"}),
    "tp2 pp2 1f1b": (2, {"tp": 2, "pp": 2}),
    "tp2 pp2 zb-v": (2, {"tp": 2, "pp": 2, "schedule": "zb-v"}),
    "pp2 dp2 zero3 gpipe": (1, {"pp": 2, "dp": 2, "zero": 3, "schedule": "gpipe"}),
    # Experts over groups of their own, of fewer and of more ranks than tensor-parallel ones.
    "tp2 cp2 ep1": (2, {"tp": 2, "cp": 2, "ep": 1}),
    "dp4 zero3 ep2": (1, {"dp": 4, "zero": 3, "ep": 2}),
    "dp4 zero2 ep4": (1, {"dp": 4, "zero": 2, "ep": 4}),
    "dp4 zero1 ep2 hybrid": (1, {"dp": 4, "zero": 1, "ep": 2, "dp_replicate": 2}),
    "dp4 zero0 ep2": (1, {"dp": 4, "zero": 0, "ep": 2}),
    "tp2 dp2 zero3 ep1": (1, {"tp": 2, "dp": 2, "zero": 3, "ep": 1}),
    "tp2 dp2 zero1 ep4": (1, {"tp": 2, "dp": 2, "zero": 1, "ep": 4}),
    "tp2 dp2 zero3 ep4 full": (1, {"tp": 2, "dp": 2, "zero": 3, "ep": 4, "recompute": "full"}),
    "tp2 cp2 zero2 ep4": (2, {"tp": 2, "cp": 2, "zero": 2, "ep": 4}),
    "cp2 dp2 zero1 ep2": (1, {"cp": 2, "dp": 2, "zero": 1, "ep": 2}),
    "pp2 dp2 zero2 ep2 zb-h1": (1, {"pp": 2, "dp": 2, "zero": 2, "ep": 2, "schedule": "zb-h1"}),
    "tp2 pp2 ep1 zb-v": (2, {"tp": 2, "pp": 2, "ep": 1, "schedule": "zb-v"}),
    "tp2 cp2 dp2 zero3 ep4": (1, {"tp": 2, "cp": 2, "dp": 2, "zero": 3, "ep": 4}),
    "tp2 dp2 pp2 zero1 ep4": (1, {"tp": 2, "dp": 2, "pp": 2, "zero": 1, "ep": 4}),
    # Causal slices: rows of one travel to experts behind what another computes.
    "dp4 zero1 ep2 sliced": (1, {"dp": 4, "zero": 1, "ep": 2, "tp_slices": 2}),
    "dp4 zero2 ep4 sliced full": (1, {"dp": 4, "zero": 2, "ep": 4, "tp_slices": 3, "recompute": "full"}),
    "cp2 dp2 zero1 ep2 sliced": (1, {"cp": 2, "dp": 2, "zero": 1, "ep": 2, "tp_slices": 2}),
    "pp2 dp2 zero1 ep2 zb-h1 sliced": (
        1,
        {"pp": 2, "dp": 2, "zero": 1, "ep": 2, "tp_slices": 2, "schedule": "zb-h1"},
    ),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.second_tier(
    but=[
        "tp3",
        "tp2 dp2 zero3",
        "tp2 pp2 zb-v",
        "dp4 zero3 ep2",
        "tp2 dp2 zero1 ep4",
        "dp4 zero1 ep2 sliced",
    ]
)
def test_losses_and_norms_are_those_of_one_rank(ranks, config, whole, name):
    micro_batches, sizes = MESHES[name]
    asked = jobs.on_mesh(config, micro_batches, **sizes)
    of_mesh = asked.parallel
    found = ranks.run(steps_of, of_mesh.tp * of_mesh.dp * of_mesh.cp * of_mesh.pp, asked)
    assert found[0] == found[-1]
    assert parity.difference(found[0], whole[micro_batches]) <= parity.TOLERANCE


@pytest.mark.second_tier
def test_so_they_are_where_neither_group_is_a_part_of_the_other(ranks, config):
    """Of six ranks, (0, 1, 2) share tokens, and (0, 1), (2, 3), (4, 5) share experts."""
    asked = jobs.on_mesh(jobs.changed(config, "train", batch_size=6), 1)
    expected = ranks.run(steps_of, 1, asked)[0]
    asked = jobs.on_mesh(asked, 1, tp=3, dp=2, ep=2, zero=1)
    found = [outcome.value or outcome.error for outcome in ranks.launch(steps_of, 6, asked)]
    assert found[0] == found[-1]
    assert parity.difference(found[0], expected) <= parity.TOLERANCE


@pytest.mark.parametrize("name", ["tp2 dp2 zero3", "tp2 cp2 zero2", "tp2 dp2 zero1 ep4", "dp4 zero3 ep2"])
@pytest.mark.second_tier
def test_so_they_are_between_hosts(ranks, config, whole, name):
    micro_batches, sizes = MESHES[name]
    found = ranks.run(jobs.between_hosts, 4, jobs.on_mesh(config, micro_batches, **sizes), steps_of)
    assert parity.difference(found[0], whole[micro_batches]) <= parity.TOLERANCE


@pytest.mark.second_tier
def test_a_run_is_resumed_on_other_meshes(ranks, config, tmp_path):
    """Three steps on four ranks, then three on other numbers of ranks, are six on one."""
    config = jobs.changed(jobs.on_mesh(config, 1), "train", steps=6, val_every=0)
    config = jobs.changed(config, "checkpoint", every_steps=3, keep=9)
    runs = {}
    for name in ("one", "four"):
        runs[name] = jobs.changed(config, "output", run_dir=str(tmp_path / name))
        (tmp_path / name).mkdir()
    whole = ranks.run(jobs.history, 1, runs["one"])[0]
    four = jobs.on_mesh(runs["four"], 1, tp=2, dp=2, zero=3)
    ranks.run(jobs.history, 4, four)
    saved = tmp_path / "four" / "checkpoints" / "step-000003"
    for count in (1, 3):
        other = jobs.changed(runs["one"], "output", run_dir=str(tmp_path / f"again{count}"))
        other = jobs.changed(other, "parallel", tp=count)
        (tmp_path / f"again{count}").mkdir()
        found = ranks.run(jobs.history, count, other, saved)
        assert [each.step for each in found[0]] == [4, 5, 6]
        jobs.check_curves(found, whole[3:])
    states = [
        ranks.run(jobs.full_state, count, jobs.changed(runs["one"], "parallel", tp=count), saved)[0]
        for count in (1, 2)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


MUON_MESHES = {
    "tp2 dp2 zero1": (1, {"tp": 2, "dp": 2, "zero": 1}),
    "tp2 dp2 ep1 zero3": (1, {"tp": 2, "dp": 2, "ep": 1, "zero": 3}),
    "dp4 ep2 zero2": (1, {"dp": 4, "ep": 2, "zero": 2}),
    "tp2 pp2 zb-h1": (2, {"tp": 2, "pp": 2, "schedule": "zb-h1"}),
}


@pytest.mark.parametrize("name", MUON_MESHES)
@pytest.mark.second_tier(but=["dp4 ep2 zero2"])
def test_muon_steps_along_each_expert_alike_on_every_mesh(ranks, config, name):
    config = jobs.changed(config, "optimizer", name="muon", lr=1e-3)
    micro_batches, sizes = MUON_MESHES[name]
    expected = ranks.run(steps_of, 1, jobs.on_mesh(config, micro_batches))[0]
    found = ranks.run(steps_of, 4, jobs.on_mesh(config, micro_batches, **sizes))
    assert found[0] == found[-1]
    assert parity.difference(found[0], expected) <= parity.TOLERANCE


def test_torch_reads_blocks_of_a_stack_that_one_rank_has_written(ranks, config, tmp_path):
    """Seven experts over four ranks are cut within three of them: a rank has one block, two or three."""
    config = jobs.changed(jobs.on_mesh(config, 1, dp=4, zero=2), "train", steps=1, val_every=0)
    config = jobs.changed(config, "model", num_hidden_layers=2)
    config = jobs.changed(config, "output", run_dir=str(tmp_path))
    ranks.run(jobs.history, 4, config)
    saved = tmp_path / "checkpoints" / "step-000001"
    assert {f"rank-00001{more}.safetensors" for more in ("", "-1", "-2")} <= {
        each.name for each in saved.iterdir()
    }
    for theirs, ours in ranks.run(through_torch, 4, config, saved):
        assert theirs.keys() == ours.keys() and any("experts" in name for name in ours)
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)


STATES = {
    "replicas": ("data_parallel", {"method": "co2", "tau": 3, "outer_momentum": 0.3}),
    "a file": ("optimizer", {"offload": "states"}),
    "fewer bytes": ("data_parallel", {"compression": "top_k", "compression_density": 0.9}),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.second_tier
def test_rows_of_experts_go_on_over_other_ranks(ranks, config, tmp_path, name):
    """A run resumes on another mesh, in the midst of a round: with replicas that meet rarely, with states in
    a file, and with compressed gradients."""
    section, options = STATES[name]
    config = jobs.changed(config, "train", steps=7, val_every=0, balance_loss=0.0)
    config = jobs.changed(jobs.changed(config, section, **options), "checkpoint", every_steps=4)
    config = jobs.changed(config, "output", run_dir=str(tmp_path))
    replicas = 2 if name == "replicas" else 1
    one = jobs.on_mesh(config, 1, dp=4, zero=1, **({"dp_replicate": 2} if replicas == 2 else {}))
    expected = ranks.run(jobs.history, 4, one)[0]
    saved = tmp_path / "checkpoints" / "step-000004"
    assert jobs.curve(ranks.run(jobs.history, 4, one, saved)[0], "loss") == jobs.curve(expected, "loss")[4:]
    assert expected[-1].loss < expected[0].loss
    other = jobs.on_mesh(config, 1 if replicas == 2 else 2, tp=2, dp=2)
    if name != "fewer bytes":
        jobs.check_curves(ranks.run(jobs.history, 4, other, saved), expected[4:])


def by_sigmoid(config):
    """The job with routers by sigmoid, whose biases move so far that they matter."""
    return jobs.changed(jobs.changed(config, "model", **SIGMOID), "train", router_bias_rate=0.02)


def steps_and_biases(group, config):
    """For each of three steps loss and norm, and by layer the rows that this rank's tokens sent to each
    expert and the bias after it."""
    seen, found, routes = collections.defaultdict(list), [], SigmoidRouter.routes

    def recorded(router, logits):
        routed = routes(router, logits)
        if router.training and torch._C._current_graph_task_id() == -1:  # not what is computed again
            seen[f"{router.label}.bias"].append(routed.ids)
        return routed

    made = jobs.trainer(group, config)
    with patch.object(SigmoidRouter, "routes", recorded), contextlib.closing(made.fit()) as steps:
        for _ in range(3):
            step = next(steps)
            rows = {name: counts_of(torch.cat(ids), SIGMOID["experts"]) for name, ids in seen.items()}
            biases = {name: each.clone() for name, each in made.model.named_buffers() if name in seen}
            found.append(((step.loss, step.grad_norm), rows, biases))
            seen.clear()
    made.close()
    return found


SIGMOID_MESHES = {
    "tp2 dp2 ep4 zero2": (1, {"tp": 2, "dp": 2, "ep": 4, "zero": 2}),
    "tp2 cp2 full": (2, {"tp": 2, "cp": 2, "recompute": "full"}),
    "tp2 pp2 zb-v": (2, {"tp": 2, "pp": 2, "schedule": "zb-v"}),
    "dp4 ep2 zero3": (1, {"dp": 4, "ep": 2, "zero": 3}),
}


@pytest.mark.parametrize("losses", [0.5, 0.0])
@pytest.mark.parametrize("name", SIGMOID_MESHES)
@pytest.mark.second_tier(but=["tp2 dp2 ep4 zero2-0.0"])
def test_routers_by_sigmoid_move_their_biases_by_the_rows_of_all_ranks(ranks, config, name, losses):
    """Once for each step, on all ranks alike, with losses of routers and without. Scores are close to each
    other, so that rounding may send tokens elsewhere than on one rank, each of which changes a norm by less
    than 1e-3."""
    config = jobs.changed(by_sigmoid(config), "train", balance_loss=losses, router_z_loss=losses / 5)
    micro_batches, sizes = SIGMOID_MESHES[name]
    (exact,) = ranks.run(steps_and_biases, 1, jobs.on_mesh(config, micro_batches))
    found = ranks.run(steps_and_biases, 4, jobs.on_mesh(config, micro_batches, **sizes))
    layers = exact[0][1].keys()
    assert len(layers) == MODEL.num_hidden_layers - MODEL.dense_layers
    for layer in layers:
        bias = torch.zeros(SIGMOID["experts"])
        for step, ((expected, whole, _), *of_ranks) in enumerate(zip(exact, *found, strict=True)):
            holders = [(rows[layer], biases[layer]) for _, rows, biases in of_ranks if layer in rows]
            total = sum(rows for rows, _ in holders)
            assert total.sum() == whole[layer].sum()
            bias = moved_bias(bias, total, 0.02).float()
            assert all(torch.equal(held, bias) for _, held in holders), f"{layer} after step {step + 1}"
            for figures, _, _ in of_ranks:
                assert figures == pytest.approx(expected, rel=1e-2)
        assert bias.any()


def whole_run(group, config):
    return run(config, "job", jobs.runtime(group, config), StopRequest())


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "dp": 2, "ep": 4, "sigmoid": 1},
        {"dp": 4, "zero": 3, "ep": 2},
        {"pp": 2, "dp": 2, "ep": 2, "sigmoid": 1},
        {"tp": 2, "cp": 2, "ep": 1},
    ],
    ids=lambda sizes: " ".join(f"{name}{size}" for name, size in sizes.items()),
)
@pytest.mark.second_tier(but=["tp2 dp2 ep4 sigmoid1"])
def test_a_run_leaves_the_experts_of_all_ranks_and_goes_on_over_others(ranks, config, tmp_path, sizes):
    """Its model is bitwise that of its checkpoint, biases included, on every mesh; from that one rank and
    four go on as after steps of their own."""
    sizes = dict(sizes)
    if is_sigmoid := sizes.pop("sigmoid", 0):
        config = by_sigmoid(config)
    config = jobs.changed(jobs.on_mesh(config, 1), "train", steps=4, val_every=0)
    config = jobs.changed(config, "checkpoint", every_steps=2, keep=9)
    asked = jobs.changed(jobs.on_mesh(config, 1, **sizes), "output", run_dir=str(tmp_path / "run"))
    (folder, *_) = ranks.run(whole_run, 4, asked)
    saved = folder / "checkpoints" / "step-000002"
    state = ranks.run(jobs.full_state, 1, config, folder / "checkpoints" / "step-000004")[0]
    weights = load_hf(folder / "model").state_dict()
    assert sum("experts" in name for name in weights) == 2 * (MODEL.num_hidden_layers - MODEL.dense_layers)
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert (folder / "samples.jsonl").is_file()
    runs = {
        name: jobs.changed(config, "output", run_dir=str(tmp_path / name))
        for name in ("whole", "on", "other")
    }
    for name in runs:
        (tmp_path / name).mkdir()
    other = jobs.on_mesh(runs["other"], 1, tp=2, dp=2, ep=1, zero=2)
    for of_rank in ranks.run(jobs.full_state, 4, other, folder / "checkpoints" / "step-000004"):
        assert of_rank.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in of_rank.items())
    if is_sigmoid:
        return  # rounding may send a token elsewhere
    expected = ranks.run(jobs.history, 1, runs["whole"])[0][2:]
    jobs.check_curves(ranks.run(jobs.history, 1, runs["on"], saved), expected)
    jobs.check_curves(ranks.run(jobs.history, 4, other, saved), expected)


def test_slices_of_a_pipeline_without_losses_of_routers(ranks, config):
    config = jobs.changed(config, "train", balance_loss=0.0, router_z_loss=0.0)
    expected = ranks.run(steps_of, 1, jobs.on_mesh(config, 2))[0]
    piped = jobs.on_mesh(config, 2, tp=2, pp=2, schedule="seq1f1b")
    found = ranks.run(steps_of, 4, jobs.changed(piped, "pipeline", slices=2))
    assert found[0] == found[-1]
    assert parity.difference(found[0], expected) <= parity.TOLERANCE


def test_counts_of_other_ranks_matter(ranks, config, whole):
    """With the rows of a rank alone, as they were often counted, the losses of routers are others."""
    found = ranks.run(with_own_counts, 2, jobs.on_mesh(config, 2, tp=2))
    assert parity.difference(found[0], whole[2]) > 3 * parity.TOLERANCE


def with_own_counts(group, config):
    with patch.object(model_of_run, "_router_losses", own_losses):
        return steps_of(group, config)


def own_losses(run, runtime):
    return RouterLosses(run.config.train.balance_loss, run.config.train.router_z_loss, scale=0.5)


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ("train", {"check_types": True}, "train.check_types=true does not support a model with 7 experts"),
        ("parallel", {"tp_slices": 3}, "experts, over tp=2 ranks of which at most 2 are possible; leave it"),
        ("parallel", {"tp_slices": 2}, "a shared expert, unless ep puts the other experts over other ranks"),
        ("parallel", {"tp_wire": "fp8"}, "parallel.tp_wire=fp8 does not support a model with 7 experts"),
        ("parallel", {"tp": Grid(1, 2)}, "cuts features over y, which a model with experts does not support"),
        ("model", {"experts": 2, "experts_per_token": 3}, "A token cannot go to 3 of 2 experts"),
        ("model", {"experts": 0}, "model.experts_per_token applies to experts, and there are none"),
        ("model", {"experts": 1, "experts_per_token": 1}, "tp=2 leaves a rank without one of the 1 experts"),
        ("train", {"balance_loss": 2.0}, "train.balance_loss must be between 0 and 1"),
        ("parallel", {"ep": 4}, "parallel.ep=4 does not divide the 2 ranks that share experts"),
        ("parallel", {"ep": 0}, "parallel.ep must be at least 1, found 0"),
    ],
)
def test_what_experts_do_not_support_is_refused(config, section, options, message):
    asked = jobs.changed(jobs.changed(config, "parallel", tp=2), section, **options)
    asked = jobs.changed(asked, "data", tokenizer="bytes")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(asked, 2)


NO_EXPERTS = dict.fromkeys(
    ("experts", "experts_per_token", "expert_size", "shared_expert_size", "dense_layers")
)


@pytest.mark.parametrize(
    ("parallel", "section", "options", "message"),
    [
        (
            {"ep": 4},
            "data_parallel",
            {"compression": "top_k"},
            "data_parallel.compression=top_k supports experts over",
        ),
        (
            {"ep": 1},
            "data_parallel",
            {"method": "co2"},
            "data_parallel.method=co2 supports experts over the tensor-",
        ),
        ({"ep": 4}, "model", {"experts": 5}, "ep=4 leaves a rank without one of the 5 experts"),
        ({"ep": 3}, "model", {}, "parallel.ep=3 does not divide the 4 ranks that share experts"),
        ({"ep": 4, "dp_replicate": 2}, "model", {}, "divided by parallel.dp_replicate=2; use one of 1, 2."),
        (
            {},
            "data_parallel",
            {"method": "co2"},
            "model.sigmoid_router moves a bias by the rows of all ranks",
        ),
        ({"ep": 4}, "model", NO_EXPERTS, "parallel.ep=4 says over how many ranks experts lie, and the model"),
    ],
)
def test_groups_of_experts_that_do_not_fit_are_refused(config, parallel, section, options, message):
    asked = by_sigmoid(config) if not parallel else config
    asked = jobs.on_mesh(asked, 1, **{"tp": 2, "dp": 2} | parallel)
    asked = jobs.changed(jobs.changed(asked, section, **options), "data", tokenizer="bytes")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(asked, 4)


def test_slices_of_a_pipeline_with_a_balance_loss_are_refused(config):
    asked = jobs.changed(jobs.on_mesh(config, 2, tp=1, pp=2, schedule="seq1f1b"), "pipeline", slices=2)
    with pytest.raises(ConfigError, match=r"train\.balance_loss=0\.5 counts the tokens of whole"):
        check(jobs.changed(asked, "data", tokenizer="bytes"), 2)


WATCHED = {
    "one": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2 dp2 full recomputation": (1, {"tp": 2, "dp": 2, "recompute": "full"}),
    "tp2 pp2 zb-h1": (2, {"tp": 2, "pp": 2, "schedule": "zb-h1"}),
    "dp4 ep2": (1, {"dp": 4, "ep": 2}),
}


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.second_tier("dp4 ep2")
def test_the_load_of_experts_is_that_of_a_recount(ranks, config, counted, name):
    """Imbalance of the ranks over which experts lie aside, the figures are one rank's on every mesh."""
    micro_batches, sizes = WATCHED[name]
    asked = jobs.on_mesh(config, micro_batches, **sizes)
    found = ranks.run(first_steps, asked.parallel.tp * asked.parallel.dp * asked.parallel.pp, asked)
    for steps in found:
        over = asked.parallel.ep or asked.parallel.tp
        for step, expected in zip(steps, counted[micro_batches, over], strict=True):
            for figure, value in expected.items():
                assert getattr(step, figure) == pytest.approx(value, rel=2e-4), figure
    last = found[0][-1]
    assert last.expert_imbalance == found[-1][-1].expert_imbalance
    if asked.parallel.ep:
        assert last.exposed_by_axis_s["ep"] > 0 and "tp" not in last.exposed_by_axis_s
        assert sum(last.exposed_by_axis_s.values()) == pytest.approx(last.exposed_comm_s)


@pytest.fixture(scope="module")
def counted(ranks, config):
    """The figures of the first two steps of one rank, as recounted from logits."""
    found = {}
    for micro_batches in (1, 2):
        steps = ranks.run(logits_of_steps, 1, jobs.on_mesh(config, micro_batches), micro_batches)[0]
        for tp in (1, 2):
            found[micro_batches, tp] = [recounted(each, tp) for each in steps]
    return found


def first_steps(group, config):
    """What the first two steps measured. Takes no checkpoint."""
    made = jobs.trainer(group, config)
    with contextlib.closing(made.fit()) as steps:
        found = [next(steps), next(steps)]
    made.close()
    return found


def logits_of_steps(group, config, micro_batches):
    """Returns for each of two steps and its micro-batches the logits of each layer."""
    seen, route = [], router.softmax_routes

    def recorded(logits, *args, **options):
        seen.append(logits.detach().double())
        return route(logits, *args, **options)

    with patch.object(router, "softmax_routes", recorded):
        first_steps(group, config)
    return torch.stack(seen).unflatten(0, (2, micro_batches, MODEL.num_hidden_layers - MODEL.dense_layers))


def recounted(micro_batches, tp):
    """Figures of a step's logits [micro-batches, layers, T, E]."""
    experts, k = MODEL.experts, MODEL.experts_per_token
    shares, tokens = micro_batches.softmax(-1), micro_batches.shape[-2]
    chosen = torch.zeros_like(shares).scatter_(-1, micro_batches.topk(k).indices, 1.0).sum(-2)
    balance = experts / (k * tokens**2) * (chosen * shares.sum(-2)).sum(-1)
    rows = chosen.sum(0)
    of_ranks = torch.stack([each.sum(-1) for each in rows.chunk(tp, -1)], -1)
    entropy = -(shares * shares.log()).sum(-1).mean((0, 2))
    by_layer = {
        "expert_imbalance": rows.amax(-1) / rows.mean(-1),
        "rank_imbalance": of_ranks.amax(-1) / of_ranks.mean(-1),
        "router_entropy": entropy,
    }
    first = MODEL.dense_layers
    named = {
        name: {str(first + number): each for number, each in enumerate(values.tolist())}
        for name, values in by_layer.items()
    }
    z = micro_batches.logsumexp(-1).square().mean()
    return {**named, "balance_loss": float(balance.mean()), "router_z_loss": float(z)}
