"""Makes save_pretrained of a parallel model write whole tensors, once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pyruntime import ops
from pyruntime.nn.parameters import TensorGroup, axis_names


class SavePretrained:
    """The save_pretrained() of one parallel model. An object, not a closure, so that a copy or a pickle of
    the model has its own."""

    def __init__(self, model: nn.Module, groups: tuple[TensorGroup, ...]) -> None:
        self.model, self.groups = model, groups

    def __call__(self, *args: Any, **options: Any) -> Any:
        model, given = self.model, options.pop("state_dict", None)
        writes = all(group.is_first for group in self.groups)
        state = _whole(model.state_dict() if given is None else given, keep=writes)
        result, error = None, None
        if writes:
            try:
                result = type(model).save_pretrained(model, *args, state_dict=state, **options)
            except Exception as raised:
                error = raised
        raise_everywhere(error, self.groups, next(model.parameters()).device, "save the model")
        return result


def save_whole(model: nn.Module, *groups: TensorGroup) -> None:
    """Replaces save_pretrained of `model` and of the models inside it (transformers, peft) by one that writes
    whole tensors, at any tp.

    groups: the model's, and that of its experts. Every rank of the groups must call the new one. Tensors are
    gathered one at a time; rank 0 of all groups keeps them on the CPU and writes them, unless it is given
    is_main_process=False. Raises on every rank where rank 0 fails."""
    for module in model.modules():  # peft's merge_and_unload() returns the inner model
        if callable(getattr(type(module), "save_pretrained", None)):
            module.save_pretrained = SavePretrained(module, groups)


def _whole(state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """Returns full tensors on the CPU; tied ones stay one tensor."""
    done: dict[tuple, Tensor] = {}
    whole: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            key = (value.to_local().data_ptr(), tuple(value.shape))
            if key not in done:
                full = value.full_tensor()
                done[key] = full.detach().cpu() if keep else full.new_empty(0)
            value = done[key]
        whole[name] = value
    return whole


def raise_everywhere(
    error: Exception | None, groups: Iterable[TensorGroup], device: torch.device, what: str
) -> None:
    """Raises on every rank of the groups if rank 0 has an error: rank 0 raises it, other ranks a
    RuntimeError."""
    failed = torch.tensor([0.0 if error is None else 1.0], device=device)
    for name in axis_names(groups):
        failed = ops.all_reduce(failed, name)
    if error is not None:
        raise error
    if failed.item():
        raise RuntimeError(f"Rank 0 could not {what}; its own error says why.")
