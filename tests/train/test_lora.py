"""Training low-rank adapters on a mesh is training them on one rank; frozen weights cost no gradient."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from unittest.mock import patch

import peft
import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from pyruntime import comm
from pyruntime.choices import LORA_ATTENTION, LORA_TARGETS
from pyruntime.cli import main
from pyruntime.cli.dry_run import report
from pyruntime.llama import Llama, save_hf
from pyruntime.nn import SigmoidRouter
from pyruntime.train import config_file
from pyruntime.train.checkpoint_folder import find
from pyruntime.train.config import Grid, Model, RunConfig, Train, mesh_of
from pyruntime.train.errors import ConfigError
from pyruntime.train.metrics import read
from pyruntime.train.planned import estimate
from pyruntime.train.resolved import check
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.ranks import RankError
from tests.train import jobs, test_experts
from tools import check_parity as parity

MODEL = Model(
    preset="debug",
    hidden_size=48,
    intermediate_size=84,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=6,
    vocab_size=259,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A job for one rank. A learning rate so high that adapters have an effect after a step."""
    config = parity.job(tmp_path_factory.mktemp("lora"))
    config = jobs.changed(config, "model", **vars(MODEL))
    config = jobs.changed(config, "lora", rank=5, alpha=20.0)
    config = jobs.changed(config, "optimizer", lr=0.01)
    jobs.prepare(config)
    return config


@pytest.fixture(scope="module")
def whole(ranks, config):
    """Figures of one rank, in steps of one and of two micro-batches."""
    return {count: ranks.run(steps_of, 1, jobs.on_mesh(config, count))[0] for count in (1, 2)}


def steps_of(group, config):
    """At stage 3 with such small buckets that adapters are cut and gathered too, not only frozen weights."""
    small = parity.BUCKET_BYTES if config.parallel.zero < 3 else 1024
    with patch.object(parity, "BUCKET_BYTES", small):
        return parity.steps_of(jobs.runtime(group, config), config)


def test_one_rank_repeats_itself_and_learns(ranks, config, whole):
    again = ranks.run(steps_of, 1, jobs.on_mesh(config, 2))[0]
    assert again == whole[2]
    assert again[-1][0] < again[0][0]


MESHES = {
    "tp2": (2, {"tp": 2}),
    "tp3": (2, {"tp": 3}),
    "tp2 full recomputation": (2, {"tp": 2, "recompute": "full"}),
    "tp2 selective recomputation": (2, {"tp": 2, "recompute": "selective"}),
    "dp4 zero0": (1, {"dp": 4, "zero": 0}),
    "dp4 zero1": (1, {"dp": 4, "zero": 1}),
    "dp4 zero2 hybrid": (1, {"dp": 4, "zero": 2, "dp_replicate": 2}),
    "dp4 zero3": (2, {"dp": 4, "zero": 3}),
    "tp2 dp2 zero0": (2, {"tp": 2, "dp": 2, "zero": 0}),
    "tp2 dp2 zero1": (2, {"tp": 2, "dp": 2, "zero": 1}),
    "tp2 dp2 zero3": (2, {"tp": 2, "dp": 2, "zero": 3}),
    "tp2 dp2 zero3 full recomputation": (1, {"tp": 2, "dp": 2, "zero": 3, "recompute": "full"}),
    "tp2 cp2 zero2": (2, {"tp": 2, "cp": 2, "zero": 2}),
    "cp2 dp2 zero3": (2, {"cp": 2, "dp": 2, "zero": 3}),
    "pp4 1f1b": (2, {"pp": 4}),
    "pp4 zb-h1": (2, {"pp": 4, "schedule": "zb-h1"}),
    "tp2 pp2 zb-v": (2, {"tp": 2, "pp": 2, "schedule": "zb-v"}),
    "tp2 pp2 1f1b": (2, {"tp": 2, "pp": 2}),
    "tp2 pp2 seq1f1b": (2, {"tp": 2, "pp": 2, "schedule": "seq1f1b", "slices": 2}),
    "pp2 dp2 zero3 zb-v": (2, {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-v"}),
    "pp2 dp2 zero1 zb-h1": (2, {"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-h1"}),
    "cp2 pp2 zero1 1f1b": (2, {"cp": 2, "pp": 2, "zero": 1}),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.second_tier(
    but=[
        "tp3",
        "dp4 zero0",
        "tp2 dp2 zero1",
        "tp2 dp2 zero3",
        "tp2 cp2 zero2",
        "tp2 pp2 1f1b",
        "tp2 pp2 zb-v",
    ]
)
def test_losses_and_norms_are_those_of_one_rank(ranks, config, whole, name):
    micro_batches, sizes = MESHES[name]
    asked = jobs.on_mesh(config, micro_batches, **sizes)
    of_mesh = asked.parallel
    found = ranks.run(steps_of, of_mesh.tp * of_mesh.dp * of_mesh.cp * of_mesh.pp, asked)
    assert found[0] == found[-1]
    assert parity.difference(found[0], whole[micro_batches]) <= parity.TOLERANCE


@pytest.fixture(scope="module")
def beside_experts(config):
    config = jobs.changed(config, "model", **vars(test_experts.MODEL))
    return jobs.changed(config, "lora", targets=LORA_ATTENTION)


@pytest.fixture(scope="module")
def whole_beside_experts(ranks, beside_experts):
    return {n: ranks.run(steps_of, 1, jobs.on_mesh(beside_experts, n))[0] for n in (1, 2)}


@pytest.mark.parametrize(
    "name",
    ["tp3", "tp2 dp2 zero3", "tp2 pp2 zb-v", "dp4 zero3 ep2", "tp2 dp2 zero1 ep4", "tp2 cp2 zero2 ep4"],
)
@pytest.mark.second_tier(but=["tp2 dp2 zero3", "tp2 pp2 zb-v", "dp4 zero3 ep2"])
def test_so_they_are_beside_frozen_experts(ranks, beside_experts, whole_beside_experts, name):
    micro_batches, sizes = test_experts.MESHES[name]
    asked = jobs.on_mesh(beside_experts, micro_batches, **sizes)
    found = ranks.run(steps_of, mesh_of(asked, 1).ranks, asked)
    assert found[0] == found[-1]
    assert parity.difference(found[0], whole_beside_experts[micro_batches]) <= parity.TOLERANCE


@pytest.mark.parametrize("name", ["tp2 dp2 zero3", "tp2 cp2 zero2"])
@pytest.mark.second_tier
def test_so_they_are_between_hosts(ranks, config, whole, name):
    micro_batches, sizes = MESHES[name]
    found = ranks.run(jobs.between_hosts, 4, jobs.on_mesh(config, micro_batches, **sizes), steps_of)
    assert parity.difference(found[0], whole[micro_batches]) <= parity.TOLERANCE


def held(group, config):
    """Names of the parameters whose gradients travel; bytes of optimizer states and saved weights, and those
    that this rank reads from data-parallel ranks in a step; the frozen weights before and after."""
    trainer = jobs.trainer(group, config)
    named = dict(trainer.model.named_parameters())
    frozen = {name: p.clone() for name, p in named.items() if not p.requires_grad}
    biases = [
        (each, each.bias.clone()) for each in trainer.model.modules() if isinstance(each, SigmoidRouter)
    ]
    names = {id(p): name for name, p in named.items()}
    reduced = {names[id(p)] for bucket in trainer.sharded.buckets for p in bucket.parameters}
    steps = trainer.fit()
    next(steps)
    before = comm.bytes_read("dp")
    next(steps)
    received = comm.bytes_read("dp") - before
    steps.close()
    states, saved = (
        sum(value.to_local().nbytes for value in state.values() if isinstance(value, DTensor))
        for state in (trainer.optimizer.state_dict(), trainer.sharded.state_dict())
    )
    assert all(p.grad is None and torch.equal(p, frozen[name]) for name, p in named.items() if name in frozen)
    assert all(torch.equal(router.bias, bias) for router, bias in biases)
    trainer.close()
    return reduced, frozen.keys() & reduced, states, saved, received


@pytest.mark.parametrize("kind", ["fp32", "bf16", "experts"])
def test_frozen_weights_have_no_gradient_no_state_and_no_traffic(
    ranks, config, beside_experts, tmp_path, kind
):
    """On four data-parallel ranks, at a stage that cuts nothing: adapters alone have two fp32 moments, and in
    bf16 an fp32 master. Biases of frozen routers stay too."""
    dtype = "bf16" if kind == "bf16" else "fp32"
    config = test_experts.by_sigmoid(beside_experts) if kind == "experts" else config
    config = jobs.changed(jobs.on_mesh(config, 1, dp=4, zero=0), "output", run_dir=str(tmp_path))
    config = jobs.changed(config, "train", dtype=dtype)
    count, size = jobs.resolved(config, 4).adapters, 4 if dtype == "fp32" else 2
    for reduced, both, states, saved, received in ranks.run(held, 4, config):
        assert reduced and all(".adapters." in name for name in reduced) and not both
        assert saved == size * count
        assert states == (8 if dtype == "fp32" else 12) * count
        # A sum over P ranks: the parts of the others, then their sums, and marks and padding.
        assert 0 < received <= 1.3 * 2 * size * count * 3 / 4
    assert jobs.resolved(config, 4).shape.parameter_count() > 6 * count


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "dp": 2, "zero": 3}], ids=str)
@pytest.mark.second_tier(but=["{'tp': 2}"])
def test_a_resumed_run_is_the_one_that_was_not_interrupted(ranks, config, tmp_path, sizes):
    config = jobs.changed(jobs.on_mesh(config, 2, **sizes), "train", steps=6, val_every=3, batch_size=8)
    config = jobs.changed(config, "train", micro_batch_size=2)
    config = jobs.changed(config, "checkpoint", every_steps=3, keep=9)
    world_size = sizes["tp"] * sizes.get("dp", 1)
    runs = [jobs.changed(config, "output", run_dir=str(tmp_path / name)) for name in ("one", "two")]
    for each in ("one", "two"):
        (tmp_path / each).mkdir()
    whole = ranks.run(jobs.history, world_size, runs[0])
    saved = tmp_path / "one" / "checkpoints"
    again = ranks.run(jobs.history, world_size, runs[1], saved / "step-000003")
    for name in ("loss", "grad_norm", "val_loss"):
        assert jobs.curve(again[0], name) == jobs.curve(whole[0], name)[3:]
    for file in sorted((saved / "step-000006").glob("rank-*")):
        assert file.read_bytes() == (tmp_path / "two/checkpoints/step-000006" / file.name).read_bytes()
    held = sum(file.stat().st_size for file in (saved / "step-000006").glob("rank-*"))
    assert (
        held < 4 * jobs.resolved(config, world_size).shape.parameter_count()
    )  # less than the frozen weights
    other = jobs.changed(runs[1], "lora", alpha=7.0)
    with pytest.raises(RankError, match=r"was saved with adapters=rank=5 alpha=20 on .*asks for .*alpha=7"):
        ranks.run(jobs.history, world_size, other, saved / "step-000003")


def whole_run(group, config):
    return run(config, "job", jobs.runtime(group, config), StopRequest())


@pytest.mark.parametrize("kind", ["tp2", "tp2 pp2", "tp2 experts"])
@pytest.mark.second_tier(but=["tp2 pp2"])
def test_a_run_leaves_adapters_that_peft_reads_and_that_merge(ranks, tmp_path, kind, capsys):
    config = jobs.job(tmp_path, steps=4, val_every=2)
    targets: tuple[str, ...] = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    if kind == "tp2 experts":
        config, targets = jobs.changed(config, "model", experts=4), ("q_proj", "o_proj")
    shape = jobs.resolved(config).shape
    save_hf(Llama(shape, seed=4), tmp_path / "base")
    config = dataclasses.replace(config, model=Model(init_from=str(tmp_path / "base")))
    config = jobs.changed(config, "lora", rank=4, targets=targets)
    config = jobs.changed(config, "parallel", tp=2, pp=2 if kind == "tp2 pp2" else 1)
    (folder, *_) = ranks.run(whole_run, mesh_of(config, 1).ranks, config)
    assert not (folder / "model").exists()
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base") and settings["r"] == 4
    last = read(folder / "metrics.jsonl")[-1]

    # The same adapters from the checkpoint, and the merged model: peft's, and the one of the validation.
    for target, *options in (("alone",), ("merged", "--merge", "true")):
        where = ["--source", str(folder), "--target", str(tmp_path / target)]
        assert main(["convert", *where, *options]) == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "alone" / name).read_bytes() == (folder / "adapter" / name).read_bytes()
    base, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("base", "merged")
    )
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / "adapter")
    theirs = theirs.merge_and_unload().state_dict()
    base, merged = base.state_dict(), merged.state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6)
    moved = {name.split(".")[-2] for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert moved == set(config.lora.targets)
    validation = jobs.changed(config, "model", init_from=str(tmp_path / "merged"))
    validation = jobs.changed(validation, "parallel", tp=1, pp=1)
    validation = jobs.changed(validation, "lora", rank=0, targets=LORA_TARGETS)
    (loss,) = ranks.run(validated, 1, validation)
    assert loss == pytest.approx(last["val_loss"], abs=1e-4)

    # With other weights under them they would compute something else.
    save_hf(Llama(shape, seed=5), tmp_path / "base")
    assert (
        main(["convert", "--source", str(folder), "--target", str(tmp_path / "no"), "--merge", "true"]) != 0
    )
    assert "restore the model that model.init_from names there" in capsys.readouterr().err
    with pytest.raises(RankError, match=r"was saved with adapters=rank=4 alpha=32 on .*of weights"):
        ranks.run(jobs.history, mesh_of(config, 1).ranks, config, find(folder))
    save_hf(Llama(shape, seed=4), tmp_path / "base")

    # They begin another run where this one ended.
    onward = jobs.changed(config, "lora", init_from=str(folder / "adapter"))
    onward = jobs.changed(onward, "parallel", tp=2, pp=1)
    assert ranks.run(validated, 2, onward)[0] == pytest.approx(last["val_loss"], abs=1e-4)
    onward = jobs.changed(onward, "output", run_dir=str(tmp_path / "onward"))
    (again, _) = ranks.run(whole_run, 2, onward)
    assert (again / "adapter" / "adapter_model.safetensors").is_file()
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(RankError, match=r"lora\.init_from: .* holds no adapter_model\.safetensors"):
        ranks.run(whole_run, 2, jobs.changed(onward, "output", run_dir=str(tmp_path / "never")))


def validated(group, config):
    """The validation loss before the first step."""
    trainer = jobs.trainer(group, config)
    (found,) = trainer.validate().values()
    trainer.close()
    return found[0]


BESIDE = {
    "rounded rows": {"parallel": {"tp": 2, "tp_wire": "bf16"}},
    "rounded keys and messages": {
        "parallel": {"cp": 2, "pp": 2},
        "context": {"wire": "bf16"},
        "pipeline": {"wire": "bf16"},
    },
    "another way around the ring": {"parallel": {"tp": 2, "cp": 2}, "context": {"variant": "all_gather_kv"}},
    "stochastic rounding": {"train": {"dtype": "bf16"}, "optimizer": {"rounding": "stochastic"}},
    "skipped steps": {"optimizer": {"on_bad_step": "skip", "spike_factor": 4.0}},
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.second_tier
def test_other_options_go_with_adapters(ranks, config, whole, name):
    asked = jobs.on_mesh(config, 2)
    for section, values in BESIDE[name].items():
        asked = jobs.changed(asked, section, **values)
    found = ranks.run(steps_of, mesh_of(asked, 1).ranks, asked)
    assert found[0] == found[-1]
    for step, expected in zip(found[0], whole[2], strict=True):
        assert step[::2] == pytest.approx(expected[::2], abs=1e-3)
        # bf16 weights, rounded up or down by chance, are off by 2^-8: with it go the last, small norms.
        assert step[1] == pytest.approx(expected[1], rel=0.25)


REFUSED = [
    ({"optimizer": {"name": "muon"}}, "optimizer.name=muon does not support low-rank adapters"),
    ({"parallel": {"tp": Grid(1, 2)}}, "parallel.tp="),
    ({"parallel": {"tp": 2, "tp_slices": 2}}, "parallel.tp_slices=2 does not"),
    (
        {"parallel": {"tp": 1, "pp": 2, "rebalance": "on"}, "checkpoint": {"every_steps": 20}},
        "parallel.rebalance=on does not",
    ),
    (
        {"parallel": {"tp": 1, "dp": 2}, "data_parallel": {"method": "co2"}},
        "data_parallel.method=co2 does not",
    ),
    (
        {"parallel": {"tp": 1, "dp": 2}, "data_parallel": {"compression": "top_k"}},
        "data_parallel.compression=top_k does not",
    ),
    (
        {"parallel": {"tp": 1, "dp": 2, "zero": 3}, "data_parallel": {"weight_wire": "bf16"}},
        "data_parallel.weight_wire=bf16 does not",
    ),
    ({"train": {"check_types": True}}, "train.check_types=true does not"),
    (
        {"model": {"experts": 4}},
        "lora.targets: a model with experts has adapters of attention alone, and gate_proj, up_proj, "
        "down_proj belong to its experts, which stay as they are; take the targets q_proj k_proj v_proj "
        "o_proj.",
    ),
    ({"lora": {"targets": ("lm_head",)}}, "lora.targets names lm_head"),
    ({"lora": {"targets": ("all",)}}, "or leave it out for all of them."),
    ({"lora": {"targets": ("q_proj,v_proj",)}}, "lora.targets=q_proj,v_proj is one name with a comma"),
    ({"lora": {"targets": ()}}, "lora.targets names no linear"),
    ({"lora": {"targets": ("q_proj", "q_proj")}}, "names a linear twice"),
    ({"lora": {"rank": 0}}, "lora.alpha=20.0 without lora.rank"),
    ({"lora": {"rank": -1}}, "lora.rank must not be negative"),
    ({"lora": {"alpha": 0.0}}, "lora.alpha must be between"),
    ({"lora": {"init_from": "/nowhere"}}, "lora.init_from: /nowhere holds no adapter_config.json"),
]


@pytest.mark.parametrize("changes, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_adapters_do_not_support_is_refused(config, changes, words):
    for section, values in changes.items():
        config = jobs.changed(config, section, **values)
    world_size = mesh_of(config, 2).ranks
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(config, world_size)


def test_the_folder_of_a_run_in_place_of_its_adapters_is_refused_with_theirs(config, tmp_path):
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "adapter" / "adapter_config.json").touch()
    asked = jobs.changed(config, "lora", init_from=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=re.escape(f"give {tmp_path}/run/adapter.")):
        check(asked, mesh_of(asked, 2).ranks)


def test_the_plan_counts_frozen_weights_and_adapters():
    config = RunConfig(
        model=Model(preset="llama3-8b"),
        train=Train(dtype="bf16", seq_len=2048, batch_size=8, micro_batch_size=1),
    )
    whole = estimate(resolved_of(config))
    lora = estimate(resolved_of(jobs.changed(config, "lora", rank=16)))
    adapters = jobs.resolved(jobs.changed(config, "lora", rank=16)).adapters
    assert adapters == 32 * 16 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336))
    assert lora.weights == pytest.approx(whole.weights + 2 * adapters)
    assert lora.gradients == pytest.approx(2 * adapters)
    assert lora.optimizer == pytest.approx(12 * adapters)
    assert whole.optimizer > 50 * lora.optimizer
    of_two = estimate(resolved_of(jobs.changed(jobs.changed(config, "lora", rank=16), "parallel", tp=2), 2))
    assert of_two.weights < 0.6 * lora.weights and of_two.optimizer < lora.optimizer


def resolved_of(config, world_size=1):
    return jobs.resolved(jobs.changed(config, "model", vocab_size=128256), world_size)


def test_the_operations_of_a_step_leave_out_gradients_of_frozen_weights():
    shape = jobs.resolved(RunConfig(model=Model(preset="llama3-8b"))).shape
    forward, whole = (shape.flops_per_token(2048, training=each) for each in (False, True))
    linears = 2 * (
        shape.num_hidden_layers * shape.layer_matmul_parameters() + shape.vocab_size * shape.hidden_size
    )
    assert shape.flops_per_token(2048, adapters=1000) == whole - linears + 6000 > 2 * forward


def test_the_preset_for_finetuning_has_its_own_text_and_says_what_trains():
    config = config_file.load(config_file.find("finetune"))
    assert all(Path(each).is_file() for each in (*config.data.paths, config.data.chat_template))
    said, refusal = report(config, 2)
    assert not refusal
    assert re.search(r"^lora +rank 16 on q_proj, .*: 0\.0584 M parameters train \(2\d\.\d+% of ", said, re.M)
