"""verify(): one forward and backward against the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pyruntime
from pyruntime.any_model.verify import VerificationError
from pyruntime.nn import RowParallelLinear
from pyruntime.nn.module import LayerHook
from tests.any_model.test_regions import PLAN, Gain
from tests.ranks import without_processes

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))


def models(group) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    whole = nn.Sequential(Gain(), Gain())
    return pyruntime.parallelize(copy.deepcopy(whole), group, PLAN), whole


def the_same(group) -> None:
    model, whole = models(group)
    for batch in (X, (X,), {"input": X}):
        pyruntime.verify(model, whole, batch)
    assert all(p.grad is None for m in (model, whole) for p in m.parameters()), "gradients are left alone"


def wrong_gradient(group) -> str:
    """What a region without its sums leaves: the loss is right, and every rank has its own gradient."""
    model, whole = models(group)
    model(X)
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.label.startswith("1."):
            module.hook = LayerHook()
    with pytest.raises(VerificationError) as caught:
        pyruntime.verify(model, whole, X)
    return str(caught.value)


def wrong_output(group) -> str:
    """One rank alone has it wrong."""
    model, whole = models(group)
    if group.rank() == 1:
        whole[0].down.bias.data[3] += 1
    with pytest.raises(VerificationError) as caught:
        pyruntime.verify(model, whole, X)
    return str(caught.value)


def test_a_parallel_model_is_its_reference(ranks):
    for world_size in (1, 2, 3):
        ranks.run(the_same, world_size)


def test_a_wrong_gradient_is_named(ranks):
    for message in ranks.run(wrong_gradient, 2):
        assert "the gradient of 1.gain is " in message


def test_every_rank_hears_of_what_one_has_found(ranks):
    first, second = ranks.run(wrong_output, 2)
    assert "rank 1 has found a difference" in without_processes(first)
    assert "the output is " in second
