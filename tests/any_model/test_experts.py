"""Experts of transformers' mixtures, spread over a group by parallelize()."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GptOssConfig, MixtralForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from pyruntime import explain, parallelize, shard, verify
from pyruntime.nn import ParallelExperts
from pyruntime.nn.parallel_experts import form_of, why_not
from pyruntime.ops.experts import ExpertForm
from tests.any_model.test_auto import BATCH, COMMON, EXPERTS, IDS, build
from tests.nn.cases import assert_near
from tests.ranks import RankError

MIXTRAL = COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
GROUPED = ROUTED | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
SHAPES = {
    "Mixtral": MIXTRAL,
    "Qwen2Moe": COMMON | EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3Moe": COMMON | EXPERTS,
    "Olmoe": COMMON | EXPERTS,
    "DeepseekV2": COMMON | LATENT | GROUPED,
    "DeepseekV3": COMMON | LATENT | GROUPED,
    "Glm4Moe": COMMON | GROUPED,
    "GptOss": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.5},
    "Llama4Text": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 48},
    "MiniMaxM2": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Models whose experts are spread."""
NEMOTRON = COMMON | ROUTED | {"layers_block_type": ["moe", "full_attention"], "n_group": 1, "topk_group": 1}


def is_the_whole_model(group, name: str) -> None:
    whole = build(name, SHAPES)
    model = parallelize(copy.deepcopy(whole), group, "auto")
    assert any(isinstance(module, ParallelExperts) for module in model.modules())
    assert not any("experts" in name.split(".") for name in explain(model).left_whole)
    verify(model, whole, BATCH, tolerance=1e-5)
    verify(model.eval(), whole.eval(), BATCH, tolerance=1e-5)
    assert "experts_backward" in str(explain(model))
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        key: value.shape for key, value in whole.state_dict().items()
    }


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.second_tier(but=["Mixtral"])
def test_loss_logits_and_every_gradient_are_those_of_the_whole(ranks, name):
    ranks.run(is_the_whole_model, 2, name)


def on_three_ranks(group) -> str:
    """Which divide neither the rows nor the experts."""
    whole = build("Mixtral", {"Mixtral": MIXTRAL | {"num_local_experts": 5}})
    model = parallelize(copy.deepcopy(whole), group, {"*.experts": "experts"})
    verify(model, whole, BATCH, tolerance=1e-5)
    return str(model.model.layers[0].mlp.experts)


def test_ragged_experts(ranks):
    assert "experts=5, features=32, width=48, group=" in ranks.run(on_three_ranks, 3)[2]


def too_few(group) -> str:
    model = parallelize(build("Mixtral", SHAPES), group, "auto")
    return explain(model).left_whole["model.layers.1.mlp.experts"]


def test_with_more_ranks_than_experts_they_stay_whole(ranks):
    """torch.chunk deals four experts to three ranks as two, two and none."""
    assert "tp=3 cuts its number of experts, which is 4" in ranks.run(too_few, 3)[0]


def others_stay(group) -> dict[str, str]:
    """Experts of another kind."""
    whole = build("NemotronH", {"NemotronH": NEMOTRON})
    model = parallelize(copy.deepcopy(whole), group, "auto")
    verify(model, whole, BATCH, tolerance=1e-5)
    return {name.rsplit(".", 1)[-1]: why for name, why in explain(model).left_whole.items()}


@pytest.mark.second_tier
def test_experts_of_another_kind_stay_whole_and_it_is_said(ranks):
    assert ranks.run(others_stay, 2)[0]["experts"] == "its experts have no gate"


class Own(GptOssExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super()._apply_gate(gate_up).abs()


def test_experts_are_known_by_what_they_compute():
    config = GptOssConfig(**SHAPES["GptOss"])
    form = form_of(GptOssExperts(config))
    assert form == ExpertForm(transposed=True, interleaved=True, alpha=1.702, limit=0.5, shift=1.0)
    assert why_not(Own(config)) == "it joins gate and up in its own way"


def saved(group, folder: str) -> None:
    whole = build("Mixtral", SHAPES)
    model = parallelize(copy.deepcopy(whole), group, "auto")
    model.save_pretrained(folder)
    again = MixtralForCausalLM.from_pretrained(folder)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    loaded = parallelize(build("Mixtral", SHAPES), group, "auto")
    loaded.load_state_dict(model.state_dict())
    assert all(map(torch.equal, _locals(loaded), _locals(model)))


def _locals(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters()]


def test_it_is_saved_as_transformers_reads_it(ranks, tmp_path):
    ranks.run(saved, 2, str(tmp_path))


def sharded(group, stage: int) -> None:
    """Steps of AdamW over two data-parallel ranks of two tensor-parallel ones, beside one rank's."""
    logging.disable(logging.WARNING)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh["dp"].get_local_rank()
    whole = build("Mixtral", SHAPES)
    model = parallelize(copy.deepcopy(whole), mesh["tp"], "auto")
    steps_are_those_of_one_rank(model, whole, mesh["dp"], mine, stage, lengths=(7, 7))


def steps_are_those_of_one_rank(model, whole, over, mine: int, stage: int, lengths: tuple[int, ...]) -> None:
    """Takes steps of AdamW over data-parallel ranks, which have sequences of these lengths, beside one rank's
    on the mean of their losses. mine: this rank among them."""
    optimizer = shard(model, over, stage=stage).adamw(lr=1e-3, weight_decay=0.0)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randint(1, 101, (2, length), generator=generator) for length in lengths]
        model(input_ids=batches[mine], labels=batches[mine]).loss.backward()
        reference.zero_grad()
        losses = [whole(input_ids=batch, labels=batch).loss for batch in batches]
        torch.stack(losses).mean().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
        assert_near(torch.as_tensor(optimizer.step().grad_norm), norm, f"norm of step {step}", 1e-4)
        reference.step()
    with torch.no_grad():
        assert_near(model(input_ids=IDS).logits, whole(input_ids=IDS).logits, "logits", 1e-3)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.second_tier("1")
def test_steps_beside_data_parallelism_are_those_of_one_rank(ranks, stage):
    ranks.run(sharded, 4, stage)


def refused(group) -> None:
    parallelize(build("Mixtral", SHAPES), group, {"*.mlp": "experts"})


def test_what_is_no_experts_is_refused(ranks):
    with pytest.raises(RankError, match=r"asks for 'experts' on model.layers.0.mlp, a MixtralSparseMoeBlock"):
        ranks.run(refused, 2)
    assert why_not(nn.Linear(2, 2)) == "it has no gate_up_proj and down_proj of all experts"
