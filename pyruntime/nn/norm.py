"""RMS normalisation of rows whose features are cut over ranks.

Rank s of Y holds the features x_s [M, D/Y] of the same M rows. Statistics are fp32 (fp64 for fp64):

    rstd = 1 / sqrt(sum_s |x_s|^2 / D + eps)        one number for each row is summed over ranks
    y_s  = x_s rstd w_s
    dx_s = rstd (dy_s w_s - xhat_s c),              xhat_s = x_s rstd, c = sum_s (dy_s w_s . xhat_s) / D
    dw_s = sum over rows of dy_s xhat_s

(Zhang and Sennrich 2019, equation 4; the gradients are derived.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyruntime import ops
from pyruntime.nn.cut import CutTensor, memory_of
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.parameters import Group, Part, TensorGroup
from pyruntime.ops import layers
from pyruntime.ops.attention import statistics_dtype


class Normed(NamedTuple):
    """The result of a norm, and the `rstd` with which `rows` can be recomputed from x without an exchange."""

    rows: Tensor
    """[..., D_s]"""
    rstd: Tensor | None
    """[..., 1] where features are cut over y, else None. The norm's backward keeps it too."""


def is_cut(y: TensorGroup | None) -> TypeGuard[TensorGroup]:
    """Whether y has several ranks."""
    return y is not None and y.size > 1


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    features: int,
    y: TensorGroup | None,
    whole: Callable[[Tensor, Tensor, float], Tensor] = layers.rms_norm,
) -> Normed:
    """Normalises x [..., D_s] by weight [D_s]: this rank's share of `features` D, which are cut over y.
    y=None: features are not cut. whole: the function for features that are not cut."""
    if not is_cut(y):
        return Normed(whole(x, weight, eps), None)
    return Normed(*_CutNorm.apply(x, weight, eps, features, y.name))


def normed_by(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """Computes `Normed.rows` from its `rstd`."""
    return (x.to(rstd.dtype) * rstd * weight).to(x.dtype)


def _sum_over(numbers: Tensor, group: str) -> Tensor:
    """Sums a few numbers over ranks, in rank order on every rank. All ranks' numbers are gathered: that waits
    once and takes half as long as an all-reduce, which waits twice."""
    return ops.all_gather_stats(numbers, group).sum(0)


class _CutNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, eps: float, features: int, group: str
    ) -> tuple[Tensor, Tensor]:
        weight = memory_of(weight)
        wide = x.to(statistics_dtype(x))
        square = _sum_over(wide.square().sum(-1, keepdim=True), group)
        rstd = (square / features + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        ctx.over = features, group
        ctx.mark_non_differentiable(rstd)
        return normed_by(x, rstd, weight), rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _):
        x, weight, rstd = ctx.saved_tensors
        features, group = ctx.over
        xhat, grad = x.to(rstd.dtype) * rstd, grad.to(rstd.dtype)
        scaled = grad * weight
        mean = _sum_over((scaled * xhat).sum(-1, keepdim=True), group) / features
        dx = (scaled - xhat * mean) * rstd
        dweight = (grad * xhat).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None


class RMSNorm(ParallelModule):
    """y = x / sqrt(mean(x^2, last dim) + eps) * weight, with statistics in fp32 (Zhang and Sennrich 2019).

    A rank normalises its own rows without communication. The weight [dim] is the same on every rank of
    `group`. All ranks' rows contribute to its gradient, so the backward sums it over the group. group=None:
    rows are not cut (or the norm is replicated), and nothing is summed. A group of two axes cuts features
    over y: input [..., D/Y], weight [D/Y]. is_cut: features are cut over `group`, and rows are not: input
    [..., D/P], weight [D/P]; with `shares`, rank r holds shares[r] of them. State dict: "weight", a DTensor;
    plain without a group."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        group: Group | TensorGroup | None = None,
        is_cut: bool = False,
        shares: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group)
        self.dim = dim
        self.eps, self.is_cut = eps, is_cut
        part, dim_y = Part("weight", (dim,), shares=tuple(shares)), None if is_cut else 0
        self.add_parameter("weight", 0 if is_cut else None, [part], dtype, device, dim_y=dim_y)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            torch.nn.init.ones_(self.weight)

    def compute(self, x: Tensor) -> Tensor:
        if self.is_cut:
            own = self.weight.to_local() if isinstance(self.weight, CutTensor) else self.weight
            return rms_norm(x, own, self.eps, self.dim, self.group).rows
        weight = self.weight if self.group.size == 1 else ops.replicate_grad(self.weight, self.group.name)
        return rms_norm(x, weight, self.eps, self.dim, self.group.y).rows

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, group=({self.group})"
