"""Parameters of sharded models: gathers stage-3 weights when read; `.grad` goes through the handle.

At stage 3 a rank keeps only its rows of a weight; the shape stays. Modules gather their own weights for their
calls. If other code reads a weight (a head that shares the embedding's, a norm, a copy), it is gathered too,
and stays whole until the next update. That is a collective: every rank must read it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyruntime.nn.cut import LIKE, SHAPES_ALONE, CutParameter, as_plain, gradient_of, set_gradient


class Handle(Protocol):
    """The handle of a parameter, which takes its gradients."""

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the parameter's `.grad`."""

    def bring(self, parameter: nn.Parameter) -> None:
        """Gathers the parameter; it is whole and current when it returns."""

    def takes_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        """Takes a `.grad` that was set; False if the parameter itself has to keep it."""


class ShardedParameter(nn.Parameter):
    """A parameter whose gradients go to the handle that shard() returned."""

    handle: Handle
    sharded_as: str
    """The name in the model that was sharded."""

    @property
    def grad(self) -> Tensor | None:
        found = super().grad if isinstance(self, CutParameter) else gradient_of(self)
        return self.handle.gradient_of(self) if found is None else found

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if not self.handle.takes_gradient(self, gradient):
            set_gradient(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.handle.bring(self)
        if isinstance(self, CutParameter):
            return super().__deepcopy__(memo)
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class ShardedCutParameter(ShardedParameter, CutParameter):
    """A sharded parameter that is also cut over a tensor-parallel group."""


_SHARDED: dict[type, type] = {nn.Parameter: ShardedParameter, CutParameter: ShardedCutParameter}


def mark_sharded(parameter: nn.Parameter, name: str, handle: Handle | None) -> None:
    """Marks a parameter as sharded, until `unmark`. handle: takes its gradients; None: they stay in `.grad`.
    A parameter of a class of its own keeps that class."""
    parameter.sharded_as = name
    if handle is not None:
        parameter.handle = handle
        parameter.__class__ = _SHARDED.get(type(parameter), type(parameter))


def unmark(parameter: nn.Parameter) -> None:
    if isinstance(parameter, ShardedParameter):
        parameter.__class__ = CutParameter if isinstance(parameter, CutParameter) else nn.Parameter
    for name in ("sharded_as", "handle"):
        vars(parameter).pop(name, None)


class AwayWeight(ShardedParameter):
    """A parameter whose memory is freed, or has old values, until `take_back`. Parameters change into this
    class and back in place, as torch's UninitializedParameter does."""

    fetch: Callable[[], None]
    """Gathers it; afterwards it is an ordinary ShardedParameter."""
    keeps_writes: bool
    """Whether writes into the whole count; otherwise they are refused."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _reads_values(func):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, AwayWeight):
                    if not each.keeps_writes and _writes(func, args, kwargs, each):
                        _refuse(each, func)
                    each.fetch()
            return func(*args, **kwargs)  # none is away now
        with as_plain():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.fetch()
        return self.__deepcopy__(memo)  # ShardedParameter's: the class has changed

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.fetch()
        return self.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Parameter {self.sharded_as} {list(self.shape)}, {self.dtype}, of which ranks keep rows"


class AwayCutWeight(AwayWeight, ShardedCutParameter):
    """An AwayWeight that is also cut over a tensor-parallel group."""


def give_back(parameter: nn.Parameter, fetch: Callable[[], None], keeps_writes: bool) -> None:
    """Frees the parameter's memory; its shape stays. fetch: gathers it when it is read. keeps_writes: writes
    into it count; otherwise they are refused."""
    parameter.untyped_storage().resize_(0)
    _send_away(parameter, fetch, keeps_writes)


def mark_old(parameter: nn.Parameter) -> None:
    """Marks the parameter's values as older than an update, until `take_back`. Its memory stays; code that
    reads it gets the new values."""
    if isinstance(parameter, ShardedParameter) and not isinstance(parameter, AwayWeight):
        _send_away(parameter, partial(parameter.handle.bring, parameter), keeps_writes=False)


def _send_away(parameter: nn.Parameter, fetch: Callable[[], None], keeps_writes: bool) -> None:
    parameter.__class__ = AwayCutWeight if isinstance(parameter, CutParameter) else AwayWeight
    parameter.fetch, parameter.keeps_writes = fetch, keeps_writes


def take_back(parameter: nn.Parameter) -> None:
    """Gives the parameter memory again, which the caller has to fill."""
    if isinstance(parameter, AwayWeight):
        is_cut = isinstance(parameter, CutParameter)
        parameter.__class__ = ShardedCutParameter if is_cut else ShardedParameter
        del parameter.fetch, parameter.keeps_writes
    storage = parameter.untyped_storage()
    needed = parameter.numel() * parameter.element_size()
    if storage.nbytes() < needed:
        storage.resize_(needed)


def is_ordinary_matrix(parameter: nn.Parameter) -> bool:
    """Whether a frozen parameter can be cut. Quantised ones, for example, have another class and cannot."""
    is_known = type(parameter) in _SHARDED and parameter.is_floating_point()
    return is_known and parameter.dim() >= 2 and parameter.is_contiguous()


def own_memory(parameter: nn.Parameter, name: str) -> None:
    """Makes the parameter's memory its own, so that it can be freed. Memory that is mapped from a file, or
    shared by several parameters, is copied.

    Raises ValueError for a parameter of another class than nn.Parameter or CutParameter."""
    if type(parameter) not in _SHARDED:
        raise ValueError(
            f"Stage 3 gives back the memory of weights between calls, and {name} is a "
            f"{type(parameter).__name__}, not an nn.Parameter; use stage 2."
        )
    storage = parameter.untyped_storage()
    if not storage.resizable() or storage.nbytes() != parameter.numel() * parameter.element_size():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _refuse(parameter: AwayWeight, func: Callable) -> None:
    name = getattr(func, "__name__", func)
    raise RuntimeError(
        f"{'an assignment to .data' if name == '__set__' else name} would write into {parameter.sharded_as} "
        f"{list(parameter.shape)}, but this rank keeps only some of its rows, so the write would be lost. "
        "Write within `with handle.writes():`, on every rank, or before shard()."
    )


def _reads_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # of a property, such as p.grad
        return func.__self__.__name__ in ("data", "T", "H", "mT", "mH", "real", "imag")
    return name not in SHAPES_ALONE | LIKE


def _writes(func: Callable, args: tuple, kwargs: dict[str, Any], parameter: AwayWeight) -> bool:
    """Whether `func` writes `parameter`: as first argument, if torch's naming says in place, or as `out`."""
    if any(each is parameter for each in tree_leaves(kwargs.get("out"))):
        return True
    name = getattr(func, "__name__", "")
    operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    in_place = name.endswith("_") and not name.endswith("__")
    target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
    writes = in_place or operator or name in ("__setitem__", "__set__")
    return writes and any(each is parameter for each in tree_leaves(target))
