"""parallelize() on Hugging Face's LlamaForCausalLM: the same loss, gradients, training and text as
without."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from pyruntime import explain, parallelize, verify
from pyruntime.nn import clip_grad_norm_
from tests.nn.cases import assert_near

SHAPE = {
    "vocab_size": 101,  # ragged over 2 and 4 ranks
    "hidden_size": 64,
    "intermediate_size": 90,  # ragged over 4 ranks
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


RAGGED = {"hidden_size": 66, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
"""Features that 4 ranks do not divide."""


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | changes)))


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 101, (2, 13), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def same_as_one_rank(group, changes: dict) -> None:
    """Logits, loss, every gradient, and the weights after three clipped AdamW steps, against the model left
    alone."""
    whole = llama(**changes)
    model = parallelize(copy.deepcopy(whole), group, "llama")
    found, expected = model(**batch()), whole(**batch())
    assert_near(found.logits, expected.logits, "logits")
    assert_near(found.loss, expected.loss, "loss")
    found.loss.backward()
    expected.loss.backward()
    compare(model, whole, lambda p: p.grad, "gradient", 1e-5)

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4) for m in (model, whole)]
    for step in range(3):
        for m, optimizer in zip((model, whole), optimizers, strict=True):
            optimizer.zero_grad()
            m(**batch(step)).loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5, group)
        assert_near(norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5), "norm")
        for optimizer in optimizers:
            optimizer.step()
    compare(model, whole, lambda p: p, "weight after three steps", 1e-5)


def same_over_two_axes(group, sizes: tuple[int, int], changes: dict, plan: str) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y"))
    if plan == "llama":
        same_as_one_rank(mesh, changes)
        return
    whole = llama(**changes)
    verify(parallelize(copy.deepcopy(whole), mesh, plan), whole, batch())


def compare(model, whole, of, what: str, tolerance: float) -> None:
    """Largest difference relative to the largest element of each tensor."""
    references = dict(whole.named_parameters())
    assert set(references) == set(dict(model.named_parameters()))
    for name, p in model.named_parameters():
        reference = of(references[name]).detach()
        layout = getattr(p, "tp_layout", None)
        mine = reference if layout is None else layout.local_part(layout.parts[0], reference)
        scale = reference.abs().max().clamp_min(1e-6)
        assert_near(of(p) / scale, mine / scale, f"{what} of {name}", tolerance)


@torch.no_grad()
def text(group, tp: bool, sample: bool) -> list[list[int]]:
    model = llama().eval()
    if tp:
        parallelize(model, group, "llama")
    torch.manual_seed(5)
    prompt = batch()["input_ids"][:, :5]
    return model.generate(prompt, max_new_tokens=12, do_sample=sample, use_cache=True).tolist()


def local_shapes(group) -> tuple:
    model = parallelize(llama(), group, "llama")
    attention = model.model.layers[0].self_attn
    names = {row.name for row in explain(model).rows}
    return (
        tuple(attention.q_proj.weight.shape),
        tuple(attention.k_proj.weight.shape),
        tuple(attention.o_proj.weight.shape),
        attention.num_key_value_groups,
        "model.layers.1.mlp.down_proj" in names and "lm_head" in names and len(names) == 2 * 7 + 2,
    )


def refused(group, changes: dict) -> str:
    model = llama(**changes)
    with pytest.raises(ValueError) as caught:
        parallelize(model, group, "llama")
    assert type(model.lm_head) is torch.nn.Linear
    return str(caught.value)


def asked_for_attentions(group) -> str:
    model = parallelize(llama(), group, "llama").eval()
    with torch.no_grad():
        model(**batch())
        with pytest.raises(ValueError) as caught:
            model(**batch(), output_attentions=True)
    return str(caught.value)


def save(group, folder: str) -> None:
    torch.manual_seed(0)
    model = parallelize(llama(), group, "llama")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)


def load(group, folder: str) -> torch.Tensor:
    torch.manual_seed(1)
    config = LlamaConfig(**SHAPE)
    model = parallelize(LlamaForCausalLM(config), group, "llama")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    return model(**batch()).loss.detach()


def whole_state_dict_of_one_rank_loads(group) -> None:
    """What from_pretrained would have read: full tensors under Hugging Face's names."""
    whole = llama()
    torch.manual_seed(1)
    model = parallelize(LlamaForCausalLM(LlamaConfig(**SHAPE)), group, "llama")
    model.load_state_dict(whole.state_dict())
    assert_near(model(**batch()).logits, whole(**batch()).logits, "logits")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"},
    ],
    ids=["plain", "tied", "biased"],
)
@pytest.mark.second_tier(but=["tied-1", "biased-1"])
def test_training_equals_that_of_one_rank(ranks, world_size, changes):
    ranks.run(same_as_one_rank, world_size, changes)


@pytest.mark.parametrize(
    ("sizes", "changes", "plan"),
    [
        ((2, 2), {"attention_bias": True, "mlp_bias": True, **RAGGED}, "llama"),
        ((1, 4), {"tie_word_embeddings": True, **RAGGED}, "llama"),
        ((2, 2), {}, "auto"),
    ],
    ids=["2x2", "1x4", "auto"],
)
@pytest.mark.second_tier("2x2", "1x4")
def test_training_over_two_axes_equals_that_of_one_rank(ranks, sizes, changes, plan):
    ranks.run(same_over_two_axes, 4, sizes, changes, plan)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.second_tier("greedy")
def test_generated_text_is_the_same(ranks, sample):
    alone = ranks.run(text, 1, False, sample)[0]
    for world_size in (1, 2, 4):
        assert ranks.run(text, world_size, True, sample) == [alone] * world_size


@pytest.mark.parametrize(("world_size", "heads", "key_value_heads"), [(1, 8, 4), (2, 4, 2), (4, 2, 1)])
def test_every_rank_holds_whole_heads(ranks, world_size, heads, key_value_heads):
    expected = ((8 * heads, 64), (8 * key_value_heads, 64), (64, 8 * heads), 2, True)
    assert ranks.run(local_shapes, world_size) == [expected] * world_size


def test_heads_that_tp_does_not_divide_are_refused(ranks):
    message = ranks.run(refused, 4, {"num_key_value_heads": 2})[0]
    assert message == (
        "tp=4 does not divide num_key_value_heads=2, and a head cannot be cut; use a tp out of 1, 2."
    )
    assert "tp=3 does not divide num_attention_heads=8" in ranks.run(refused, 3, {})[0]


def test_attention_weights_of_a_ranks_heads_are_refused(ranks):
    for message in ranks.run(asked_for_attentions, 2):
        assert "but each rank computes only the attention of its own heads" in message


def test_checkpoint_of_one_tp_loads_at_another(ranks, tmp_path):
    expected = llama()(**batch()).loss
    ranks.run(save, 2, str(tmp_path))
    for world_size in (1, 4):
        for loss in ranks.run(load, world_size, str(tmp_path)):
            assert_near(loss, expected, "loss")


def test_a_plain_state_dict_loads(ranks):
    ranks.run(whole_state_dict_of_one_rank_loads, 2)


def autocast(group) -> None:
    """The same dtypes as autocast gives the whole model, and gradients in the weights' own."""
    whole = llama()
    model = parallelize(copy.deepcopy(whole), group, "llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model(**batch()), whole(**batch())
    assert found.logits.dtype == expected.logits.dtype
    assert_near(found.loss, expected.loss, "loss", 1e-2)
    found.loss.backward()
    expected.loss.backward()
    compare(model, whole, lambda p: p.grad, "gradient", 0.1)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_autocast_runs_parallel_linears_as_it_runs_linears(ranks):
    for world_size in (1, 2):
        ranks.run(autocast, world_size)
