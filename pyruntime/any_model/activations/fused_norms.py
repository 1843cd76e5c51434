"""Replaces the RMS norms in a model's code by our kernel, with one pass over memory instead of eight.

A module counts as an RMS norm if it gives what the kernel gives (ops/layers.py) for random inputs, also tiny
ones, and random weights. Its name does not matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from pyruntime.ops.layers import rms_norm


class FusedNorm:
    """The forward of one norm. The kernel rounds once; the model's code also rounds after the division.

    why_not: why the last eager call ran the model's code, for explain(); "" where it ran the kernel, and
    before the first call."""

    def __init__(self, module: nn.Module, eps: float) -> None:
        self.module, self.eps = module, eps
        self.why_not = ""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = self.module.weight
        why_not = ""
        if args or kwargs:
            why_not = "it is called with more than one tensor"
        elif torch.is_autocast_enabled(x.device.type):
            why_not = "autocast chooses the dtypes"
        elif x.dtype != weight.dtype:
            why_not = f"it reads {x.dtype}, and its weight is {weight.dtype}"
        if not is_compiling():
            self.why_not = why_not
        if why_not:
            return type(self.module).forward(self.module, x, *args, **kwargs)
        return rms_norm(x, weight, self.eps)


def fused_norms(model: nn.Module) -> dict[str, str]:
    """Returns {RMS norm of `model` that has the kernel: why its last call did not run it, or ""}."""
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: forward.why_not for name, forward in forwards.items() if isinstance(forward, FusedNorm)}


def fuse_norms(model: nn.Module) -> None:
    """Gives the RMS norms in `model` a FusedNorm as their forward."""
    known: dict[tuple, float | None] = {}
    for module in model.modules():
        plain = {name: v for name, v in vars(module).items() if type(v) in (float, int, bool, str)}
        floats = sorted({v for v in plain.values() if type(v) is float})
        tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if tensors != ["weight"] or next(module.children(), None) is not None or "forward" in vars(module):
            continue
        if module.weight.dim() != 1 or type(module).forward is nn.Module.forward:
            continue
        kind = type(module), module.weight.shape[0], tuple(sorted(plain.items()))
        if kind not in known:
            known[kind] = next((eps for eps in floats if _is_rms_norm(module, eps)), None)
        if (eps := known[kind]) is not None:
            module.forward = FusedNorm(module, eps)


@torch.no_grad()
def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    size = module.weight.shape[0]
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(4, size, generator=draw) * torch.tensor([[1.0], [30.0], [1e-2], [1e-3]])
    weight = torch.randn(size, generator=draw)
    try:
        found = torch.func.functional_call(module, {"weight": weight}, (x,))
    except Exception:  # the module takes other arguments
        return False
    expected = rms_norm(x, weight, eps)
    alike = isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
    return alike and torch.allclose(found, expected, rtol=1e-5, atol=1e-7)
