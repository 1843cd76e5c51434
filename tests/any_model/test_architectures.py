"""A few of what tools/check_architectures.py goes over: right where they were wrong once."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from pyruntime import parallelize, verify
from tools.check_architectures import rows_of, table

PAGE = Path(__file__).resolve().parents[2] / "bench" / "results" / "architectures.md"

COMMON = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
ATTENTION = {"*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column", "*.o_proj": "row"}
MLP = {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}
LATENT = {"*.q_b_proj": "column", "*.kv_b_proj": "column", "*.o_proj": "row"}
OPT = {"*.[qkv]_proj": "column", "*.out_proj": "row", "*.fc1": "column", "*.fc2": "row"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **{
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    **{"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
RIGHT = {
    "Qwen3": ("llama", SHAPE),
    "Gemma3": (ATTENTION | MLP, SHAPE),
    "Qwen3Moe": (ATTENTION, SHAPE | EXPERTS),
    "OPT": (OPT, COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 0}),
    "DeepseekV3": (LATENT, SHAPE | DEEPSEEK | {"num_key_value_heads": 4}),
}
REFUSED = {
    "Phi3": (
        {"*.gate_up_proj": "column", "*.down_proj": "row"},
        SHAPE,
        "mlp.gate_up_proj and it does not work",
    ),
    "Olmo2": (
        "llama",
        SHAPE,
        "model.layers.0.self_attn.q_norm cannot work on a rank's features of model.layers.0",
    ),
    "GPT2": (
        "llama",
        {"n_embd": 32, "n_layer": 1, "n_head": 4},
        "GPT2Config of this GPT2LMHeadModel it is missing",
    ),
}


def build(name: str, shape: dict) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(**shape)
    kind = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}.get(name, "ForCausalLM")
    model = getattr(transformers, f"{name}{kind}")(config)
    for p in model.parameters():  # biases are zeros and norms are ones as they are made, which hides mistakes
        p.data.add_(torch.randn_like(p) * 0.1)
    return model


IDS = torch.randint(1, 101, (2, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}


def right(group, name: str) -> None:
    plan, shape = RIGHT[name]
    whole = build(name, shape)
    verify(parallelize(copy.deepcopy(whole), group, plan, tier="unfused"), whole, BATCH)


def refused(group, name: str) -> str:
    plan, shape, _ = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        parallelize(build(name, shape), group, plan)(**BATCH)
    return str(caught.value)


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.second_tier("Qwen3")
def test_loss_and_every_gradient_are_those_of_the_whole(ranks, name):
    ranks.run(right, 2, name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_in_a_sentence(ranks, name):
    for message in ranks.run(refused, 2, name):
        assert REFUSED[name][2] in message


def test_the_page_is_as_the_tool_writes_it():
    """Counts too, so rows that are run anew (--only) leave no figure behind that another row has made."""
    page = PAGE.read_text()
    written = table(rows_of(page))
    assert len(rows_of(page)) > 200
    assert [line for line in written.splitlines() if line.startswith("|")] == [
        line for line in page.splitlines() if line.startswith("|")
    ]
