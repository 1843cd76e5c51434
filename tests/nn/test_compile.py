"""torch.compile(fullgraph=True) of parallel layers gives what eager gives, forward and backward."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from pyruntime import parallelize
from pyruntime.nn import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tests.nn.cases import assert_near


class Mlp(nn.Module):
    """Sequence-parallel norm, merged column, row."""

    def __init__(self, group):
        super().__init__()
        self.norm = RMSNorm(8, group=group)
        self.gate_up = MergedColumnParallelLinear(8, {"gate": 16, "up": 16}, group=group)
        self.down = RowParallelLinear(16, 8, bias=True, group=group)

    def forward(self, x):
        gate, up = self.gate_up(self.norm(x), rows=12).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


class Head(nn.Module):
    """Embedding, gathered column and loss, with whole activations."""

    def __init__(self, group):
        super().__init__()
        self.group = group.group_name
        self.embed = VocabParallelEmbedding(16, 8, group=group, sequence_parallel=False)
        self.mix = ColumnParallelLinear(8, 8, group=group, sequence_parallel=False, gather_output=True)
        self.head = ColumnParallelLinear(8, 16, group=group, sequence_parallel=False)

    def forward(self, ids):
        logits = self.head(self.mix(self.embed(ids)))
        return vocab_parallel_cross_entropy(logits, ids, self.group, vocab_start=self.head.vocab_start)


def plain(group) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return parallelize(model, group, {"0": "column", "2": "row"})


def compiled_equals_eager(group, kind: str, backend: str) -> None:
    torch.manual_seed(0)
    model = {"mlp": Mlp, "head": Head, "plain": plain}[kind](group)
    rows = 12 // group.size() if kind == "mlp" else 12
    x = torch.arange(12) if kind == "head" else torch.randn(rows, 8)
    results = []
    torch.compiler.reset()
    for call in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.zero_grad()
        leaf = x.clone().requires_grad_(x.is_floating_point())
        y = call(leaf)
        y.square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        results.append([y.detach(), *grads, *([leaf.grad] if leaf.grad is not None else [])])
    for eager, compiled in zip(*results, strict=True):
        assert_near(compiled, eager, f"{kind} by {backend}", 1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["mlp", "head", "plain"])
@pytest.mark.second_tier(but=["plain-1"])
def test_one_graph_equals_eager(ranks, kind, world_size):
    ranks.run(compiled_equals_eager, world_size, kind, "aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ to compile for the CPU")
@pytest.mark.parametrize("kind", ["mlp", "plain"])
@pytest.mark.second_tier("mlp")
def test_inductor_equals_eager(ranks, kind):
    ranks.run(compiled_equals_eager, 2, kind, "inductor", timeout=300)
