"""When flights begin and end: what has come is taken before it must be, so that ranks may be apart; weights
come when they are read."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime.comm import group_rank, process_group
from pyruntime.data_parallel.axes import Axes, Axis
from pyruntime.data_parallel.reduction import launch
from pyruntime.data_parallel.units import matrix_unit
from tests.transports import take

PLACES, FLIGHTS, BEHIND = 4, 6, 3
TAG = 77


def begin(number, axis, on_reduced) -> None:
    """The next flight of this rank: its part of a unit's gradient."""
    unit = matrix_unit(f"unit {number}", nn.Parameter(torch.zeros(5, 3)), axis.size)
    launch(
        unit,
        torch.float32,
        Axes(axis, Axis(None)),
        lambda chunk, begin: chunk.fill_(10 * number + axis.rank),
        lambda _, gradient: on_reduced(gradient),
    )


def sums_of_ranks_apart(group) -> list[torch.Tensor]:
    """Of every unit's gradient, this rank's rows. Rank 1 begins its fourth flight when rank 0 has begun its
    sixth, which needs the place of the second."""
    take(group, "symmetric_memory")
    axis = Axis.of(DeviceMesh.from_group(group, "cpu"))
    rank, wire = group_rank(group), process_group(group)
    for number in range(PLACES):  # every place gets its memory, for which ranks meet
        begin(number, axis, lambda _: None)
    axis.make_room(0)
    sums: list[torch.Tensor] = []
    for number in range(FLIGHTS):
        if rank == 1 and number in (BEHIND - 1, BEHIND):
            dist.recv(torch.empty(1), group=wire, group_src=0, tag=TAG)
        begin(number, axis, sums.append)
        if rank == 0 and number in (BEHIND - 2, FLIGHTS - 1):  # two have left; all have
            dist.send(torch.ones(1), group=wire, group_dst=1, tag=TAG)
    axis.make_room(0)
    return sums


def test_a_rank_may_be_several_flights_ahead(ranks):
    for sums in ranks.run(sums_of_ranks_apart, 2):
        assert len(sums) == FLIGHTS
        for number, each in enumerate(sums):
            torch.testing.assert_close(each, torch.full((4, 3), 20.0 * number + 1))  # 3 rows and the mark


class ReadsItsWeight(nn.Module):
    """Its forward reads the weight of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return x @ self.inner.weight.T


def current_after_a_step(group, reads) -> list[bool]:
    """Of every unit of a model of three matrices, whether all of it is there when a step returns."""
    take(group, "symmetric_memory")
    torch.manual_seed(0)
    middle = ReadsItsWeight() if reads else nn.Linear(4, 4, bias=False)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), middle, nn.Linear(4, 4, bias=False))
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=2)
    optimizer = handle.adamw()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    current = [each.is_current for each in handle._weights]
    handle.close()
    return current


@pytest.mark.parametrize("reads", [False, True])
def test_a_bucket_comes_under_the_forward_pass_unless_a_weight_of_it_is_read_unannounced(ranks, reads):
    for current in ranks.run(current_after_a_step, 2, reads):
        assert current == [reads]
