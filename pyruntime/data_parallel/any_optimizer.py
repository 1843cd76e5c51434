"""Runs torch's optimizers, and others that are written like these, over this rank's rows.

Rows that are cut are CutTensors (nn/cut.py). An update that works element by element is that of the whole
weight, a norm is that of the whole weight, and what mixes elements otherwise is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.optimizer import ShardedOptimizer, Shards
from pyruntime.data_parallel.states import as_dtensor, part_of
from pyruntime.data_parallel.update import AfterTheNorm, Own, PartState
from pyruntime.nn.cut import cut_like
from pyruntime.nn.layout import BlocksDTensor
from pyruntime.nn.optimizer_states import refuse_mixing
from pyruntime.nn.parameters import Part


@dataclass(frozen=True)
class RowsLayout:
    """The layout of this rank's rows of one part, as a CutTensor has it. group: its name in words."""

    state: PartState
    cut_over: tuple[str, ...]
    parts: tuple[Part, ...]
    group: Any
    dim: int = 0
    dim_y: None = None

    @classmethod
    def of(cls, state: PartState) -> RowsLayout:
        shard = state.axes.shard
        over = (*state.tp_groups, *((shard.name,) if shard.size > 1 else ()))
        whole = as_dtensor(state.rows, state.parameter, state.part, state.axes)
        part = Part(state.part.key, tuple(whole.shape))
        return cls(state, over, (part,), _Words(over))

    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.state.rows.shape)

    def to_dtensors(self, local: Tensor) -> dict[str, Tensor]:
        return {self.parts[0].key: as_dtensor(local, self.state.parameter, self.state.part, self.state.axes)}

    def gather_parts(self, wholes: Mapping[str, Tensor]) -> Tensor:
        """Returns this rank's rows of a whole tensor, or of a DTensor."""
        whole = wholes[self.parts[0].key]
        if isinstance(whole, DTensor):
            own = as_dtensor(self.state.rows, self.state.parameter, self.state.part, self.state.axes)
            if isinstance(own, DTensor) and _is_cut_like(own, whole):
                return whole._local_tensor.detach()
            whole = whole.full_tensor()
        layout = getattr(self.state.parameter, "tp_layout", None)
        if layout is not None:
            whole = layout.local_part(part_of(layout, self.state.part.key), whole)
        return self.rows_of(whole)

    def rows_of(self, parameter: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor with the shape of the part, as tensor parallelism cuts it."""
        first, count = self.state.first, self.state.rows.numel()
        return parameter.reshape(-1)[first : first + count].view(self.state.rows.shape)


def _is_cut_like(own: DTensor, other: DTensor) -> bool:
    """Whether this rank holds the same elements of both."""
    if isinstance(own, BlocksDTensor) and isinstance(other, BlocksDTensor):
        return own.is_cut_like(other)
    return type(own) is type(other) and (own.device_mesh, own.placements) == (
        other.device_mesh,
        other.placements,
    )


@dataclass(frozen=True)
class _Words:
    over: tuple[str, ...]

    @property
    def name(self) -> str:
        return " and ".join(self.over)

    def __str__(self) -> str:
        return " and ".join(map(repr, self.over))


class TorchUpdate(AfterTheNorm):
    """A torch optimizer whose parameters are the masters of `states`, or the rows if there is no master."""

    def __init__(self, kind: type[Optimizer], options: dict[str, Any], states: Sequence[PartState]) -> None:
        self._of: dict[int, Tensor] = {}
        for state in states:
            kept = state.master if state.has_master else state.rows
            layout = RowsLayout.of(state)
            whole = kept if layout.cut_over else kept.view(layout.parts[0].shape)
            self._of[id(state)] = cut_like(whole, layout)
        self._states = list(states)
        self.inner = kind(list(self._of.values()), **options)
        refuse_mixing(self.inner)
        self._is_blank = False
        self._take_states()

    @torch.no_grad()
    def update(self, gradients: Own, lr: float, scale: float | Tensor) -> None:
        if not gradients:
            return
        if self._is_blank:  # states that make_states() made
            self.inner.state.clear()
            self._is_blank = False
        for group in self.inner.param_groups:
            if "lr" in group:
                group["lr"] = lr
        for state, rows in gradients:
            own = self._of[id(state)]
            gradient = (rows.to(own.dtype) * scale).view(own.shape)
            layout = getattr(own, "tp_layout", None)
            own.grad = gradient if layout is None else cut_like(gradient, layout)
            state.steps += 1
        with marked("dp update"):
            self.inner.step()
        for state, _ in gradients:
            self._of[id(state)].grad = None
            if state.has_master:
                state.rows.copy_(state.master)
        self._take_states()

    def _take_states(self) -> None:
        """Notes the tensors that the optimizer keeps."""
        for state in self._states:
            own = self._of[id(state)]
            found = self.inner.state.get(own, {})
            kept = {name: each for name, each in found.items() if isinstance(each, Tensor)}
            of_rows = {name for name, each in kept.items() if each.shape == own.shape and own.dim() > 0}
            state.moments = {name: each.as_subclass(Tensor) for name, each in kept.items() if name in of_rows}
            state.numbers = {name: each for name, each in kept.items() if name not in of_rows}

    @torch.no_grad()
    def make_states(self) -> None:
        """Makes the optimizer create its states, at zero, by a step with zero gradients that is undone."""
        if self.inner.state:
            return
        for own in self._of.values():
            own.grad = torch.zeros_like(own)
        before = [own.clone() for own in self._of.values()]
        self.inner.step()
        for own, value in zip(self._of.values(), before, strict=True):
            own.copy_(value)
            own.grad = None
            for each in self.inner.state.get(own, {}).values():
                if isinstance(each, Tensor):
                    each.zero_()
        self._is_blank = True
        self._take_states()

    def loaded(self) -> None:
        self._is_blank = False


class ShardedTorchOptimizer(ShardedOptimizer):
    """The optimizer that `Sharded.of_torch` makes."""

    def __init__(
        self,
        shards: Shards,
        *,
        kind: type[Optimizer],
        max_norm: float = 0.0,
        nonfinite: Any = "raise",
        **options: Any,
    ):
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or issubclass(kind, ShardedOptimizer):
            raise TypeError(f"of_torch() takes an optimizer class, such as torch.optim.SGD; found: {kind!r}.")
        states = shards.states(with_master=True)
        update = TorchUpdate(kind, options, [each for some in states.values() for each in some])
        (first, *_) = update.inner.param_groups
        group = {name: value for name, value in first.items() if name != "params"}
        super().__init__(
            shards,
            update,
            states,
            group={"lr": 0.0, **group},
            max_norm=max_norm,
            nonfinite=nonfinite,
        )

    def _send_all(self, gradients: dict[int, Own], scale: float | Tensor = 1.0) -> None:
        self._update.update([each for own in gradients.values() for each in own], self.lr, scale)
        super()._send_all({}, scale)
