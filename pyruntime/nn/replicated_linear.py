"""A linear that every rank has whole, for its own rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.parameters import Group, Part, TensorGroup
from pyruntime.ops import primitives


class ReplicatedLinear(ParallelModule):
    """y = x W^T + b of this rank's rows x [M_p, K] of those that the group shares; y [M_p, sum of N_i].

    Nothing travels forward. W and b are the same on every rank; the backward pass sums their gradients over
    the group. out_features: {name: N_i}, the parts of a result. State dict: "name.weight" [N_i, K] and
    "name.bias" [N_i], one of each part."""

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        bias: bool = False,
        *,
        group: Group | TensorGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group)
        self.in_features, self.out_features = in_features, dict(out_features)
        parts = [Part(f"{name}.weight", (width, in_features)) for name, width in out_features.items()]
        self.add_parameter("weight", None, parts, dtype, device)
        if not bias:
            self.register_parameter("bias", None)
        else:
            parts = [Part(f"{name}.bias", (width,)) for name, width in out_features.items()]
            self.add_parameter("bias", None, parts, dtype, device)
        if not self.weight.is_meta:
            bound = 1 / math.sqrt(in_features)
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -bound, bound)

    def compute(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.group.size > 1:
            weight = ops.replicate_grad(weight, self.group.name)
            bias = None if bias is None else ops.replicate_grad(bias, self.group.name)
        return primitives.linear(x, weight, bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group=({self.group})"
