"""Gradients of shards that know that they are shards.

A parameter that is cut over ranks has the gradient of this rank's shard in `.grad`. What torch computes of
all gradients at once must see those of all ranks, or every rank goes on with a number of its own: the norm
that `torch.nn.utils.clip_grad_norm_` clips by, and whether `GradScaler` found an infinity. Both are whole
here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.comm.core import _C


class ShardGradient(Tensor):
    """The gradient of this rank's shard: a plain tensor, but for its norms, which are those of all ranks'
    shards together, the same bits on every rank. Every rank must ask for them. p.grad * 2, and whatever else
    is computed of it, is plain."""

    groups: tuple[str, ...]
    """Over which it is cut."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            whole = _OF_ALL_RANKS.get(func)
            return func(*args, **kwargs) if whole is None else whole(func, *args, **kwargs)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Reads `.grad` past a class that would say why there is none."""
    return GRAD.__get__(parameter)


GRAD: Any = Tensor.grad
"""Torch's own descriptor."""


def watch_gradient(parameter: nn.Parameter) -> None:
    """The gradients that autograd accumulates into `parameter` are ShardGradients of the groups of
    `parameter.tp_layout` from now on."""
    if _wrap in (parameter._post_accumulate_grad_hooks or {}).values():
        return
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook of a frozen parameter, which may be thawed later
    parameter.register_post_accumulate_grad_hook(_wrap)
    parameter.requires_grad_(trains)


def _bears_none(parameter: Tensor) -> bool:
    """Whether what is called when a gradient has been accumulated may be called before it has come."""
    return all(hook is _wrap for hook in (parameter._post_accumulate_grad_hooks or {}).values())


_C.set_hooks_check(_bears_none)


def _wrap(parameter: Tensor) -> None:
    gradient = gradient_of(parameter)
    if gradient is None or isinstance(
        gradient, ShardGradient
    ):  # None: a sink has taken it, or it comes later
        return
    parameter.grad = shard = gradient.as_subclass(ShardGradient)
    shard.groups = parameter.tp_layout.cut_over


# -- what is computed of the shards of all ranks; `func` is torch's own, for this rank's


def _norms(func: Callable, gradients: Sequence[Tensor], ord: float = 2, **options: Any) -> list[Tensor]:
    """torch._foreach_norm."""
    return _of_all_ranks(list(func(gradients, ord, **options)), gradients, float(ord))


def _norm(func: Callable, gradient: Tensor, *given: Any, **options: Any) -> Tensor:
    """torch.linalg.vector_norm, torch.norm and Tensor.norm."""
    arguments = {**dict(zip(("ord", "dim"), given, strict=False)), **options}
    if (dim := arguments.get("dim")) is not None:
        raise ValueError(
            f"A norm along dim={dim} was asked of a gradient that is cut over ranks, of which this "
            "rank holds a shard; take it of gradient.as_subclass(torch.Tensor), which is the shard alone."
        )
    norm = func(gradient, *given, **options)
    order = arguments.get("ord", arguments.get("p"))
    return _of_all_ranks([norm], [gradient], 2.0 if order in ("fro", None) else float(order))[0]


def _of_all_ranks(norms: list[Tensor], gradients: Sequence[Tensor], order: float) -> list[Tensor]:
    """`norms` of this rank's shards, made those of all ranks' shards where the gradient is one. One gather
    for each group."""
    for groups, places in _places(gradients).items():
        whole = torch.stack([norms[i].double().reshape(()) for i in places])
        for group in groups:
            whole = _combined(ops.all_gather_stats(whole, group), order)  # of [P, len(places)]
        for i, norm in zip(places, whole, strict=True):
            norms[i] = norm.to(norms[i].dtype).reshape(norms[i].shape)
    return norms


def _combined(norms: Tensor, order: float) -> Tensor:
    """Norms of vectors [n] out of those of their parts [P, n]."""
    if order == float("inf"):
        return norms.amax(0)
    if order == -float("inf"):
        return norms.amin(0)
    return norms.sum(0) if order == 0 else norms.pow(order).sum(0).pow(1 / order)


def _unscale(func: Callable, gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """torch._amp_foreach_non_finite_check_and_unscale_: what one rank found, all have found."""
    func(gradients, found_inf, inverse_scale)
    for group in dict.fromkeys(group for groups in _places(gradients) for group in groups):
        found_inf.copy_(ops.all_gather_stats(found_inf.double(), group).amax(0))


def _places(gradients: Sequence[Tensor]) -> dict[tuple[str, ...], list[int]]:
    """By the groups that they are cut over, where the gradients stand."""
    places: dict[tuple[str, ...], list[int]] = {}
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, ShardGradient):
            places.setdefault(gradient.groups, []).append(i)
    return places


_OF_ALL_RANKS: dict[Any, Callable] = {
    torch._foreach_norm: _norms,
    torch.linalg.vector_norm: _norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
