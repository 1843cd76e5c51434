"""When flights begin and end: what has come is taken before it must be, so that ranks may be apart; weights
come when they are read."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime.comm import group_rank, process_group
from pyruntime.data_parallel import bucket_sum
from pyruntime.data_parallel.axes import Axes, FlightAxis
from pyruntime.data_parallel.bucket_sum import launch
from pyruntime.data_parallel.buckets import Bucket, cut_into_buckets
from tests.data_parallel.compression.cases import copied_from
from tests.transports import take

PLACES, FLIGHTS, BEHIND = 4, 6, 3
TAG = 77


def begin(number, axis, on_reduced) -> None:
    """The next flight of this rank: its part of a bucket's gradient."""
    bucket = Bucket([(f"bucket {number}", nn.Parameter(torch.zeros(5, 3)))], axis.size)
    launch(
        bucket,
        torch.float32,
        Axes(axis, FlightAxis(None), FlightAxis(None)),
        lambda chunk, *_: chunk.fill_(10 * number + axis.rank),
        lambda _, gradient: on_reduced(gradient),
    )


def sums_of_ranks_apart(group) -> list[torch.Tensor]:
    """Of every bucket's gradient, this rank's rows. Rank 1 begins its fourth flight when rank 0 has begun its
    sixth, which needs the place of the second."""
    take(group, "symmetric_memory")
    axis = FlightAxis.of(DeviceMesh.from_group(group, "cpu"))
    rank, wire = group_rank(group), process_group(group)
    for number in range(PLACES):  # every place gets its memory, for which ranks meet
        begin(number, axis, lambda _: None)
    axis.complete_all()
    sums: list[torch.Tensor] = []
    for number in range(FLIGHTS):
        if rank == 1 and number in (BEHIND - 1, BEHIND):
            dist.recv(torch.empty(1), group=wire, group_src=0, tag=TAG)
        begin(number, axis, sums.append)
        if rank == 0 and number in (BEHIND - 2, FLIGHTS - 1):  # two have left; all have
            dist.send(torch.ones(1), group=wire, group_dst=1, tag=TAG)
    axis.complete_all()
    return sums


def test_a_rank_may_be_several_flights_ahead(ranks):
    for sums in ranks.run(sums_of_ranks_apart, 2):
        assert len(sums) == FLIGHTS
        for number, each in enumerate(sums):
            torch.testing.assert_close(each, torch.full((4, 3), 20.0 * number + 1))  # 3 rows and the mark


def sums_in_pieces(group, most_bytes) -> tuple[int, list[torch.Tensor]]:
    """The number of flights of a bucket of two parameters, and this rank's rows of the sum."""
    take(group, "symmetric_memory")
    axis = FlightAxis.of(DeviceMesh.from_group(group, "cpu"))
    named = [(name, nn.Parameter(torch.zeros(rows))) for name, rows in (("a", 7), ("b", 12))]
    bucket, found = Bucket(named, axis.size), []
    torch.manual_seed(axis.rank)
    whole = torch.randn(bucket.lines, 1)
    with mock.patch.object(bucket_sum, "most_bytes", lambda _: most_bytes):
        flights = len(bucket_sum.pieces_of(bucket, torch.float32))
        launch(
            bucket,
            torch.float32,
            Axes(axis, FlightAxis(None), FlightAxis(None)),
            copied_from(whole, bucket),
            lambda _, gradient: found.append(gradient),
        )
        axis.complete_all()
    (gradient,) = found
    return flights, gradient


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_large_gradient_is_summed_in_several_flights_to_the_same_bits(ranks, world_size):
    whole = ranks.run(sums_in_pieces, world_size, None)
    for most_bytes, flights in ((48, (2, 3)), (8, (9, 12))):
        pieces = ranks.run(sums_in_pieces, world_size, most_bytes)
        for (one, expected), (count, found) in zip(whole, pieces, strict=True):
            assert one == 1 and flights[0] <= count <= flights[1]
            assert torch.equal(found, expected)


class Reads(nn.Module):
    """Its forward reads the weight of a module, and calls it or not."""

    def __init__(self, calls: bool):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4, bias=False), calls

    def forward(self, x):
        return self.inner(x) if self.calls else x @ self.inner.weight.T


def sharded(group, stage, bucket_bytes=None, calls=True):
    """Three matrices in a row."""
    take(group, "symmetric_memory")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Reads(calls), nn.Linear(4, 4, bias=False))
    mesh = DeviceMesh.from_group(group, "cpu")
    handle = pyruntime.shard(model, mesh, stage=stage, bucket_bytes=bucket_bytes)
    return model, handle, handle.adamw()


def train(model, optimizer) -> None:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def current_after_a_step(group, callers) -> list[bool]:
    """Of every bucket, whether all of it is there when a step returns, where only the ranks `callers` call
    the module of a weight that all read."""
    model, handle, optimizer = sharded(group, stage=2, calls=group_rank(group) in callers)
    train(model, optimizer)
    current = [each.is_current for each in handle._weights]
    handle.close()
    return current


@pytest.mark.parametrize("callers", [[0, 1], [0], []])
def test_a_bucket_comes_under_the_forward_pass_if_all_ranks_announce_all_of_it(ranks, callers):
    for current in ranks.run(current_after_a_step, 2, callers):
        assert current == [len(callers) < 2]


def weights_after_loading(group, stage, bucket_bytes, steps_before) -> tuple[set[float], list[torch.Tensor]]:
    """Values in the weights after ones have been loaded, and the weights after the step that follows."""
    model, handle, optimizer = sharded(group, stage, bucket_bytes)
    for _ in range(steps_before):
        train(model, optimizer)
    for tensor in handle.state_dict().values():
        tensor.to_local().fill_(1.0)
    handle.loaded()
    values = {value for p in model.parameters() for value in p.flatten().tolist()}
    train(model, optimizer)
    handle.close()
    return values, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(("stage", "bucket_bytes"), [(2, None), (2, 1), (3, 1)])
def test_what_is_loaded_replaces_what_is_under_way(ranks, stage, bucket_bytes, steps_before):
    (values, after), (others_values, others) = ranks.run(
        weights_after_loading, 2, stage, bucket_bytes, steps_before
    )
    assert values == others_values == {1.0}
    for one, other in zip(after, others, strict=True):
        assert torch.equal(one, other) and (one != 1.0).any()


def test_a_matrix_without_rows_is_a_bucket():
    (bucket,) = cut_into_buckets([("none", nn.Parameter(torch.empty(0, 4)))], segments=2, bucket_bytes=8)
    assert bucket.lines == 2  # the marks
