"""Causal slices through layers with experts: what whole sequences give, on every folding of four ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pyruntime.comm import CommError, Runtime, set_deadline
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
@pytest.mark.second_tier(
    but=["dp4-2-mixtral-symmetric_memory-options0", "dp2 tp2-4-qwen2_moe-process_group-options6"]
)
def test_slices_give_what_whole_sequences_give(ranks, folding, ep, family, transport, options):
    ranks.run(compare, 4, folding, ep, family, transport, options)


def fault_case(_group, fault: str):
    """(type, message) of this rank's error; rank 1 fails while rows of another slice are on their way."""
    runtime = Runtime(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), ep=2)
    model = Llama(FAMILIES["mixtral"], runtime.tp, experts=runtime.ep, slices=2)
    ids = torch.zeros(1, 24, dtype=torch.long)
    model(ids, ids).backward()
    set_deadline(runtime.ep.group, 1.5)

    def fail(*_):
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3.0)

    if runtime.dp.rank == 1:
        model.layer(1).out.register_forward_pre_hook(fail)
    try:
        model(ids, ids).backward()
    except CommError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("fault", "error"), [("killed", "PeerLost"), ("late", "CommTimeout")])
@pytest.mark.second_tier(but=["killed-PeerLost"])
def test_a_fault_between_two_steps_ends_in_a_named_error(ranks, fault, error):
    outcomes = ranks.launch(fault_case, 2, fault)
    found, message = outcomes[0].value
    assert found == error and "rank 1" in message, message


def refusals(_group) -> list[str]:
    runtime, found = runtime_of("dp2 tp2", 4), []
    for family, options in (
        ("mixtral", {"slices": 3}),
        ("qwen2_moe", {"experts": runtime.tp}),
        ("deepseek_v3", {}),
        ("mixtral", {"group": runtime_of("dp4", 1).tp, "experts": runtime_of("dp4", 1).ep}),
    ):
        given = {"group": runtime.tp, "experts": runtime.ep, "slices": 2, "device": "meta"} | options
        try:
            Llama(FAMILIES[family], **given)
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_slices_of_experts_do_not_know_is_refused(ranks):
    assert ranks.run(refusals, 4)[0] == [
        "slices=3 do not support experts, over tp=2 ranks of which at most 2 are possible; leave it at 1.",
        "slices=2 do not support a shared expert, unless ep puts the other experts over other ranks than tp; "
        "leave it at 1.",
        "slices=2 do not support latent attention; leave it at 1.",
        "slices=2 hide nothing without tensor parallelism or experts over several ranks; leave it at 1.",
    ]
