"""Plan "auto": transformers' own plans, plans read off a model's data flow, and what gives way in the first
call."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from pyruntime import explain, parallelize, verify
from pyruntime.any_model.auto.data_flow import Flow, flow_of, styles_of
from pyruntime.any_model.auto.found_plan import auto_plan
from pyruntime.text import block_name
from tests.any_model.test_parallelize import PLAN, Transformer, seeded
from tests.nn.cases import assert_near

IDS = torch.randint(1, 101, (2, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
COMMON = {
    **{"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
}
GPT2 = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
T5 = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

MODELS = {
    "Llama": COMMON,
    "Llama tied": COMMON | {"tie_word_embeddings": True, "attention_bias": True},
    "Llama with one key head": COMMON | {"num_key_value_heads": 1},
    "Llama with three heads": COMMON
    | {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    "Qwen3": COMMON,  # norms of q and k
    "Phi3": COMMON,  # q, k and v in one linear, gate and up in another
    "Olmo2": COMMON,  # norms over all heads
    "Gemma3Text": COMMON | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Qwen3Moe": COMMON | EXPERTS,
    "GPT2": GPT2 | {"attn_pdrop": 0.0},  # Conv1D
    "OPT": COMMON | OPT,
    "T5": T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
}
HEADS = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration", "Gemma3Text": "ForCausalLM"}


def build(name: str, shapes: dict[str, dict] = MODELS) -> nn.Module:
    """With random numbers in every parameter: biases are zeros and norms are ones as they are made."""
    torch.manual_seed(0)
    kind = name.split()[0]
    config = getattr(transformers, f"{kind}Config")(**shapes[name])
    model = getattr(transformers, kind.removesuffix("Text") + HEADS.get(kind, "ForCausalLM"))(config)
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    return model


def is_the_whole_model(group, name: str) -> tuple[set[str], str]:
    """What of it gives way, and what explain() prints."""
    whole = build(name)
    model = parallelize(copy.deepcopy(whole), group, "auto")
    verify(model, whole, BATCH, tolerance=1e-5)
    report = explain(model)
    return {block_name(layer).split("*", 1)[1] for layer in report.gave_way}, str(report)


ATTENTION = {f".self_attn.{leaf}_proj" for leaf in "qkvo"}
GIVES_WAY = {
    "Llama with one key head": {".self_attn.k_proj", ".self_attn.v_proj"},
    "Llama with three heads": ATTENTION,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.second_tier(but=["Qwen3"])
def test_loss_logits_and_every_gradient_are_those_of_the_whole(ranks, name):
    gave_way, said = ranks.run(is_the_whole_model, 2, name)[0]
    assert gave_way == GIVES_WAY.get(name, set()), said
    assert ("reads or gives whole activations: " in said) == bool(gave_way)
    assert (".mlp.experts " in said) == (name == "Qwen3Moe")


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.second_tier("Llama")
def test_it_is_right_on_three_ranks_too(ranks, name):
    """Which divide neither heads nor features."""
    ranks.run(is_the_whole_model, 3, name)


# -- plans that are read off a model


def test_styles_follow_from_who_reads_whom():
    """up and gate feed down; q is read by out and by the output; deep reads what out, a row, gives."""
    flow = Flow(
        reads={
            "up": frozenset({""}),
            "gate": frozenset({""}),
            "down": frozenset({"up", "gate"}),
            "q": frozenset({"", "down"}),
            "k": frozenset({"", "down"}),
            "out": frozenset({"q", "k"}),
            "deep": frozenset({"out"}),
            "tied": frozenset({"deep"}),
        },
        results=frozenset({"q", "deep"}),
        read_elsewhere={"tied": None},
    )
    assert styles_of(flow) == {
        **{"up": "column", "gate": "column", "down": "row"},
        **{"q": "column_gather", "k": "column_gather", "out": "row_split"},
        "deep": "column_gather",
    }


def test_a_model_in_plain_torch_is_traced():
    for tied in (False, True):
        plan = auto_plan(seeded(Transformer, tied), 2, 2)
        expected = {
            **{f"blocks.{i}.{name}": "column" for i in range(2) for name in ("q", "k", "v", "mlp.0")},
            **{f"blocks.{i}.{name}": "row" for i in range(2) for name in ("out", "mlp.2")},
            **{"embed": PLAN["embed"], "head": PLAN["head"]},
        }
        assert plan.styles == expected and not plan.left_whole


def plain(group) -> None:
    whole = seeded(Transformer)
    model = parallelize(copy.deepcopy(whole), group, "auto")
    verify(model, whole, torch.arange(10).view(2, 5), tolerance=1e-5)
    assert not explain(model).gave_way


def test_a_model_in_plain_torch_is_the_whole(ranks):
    ranks.run(plain, 2)


class Weighed(nn.Module):
    """Its head's weight is read without the head, and one linear is too narrow to be cut."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head, self.score = nn.Linear(8, 5), nn.Linear(8, 1)

    def forward(self, x):
        x = self.down(self.up(x).relu())
        return x @ self.head.weight.t() + self.head(x) + self.score(x)


def test_what_cannot_be_cut_is_left_whole_with_a_reason():
    plan = auto_plan(Weighed(), 2, 2)
    assert plan.styles == {"up": "column", "down": "row"}
    assert plan.left_whole["head"] == "other code reads its weight"
    assert "cuts its features, which is 1, into chunks of 1" in plan.left_whole["score"]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x)) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Branching, "linears of this Branching feed each other, but tracing it with torch.fx failed"),
        (lambda: nn.Sequential(nn.LayerNorm(4)), "has found no linear of this Sequential that can be cut; "),
    ],
    ids=["a branch", "no linear"],
)
def test_what_it_cannot_be_sure_of_is_refused(model, sentence):
    with pytest.raises(ValueError) as caught:
        auto_plan(model(), 2, 2)
    assert sentence in str(caught.value) and "pass a mapping" in str(caught.value)


def test_the_flow_of_a_transformers_model_is_seen_by_running_it():
    model = build("OPT")
    before = copy.deepcopy(model.state_dict())
    styles = styles_of(flow_of(model))
    block = {name: style for name, style in styles.items() if ".0." in name}
    assert {name.rpartition(".")[2]: style for name, style in block.items()} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "fc1"), "column"),
        **{"out_proj": "row", "fc2": "row"},
    }
    assert styles["lm_head"] == "column_gather"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def twice_and_half(group) -> list[str]:
    """A model that is parallel already, or in part."""
    messages = []
    whole = parallelize(build("Llama"), group, "auto")
    half = build("Llama")
    parallelize(half.model.layers[0].mlp, group, {"gate_proj": "column_gather"})
    for model in (whole, half):
        with pytest.raises(ValueError) as caught:
            parallelize(model, group, "auto")
        messages.append(str(caught.value))
    return messages


def test_a_model_is_cut_once(ranks):
    for messages in ranks.run(twice_and_half, 2):
        assert messages[0].endswith("is parallel already; parallelize a model once.")
        assert messages[1].startswith("model.layers.0.mlp.gate_proj is parallel already")


# -- with the tools around transformers


def trains(group, name: str) -> None:
    """Three clipped AdamW steps with gradient checkpointing leave the weights of the whole model."""
    whole = build(name).train()
    model = parallelize(copy.deepcopy(whole), group, "auto")
    for each in (model, whole):
        each.gradient_checkpointing_enable({"use_reentrant": False})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-4) for each in (model, whole)]
    for _ in range(3):
        norms = []
        for each, optimizer in zip((model, whole), optimizers, strict=True):
            optimizer.zero_grad()
            each(**BATCH, use_cache=False).loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5))
            optimizer.step()
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    verify(model, whole, BATCH | {"use_cache": False}, tolerance=1e-4)


def saves(group, name: str, folder: str) -> None:
    whole = build(name)
    model = parallelize(copy.deepcopy(whole), group, "auto")
    model.save_pretrained(folder)
    again = type(whole).from_pretrained(folder)
    for key, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def adapted(group, folder: str) -> None:
    """LoRA first, on a model of which a part gives way; merged, it is the whole model with its adapters."""
    targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    whole = get_peft_model(build("Phi3"), LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    for name, p in whole.named_parameters():
        if "lora_B" in name:  # zeros as peft makes it
            nn.init.normal_(p, std=0.1)
    model = parallelize(copy.deepcopy(whole), group, "auto")
    verify(model, whole, BATCH, tolerance=1e-5)
    model.save_pretrained(folder)
    again = PeftModel.from_pretrained(build("Phi3"), folder)
    for each in (again, model.merge_and_unload()):
        assert_near(each(**BATCH).logits, whole(**BATCH).logits, "logits")


@torch.no_grad()
def writes(group, name: str) -> list[list[int]]:
    model = build(name).eval()
    if group.size() > 1:
        parallelize(model, group, "auto")
    return model.generate(IDS[:, :5], max_new_tokens=12, do_sample=False, use_cache=True).tolist()


@pytest.mark.parametrize("name", ["Qwen3", "GPT2"])
@pytest.mark.second_tier("Qwen3")
def test_training_with_checkpointing_equals_that_of_one_rank(ranks, name):
    ranks.run(trains, 2, name)


@pytest.mark.parametrize("name", ["Llama tied", "GPT2", "Phi3"])
@pytest.mark.second_tier("Llama tied")
def test_what_is_saved_is_the_whole_model(ranks, tmp_path, name):
    ranks.run(saves, 2, name, str(tmp_path))


def test_adapters_are_cut_with_their_linears(ranks, tmp_path):
    ranks.run(adapted, 2, str(tmp_path))


@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "T5"])
@pytest.mark.second_tier("Qwen3", "T5")
def test_generated_text_is_that_of_one_rank(ranks, name):
    alone = ranks.run(writes, 1, name)[0]
    assert ranks.run(writes, 2, name) == [alone] * 2
