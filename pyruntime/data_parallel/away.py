"""Parameters of sharded models: who asks for a gradient that was taken is told so, and weights of stage 3
come when they are read.

At stage 3 a rank keeps rows of them alone; their shapes stay, and modules that hold them gather them for
their own calls. Whoever else reads one (a head that takes the embedding's weight, a norm, a copy) gets it
gathered as well, and it stays whole until the next update. That is a collective: every rank must read it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyruntime.nn.cut import LIKE, SHAPES_ALONE, CutParameter, as_plain, gradient_of, set_gradient


class Handle(Protocol):
    """A parameter's handle, which takes its gradients."""

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Reads `.grad`."""

    def bring(self, parameter: nn.Parameter) -> None:
        """All of it is here and current when it returns."""

    def takes_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        """`.grad` is set; False where it is to be the parameter's own."""


class ShardedParameter(nn.Parameter):
    """A parameter whose gradients the handle of shard() takes."""

    handle: Handle
    sharded_as: str
    """Its name in the model that was sharded."""

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
    """One that is cut over a tensor-parallel group, too."""


_SHARDED: dict[type, type] = {nn.Parameter: ShardedParameter, CutParameter: ShardedCutParameter}


def mark_sharded(parameter: nn.Parameter, name: str, handle: Handle | None) -> None:
    """Says of a parameter that it is sharded, until `unmark`. handle: which takes its gradients; None: they
    stay in `.grad`. A parameter that has a class of its own keeps it."""
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
    """A parameter whose memory is given back, or old, until `take_back`. Parameters change into it and back
    again in place, as torch's UninitializedParameter does."""

    fetch: Callable[[], None]
    """Gathers it; it is an ordinary ShardedParameter when that returns."""
    keeps_writes: bool
    """Whether what is written into the whole counts."""

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
    """One that is cut over a tensor-parallel group, too."""


def give_back(parameter: nn.Parameter, fetch: Callable[[], None], keeps_writes: bool) -> None:
    """Gives its memory back; its shape stays. fetch: gathers it, for whoever reads it. keeps_writes: or
    writes it."""
    parameter.untyped_storage().resize_(0)
    _send_away(parameter, fetch, keeps_writes)


def mark_old(parameter: nn.Parameter) -> None:
    """Its memory stays, and has values of before an update until `take_back`: the new ones come for whoever
    reads it."""
    if isinstance(parameter, ShardedParameter) and not isinstance(parameter, AwayWeight):
        _send_away(parameter, partial(parameter.handle.bring, parameter), keeps_writes=False)


def _send_away(parameter: nn.Parameter, fetch: Callable[[], None], keeps_writes: bool) -> None:
    parameter.__class__ = AwayCutWeight if isinstance(parameter, CutParameter) else AwayWeight
    parameter.fetch, parameter.keeps_writes = fetch, keeps_writes


def take_back(parameter: nn.Parameter) -> None:
    """It has memory again, of which nothing is written yet."""
    if isinstance(parameter, AwayWeight):
        is_cut = isinstance(parameter, CutParameter)
        parameter.__class__ = ShardedCutParameter if is_cut else ShardedParameter
        del parameter.fetch, parameter.keeps_writes
    storage = parameter.untyped_storage()
    needed = parameter.numel() * parameter.element_size()
    if storage.nbytes() < needed:
        storage.resize_(needed)


def is_ordinary_matrix(parameter: nn.Parameter) -> bool:
    """Whether a frozen parameter can be cut: quantised ones, say, are of a class of their own."""
    is_known = type(parameter) in _SHARDED and parameter.is_floating_point()
    return is_known and parameter.dim() >= 2 and parameter.is_contiguous()


def own_memory(parameter: nn.Parameter, name: str) -> None:
    """Its memory is its alone and can be given back: what is mapped from a file, or what several parameters
    share, is copied.

    Raises ValueError for a parameter of another class than nn.Parameter."""
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
        f"{list(parameter.shape)}, of which this rank keeps rows and others have new values: what is written "
        "into the whole is lost. Write within `with handle.writes():`, on every rank, or before shard()."
    )


def _reads_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # of a property, such as p.grad
        return func.__self__.__name__ in ("data", "T", "H", "mT", "mH", "real", "imag")
    return name not in SHAPES_ALONE | LIKE


def _writes(func: Callable, args: tuple, kwargs: dict[str, Any], parameter: AwayWeight) -> bool:
    """Whether `parameter` is written by it: the first argument of what torch names so, or `out`."""
    if any(each is parameter for each in tree_leaves(kwargs.get("out"))):
        return True
    name = getattr(func, "__name__", "")
    operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    in_place = name.endswith("_") and not name.endswith("__")
    target = args[0] if args else kwargs.get("tensor")  # torch.nn.init names it
    writes = in_place or operator or name in ("__setitem__", "__set__")
    return writes and any(each is parameter for each in tree_leaves(target))
