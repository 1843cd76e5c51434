"""Compares one forward and backward pass of a parallel model with the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.any_model.comparing import tensors_of
from pyruntime.any_model.layer_hooks import ExpertsHook
from pyruntime.comm.core import _C
from pyruntime.nn.cut import memory_of
from pyruntime.nn.parallel_experts import ParallelExperts
from pyruntime.nn.parameters import TensorGroup, axis_names

# Shares of a tensor's norm. A gradient smaller than _NOISE times the largest is compared with that instead.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_NOISE = 1e-3


class VerificationError(ValueError):
    """Raised for a parallel model whose results differ from the whole model's."""


def verify(
    model: nn.Module,
    reference: nn.Module,
    batch: Mapping[str, Any] | tuple | Tensor,
    *,
    tolerance: float | None = None,
) -> None:
    """Raises VerificationError on every rank where results of `model` differ from those of `reference`.

    model: the model that parallelize() returned. reference: the same model with the same weights, whole, on
    every rank (copy.deepcopy before parallelize). batch: the arguments of one call, the same on every rank,
    of the experts' group too: a mapping of keyword arguments, a tuple of positional ones, or one tensor.

    Both models run once, forward and backward, and every output and the gradient of every parameter are
    compared. The backward starts from the output's `loss` where there is one, else from a random weighting of
    all floating-point outputs. Existing gradients of both are restored. Dropout must be off (p = 0, or
    eval()), because a rank draws for its own heads. The message names the parameter whose gradient differs
    most. tolerance: a share of each tensor's norm; None: 1e-3 in fp32, 1e-6 in fp64, 0.1 in bf16, 0.05 in
    fp16."""
    expected, wanted = _run(reference, batch)
    found, got = _run(model, batch)
    _divide_experts(model, got)
    message = _compare_outputs(dict(expected), dict(found), tolerance) or _compare_gradients(
        model, wanted, got, tolerance
    )
    _raise_everywhere(message, model)


def _run(model: nn.Module, batch: Any) -> tuple[list[tuple[str, Tensor]], dict[str, Tensor]]:
    """Returns the outputs, and {parameter: gradient}."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*(batch if isinstance(batch, tuple) else (batch,)))
    outputs = list(tensors_of(output))
    losses = [value for name, value in outputs if name == " loss"]
    loss = losses[0] if losses else _weighted([value for _, value in outputs])
    outputs = [(name, value.detach()) for name, value in outputs]  # some can be read only before backward
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        loss.backward()  # not autograd.grad: reentrant checkpoints refuse it
        gradients = {name: p if p.grad is None else p.grad for name, p in parameters.items()}
        return outputs, {
            name: torch.zeros_like(memory_of(g)) if g is parameters[name] else memory_of(g)
            for name, g in gradients.items()
        }
    finally:
        for name, p in parameters.items():
            p.grad = kept[name]


def _divide_experts(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Makes the gradients of experts over a group of their own those of one copy of the batch, of which every
    data-parallel rank has run one."""
    for name, layer in model.named_modules():
        if not isinstance(layer, ParallelExperts) or layer.group.copies is None:
            continue
        tp = layer.hook.model.group.size if isinstance(layer.hook, ExpertsHook) else 1
        share = tp / (layer.group.size * layer.group.copies.size())
        for key, _ in layer.named_parameters(name):
            if key in gradients:
                for axis in axis_names(_copies(layer.group)):
                    gradients[key] = ops.all_reduce(gradients[key].contiguous(), axis)
                gradients[key] = gradients[key] * share


def _copies(group: TensorGroup) -> list[TensorGroup]:
    """Returns the groups of the ranks that hold the same experts, one for each dimension of their mesh."""
    mesh = group.copies
    return [] if mesh is None else [TensorGroup.of(mesh.get_group(dim)) for dim in range(mesh.ndim)]


def _weighted(outputs: list[Tensor]) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    parts = [
        (value * torch.randn(value.shape, generator=draw, dtype=torch.float32).to(value)).sum()
        for value in outputs
        if value.requires_grad
    ]
    if not parts:
        raise ValueError(
            "Nothing in the model's output depends on a trained parameter, so there is no gradient to "
            "compare; use a model whose output is a tensor, or a tuple or mapping of tensors."
        )
    return torch.stack(parts).sum()


def _compare_outputs(expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float | None) -> str:
    for name, whole in expected.items():
        mine = found.get(name)
        if mine is None or mine.shape != whole.shape:
            shape = "missing" if mine is None else f"of shape {list(mine.shape)}"
            return f"the output{name} is {shape}, and {list(whole.shape)} in the reference"
        if whole.is_floating_point():
            off = _off(mine, whole, 0.0)
            if off > (tolerance or _tolerance(whole)):
                return f"the output{name} is {off:.2g} of its norm off"
        elif not torch.equal(mine, whole):
            return f"the output{name} holds other numbers than the reference's"
    return ""


def _compare_gradients(
    model: nn.Module, wanted: dict[str, Tensor], got: dict[str, Tensor], tolerance: float | None
) -> str:
    parameters = dict(model.named_parameters())
    if missing := sorted(wanted.keys() ^ got.keys()):
        return f"{missing[0]} is trained in one of the two models only"
    noise = _NOISE * max((g.double().norm().item() for g in wanted.values()), default=0.0)
    worst, worst_name = 0.0, ""
    for name, whole in wanted.items():
        layout = getattr(parameters[name], "tp_layout", None)
        if layout is not None and len(layout.parts) == 1:
            whole = layout.local_part(layout.parts[0], whole)
        if got[name].shape != whole.shape:
            return f"{name} is {list(got[name].shape)}, and {list(whole.shape)} in the reference"
        off = _off(got[name], whole, noise) / (tolerance or _tolerance(whole))
        if off > max(worst, 1.0):
            worst, worst_name = off, name
    if not worst_name:
        return ""
    off = worst * (tolerance or _tolerance(wanted[worst_name]))
    return f"the gradient of {worst_name} is {off:.2g} of its norm off"


def _off(mine: Tensor, whole: Tensor, noise: float) -> float:
    mine, whole = mine.detach().double(), whole.detach().double()
    difference = (mine - whole).norm().item()
    return difference / max(whole.norm().item(), noise, 1e-30) if difference == difference else float("inf")


def _tolerance(like: Tensor) -> float:
    return _TOLERANCES.get(like.dtype, 1e-3)


def _groups(model: nn.Module) -> list[TensorGroup]:
    return [m.group for m in model.modules() if isinstance(getattr(m, "group", None), TensorGroup)]


def _raise_everywhere(message: str, model: nn.Module) -> None:
    """Raises on every rank where one rank has a message."""
    failed = 1.0 + dist.get_rank() if message else 0.0
    for name in axis_names(_groups(model)):
        flag = torch.tensor([failed], dtype=torch.float64, device=next(model.parameters()).device)
        flags = ops.all_gather_stats(flag, name).flatten()
        failed = flags[flags > 0].min().item() if flags.any() else 0.0
    if failed:
        what = (
            message
            or f"{_C.name_of_rank(int(failed) - 1)} has found a difference, which its own message names"
        )
        raise VerificationError(f"The parallel model is not the reference: {what}.")
