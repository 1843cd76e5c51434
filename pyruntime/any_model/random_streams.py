"""Which random numbers the ranks of a tensor-parallel group draw (dropout, sampled tokens).

What is whole is drawn alike on all of them, whatever each was seeded with: where a forward pass begins, ranks
whose generators differ take the first rank's state. What is cut, between a column and a row linear, each rank
draws for itself, from a state that is made of the whole's and of the rank's number; the whole's goes on from
where it was, one number further where a rank has drawn. That is the rule of Megatron-LM (Shoeybi et al. 2019,
section 3) and of DTensor. All of it is read off the generators' states, so checkpointing, which puts them
back, draws the same again.

Training asks nothing of the other ranks where the model draws nothing."""

from __future__ import annotations

import hashlib

import torch
from torch import Generator, Tensor, nn
from torch.compiler import is_compiling

from pyruntime import ops
from pyruntime.comm.devices import generators_of
from pyruntime.nn.parameters import TensorGroup


class RandomStreams:
    """Of one model that parallelize() has cut.

    draws: whether it draws random numbers in training, which its first call in training finds out."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self.draws = False
        self._is_on = False  # within forward passes in training, and the backward passes that follow
        self._device = torch.device("cpu")
        self._whole: list[Tensor] = []  # the states outside of the region
        self._own: list[Tensor] = []  # with which this rank began in it

    def begin_forward(self, model: nn.Module, _args: tuple) -> None:
        """A forward pre-hook of the model."""
        self._is_on = model.training and self.draws
        if is_compiling() or (model.training and not self.draws):
            return
        self._device = device = next(model.parameters()).device
        states = [generator.get_state() for generator in self._generators]
        mine = torch.tensor([float(_number_of(states) % 2**52)], dtype=torch.float64, device=device)
        for axis in self._group.axes:
            if axis.size > 1 and len(set(ops.all_gather_stats(mine, axis.name).flatten().tolist())) > 1:
                self._take_first(axis.name, device)

    @property
    def _generators(self) -> list[Generator]:
        return generators_of(self._device)

    def _take_first(self, group: str, device: torch.device) -> None:
        for generator in self._generators:
            state = generator.get_state()
            every = ops.all_gather_stats(state.to(device, torch.float64), group)
            generator.set_state(every[0].to("cpu", state.dtype))

    def enter(self) -> None:
        """A column linear has been called: what follows is cut. Several may open one region."""
        if not self._is_on or is_compiling() or self._is_inside():
            return
        self._whole = [generator.get_state() for generator in self._generators]
        place = [axis.rank for axis in self._group.axes]
        for generator in self._generators:
            generator.manual_seed(_number_of(self._whole, *place))
        self._own = [generator.get_state() for generator in self._generators]

    def leave(self) -> None:
        """A row linear is called."""
        if not self._is_on or is_compiling() or not self._is_inside():
            return
        for generator, whole, own in zip(self._generators, self._whole, self._own, strict=True):
            has_drawn = not torch.equal(generator.get_state(), own)
            generator.set_state(whole)
            if has_drawn:
                torch.rand((), generator=generator, device=generator.device)
        self._whole = []

    def _is_inside(self) -> bool:
        """Whether the generators go on from where enter() has left them: a pass that fails, or a
        checkpoint's second forward pass that has all it needs, does not come to the row linear."""
        if not self._whole:
            return False
        place = [axis.rank for axis in self._group.axes]
        return self._generators[0].initial_seed() == _number_of(self._whole, *place)


def _number_of(states: list[Tensor], *place: int) -> int:
    """63 bits of states and a place."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8)
    for state in states:
        digest.update(state.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
