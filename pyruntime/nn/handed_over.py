"""Linear layers that hand (dY, X) over instead of computing their weight's gradient.

`_C.set_weight_gradient_sink(weight, take)` says who takes it (csrc/ops/weight_gradient.h).
"""

from __future__ import annotations

import types
from collections.abc import Iterable

from torch import Tensor, nn

from pyruntime.nn.linear import ParallelLinear
from pyruntime.ops.primitives import linear


def handing_weights(model: nn.Module) -> list[nn.Parameter]:
    """Trainable weights whose only reader is a linear layer that hands (dY, X) over."""
    readers: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            readers[id(parameter)] = readers.get(id(parameter), 0) + 1
    return [
        module.weight
        for module in model.modules()
        if (type(module) is nn.Linear or isinstance(module, ParallelLinear))
        and module.weight.requires_grad
        and readers[id(module.weight)] == 1
    ]


def hand_over(model: nn.Module) -> list[nn.Linear]:
    """Gives every nn.Linear a forward whose backward hands (dY, X) over. Returns those that changed."""
    patched = [
        module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)
    ]
    for module in patched:
        module.forward = types.MethodType(_linear_forward, module)
    return patched


def take_back(patched: Iterable[nn.Linear]) -> None:
    """They are as they were before `hand_over`."""
    for module in patched:
        del module.forward


def _linear_forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)
