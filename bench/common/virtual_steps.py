"""Steps of programs that are not ours in virtual time: what bench/clock_torch.py and bench/clock_megatron.py
share. They run on the simulated GPU of pyruntime/clock, and the account is that of our own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyruntime.clock import mirrors
from pyruntime.clock.machine_model import Machine
from pyruntime.clock.mirrors import ProgramPlace, mirrored
from pyruntime.clock.sim_device import core
from pyruntime.clock.simulated_step import Program, axes_of_groups, named_places
from pyruntime.clock.step_account import COMPUTING, Span, of_step
from pyruntime.comm import Runtime


def touch(name: str, *tensors: Tensor) -> None:
    """Launches what reads or writes these tensors."""
    core().touch(name, sum(each.numel() * each.element_size() for each in tensors))


class OneLaunch(torch.autograd.Function):
    """An elementwise function, as torch.compile makes it: one launch forward, which reads its inputs and
    writes a result like the first, and one backward, which reads inputs and gradient, and writes a gradient
    of each."""

    @staticmethod
    def forward(ctx: Any, name: str, *inputs: Tensor) -> Tensor:
        result = torch.empty_like(inputs[0])
        touch(name, *inputs, result)
        ctx.name = name
        ctx.save_for_backward(*inputs)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # a checkpoint gives them once
        gradients = [torch.empty_like(each) for each in inputs]
        touch(f"{ctx.name} backward", gradient, *inputs, *gradients)
        return None, *gradients


def program(
    machine: Machine,
    axes: Mapping[str, int],
    prepare: Callable[[Runtime], tuple[nn.Module, Callable[[], None]]],
    place: ProgramPlace,
    *,
    tokens: int,
    flops: float,
    before: int = 2,
) -> Program:
    """Runs steps in this process, which can do so once, and returns the one that has `before` others before
    it. After `device_build.build`.

    prepare: makes the model and its step, which ends when the device has done it. place: the ranks for which
    this process stands. tokens, flops: of a step of all ranks.
    """
    memory = machine.cluster.memory_bytes - machine.cluster.process_bytes
    clock = mirrors.begin(machine.seconds, memory)
    with mirrored(axes, place, machine.exchanged) as runtime:
        model, step = prepare(runtime)
        marks, spans = [0.0], list[Span]()
        with named_places(clock, model):
            clock.keep_spans(True)
            for _ in range(before + 2):  # the last one's calls show how the one before it ended
                step()
                marks.append(clock.host_time())
                spans += [each for each in clock.take_spans() if each[0] == COMPUTING]
        account = of_step(spans, *marks[before : before + 2], axes_of_groups(runtime))
        used = torch.accelerator.max_memory_allocated()
    return Program(dict(place.at), account, used, 0, tokens, flops, None, frozenset(), ())
