"""Tensor-parallel ranks of unequal speed: the cut, and a Llama that is cut by it against one rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor

from pyruntime.llama import Llama, LlamaConfig, generate, load_hf, save_hf
from pyruntime.llama.mixture import Mixture
from pyruntime.llama.tensor_shards import TensorCuts, gather_full, tensor_cuts
from pyruntime.nn.low_rank import LoRA
from tests.llama.cases import CASES, full_tensors, logits_loss_gradients

# 11 units of 16 MLP features, the last one of 8; 8 units of 64 rows of the vocabulary, the last one of 53.
RAGGED = {"vocab_size": 501, "intermediate_size": 168}
MODELS = {
    "tied": dataclasses.replace(CASES["gqa-llama3-tied"], **RAGGED),
    "biases": dataclasses.replace(CASES["gqa-linear-bias-wide"], **RAGGED),
    "norm of each head": dataclasses.replace(CASES["gqa-llama3-tied"], **RAGGED, qk_norm=True),
    "norm of all heads": LlamaConfig(
        **{**RAGGED, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8},
        num_key_value_heads=4,
        max_position_embeddings=256,
        qk_norm=True,
        qk_norm_of_all=True,
        norms_after=True,
    ),
}
SPEEDS = {2: (1.0, 0.5), 3: (0.4, 1.0, 0.6)}


@pytest.mark.parametrize(
    ("features", "speeds", "expected"),
    [
        (1024, (1, 1, 1, 0.5), (304, 288, 288, 144)),
        (11008, (1, 0.7), (6480, 4528)),
        (168, (0.4, 1.0, 0.6), (32, 96, 40)),
    ],
)
def test_features_go_to_the_rank_that_finishes_first(features, speeds, expected):
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=features,
        num_hidden_layers=1,
        num_attention_heads=8,
    )
    assert tensor_cuts(config, len(speeds), speeds).features == expected


def test_vocabulary_and_groups_of_heads_have_units_of_their_own():
    config = dataclasses.replace(MODELS["tied"], vocab_size=1024)
    cuts = tensor_cuts(config, 2, (1, 0.5))
    assert (cuts.vocabulary, cuts.groups) == ((704, 320), (3, 1))
    assert cuts.largest_share(config, 2) == 128 / 168


def test_every_rank_has_heads_and_vocabulary():
    config = dataclasses.replace(CASES["plain"], vocab_size=130, intermediate_size=1024)
    cuts = tensor_cuts(dataclasses.replace(config, num_key_value_heads=2), 2, (1, 0.4))
    assert (cuts.features, cuts.groups, cuts.vocabulary) == ((736, 288), (), (128, 2))
    with pytest.raises(
        ValueError, match="The 2 key/value heads are 2 units of 1, fewer than the 3 tensor-par"
    ):
        tensor_cuts(dataclasses.replace(config, num_key_value_heads=2), 3, (1, 1, 0.4))


@pytest.mark.parametrize("speeds", [(), (1.0, 1.0), (0.3, 0.3)])
def test_equal_speeds_are_the_equal_cut(speeds):
    assert tensor_cuts(MODELS["tied"], 2, speeds) == TensorCuts()


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ((1.0,), "1 numbers for 2 tensor-parallel ranks"),
        ((1.0, 0.0), "must be positive numbers"),
        ((1.0, -1.0), "must be positive numbers"),
        ((1.0, float("nan")), "must be positive numbers"),
        ((float("inf"), 1.0), "must be positive numbers"),
        ((1.0, 0.01), "leave rank 1 without any of the 168 MLP features, which are dealt in units of 16"),
    ],
)
def test_speeds_that_cut_nothing_are_refused(speeds, message):
    with pytest.raises(ValueError, match=message):
        tensor_cuts(MODELS["tied"], 2, speeds)


def test_experts_are_refused():
    config = dataclasses.replace(MODELS["tied"], mixture=Mixture(4, 2, 32))
    with pytest.raises(ValueError, match="do not support a model with experts"):
        tensor_cuts(config, 2, (1.0, 0.5))


def saved(config: LlamaConfig, folder) -> Llama:
    """Saves a model of one rank with random weights, and returns it."""
    model = Llama(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    save_hf(model, folder)
    return model


def batch_of(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = torch.randint(config.vocab_size, (2, 2, 23)).unbind()
    return ids, labels.masked_fill(torch.rand(labels.shape) < 0.2, -100)


def assert_near(found, exact, what):
    limit = 2e-5 * max(exact.abs().max().item(), 1e-2)
    assert found.shape == exact.shape and (found - exact).abs().max() <= limit, what


@pytest.mark.parametrize("tp", SPEEDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.second_tier("norm of each head-3", "biases-2")
def test_loss_and_gradients_are_those_of_one_rank(ranks, tmp_path, name, tp):
    exact = saved(MODELS[name], tmp_path)
    ids, labels = batch_of(exact.config)
    loss = exact(ids, labels)
    loss.backward()
    options = {"tp_speeds": SPEEDS[tp]}
    first, again = (ranks.run(logits_loss_gradients, tp, tmp_path, ids, labels, options) for _ in range(2))
    for rank, (logits, found, _) in enumerate(first):
        assert_near(logits, exact(ids).detach(), f"logits of rank {rank}")
        assert found.item() == pytest.approx(loss.item(), abs=1e-5)
        assert torch.equal(found, first[0][1]), "the loss must be bitwise the same on every rank"
    gradients, repeated = first[0][2], again[0][2]
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.grad)
    for key, gradient in full_tensors(exact).items():
        assert_near(gradients[key], gradient, f"gradient of {key}")
        assert torch.equal(gradients[key], repeated[key]), f"gradient of {key} must repeat"


@pytest.mark.parametrize(
    "options",
    [{"recompute": "full"}, {"recompute": "selective", "slices": 2}, {"keep_gathered": True}],
    ids=lambda options: "-".join(options),
)
def test_other_ways_through_the_layers_give_the_same_loss(ranks, tmp_path, options):
    exact = saved(MODELS["biases"], tmp_path)
    ids, labels = batch_of(exact.config)
    loss = exact(ids, labels)
    loss.backward()
    (_, found, gradients), _ = ranks.run(
        logits_loss_gradients, 2, tmp_path, ids, labels, {"tp_speeds": SPEEDS[2], **options}
    )
    assert found.item() == pytest.approx(loss.item(), abs=1e-5)
    gradient = exact.layer(0).down.weight.grad
    assert_near(gradients["model.layers.0.mlp.down_proj.weight"], gradient, "gradient of down")


def save_again(group, source, target):
    save_hf(load_hf(source, group, tp_speeds=(1.0, 0.5)), target)


def test_a_saved_model_does_not_know_its_cut(ranks, tmp_path):
    saved(MODELS["biases"], tmp_path / "one")
    ranks.run(save_again, 2, tmp_path / "one", tmp_path / "two")
    one, two = (load_hf(tmp_path / name) for name in ("one", "two"))
    for (key, tensor), other in zip(full_tensors(one).items(), full_tensors(two).values(), strict=True):
        assert torch.equal(tensor, other), key


def state_through_cuts(group, config):
    """Carries weights from one cut to another and to the equal one by state dicts, and gathers both."""
    model = Llama(config, group, seed=3, tp_speeds=(1.0, 0.5))
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    found = []
    for speeds in ((0.6, 1.0), ()):
        other = Llama(config, group, seed=4, tp_speeds=speeds)
        other.load_state_dict(state)
        found.append(full_tensors(other))
    wholes = {name: value.full_tensor() for name, value in state.items()}
    return full_tensors(model), found, wholes


def test_state_dicts_load_at_any_cut(ranks):
    config = MODELS["biases"]
    one = full_tensors(Llama(config, seed=3))
    whole = Llama(config, seed=3).state_dict()
    for model, others, wholes in ranks.run(state_through_cuts, 2, config):
        for name, tensor in one.items():
            assert torch.equal(model[name], tensor), f"first {name}"
            assert all(torch.equal(each[name], tensor) for each in others), f"loaded {name}"
        assert wholes.keys() == whole.keys()
        assert all(torch.equal(wholes[name], whole[name]) for name in whole)


def test_text_is_that_of_one_rank(ranks):
    config = MODELS["tied"]
    ids = torch.randint(config.vocab_size, (2, 7))
    alone = generate(Llama(config, seed=5), ids, 9, temperature=0)
    found = ranks.run(generated, 3, config, ids, SPEEDS[3])
    assert all(torch.equal(each, alone) for each in found)


def generated(group, config, ids, speeds):
    return generate(Llama(config, group, seed=5, tp_speeds=speeds), ids, 9, temperature=0)


LORA = LoRA(3, 6.0, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), seed=3)


def adapter_gradients(group, folder, ids, labels, speeds=()):
    """Loss of a model with adapters that have an effect, and their gradients."""
    model = load_hf(folder, group, lora=LORA, tp_speeds=speeds)
    for number, shard in enumerate(model.adapter_shards()):
        generator = torch.Generator().manual_seed(number)
        whole = 0.1 * torch.randn(shard.shape, generator=generator)
        dim = shard.dim or 0
        shard.local.copy_(whole.narrow(dim, shard.start, shard.local.shape[dim]))
    loss = model(ids, labels)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    return loss.detach(), {shard.name: gather_full(shard).clone() for shard in model.adapter_shards()}


def test_adapters_follow_their_linears(ranks, tmp_path):
    saved(MODELS["biases"], tmp_path)
    ids, labels = batch_of(MODELS["biases"])
    loss, exact = adapter_gradients(None, tmp_path, ids, labels)
    for found, gradients in ranks.run(adapter_gradients, 2, tmp_path, ids, labels, SPEEDS[2]):
        assert found.item() == pytest.approx(loss.item(), abs=2e-5)
        for name, gradient in exact.items():
            assert_near(gradients[name], gradient, name)
