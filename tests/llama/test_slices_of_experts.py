"""Causal slices through layers with experts: what whole sequences give, on every folding of four ranks."""

from __future__ import annotations

import pytest
import torch

from pyruntime.llama import Llama
from pyruntime.llama.slices import MOST, SliceAction, order
from pyruntime.nn import RouterLosses
from tests.llama.test_mixture import FAMILIES
from tests.llama.test_slices import SLOTS
from tests.nn.test_expert_groups import runtime_of
from tests.transports import take

BATCH, SEQ = 2, 23


@pytest.mark.parametrize("slices", range(2, MOST + 1))
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_no_flight_of_experts_begins_before_the_one_four_before_is_over(layers, slices):
    """In both directions: a table, rows and sums; dY, x, sums and gradients of weights."""
    actions = list(order(2 * layers, slices, attention_travels=False))
    assert len(actions) == len(set(actions)) == 4 * 2 * layers * slices
    of_experts = [action for action in actions if action.half % 2 == 1]
    forward = {"begin": ("", "ab"), "scatter": ("ab", "s"), "finish": ("s", "")}
    backward = {"finish": ("", "ab"), "scatter": ("ab", "st"), "begin": ("st", "")}
    for way, steps in ((of_experts, forward), (of_experts[::-1], backward)):
        begun, over = [], set()
        for action in way:
            ends, begins = steps.get(action.kind, ("", ""))
            over |= {(action.half, action.part, flight) for flight in ends}
            for flight in begins:
                begun.append((action.half, action.part, flight))
                assert len(begun) <= SLOTS or begun[-1 - SLOTS] in over
        assert over == set(begun)


@pytest.mark.parametrize("slices", range(2, MOST + 1))
def test_rows_travel_behind_attention_or_experts_of_another_slice(slices):
    """But those of the last slice that has no partner."""
    actions = list(order(8, slices, attention_travels=False))
    at = {action: index for index, action in enumerate(actions)}
    for action in actions:
        following = {"begin": "scatter", "scatter": "finish"}.get(action.kind)
        if action.half % 2 == 0 or following is None or action.half == 7:
            continue
        end = at[SliceAction(following, action.half, action.part)]
        between = {other.part for other in actions[at[action] + 1 : end] if other.kind == "scatter"}
        assert between - {action.part}


def passed(runtime, family: str, **options) -> dict[str, torch.Tensor]:
    """Logits, loss, loads of routers and gradients of this rank, for a batch of its data-parallel rank."""
    axes = [axis for axis in (runtime.tp, runtime.replicas) if axis.size > 1]
    losses = RouterLosses(balance=0.3, z=0.1, groups=[axis.group for axis in axes])
    losses.shares = runtime.replicas.size
    model = Llama(
        FAMILIES[family], runtime.tp, experts=runtime.ep, seed=3, router_losses=losses,
        **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(runtime.replicas.rank)
    ids, labels = torch.randint(101, (2, BATCH, SEQ), generator=generator).unbind()
    with torch.no_grad():
        logits = model(ids)
    loss = model(ids, labels)
    loss.backward()
    found = {"logits": logits, "loss": loss.detach()}
    for name, module in model.named_modules():
        if hasattr(module, "take_load"):
            found[f"{name} load"] = module.take_load()
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(_group, folding: str, ep: int, family: str, transport: str, options: dict) -> None:
    """With whole sequences that are kept; and twice, with the same bits."""
    runtime = runtime_of(folding, ep)
    axes = [axis.group for axis in (runtime.tp, runtime.ep) if axis.size > 1]
    for axis in axes:
        take(axis, transport)
    exact = passed(runtime, family)
    first, second = (passed(runtime, family, **options) for _ in "12")
    for axis in axes:
        take(axis, "symmetric_memory")
    assert exact.keys() == first.keys()
    for name, value in exact.items():
        largest = max(float(value.abs().max()), 1e-6)
        assert float((first[name] - value).abs().max()) <= 2e-5 * largest, name
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize(
    ("folding", "ep", "family", "transport", "options"),
    [
        ("dp4", 2, "mixtral", "symmetric_memory", {"slices": 2}),
        ("dp4", 4, "qwen3_moe", "process_group", {"slices": 3}),
        ("dp4", 4, "qwen2_moe", "symmetric_memory", {"slices": 2, "recompute": "selective"}),
        ("dp4", 2, "qwen2_moe", "symmetric_memory", {"slices": 4, "recompute": "full"}),
        ("dp4", 2, "dots1", "hierarchical", {"slices": 2}),
        ("dp2 tp2", 4, "qwen3_moe", "symmetric_memory", {"slices": 2}),
        ("dp2 tp2", 4, "qwen2_moe", "process_group", {"slices": 2, "recompute": "selective"}),
        ("dp2 tp2", 1, "qwen2_moe", "symmetric_memory", {"slices": 2}),
        ("dp2 tp2", 4, "dots1", "symmetric_memory", {"slices": 2, "recompute": "full"}),
        ("dp2 tp2", 2, "mixtral", "symmetric_memory", {"slices": 2}),
        ("dp2 tp2", 2, "qwen3_moe", "process_group", {"slices": 2, "recompute": "selective"}),
        ("dp2 tp2", 2, "qwen3", "symmetric_memory", {"slices": 4}),
    ],
)
def test_slices_give_what_whole_sequences_give(ranks, folding, ep, family, transport, options):
    ranks.run(compare, 4, folding, ep, family, transport, options)
