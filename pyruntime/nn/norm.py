"""Root-mean-square normalisation of a sequence shard."""

from __future__ import annotations

import torch
from torch import Tensor

from pyruntime import ops
from pyruntime.nn.grid.rms_norm import rms_norm
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.parameters import Group, Part, TensorGroup


class RMSNorm(ParallelModule):
    """y = x / sqrt(mean(x^2, last dim) + eps) * weight, with statistics in fp32 (Zhang and Sennrich 2019).

    Rows are independent, so a rank normalises its own rows without communication. The weight [dim] is the
    same on every rank of `group`, and its gradient, to which every rank's rows contribute, is summed over the
    group in the backward. group=None: the input is not cut (or the norm is replicated), and nothing is
    summed. With a group of two axes the features are cut over y (grid/rms_norm.py): input [..., D/Y], weight
    [D/Y]. State dict: "weight", a DTensor, or a plain tensor without a group."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        group: Group | TensorGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group)
        self.dim = dim
        self.eps = eps
        self.add_parameter("weight", None, [Part("weight", (dim,))], dtype, device, dim_y=0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            torch.nn.init.ones_(self.weight)

    def compute(self, x: Tensor) -> Tensor:
        weight = self.weight if self.group.size == 1 else ops.replicate_grad(self.weight, self.group.name)
        return rms_norm(x, weight, self.eps, self.dim, self.group.y).rows

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, group=({self.group})"
