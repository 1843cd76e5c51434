"""Stages that send rounded activations and gradients train as the whole model with the same roundings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyruntime import comm
from pyruntime.comm.wire import Wire
from pyruntime.pipeline.executor import Pipeline
from pyruntime.pipeline.schedules import make_schedule
from pyruntime.pipeline.split import split_layers
from tests.pipeline.test_executor import loss_of
from tests.transports import take

WIDTH, BATCH, LAYERS, MICRO_BATCHES = 130, 3, 4, 4


class Rounded(nn.Module):
    def __init__(self, wire: str):
        super().__init__()
        self.wire = Wire(wire, WIDTH, torch.float32)

    def forward(self, x):
        return _Rounded.apply(x, self.wire)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire):
        ctx.wire = wire
        return wire.unpacked(wire.packed(x))

    @staticmethod
    def backward(ctx, gradient):
        return ctx.wire.unpacked(ctx.wire.packed(gradient)), None


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(MICRO_BATCHES)]


def by_hand(stages: int, wire: str):
    own, runs = layers(), split_layers([1.0] * LAYERS, stages)
    model = nn.Sequential(*[nn.Sequential(*[own[i] for i in run], Rounded(wire)) for run in runs])
    model[-1][-1] = nn.Identity()
    losses = []
    for index, x in enumerate(batches()):
        loss = loss_of(model(x), index, 0)
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for layer in own for p in layer.parameters()]


def piped(group, transport, kind, wire):
    take(group, transport)
    schedule = make_schedule(kind, group.size(), MICRO_BATCHES)
    own, runs = layers(), split_layers([1.0] * LAYERS, schedule.stages)
    modules = {
        stage: nn.Sequential(*[own[i] for i in runs[stage]]) for stage in schedule.stages_of(group.rank())
    }
    pipeline = Pipeline(schedule, modules, group, shapes=[(BATCH, WIDTH)], dtype=torch.float32, wire=wire)
    before = comm.bytes_read("pp")
    losses = [float(parts[0]) for parts in pipeline.step([[x] for x in batches()], loss_of)]
    taken = comm.bytes_read("pp") - before
    pipeline.close()
    gradients = [p.grad for stage in sorted(modules) for layer in modules[stage] for p in layer.parameters()]
    return losses, gradients, taken


@pytest.mark.parametrize(
    ("world", "transport", "kind", "wire"),
    [
        (2, "symmetric_memory", "1f1b", "fp8"),
        (3, "process_group", "zb-h1", "fp8"),
        (2, "process_group", "gpipe", "bf16"),
    ],
)
def test_it_is_the_whole_model_with_the_roundings_in_it(ranks, world, transport, kind, wire):
    losses, gradients = by_hand(world, wire)
    plain, _ = by_hand(world, "same")
    assert losses != pytest.approx(plain, rel=1e-6)
    results = ranks.run(piped, world, transport, kind, wire)
    assert results[-1][0] == pytest.approx(losses, rel=1e-6)
    found = [each for _, part, _ in results for each in part]
    for one, expected in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)


def test_the_bytes_fall_as_the_values_do(ranks):
    for wire, row in (("same", 4 * WIDTH), ("bf16", 2 * WIDTH), ("fp8", WIDTH + 2)):
        for _, _, taken in ranks.run(piped, 2, "process_group", "1f1b", wire):
            assert taken == MICRO_BATCHES * BATCH * row
