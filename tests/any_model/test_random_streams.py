"""Dropout and sampled tokens of tensor-parallel ranks that were seeded apart."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyruntime
from pyruntime.nn.cut import CutTensor

PLAN = {"*.up": "column", "*.down": "row"}
WIDTH, MIDDLE = 8, 12


class Block(nn.Module):
    """kept: what the inner dropout leaves, in the last call."""

    def __init__(self, inner: float, outer: float, recomputes: bool):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, MIDDLE), nn.Linear(MIDDLE, WIDTH)
        self.inner, self.outer, self.recomputes = nn.Dropout(inner), nn.Dropout(outer), recomputes
        self.kept = []

    def compute(self, x):
        y = self.inner(torch.ones_like(self.up(x)) + 0 * self.up(x))
        self.kept.append((y != 0).detach())
        return x + self.outer(self.down(y * self.up(x).tanh()))

    def forward(self, x):
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)


def made(inner=0.0, outer=0.0, recomputes=False) -> nn.Module:
    torch.manual_seed(5)
    blocks = [Block(inner, outer, recomputes) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH)).double()


def steps(model, seed: int):
    """Norms of three steps, and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    norms = []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    wholes = [p.full_tensor() if isinstance(p, CutTensor) else p.detach() for p in model.parameters()]
    return norms, wholes


def parallel(group, *given):
    return pyruntime.parallelize(made(*given), group, PLAN)


def of_the_stream(group):
    ours = steps(parallel(group, 0.0, 0.3), 100 + dist.get_rank(group))
    plain = steps(made(0.0, 0.3), 100)
    return ours, plain


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.second_tier("2")
def test_dropout_of_what_is_whole_is_the_first_ranks(ranks, world_size):
    for (norms, parameters), (plain_norms, plain) in ranks.run(of_the_stream, world_size):
        assert norms == pytest.approx(plain_norms, rel=1e-9)
        for ours, theirs in zip(parameters, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def of_both(group):
    outcome = {}
    for recomputes in (False, True):
        model = parallel(group, 0.4, 0.3, recomputes)
        outcome[recomputes] = steps(model, 100 + dist.get_rank(group))
        kept = [block.kept for block in model[:3]]
    again = copy.deepcopy(model)
    return outcome, kept, len(list(again.parameters()))


def test_what_is_cut_is_drawn_by_each_rank_and_again_by_checkpoints(ranks):
    (first, kept, count), (other, others, _) = ranks.run(of_both, 2)
    assert count > 0
    for recomputes in (False, True):
        assert first[recomputes][0] == other[recomputes][0]
        for ours, theirs in zip(first[recomputes][1], other[recomputes][1], strict=True):
            assert torch.equal(ours, theirs)
    assert first[False][0] == pytest.approx(first[True][0], rel=1e-12)
    # of each block the masks of its three steps, each drawn twice: forward, and recomputed
    for mine, theirs in zip(kept, others, strict=True):
        steps_of = [mask for mask in mine if not mask.all()]
        assert len(steps_of) == 6
        assert all(torch.equal(steps_of[i], steps_of[i + 1]) for i in (0, 2, 4))
        assert not torch.equal(steps_of[0], steps_of[2]) and not torch.equal(steps_of[2], steps_of[4])
        apart = [mask for mask in theirs if not mask.all()]
        assert not any(torch.equal(a, b) for a, b in zip(steps_of, apart, strict=True))
    assert not torch.equal(kept[0][-1], kept[1][-1])


def sampled(group):
    model = parallel(group).eval()
    torch.manual_seed(100 + dist.get_rank(group))
    tokens = []
    with torch.no_grad():
        for _ in range(4):
            logits = model(torch.ones(2, WIDTH, dtype=torch.float64))
            tokens.append(torch.multinomial(logits.softmax(-1), 1).flatten().tolist())
    return tokens


def test_sampled_tokens_agree(ranks):
    first, *others = ranks.run(sampled, 3)
    assert all(each == first for each in others)
    assert len({tuple(each) for each in first}) > 1
