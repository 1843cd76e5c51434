"""ZeRO 3 gathers weights in the order in which passes read them, and none in vain."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import pyruntime
from pyruntime.data_parallel.bucket_weights import BucketWeights
from tests.transports import take

BLOCKS = 3


class Blocks(nn.Module):
    """Blocks of two linears, which may be recomputed, and a head. A block's backward begins with what its
    last Tanh has saved, so then the whole block is recomputed before a linear's backward."""

    def __init__(self, recomputes: bool):
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh())
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


class Loop(nn.Module):
    """Linears that a forward pass uses twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))

    def forward(self, x):
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x


def gathered(group, model, micro_batches) -> list[list[str]]:
    """The weights whose gathers each step began, in order."""
    take(group, "symmetric_memory")
    torch.manual_seed(0)
    model = model()
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=3, bucket_bytes=1)
    optimizer, begin, steps = handle.adamw(), BucketWeights._begin, []

    def begun(self, rows):
        steps[-1].append(self.bucket.name.removesuffix(".weight"))
        begin(self, rows)

    with mock.patch.object(BucketWeights, "_begin", begun):
        for _ in range(3):
            steps.append([])
            for number in range(micro_batches):
                with handle.accumulate() if number + 1 < micro_batches else mock.MagicMock():
                    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
            optimizer.step()
    handle.close()
    return steps


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_pass_gathers_each_weight_once_and_in_its_order(ranks, recomputes, micro_batches):
    numbers = [(block, linear) for block in range(BLOCKS) for linear in (0, 2)]
    forward = [f"blocks.{block}.{linear}" for block, linear in numbers]
    if recomputes:
        numbers.sort(key=lambda number: -number[0])
    else:
        numbers.reverse()
    backward = [f"blocks.{block}.{linear}" for block, linear in numbers]
    first, rest = [*forward[3:], "head", *backward], [*forward[1:], "head", *backward]
    for _, _, third in ranks.run(gathered, 2, partial(Blocks, recomputes), micro_batches):
        # The weight that a backward pass read last is still whole; the last gathers are for the next step.
        assert third == [*first, *rest * (micro_batches - 1), *forward[:3]]


def test_a_backward_pass_that_reads_weights_twice_gathers_them_twice(ranks):
    names = [f"blocks.{number}" for number in range(6)]
    backward = [*names[4::-1], *names[::-1]]  # the last one is still whole
    for _, _, third in ranks.run(gathered, 2, Loop, 1):
        assert third[-len(backward) - 3 :] == [*backward, *names[:3]]
