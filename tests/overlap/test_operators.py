"""Which operators a ledger is told of, and under which layer, in one process without ranks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import pyruntime
from pyruntime.overlap import Entry, EntryKind, Ledger


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x


def operators(ledger: Ledger) -> list[Entry]:
    return [entry for entry in ledger.stretch.entries if entry.kind is EntryKind.OP]


def test_every_operator_has_its_layer_forward_and_backward():
    model, x = Model(), torch.randn(3, 8)
    with pyruntime.ledger() as ledger:
        model(x).sum().backward()
    found = {(entry.name, entry.layer) for entry in operators(ledger)}
    for layer in ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"):
        assert ("aten::linear", layer) in found
        assert ("AddmmBackward0", layer) in found
    assert ("ReluBackward0", "blocks.1") in found
    assert ("AccumulateGrad", "") in found


def test_operators_follow_each_other_and_a_node_lasts_until_the_next():
    model, x = Model(), torch.randn(3, 8)
    with pyruntime.ledger() as ledger:
        model(x).sum().backward()
    found = operators(ledger)
    assert all(entry.begin <= entry.end for entry in found)
    assert all(one.end <= next_one.begin for one, next_one in itertools.pairwise(found))
    nodes = [entry for entry in found if "Backward" in entry.name or entry.name == "AccumulateGrad"]
    assert len(nodes) > 10
    assert all(one.end == next_one.begin for one, next_one in itertools.pairwise(nodes))


def test_what_is_done_in_a_backward_pass_is_in_the_account_of_its_nodes():
    model, x = Model(), torch.randn(3, 8)
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(0.05))
    with pyruntime.ledger() as ledger:
        model(x).sum().backward()
        time.sleep(0.05)  # is none of its
    account = ledger.account()
    assert 0.05 <= account.computing_s < account.seconds - 0.05
    (slow,) = [entry for entry in operators(ledger) if entry.seconds > 0.04]
    assert slow.name == "AccumulateGrad"


def test_operators_after_a_backward_pass_are_told_of_again():
    model, x = Model(), torch.randn(3, 8)
    with pyruntime.ledger() as ledger:
        for _ in range(2):
            model(x).sum().backward()
            x.neg()
    names = [entry.name for entry in operators(ledger)]
    assert names.count("aten::neg") == 2
    assert names.count("aten::linear") == 8


def test_a_backward_pass_that_fails_ends_with_the_next_module():
    model, x = Model(), torch.randn(3, 8)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a hook that fails")

    hook = model.blocks[0].up.weight.register_hook(fail)
    with pyruntime.ledger() as ledger:
        with pytest.raises(ValueError, match="a hook that fails"):
            model(x).sum().backward()
        hook.remove()
        ledger.take()
        model(x).sum().backward()
        x.neg()
    found = operators(ledger)
    names = [entry.name for entry in found]
    assert names.count("aten::linear") == 4
    assert names.count("aten::neg") == 1
    assert {("AddmmBackward0", "blocks.0.up"), ("aten::linear", "blocks.0.up")} <= {
        (entry.name, entry.layer) for entry in found
    }


def test_what_is_recomputed_and_its_backward_pass_have_their_layers():
    model, x = Model(), torch.randn(3, 8, requires_grad=True)
    with pyruntime.ledger() as ledger:
        model(x, recompute=True).sum().backward()
        x.neg()
    found = {(entry.name, entry.layer) for entry in operators(ledger)}
    for layer in ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"):
        assert ("AddmmBackward0", layer) in found
    assert ("aten::neg", "") in found


def test_a_profiler_is_told_of_all_operators_beside_a_ledger():
    """The ledger asks not to be told itself; who else listens hears the same as without one."""
    model, x = Model(), torch.randn(3, 8)

    def heard() -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            model(x).sum().backward()
        return sorted(event.name for event in found.events())

    model(x).sum().backward()
    without = heard()
    with pyruntime.ledger() as ledger:
        beside = heard()
    assert beside == without
    assert "autograd::engine::evaluate_function: AddmmBackward0" in beside
    assert any(entry.name == "aten::linear" for entry in operators(ledger))


def test_a_second_ledger_knows_nothing_of_the_layers_of_the_first():
    model, x = Model(), torch.randn(3, 8)
    with pyruntime.ledger():
        model(x).sum().backward()
    loss = model(x).sum()
    with pyruntime.ledger() as ledger:
        loss.backward()
    assert {entry.layer for entry in operators(ledger)} == {""}


def test_modules_are_called_as_before_once_the_ledger_is_off():
    before = nn.Module.__call__
    with pytest.raises(ValueError, match="inside"), pyruntime.ledger():
        assert nn.Module.__call__ is not before
        raise ValueError("inside")
    assert nn.Module.__call__ is before
