"""Gives torch's optimizers over shards a `state_dict()` of DTensors, like the model's.

An optimizer keeps the moments of its shards as plain tensors. If they were saved as they are, rank 0's
moments would be taken for those of all ranks. Hooks of the optimizer turn them into DTensors in
`state_dict()`, over their own storage and without communication, and back into shards in
`load_state_dict()`. So `torch.distributed.checkpoint` can save at one number of ranks and load at any other,
with or without `get_optimizer_state_dict`.

The hooks are registered at an optimizer's first step, which `get_optimizer_state_dict` runs too to create the
state. Before that step an optimizer has no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyruntime.nn.cut import CutTensor, cut_like, shard_of
from pyruntime.nn.layout import Layout

MIX_ELEMENTS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
"""Optimizers whose update of an element reads other elements of the weight, which may be on other ranks."""


@torch.compiler.disable
def before_step(optimizer: Optimizer, _args: tuple, _kwargs: dict) -> None:
    """Prepares an optimizer that holds shards. torch calls this hook before every step of every optimizer.

    Raises ValueError for an optimizer that would mix elements of a cut weight, or that holds weights which
    were replaced when the model was cut, or whose gradients shard() takes."""
    if getattr(optimizer, "takes_shards", False):
        return
    for handle in _handles(optimizer):
        handle.before_step(optimizer)
    _refuse_idle(optimizer)
    watched = whole_states in optimizer._optimizer_state_dict_post_hooks.values()
    if watched or next(_shards(optimizer), None) is None:
        return
    refuse_mixing(optimizer)
    optimizer.register_state_dict_post_hook(whole_states)
    optimizer.register_load_state_dict_pre_hook(local_states)
    # State that was loaded before this step did not pass through the hook.
    for parameter, layout in _shards(optimizer):
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            state.update({name: _local(layout, name, value) for name, value in state.items()})


@torch.compiler.disable
def after_step(optimizer: Optimizer, _args: tuple, _kwargs: dict) -> None:
    """Runs after every step of every optimizer; a hook of torch."""
    if not getattr(optimizer, "takes_shards", False):
        for handle in _handles(optimizer):
            handle.after_step(optimizer)


def _handles(optimizer: Optimizer) -> list[Any]:
    """Returns shard()'s handles of the models whose parameters, or rows of them, the optimizer holds."""
    found = {}
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if (handle := getattr(parameter, "handle", None)) is not None:
            found[id(handle)] = handle
    return list(found.values())


def replaced(parameter: Tensor, name: str) -> None:
    """Marks a parameter that a shard has replaced in the model. name: the parameter's name there."""
    parameter.replaced_by_shard_of = name


def _refuse_idle(optimizer: Optimizer) -> None:
    """Raises ValueError where a parameter was replaced in the model and would never get a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if name := getattr(parameter, "replaced_by_shard_of", None):
                raise ValueError(
                    f"This {type(optimizer).__name__} was made before the model was cut: its {name} "
                    f"{list(parameter.shape)} is no longer part of the model, so training it has no effect; "
                    "make the optimizer after parallelize()."
                )


def _shards(optimizer: Optimizer) -> Iterator[tuple[Tensor, Layout]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            layout = getattr(parameter, "tp_layout", None)
            if layout is not None:
                yield parameter, layout


def refuse_mixing(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer of MIX_ELEMENTS that holds a cut weight."""
    if not isinstance(optimizer, MIX_ELEMENTS):
        return
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        layout = getattr(parameter, "tp_layout", None)
        if layout is not None and layout.cut_over:
            raise ValueError(
                f"{type(optimizer).__name__} computes the update of an element from others of the same "
                f"weight, but {layout.parts[0].key} {list(layout.parts[0].shape)} is cut over group "
                f"{layout.group} and this rank holds {list(parameter.shape)} of it; use an optimizer that "
                "works element by element, such as torch.optim.AdamW."
            )


def whole_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's `state_dict` with DTensors in place of the states of shards. A parameter that
    holds several tensors, as merged linears' do, gets {key in the module: DTensor}.

    Raises ValueError for a state that has neither the shard's shape nor a single element."""
    return _mapped(optimizer, state_dict, _whole)


def local_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Does the reverse: takes this rank's shards from DTensors, full tensors or shards."""
    return _mapped(optimizer, state_dict, _local)


def _mapped(
    optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[Layout, str, Any], Any]
) -> dict[str, Any]:
    """Copies `state_dict` and applies `change` to every state of a parameter that has a layout."""
    indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    # Not strict: torch itself raises where the groups do not match.
    layouts: dict[Any, Any] = {
        index: getattr(parameter, "tp_layout", None)
        for index, parameter in zip(indices, parameters, strict=False)
    }
    states = {
        index: state
        if layouts.get(index) is None
        else {name: change(layouts[index], name, value) for name, value in state.items()}
        for index, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _whole(layout: Layout, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if tuple(value.shape) != layout.local_shape():
        if not layout.cut_over or value.numel() == 1:
            return value  # the same on every rank
        raise ValueError(
            f"The optimizer's state {name!r} of {layout.parts[0].key} has shape {list(value.shape)}, and "
            f"this rank's shard {list(layout.local_shape())}. It is no shard of a full state, so it cannot "
            "be saved for another number of ranks; use an optimizer whose state has the parameter's shape, "
            "such as torch.optim.AdamW."
        )
    parts = layout.to_dtensors(shard_of(value))
    return parts if len(parts) > 1 else next(iter(parts.values()))


def _local(layout: Layout, name: str, value: Any) -> Any:
    if isinstance(value, CutTensor):
        return value
    if isinstance(value, Mapping) and all(part.key in value for part in layout.parts):
        return cut_like(layout.gather_parts(value), layout)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if len(layout.parts) == 1 and (value.numel() > 1 or tuple(value.shape) == layout.parts[0].shape):
        return cut_like(layout.gather_parts({layout.parts[0].key: value}).contiguous(), layout)
    if tuple(value.shape) != layout.local_shape():
        raise ValueError(
            f"The optimizer's state {name!r} to load has shape {list(value.shape)}, but this rank holds "
            f"{', '.join(part.key for part in layout.parts)} in one tensor {list(layout.local_shape())}; "
            "pass a DTensor for each, as state_dict() returns them."
        )
    return cut_like(value, layout)
