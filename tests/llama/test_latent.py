"""Latent attention with a context, a cache, documents, recomputation, torch.compile is what it is alone."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyruntime.context import Context, positions
from pyruntime.llama import Llama, LlamaConfig, load_hf, preset, save_hf
from pyruntime.llama.generation import KVCache, next_logits
from pyruntime.llama.model import ModelPart
from pyruntime.nn.low_rank import LoRA
from pyruntime.plan.memory import layer_activations
from pyruntime.plan.models import LatentAttention
from pyruntime.train.planned import TRAINER, of_llama
from tests.llama.cases import full_gradients, full_tensors
from tests.llama.test_elementwise import interpreted  # noqa: F401  (a fixture)
from tests.llama.test_mixture import FAMILIES
from tests.llama.test_recompute import BATCH, SEQ, kept_bytes

CONFIG = FAMILIES["deepseek_v3"]
IDS = torch.randint(101, (2, 48), generator=torch.Generator().manual_seed(0))
DOCUMENTS = (torch.arange(48) // 13).expand(2, -1)
DENSE = ModelPart((0, 1), embed=True, head=False)
"""The part of a model whose layers have no experts, which need a process group."""


def dense(config, layers=2):
    """The config with so many layers without experts before the last."""
    mixture = dataclasses.replace(config.mixture, dense_layers=layers)
    return dataclasses.replace(config, num_hidden_layers=layers + 1, mixture=mixture)


def of_context(group, config, layout, documents):
    """Hidden features and gradients on ranks that share sequences."""
    context = Context(group, layout=layout)
    model = Llama(dense(config), context=context, part=DENSE, seed=2)
    return of_hidden(model, context.shard(IDS, documents), documents)


def of_hidden(model, ids, documents=None):
    x = model.hidden(ids, documents=documents)
    (x * model.embed.weight[ids.flatten()].detach()).sum().backward()
    return x.detach().view(*ids.shape, -1), full_gradients(model)


@pytest.mark.parametrize("name", ["deepseek_v3, biases", "deepseek_v3, yarn"])
@pytest.mark.parametrize(
    ("layout", "documents"), [("zigzag", None), ("zigzag", DOCUMENTS), ("striped", None)]
)
def test_ranks_that_share_a_sequence_compute_what_one_computes(ranks, name, layout, documents):
    config = FAMILIES[name]
    whole, exact = of_hidden(Llama(dense(config), part=DENSE, seed=2), IDS, documents)
    found = ranks.run(of_context, 2, config, layout, documents)
    for own, (x, _) in zip(positions(layout, 48, 2, documents), found, strict=True):
        torch.testing.assert_close(x, whole[:, own], rtol=1e-5, atol=1e-5)
    for name, value in exact.items():
        atol = 1e-5 * max(float(value.abs().max()), 1e-2)
        total = sum(gradients[name] for _, gradients in found)
        torch.testing.assert_close(total, value, rtol=0, atol=atol, msg=name)


def test_tokens_see_their_own_document():
    """A document's tokens are the same whatever is behind it or before it, but for their angles."""
    model = Llama(dense(CONFIG), part=DENSE, seed=2)
    with torch.no_grad():
        packed = model.hidden(IDS, documents=DOCUMENTS).view(2, 48, -1)
        changed = IDS.clone()
        changed[:, :13] = 7
        other = model.hidden(changed, documents=DOCUMENTS).view(2, 48, -1)
        alone = model.hidden(IDS[:, :13]).view(2, 13, -1)
    torch.testing.assert_close(packed[:, :13], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[:, 13:], other[:, 13:], rtol=0, atol=0)


def computed(group, recompute="none", compile=False):
    """Loss and gradients on tensor-parallel ranks."""
    model = Llama(CONFIG, group, recompute=recompute, compile=compile, seed=2)
    loss = model(IDS, IDS)
    loss.backward()
    return loss.detach(), full_gradients(model)


@pytest.mark.parametrize("count", [1, 2])
def test_recomputed_layers_have_the_same_bits(ranks, count):
    plain, *others = (ranks.run(computed, count, recompute) for recompute in ("none", "selective", "full"))
    for other in others:
        for (loss, exact), (again, found) in zip(plain, other, strict=True):
            assert torch.equal(loss, again)
            assert all(torch.equal(found[name], value) for name, value in exact.items())


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_layer_keeps_what_the_planner_counts(recompute):
    latent = LatentAttention(kv_rank=40, rope_dim=16, nope_dim=24, value_dim=20, q_rank=64)
    few, many = (
        kept_bytes(
            dense(dataclasses.replace(CONFIG, latent=latent), layers),
            recompute=recompute,
            part=ModelPart(tuple(range(layers)), embed=True, head=False),
        )
        for layers in (2, 6)
    )
    shape = of_llama("", dataclasses.replace(CONFIG, latent=latent))
    shape = dataclasses.replace(shape, experts=0, shared_ffn=0, dense_layers=0)
    planned = 2 * layer_activations(shape, BATCH * SEQ, rules=TRAINER, recompute=recompute)
    # Statistics: of four norms and of attention.
    planned += (4 + CONFIG.num_attention_heads) * BATCH * SEQ * 4
    assert (many - few) / 4 == pytest.approx(planned, rel=0.01, abs=30_000)


def cached(group):
    """Logits of every token, and of some that follow others in a cache."""
    model = Llama(CONFIG, group)
    with torch.no_grad():
        exact = model(IDS)
    cache = KVCache(model, 2, 48)
    ends = ((0, 40), (40, 41), (41, 48))
    return exact, {end: next_logits(model, IDS[:, start:end], cache) for start, end in ends}


@pytest.mark.parametrize("count", [1, 2])
def test_cached_logits_are_those_of_the_whole_text(ranks, count):
    for exact, found in ranks.run(cached, count):
        for end, logits in found.items():
            torch.testing.assert_close(logits, exact[:, end - 1], rtol=1e-5, atol=1e-5)


def test_compiled_regions_compute_the_same(interpreted):  # noqa: F811
    plain, made = (
        of_hidden(Llama(dense(CONFIG), part=DENSE, compile=each, seed=2), IDS)[1] for each in (False, True)
    )
    for name, value in plain.items():
        atol = 1e-5 * max(float(value.abs().max()), 1e-2)
        torch.testing.assert_close(made[name], value, rtol=0, atol=atol, msg=name)


def test_the_preset_has_the_published_sizes():
    config = preset("deepseek-v3")
    assert config.parameter_count() == 671_026_404_352  # of the file, without its layer 61
    assert config.active_parameter_count() == pytest.approx(37e9, rel=0.02)
    small = preset("deepseek-v3", hidden_size=64, num_attention_heads=4)
    assert (small.num_key_value_heads, small.head_dim, small.value_dim) == (4, 192, 128)


def folder_with_further_layers(group, folder):
    """Loads a folder whose files have a layer more than the model, and which config.json says or does not."""
    model = Llama(CONFIG, group, seed=2)
    save_hf(model, folder)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, last = load_file(path), f"model.layers.{CONFIG.num_hidden_layers}."
    tensors |= {name.replace("model.layers.2.", last): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors | {f"{last}enorm.weight": torch.ones(CONFIG.hidden_size)}, path)
    with pytest.raises(ValueError, match="the folder has tensors of 4 layers"):
        load_hf(folder, group)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    loaded = full_tensors(load_hf(folder, group))
    return all(torch.equal(loaded[name], tensor) for name, tensor in full_tensors(model).items())


def test_layers_that_predict_further_tokens_are_not_read(ranks, tmp_path):
    assert ranks.run(folder_with_further_layers, 1, tmp_path / "model") == [True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_dim": 21}, "Values of 21 features are wider than queries and keys of 20"),
        ({"rope_dim": 7}, "rope_dim=7 must be even"),
        ({"kv_rank": 0}, "kv_rank=0 must be a positive whole number"),
        ({"kv_rank": 2**17}, "kv_rank=131072 is larger than any model's"),
        ({"q_rank": 1.5}, "q_rank=1.5 must be a positive whole number"),
        ({"interleaved": None}, "rope_interleave=None must be true or false"),
    ],
)
def test_sizes_that_make_no_heads_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, latent=dataclasses.replace(CONFIG.latent, **changes))


def test_what_does_not_go_with_latent_attention_is_refused():
    with pytest.raises(ValueError, match="No Hugging Face family of models has latent attention without exp"):
        dataclasses.replace(CONFIG, mixture=None)
    with pytest.raises(ValueError, match="leave out num_key_value_heads=6"):
        dataclasses.replace(CONFIG, num_key_value_heads=6)
    with pytest.raises(ValueError, match="Latent attention has adapters of its o_proj alone, and q_proj"):
        Llama(CONFIG, lora=LoRA(4, 8, ("q_proj", "o_proj")))
    with pytest.raises(ValueError, match="kv_rank='many' must be"):
        LlamaConfig.from_hf(CONFIG.to_hf() | {"kv_lora_rank": "many"})
    with pytest.raises(ValueError, match=r"latent=.* must be a LatentAttention or None"):
        LlamaConfig.from_dict(dataclasses.asdict(CONFIG) | {"latent": {}})
