"""Linears that hold several (q, k and v; gate and up): where parts are seen, cut by parts, state dicts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from pyruntime import explain, parallelize, shard, verify
from pyruntime.any_model.auto.data_flow import flow_of, parts_of
from pyruntime.nn import ColumnParallelLinear
from pyruntime.nn.parameters import in_order, ranges_of
from pyruntime.text import block_name
from tests.any_model import test_auto
from tests.any_model.test_auto import BATCH, COMMON, GPT2, IDS, MODELS

FOUR = {"num_key_value_heads": 4}
MPT = {"vocab_size": 101, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
SHAPES = MODELS | {
    "Phi3 with four key heads": COMMON | FOUR,
    "Phi3 with one key head": COMMON | {"num_key_value_heads": 1},
    "Glm": COMMON,  # q, k and v are three linears, gate and up one
    "Mpt": MPT,  # no plan of transformers
    "GPTBigCode": {**GPT2, "multi_query": False, "attn_pdrop": 0.0},  # heads of q, k and v by turns
    "GPTBigCode with one key head": {**GPT2, "attn_pdrop": 0.0},
}


def build(name: str) -> nn.Module:
    return test_auto.build(name, SHAPES)


QKV, GATE_UP = "model.layers.*.self_attn.qkv_proj", "model.layers.*.mlp.gate_up_proj"


# -- orders


@pytest.mark.parametrize("sizes", [(6,), (4, 2, 6), (2, 2)])
def test_what_is_gathered_in_order_is_the_whole(sizes):
    whole = torch.randn(3, sum(sizes), 2)
    shares = [
        torch.cat([whole[:, start:stop] for start, stop in ranges_of(sizes, 2, rank, "w")], 1)
        for rank in range(2)
    ]
    assert torch.equal(in_order(torch.cat(shares, 1), 1, 2, sizes), whole)
    assert torch.equal(in_order(torch.cat(shares, 1), -2, 2, sizes), whole)


def test_parts_that_the_ranks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"tp=2 does not divide 3, a part of w, whose parts are \[4, 3\]"):
        ranges_of((4, 3), 2, 0, "w")


def sums_are_checked(group) -> str:
    with pytest.raises(ValueError) as caught:
        ColumnParallelLinear(4, 12, group=group, packed=(4, 4))
    return str(caught.value)


def test_parts_that_are_not_all_features_are_refused(ranks):
    for message in ranks.run(sums_are_checked, 2):
        assert "The parts [4, 4] have 8 features together" in message and "out_features=[12]" in message


# -- where the parts are seen


class Taken(nn.Module):
    """Linears whose outputs are taken apart in every way that there is, on its own dummy inputs."""

    def __init__(self):
        super().__init__()
        names = ("halves", "slices", "axis", "heads", "by_turns", "first", "whole")
        self.linears = nn.ModuleDict({name: nn.Linear(4, 24) for name in names})
        self.dummy_inputs = {"x": torch.randn(2, 5, 4)}

    def forward(self, x):
        y = {name: linear(x) for name, linear in self.linears.items()}
        halves = y["halves"].chunk(2, -1)
        q, kv = y["slices"][..., :16], y["slices"][..., 16:]
        three = y["axis"].view(2, 5, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        heads = y["heads"].view(2, 5, 4, 6).transpose(1, 2)
        turns = y["by_turns"].view(2, 5, 4, 6).split(2, -1)
        halves = [each + 1 for each in (*halves, *kv.chunk(2, -1), q[..., :4])]
        return (*halves, *three, heads[..., :3], *turns, y["first"][..., :12], y["whole"][:, 1:])


def test_parts_are_what_the_models_code_takes_apart():
    assert parts_of(flow_of(Taken())) == {
        "linears.halves": (12, 12),
        "linears.slices": (16, 8),
        "linears.axis": (8, 8, 8),
    }


# -- the same numbers


def is_the_whole_model(group, name: str) -> tuple[dict, set[str], str]:
    """Parts, what gives way, and what explain() says."""
    whole = build(name)
    model = parallelize(copy.deepcopy(whole), group, "auto")
    verify(model, whole, BATCH, tolerance=1e-5)
    model.eval(), whole.eval()
    assert torch.equal(
        *(each.generate(IDS[:, :5], max_new_tokens=6, do_sample=False) for each in (model, whole))
    )
    report = explain(model)
    parts = {block_name(layer): sizes for layer, sizes in report.packed.items()}
    return parts, {block_name(layer) for layer in report.gave_way}, str(report)


SEEN = {
    "Phi3": ({QKV: (32, 16, 16), GATE_UP: (48, 48)}, set()),
    "Phi3 with one key head": (
        {QKV: (32, 8, 8), GATE_UP: (48, 48)},
        {QKV, "model.layers.*.self_attn.o_proj"},
    ),
    "Glm": ({GATE_UP: (48, 48)}, set()),
    "GPT2": ({"transformer.h.*.attn.c_attn": (32, 32, 32)}, set()),
    "Mpt": (
        {"transformer.blocks.*.attn.Wqkv": (32, 32, 32)},
        {"transformer.blocks.*.attn.Wqkv", "transformer.blocks.*.attn.out_proj"},  # a bias for all heads
    ),
    "GPTBigCode": ({}, set()),
    "GPTBigCode with one key head": (
        {"transformer.h.*.attn.c_attn": (32, 8, 8)},
        {"transformer.h.*.attn.c_attn", "transformer.h.*.attn.c_proj"},
    ),
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.second_tier(but=["GPTBigCode"])
def test_it_is_the_whole_model_and_says_what_was_cut_how(ranks, name):
    parts, gave_way, said = ranks.run(is_the_whole_model, 2, name)[0]
    assert (parts, gave_way) == SEEN[name], said
    assert all(f"{' + '.join(map(str, sizes))} features" in said for sizes in parts.values())


# -- state dicts


def whole_of(state: dict) -> dict[str, Tensor]:
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()
    }


def differing(found: dict, expected: dict) -> list[str]:
    assert list(found) == list(expected)
    return [key for key, value in expected.items() if not torch.equal(found[key], value)]


def trained(group, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After two steps."""
    model = build(name)
    model = parallelize(model, group, "auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(**BATCH).loss.backward()
        optimizer.step()
    return model, optimizer


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    return {f"{names[index]}.{kind}": t for index, each in state.items() for kind, t in each.items()}


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return model.state_dict() | moments_of(model, optimizer)


def save(group, name: str, folder: str) -> dict[str, Tensor]:
    model, optimizer = trained(group, name)
    state = states_of(model, optimizer)
    dcp.save(state, checkpoint_id=folder, process_group=group)
    own = whole_of(state)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert not differing(full, {key: own[key] for key in full})
    again = build(name)
    again.load_state_dict(full)  # the names and order of the whole model
    model.eval(), again.eval()
    torch.testing.assert_close(model(**BATCH).logits, again(**BATCH).logits, rtol=1e-4, atol=1e-5)
    return own


def load(group, name: str, folder: str, again: str) -> dict[str, Tensor]:
    """In place, and back into another folder."""
    model, optimizer = trained(group, name)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = states_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    dcp.save(states_of(model, optimizer), checkpoint_id=again, process_group=group)
    return whole_of(states_of(model, optimizer))


@pytest.mark.parametrize("name", ["Phi3 with four key heads", "GPT2"])
@pytest.mark.second_tier("GPT2")
def test_what_two_ranks_save_one_and_four_load_and_back(ranks, tmp_path, name):
    saved = ranks.run(save, 2, name, f"{tmp_path}/2")[0]
    for size in (1, 4):
        there = ranks.run(load, size, name, f"{tmp_path}/2", f"{tmp_path}/{size}")
        back = ranks.run(load, 2, name, f"{tmp_path}/{size}", f"{tmp_path}/back{size}")
        assert not [differing(each, saved) for each in (*there, *back) if differing(each, saved)]


def as_a_tensor(group) -> list[str]:
    """A packed tensor of a state dict, in operators and in what is loaded from it."""
    whole = build("Phi3").state_dict()
    model = parallelize(build("Phi3"), group, "auto")
    state, key = model.state_dict(), "model.layers.0.self_attn.qkv_proj.weight"
    assert torch.equal(state[key] + 0, whole[key]) and torch.equal(
        state[key].clone().full_tensor(), whole[key]
    )
    assert torch.equal(torch.empty_like(whole[key]).copy_(state[key]), whole[key])
    kept = copy.deepcopy(state)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not state[key].to_local().any() and kept[key].to_local().any()
    model.load_state_dict(kept)
    assert not differing(whole_of(model.state_dict()), whole)
    ordinary = kept | {key: kept[key].redistribute(placements=kept[key].placements)}
    for p in model.parameters():
        p.data.zero_()
    model.load_state_dict(ordinary)
    assert not differing(whole_of(model.state_dict()), whole)
    state[key].detach().copy_(whole[key] + 1)
    assert torch.equal(model.state_dict()[key].full_tensor(), whole[key] + 1)
    with pytest.raises(ValueError) as caught:
        state[key].zero_()
    return str(caught.value)


def test_a_packed_tensor_is_the_whole_to_whatever_reads_it(ranks):
    for message in ranks.run(as_a_tensor, 2):
        assert "zero_" in message and "blocks; use copy_() of a full tensor" in message


def beside_data_parallelism(group, name: str, stage: int, folder: str) -> None:
    """At every stage weights and moments are saved, and what is loaded in place is what was saved."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = build(name)
    model = parallelize(copy.deepcopy(whole), mesh["tp"], "auto", tier="unfused")
    handle = shard(model, mesh["dp"], stage=stage)
    optimizer = handle.adamw(lr=1e-2)
    expected = {key: handle.state_dict()[key].full_tensor() for key in handle.state_dict()}
    assert not [key for key, p in whole.named_parameters() if not torch.equal(expected[key], p)]
    model(**BATCH).loss.backward()
    optimizer.step()
    state = handle.state_dict() | optimizer.state_dict()
    saved = whole_of(state)
    dcp.save(state, checkpoint_id=folder, process_group=group)
    for tensor in state.values():
        if hasattr(tensor, "to_local"):
            tensor.to_local().zero_()
    dcp.load(state, checkpoint_id=folder, process_group=group)
    assert not differing(whole_of(handle.state_dict() | optimizer.state_dict()), saved)
    handle.close()


@pytest.mark.parametrize(("name", "stage"), [("Phi3", 0), ("Phi3", 3), ("GPT2", 1)])
@pytest.mark.second_tier(but=["Phi3-0"])
def test_states_beside_data_parallelism(ranks, tmp_path, name, stage):
    ranks.run(beside_data_parallelism, 4, name, stage, str(tmp_path))
