"""Models with experts, and with normalised heads: transformers computes the same, and any ranks load them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pyruntime.llama import PRESETS, Llama, LlamaConfig, load_hf, save_hf
from pyruntime.llama.mixture import Mixture
from pyruntime.llama.rope_scaling import RopeScaling
from pyruntime.llama.stage import layers_of_stages
from pyruntime.llama.tensor_shards import ROUTER_BIAS
from pyruntime.nn import RouterLosses
from pyruntime.plan.cluster import Cluster, find_cluster
from pyruntime.plan.memory import memory_of_rank
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import LatentAttention
from pyruntime.plan.pipelines import dense_by_rank, layers_by_rank
from pyruntime.plan.step import Predictor
from pyruntime.plan.traffic import bytes_of_step
from pyruntime.train.planned import of_llama
from tests.llama.cases import full_gradients, full_tensors

_SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_YARN = RopeScaling(
    "yarn", 4.0, original_max_position_embeddings=16, attention_factor=0.9, mscale_all_dim=0.7
)
FAMILIES = {
    "mixtral": LlamaConfig(**_SMALL, mixture=Mixture(7, 2, 40)),
    "qwen2_moe": LlamaConfig(
        **_SMALL, mixture=Mixture(7, 3, 40, renormalize=False, shared_width=48, dense_layers=1)
    ),
    "qwen3_moe": LlamaConfig(**_SMALL, qk_norm=True, mixture=Mixture(7, 2, 40, dense_layers=2)),
    "qwen3": LlamaConfig(**_SMALL, qk_norm=True),
    "mixtral, window": LlamaConfig(**_SMALL, mixture=Mixture(7, 2, 40), sliding_window=5),
    "dots1": LlamaConfig(
        **_SMALL,
        qk_norm=True,
        sliding_window=5,
        first_window_layer=1,
        mixture=Mixture(
            8, 3, 24, shared_width=48, dense_layers=1, sigmoid=True, groups=4, best_groups=2, factor=2.5
        ),
    ),
    **{
        f"deepseek_v3{name}": LlamaConfig(
            **{**_SMALL, "num_key_value_heads": None},
            **{"attention_bias": "biases" in name, "rope_scaling": _YARN if "yarn" in name else None},
            latent=latent,
            mixture=Mixture(
                8, 3, 24, shared_width=48, dense_layers=1, sigmoid=True, groups=4, best_groups=2, factor=2.5
            ),
        )
        for name, latent in {
            "": LatentAttention(kv_rank=20, rope_dim=8, nope_dim=12, value_dim=10, q_rank=28),
            ", biases": LatentAttention(kv_rank=20, rope_dim=6, nope_dim=12, value_dim=18, interleaved=False),
            ", yarn": LatentAttention(kv_rank=40, rope_dim=8, nope_dim=6, value_dim=14, q_rank=12),
        }.items()
    },
    "qwen2_moe, biases": LlamaConfig(
        **_SMALL, mixture=Mixture(7, 3, 40, renormalize=False, shared_width=48), qkv_bias=True
    ),
}


def written(group, config, folder):
    """A folder with a model of which every weight matters."""
    model = Llama(config, group, seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
        for shard in model.shards():
            if shard.name.endswith(ROUTER_BIAS):
                shard.local.normal_(0.0, 0.3, generator=generator)
    save_hf(model, folder)


def of_ranks(group, folder, ids, target):
    """Logits, loss and gradients of the checkpoint, and a copy of it."""
    model = load_hf(folder, group)
    with torch.no_grad():
        logits = model(ids)
    save_hf(model, target, max_file_bytes=50_000)
    loss = model(ids, ids)
    loss.backward()
    return logits, loss.detach(), full_gradients(model)


def stored(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_and_any_ranks_load_it(ranks, tmp_path, family):
    config, ids = FAMILIES[family], torch.randint(101, (2, 19))
    ranks.run(written, 1, config, tmp_path / "whole")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", output_loading_info=True
    )
    assert theirs.config.model_type == family.partition(",")[0]
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    logits = theirs(ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    theirs.save_pretrained(tmp_path / "theirs")
    gradients = {}
    for count in (1, 2, 3):
        source = tmp_path / ("theirs" if count == 2 else "whole")
        found = ranks.run(of_ranks, count, source, ids, tmp_path / str(count))
        for made, _, of_model in found:
            torch.testing.assert_close(made, logits, rtol=1e-5, atol=2e-5)
            gradients[count] = of_model
        exact, copy = stored(tmp_path / "whole"), stored(tmp_path / str(count))
        assert exact.keys() == copy.keys()
        assert all(torch.equal(copy[name], tensor) for name, tensor in exact.items())
    for count, found in gradients.items():
        for name, value in gradients[1].items():
            largest = max(float(value.abs().max()), 1e-3)
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * largest, msg=f"{name} {count}")
    of_embedding = theirs.model.embed_tokens.weight.grad
    torch.testing.assert_close(gradients[1]["model.embed_tokens.weight"], of_embedding, rtol=1e-4, atol=1e-6)


def began(group, config, ids, recompute):
    """The initial weights, and the gradients with the losses of routers."""
    losses = RouterLosses(balance=0.3, z=0.1, groups=[group])
    model = Llama(config, group, seed=3, router_losses=losses, recompute=recompute)
    initial = full_tensors(model)
    model(ids, ids).backward()
    return initial, full_gradients(model)


@pytest.mark.parametrize(("count", "recompute"), [(2, "selective"), (3, "full")])
def test_weights_begin_alike_and_gradients_are_those_of_one_rank(ranks, count, recompute):
    config, ids = FAMILIES["qwen2_moe"], torch.randint(101, (3, 17))
    ((initial, exact),) = ranks.run(began, 1, config, ids, "none")
    assert sum(tensor.numel() for tensor in initial.values()) == config.parameter_count()
    for begin, gradients in ranks.run(began, count, config, ids, recompute):
        for name, value in exact.items():
            assert torch.equal(begin[name], initial[name])
            largest = max(float(value.abs().max()), 1e-2)
            torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-5 * largest, msg=name)


def test_a_token_uses_a_part_of_the_parameters():
    config = FAMILIES["qwen2_moe"]
    idle = 2 * 4 * 3 * 64 * 40  # layers, experts, matrices
    assert config.parameter_count() - config.active_parameter_count() == idle
    dense = dataclasses.replace(config, mixture=None)
    # The layers' feed-forward networks of 96 features, against three experts of 40, a shared one of 48, its
    # gate, and a router.
    of_experts, of_network = 3 * 64 * (3 * 40 + 48) + 64 + 64 * 7, 3 * 64 * 96
    more = 2 * 2 * (of_experts - of_network)
    assert config.flops_per_token(16, training=False) - dense.flops_per_token(16, training=False) == more


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": Mixture(7, 2, 40, renormalize=False)}, "No Hugging Face family of models has dense"),
        ({"mixture": Mixture(7, 2, 40), "attention_bias": True}, "has experts and biases"),
        ({"mixture": Mixture(7, 2, 40, dense_layers=3)}, "3 dense layers of 3 leave none with experts"),
    ],
)
def test_what_no_family_has_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**_SMALL | changes)


def test_more_ranks_than_experts_are_refused():
    with pytest.raises(ValueError, match="tp=6 leaves a rank without one of the 7 experts"):
        FAMILIES["mixtral"].check_tp(6)
    with pytest.raises(ValueError, match="A token cannot go to 3 of 2 experts"):
        Mixture(2, 3, 8)


@pytest.mark.parametrize(
    "config", [*FAMILIES.values(), PRESETS["mixtral-8x7b"], PRESETS["qwen3-30b-a3b"], PRESETS["deepseek-v3"]]
)
def test_the_planner_counts_the_same(config):
    planned = of_llama("a model", config)
    assert planned.parameters == config.parameter_count()
    assert planned.step_flops(1000, 64) == pytest.approx(1000 * config.flops_per_token(64), rel=1e-5)
    for stages in (1, 2, 3):
        by_stage = [len(run) for run in layers_of_stages(config, stages)]
        mesh = Mesh(pp=stages, kind="1f1b")
        assert list(layers_by_rank(planned, mesh)) == by_stage
        without = [
            sum(not config.mixture.has(layer) for layer in run) if config.mixture else 0
            for run in layers_of_stages(config, stages)
        ]
        assert list(dense_by_rank(planned, mesh)) == without
    assert [tp for tp in range(1, 9) if planned.fits_tp(tp)] == [tp for tp in range(1, 9) if fits(config, tp)]


def test_layers_without_experts_are_predicted_apart():
    """Seconds, bytes and parameters of a rank are those of its layers of both kinds."""
    config = PRESETS["deepseek-v3"]
    model = dataclasses.replace(of_llama("a model", config), layers=4)
    cluster = find_cluster("dgx-h100")

    def step(dense, mesh, recompute="none"):
        job = Job(dataclasses.replace(model, dense_layers=dense), cluster, 16, 16, 4096)
        predictor, mesh = Predictor(job, sums_whole=True), dataclasses.replace(mesh, recompute=recompute)
        seconds, memory = predictor.step(mesh), memory_of_rank(job, mesh, 0)
        moved = bytes_of_step(job, mesh)
        found = [seconds.compute, seconds.recompute, seconds.optimizer, predictor.parameters(mesh)]
        return [
            *found,
            memory.weights,
            memory.activations,
            *(moved[axis] for axis in ("tp", "ep", "weights")),
        ]

    for mesh in (Mesh(tp=2, dp=8, ep=8, zero=1), Mesh(tp=2, dp=8, ep=4, zero=3)):
        for recompute in ("none", "selective"):
            none, one, two, three = (step(dense, mesh, recompute) for dense in range(4))
            differences = [b - a for a, b in zip(none, one, strict=True)]
            assert differences[3] < 0  # a network has fewer parameters than experts
            for found, times in ((two, 2), (three, 3)):
                expected = [a + times * each for a, each in zip(none, differences, strict=True)]
                assert found == pytest.approx(expected, rel=1e-9)
    whole = dataclasses.replace(model, dense_layers=3)
    one_rank = Predictor(Job(whole, cluster, 1, 1, 64), sums_whole=True).parameters(Mesh())
    assert one_rank == whole.parameters


def fits(config, tp):
    try:
        config.check_tp(tp)
    except ValueError:
        return False
    return True


def test_the_fullest_rank_is_counted_where_experts_do_not_divide():
    """Of 8 experts over 3 ranks the first has 3, of whose rows ZeRO over 2 ranks leaves it half."""
    config = dataclasses.replace(FAMILIES["mixtral"], mixture=Mixture(8, 2, 4000))
    job = Job(of_llama("a model", config), Cluster.of_ranks(6), 6, 4, 64)
    of_experts = 3 * 3 * 64 * 4000  # layers, matrices, features
    memory = memory_of_rank(job, Mesh(tp=3, dp=2, zero=1), 0)
    assert memory.weights == pytest.approx(2 * 3 * of_experts, rel=0.02)
    assert memory.optimizer == pytest.approx(12 * 1.5 * of_experts, rel=0.02)
    # Over all six ranks one has 2 of them, which no other holds; over one, all 8, cut over six.
    for ep, held, kept in ((6, 2, 2), (1, 8, 8 / 6)):
        memory = memory_of_rank(job, Mesh(tp=3, dp=2, zero=1, ep=ep), 0)
        assert memory.weights == pytest.approx(2 * held * of_experts, rel=0.02)
        assert memory.optimizer == pytest.approx(12 * kept * of_experts, rel=0.02)
