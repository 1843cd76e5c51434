"""Trains a sharded model with an optimizer that was made as for any model:

    pyruntime.shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

`.grad` of a parameter is the mean gradient of all ranks, of this rank's rows; if the rows are cut it is a
CutTensor (nn/cut.py). The first read, or an optimizer's step, reduces the remaining gradients, which is a
collective. At its first step the optimizer's parameters, and what it keeps of them, become these rows. After
each step the rows leave for the other ranks. Bits are those of that optimizer in that dtype: there are no
fp32 masters, and no step is taken ahead of its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyruntime import ops
from pyruntime.data_parallel.any_optimizer import RowsLayout
from pyruntime.data_parallel.optimizer import ShardedOptimizer, Shards, with_gradients
from pyruntime.data_parallel.update import AfterTheNorm
from pyruntime.nn.cut import CutTensor, cut_like, gradient_of, memory_of, set_gradient


class _Rows(Tensor):
    """This rank's rows of a part, as an optimizer sees a parameter. users: has their gradients."""

    cut_by: RowsLayout
    users: UsersOptimizer
    handle: Any  # the same object, where torch's hooks look for it

    @property
    def grad(self) -> Tensor | None:
        self.users.show()
        return gradient_of(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.users.show()
        set_gradient(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class WholeRows(_Rows):
    """All rows, with the parameter's shape."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class CutRows(_Rows, CutTensor):
    """Rows that are cut over ranks."""


class _ByItself(AfterTheNorm):
    """Leaves updates to the user's optimizer."""

    def __init__(self) -> None:
        """Keeps nothing."""

    def update(self, gradients: Any, lr: float, scale: float | Tensor) -> None:
        """Does nothing: that optimizer has updated already."""


class UsersOptimizer(ShardedOptimizer):
    """Serves the user's optimizers, each of some parameters; see the module's docstring.

    has_some: whether a gradient of this step has come."""

    def __init__(self, shards: Shards, has_some: Callable[[], bool]):
        super().__init__(shards, _ByItself(), shards.states(with_master=False), group={"lr": 0.0})
        self._has_some, self.is_closed = has_some, False
        self._rows_of: dict[int, list[_Rows]] = {}
        """Rows by the id of their parameter."""
        self._of: dict[int, _Rows] = {}
        """Rows by the id of their state."""
        self._sent: list[int] = []
        """Versions of the rows that the other ranks have."""
        for state in self._all_states():
            self._of[id(state)] = rows = self._made(state.rows, RowsLayout.of(state))
            self._rows_of.setdefault(id(state.parameter), []).append(rows)

    def _made(self, tensor: Tensor, layout: RowsLayout) -> _Rows:
        if layout.cut_over:
            rows = cut_like(tensor.detach(), layout)
            rows.__class__ = CutRows
        else:
            rows = tensor.detach().view(layout.parts[0].shape)
            rows.__class__ = WholeRows
        rows.requires_grad_(True)
        rows.users, rows.handle, rows.cut_by = self, self, layout
        return rows

    @torch.no_grad()
    def show(self) -> None:
        """Reduces the gradients that have come into `.grad` of the rows. Every rank calls it."""
        if self._has_some():
            self._finish()
        arrived, self._arrived = self._arrived, {}
        for own in with_gradients(arrived).values():
            for state, gradient in own:
                rows = self._of[id(state)]
                mean = (gradient * (1.0 / self._axes.size)).view(rows.shape)
                before = gradient_of(rows)
                if before is None:
                    set_gradient(rows, cut_like(mean, rows.cut_by))
                else:
                    before.add_(cut_like(mean, rows.cut_by))

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the `.grad` of a parameter."""
        (rows,) = self._whole_ones(parameter)
        return rows.grad

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Sets `.grad` of a parameter. If the gradient is whole, all ranks set one, and this rank takes its
        rows of their mean."""
        self.show()
        rows_of = self._rows_of[id(parameter)] if gradient is None else self._whole_ones(parameter)
        for rows in rows_of:
            if gradient is not None and not isinstance(gradient, CutTensor):
                mean, axes = memory_of(gradient).contiguous(), rows.cut_by.state.axes
                for axis in axes.of_gradients:
                    mean = ops.all_reduce(mean, axis.name) if axis.size > 1 else mean
                mean = mean / axes.size
                gradient = cut_like(rows.cut_by.rows_of(mean).view(rows.shape), rows.cut_by)
            set_gradient(rows, gradient)

    def _whole_ones(self, parameter: nn.Parameter) -> list[_Rows]:
        found = self._rows_of[id(parameter)]
        if len(found) > 1:
            raise RuntimeError(
                f"{parameter.sharded_as} {list(parameter.shape)} holds {len(found)} tensors that are cut one "
                "by one, so it has no single gradient; use handle.adamw(max_norm=...) or handle.of_torch()."
            )
        return found

    def drop_gradients(self) -> None:
        self._arrived = {}
        for rows in self._of.values():
            set_gradient(rows, None)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Puts rows, with their gradients, in the place of the model's parameters in an optimizer that steps.

        Raises ValueError if the model is not sharded any more."""
        if self.is_closed:
            raise ValueError(
                f"This {type(optimizer).__name__} holds rows of a model whose handle was closed; make an "
                "optimizer of the model's parameters anew."
            )
        self.show()
        for group in optimizer.param_groups:
            if any(id(each) in self._rows_of for each in group["params"]):
                group["params"] = [
                    rows for each in group["params"] for rows in self._rows_of.get(id(each), [each])
                ]
        for parameter in [each for each in optimizer.state if id(each) in self._rows_of]:
            (rows,) = self._whole_ones(parameter)
            state = optimizer.state.pop(parameter)
            optimizer.state[rows] = {
                name: value if name == "step" else self._rows_in(value, rows, parameter)
                for name, value in state.items()
            }

    def _rows_in(self, value: Any, rows: _Rows, parameter: Tensor) -> Any:
        """Returns this rank's rows of a state that an optimizer has kept of a whole parameter."""
        if not isinstance(value, Tensor) or value.shape != parameter.shape or not isinstance(rows, CutRows):
            return value
        layout = rows.cut_by
        return cut_like(layout.gather_parts({layout.parts[0].key: value}).clone(), layout)

    @torch.no_grad()
    def after_step(self, _optimizer: Optimizer) -> None:
        """Sends the new rows."""
        self._send_all({})
        self._sent = self._versions()

    @torch.no_grad()
    def send_written(self) -> None:
        """Sends rows that were written in place since the last step, on every rank, as schedule-free
        optimizers do. Runs before a forward pass."""
        if self._sent and self._is_cut and (versions := self._versions()) != self._sent:
            self._send_all({})
            self._sent = versions

    def _versions(self) -> list[int]:
        return [rows._version for rows in self._of.values()]
