"""No schedule's messages, and no ring's, make devices of several hosts wait for each other for ever."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from pyruntime.comm import channel, ring
from pyruntime.context import block_attention, ring_passes
from pyruntime.context.mask import mask_of
from pyruntime.pipeline import executor
from pyruntime.pipeline.schedules import KINDS, SLICED_KINDS, make_schedule
from tests.device.order import Begin, Deadlock, Edge, Message, Program, Recorder, run

GROUP = "a group"


def of_edge(edge: Edge) -> Edge:
    """The product's: each direction of two ranks has a process group of its own."""
    return edge


def of_pair(edge: Edge) -> frozenset[int]:
    return frozenset(edge)


def of_all(edge: Edge) -> int:
    return 0


class Through(nn.Module):
    """A stage that returns what it gets."""

    def forward(self, x, carry=None):
        return x


def step_of(schedule, rank: int, monkeypatch) -> Program:
    """What a rank asks for in a step, a validation and another step."""
    recorder = Recorder(rank)
    for module in (channel, executor):
        monkeypatch.setattr(module, "group_rank", lambda group: rank)
    monkeypatch.setattr(channel, "companion", recorder.companion)
    monkeypatch.setattr(channel, "crosses_hosts", lambda group, device: True)
    monkeypatch.setattr(executor, "group_size", lambda group: schedule.ranks)
    stages = {stage: Through() for stage in schedule.stages_of(rank)}
    shapes = [(1, 1)] * schedule.slices
    pipeline = executor.Pipeline(
        schedule, stages, GROUP, shapes=shapes, dtype=torch.float32, device=recorder.device
    )
    inputs = [[torch.zeros(1, 1)] * schedule.slices] * schedule.micro_batches

    def loss(y, micro_batch, part):
        return y.sum()

    pipeline.step(inputs, loss)
    with torch.no_grad():
        pipeline.evaluate([[torch.zeros(1, 1)] * schedule.slices], loss)
    pipeline.step(inputs, loss)
    return recorder.program


def programs_of(schedule, monkeypatch) -> list[Program]:
    executor.check(schedule)
    monkeypatch.setattr(executor, "check", lambda schedule: None)
    programs = [step_of(schedule, rank, monkeypatch) for rank in range(schedule.ranks)]
    monkeypatch.undo()
    return programs


def schedules(ranks: int):
    """All kinds, with few micro-batches and many."""
    for kind, micro_batches in product(KINDS, sorted({1, ranks - 1, ranks, 2 * ranks + 2})):
        shapes = {"interleaved": [{"virtual": 2}, {"virtual": 3}]}.get(kind, [{}])
        if kind in SLICED_KINDS:
            shapes = [{"slices": 1}, {"slices": 3}]
        for shape in shapes:
            count = micro_batches * ranks if kind == "interleaved" else micro_batches
            if kind != "interleaved" or micro_batches < 3:
                yield make_schedule(kind, ranks, count, **shape)


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.second_tier(but=["2", "3"])
def test_no_schedule_deadlocks(ranks, monkeypatch):
    for schedule in schedules(ranks):
        edges = {
            (rank, schedule.route.peer(action))
            for rank, actions in enumerate(schedule.actions)
            for action in actions
            if action.kind.is_send
        }
        sends = sum(action.kind.is_send for actions in schedule.actions for action in actions)
        assert run(programs_of(schedule, monkeypatch), of_edge) > 2 * sends + 4 * len(edges)


@pytest.mark.parametrize("communicator", [of_pair, of_all])
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v"])
def test_both_directions_in_one_communicator_deadlock(kind, communicator, monkeypatch):
    programs = programs_of(make_schedule(kind, 2, 4), monkeypatch)
    with pytest.raises(Deadlock, match=r"rank 0 waits for message \d+ from rank"):
        run(programs, communicator)


def test_messages_that_are_received_in_another_order_deadlock(monkeypatch):
    programs = programs_of(make_schedule("1f1b", 2, 4), monkeypatch)
    run(programs, of_edge)
    # The first step's, after those with which the ranks meet.
    first, second = (programs[1].index(Begin(Message((0, 1), number))) for number in (4, 5))
    programs[1][first], programs[1][second] = programs[1][second], programs[1][first]
    with pytest.raises(Deadlock, match="rank 1 waits for message 4 from rank 0 to rank 1"):
        run(programs, of_edge)


def attention_of(rank: int, ranks: int, layout: str, monkeypatch) -> Program:
    """What a rank asks for in two layers of ring attention, forward and backward."""
    recorder = Recorder(rank)
    monkeypatch.setattr(ring, "group_rank", lambda group: rank)
    monkeypatch.setattr(ring, "group_size", lambda group: ranks)
    monkeypatch.setattr(ring, "companion", recorder.companion)
    share = 4
    q, k, v = (torch.zeros(1, share, 1, 8) for _ in range(3))
    mask = mask_of(layout, share * ranks, ranks, rank, True, None, share, q.device)
    done = [ring_passes.ring_forward(q, k, v, GROUP, 1, mask, 1.0, "same") for _ in range(2)]
    for out, lse in reversed(done):
        backward = block_attention.Backward(out, q, lse, 1.0, out=out)
        ring_passes.ring_backward(backward, k, v, GROUP, 1, mask, "same")
    return recorder.program


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.second_tier(but=["2-zigzag", "4-zigzag"])
def test_no_ring_deadlocks(ranks, layout, monkeypatch):
    programs = [attention_of(rank, ranks, layout, monkeypatch) for rank in range(ranks)]
    assert run(programs, of_edge) >= 2 * 2 * ranks
    if ranks == 2:
        with pytest.raises(Deadlock):
            run(programs, of_pair)
