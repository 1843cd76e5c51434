"""Controls the random numbers that ranks of a tensor-parallel group draw (dropout, sampled tokens).

For whole activations all ranks draw the same numbers, whatever their seeds: at the start of a forward pass,
ranks whose generators differ take the first rank's state. For cut activations, between a column and a row
linear, each rank draws its own numbers, from a state made of the common state and the rank's number. Behind
the row linear the common state continues from where it was, one number further if a rank has drawn. This is
the rule of Megatron-LM (Shoeybi et al. 2019, section 3) and of DTensor. Everything follows from the
generators' states, so checkpointing, which restores them, draws the same numbers again.

In training, a model that draws nothing exchanges nothing for this."""

from __future__ import annotations

import hashlib

import torch
from torch import Generator, Tensor, nn
from torch.compiler import is_compiling

from pyruntime import ops
from pyruntime.comm.devices import generators_of
from pyruntime.nn.parameters import TensorGroup


class RandomStreams:
    """The random numbers of one model that parallelize() has cut.

    draws: whether the model draws random numbers in training; its first call in training finds out."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self.draws = False
        self._is_on = False  # within forward passes in training, and the backward passes that follow
        self._device = torch.device("cpu")
        self._whole: list[Tensor] = []  # the common states, outside of the region
        self._own: list[Tensor] = []  # this rank's states at the start of the region

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
        """Switches to this rank's own numbers when a column linear is called. Several may open one region."""
        if not self._is_on or is_compiling() or self._is_inside():
            return
        self._whole = [generator.get_state() for generator in self._generators]
        place = [axis.rank for axis in self._group.axes]
        for generator in self._generators:
            generator.manual_seed(_number_of(self._whole, *place))
        self._own = [generator.get_state() for generator in self._generators]

    def leave(self) -> None:
        """Switches back to the common numbers when a row linear is called."""
        if not self._is_on or is_compiling() or not self._is_inside():
            return
        for generator, whole, own in zip(self._generators, self._whole, self._own, strict=True):
            has_drawn = not torch.equal(generator.get_state(), own)
            generator.set_state(whole)
            if has_drawn:
                torch.rand((), generator=generator, device=generator.device)
        self._whole = []

    def _is_inside(self) -> bool:
        """Whether the generators still continue from the state that enter() set. A pass that fails, or a
        checkpoint's second forward pass that stops early, does not reach the row linear."""
        if not self._whole:
            return False
        place = [axis.rank for axis in self._group.axes]
        return self._generators[0].initial_seed() == _number_of(self._whole, *place)


def _number_of(states: list[Tensor], *place: int) -> int:
    """Hashes states and a place into 63 bits."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8)
    for state in states:
        digest.update(state.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
