"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) beside parallel linears that do not train.

y = x W^T + s (x A^T) B^T, with A [r, K], B [N, r] and a scale s. Rank p of P has rows x_p [M_p, K] of a
column linear's input and features y_p [M, N_p] of its result; features x_p [M, K_p] of a row linear's input
and rows y_p [M_p, N] of its result. Rows and features are cut as in linear.py.

    column   low    = gather(x_p A^T)             [M, r]      A is whole, B_p [N_p, r] is cut
             y_p   += s low B_p^T                 [M, N_p]
             dlow_p = scatter(sum_p s dy_p B_p)   [M_p, r]
             dx_p  += dlow_p A,   dA = sum_p dlow_p^T x_p,   dB_p = s dy_p^T low

    row      low_p  = scatter(sum_p x_p A_p^T)    [M_p, r]    A_p [r, K_p] is cut, B is whole
             y_p   += s low_p B^T                 [M_p, N]
             dlow   = gather(s dy_p B)            [M, r]
             dx_p  += dlow A_p,   dA_p = dlow^T x_p,   dB = sum_p s dy_p^T low_p

So an adapter sends r features of each row in either direction, and in a backward pass the gradient of the
matrix that every rank has whole. A column adapter multiplies before rows are gathered, because its gradient
then needs no gathered x: W is frozen, so nothing else would gather x for the backward pass. A merged linear
(Q, K and V) has one A and one B for each of its parts, as if it were several linears; what they send travels
together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyruntime import ops
from pyruntime.nn.cut import memory_of
from pyruntime.nn.linear import MergedColumnParallelLinear, ParallelLinear, RowParallelLinear
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.parameters import Part
from pyruntime.ops.attention import statistics_dtype


@dataclass(frozen=True)
class LoRA:
    """The adapters of a model. targets: the linears that get one, by their names in Hugging Face's models."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    """Whether the scale is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732), not alpha / rank."""
    seed: int = 0
    """Seed of the first A matrices, which are the same for any number of ranks; B begins with 0."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Adapter(ParallelModule):
    """The low-rank part of one parallel linear, which is not its child. `scale` is s above."""

    def __init__(self, linear: ParallelLinear, scale: float):
        super().__init__(linear.group)
        self.scale = scale
        # A fused kernel wants rows of a width that a low rank may not have.
        self.tier = "auto" if linear.tier.startswith("fused") else linear.tier

    def deltas(self) -> Tensor:
        """Returns s B A of this rank's part of the linear's weight, fp32 (fp64 for fp64); no gradient."""
        # Abstract: nn.Module and abc.ABC do not mix.
        raise NotImplementedError(f"{type(self).__name__} does not define deltas().")


class ColumnAdapter(Adapter):
    """The adapters of `parts` of a merged column linear.

    Call: adapter(y, x, rows) with this rank's rows x [M_p, K] and the linear's y [M, sum of N_p], to whose
    columns of `parts` it adds in place; rows: M. State dict: "q.lora_A.weight" [r, K], replicated, and
    "q.lora_B.weight" [N, r], cut along N, for each part q."""

    def __init__(self, linear: MergedColumnParallelLinear, parts: Sequence[str], rank: int, scale: float):
        super().__init__(linear, scale)
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self._spans, begin = [], 0
        for name, width in linear.local_features.items():
            if name in parts:
                self._spans.append((begin, width))
            begin += width
        self._width = begin
        self._names = [name for name in linear.out_features if name in parts]
        for name in self._names:
            part = Part(f"{name}.lora_A.weight", (rank, linear.in_features))
            self.add_parameter(f"A_{name}", None, [part], **like)
        of_b = [
            Part(f"{name}.lora_B.weight", (linear.out_features[name], rank), shares=linear.shares[f"{name}."])
            for name in self._names
        ]
        self.add_parameter("B", 0, of_b, **like)

    def compute(self, y: Tensor, x: Tensor, rows: int) -> Tensor:
        wanted = [self._parameters[f"A_{name}"] for name in self._names]
        a = torch.cat(wanted) if len(wanted) > 1 else wanted[0]
        if self.group.size == 1:
            low = F.linear(x, a)
        else:
            low = F.linear(x, ops.replicate_grad(a, self.group.name))
            low = ops.all_gather(low, self.group.name, rows=rows)
        return _Added.apply(y, low, self.B, self._spans, self.scale)

    @torch.no_grad()
    def deltas(self) -> Tensor:
        a = [memory_of(self._parameters[f"A_{name}"]) for name in self._names]
        wide = statistics_dtype(a[0])
        found = torch.zeros(self._width, a[0].shape[1], dtype=wide, device=a[0].device)
        own = memory_of(self.B).to(wide).split([width for _, width in self._spans])
        for (begin, width), each, b in zip(self._spans, a, own, strict=True):
            found[begin : begin + width] = self.scale * (b @ each.to(wide))
        return found


class RowAdapter(Adapter):
    """The adapter of a row linear.

    Call: adapter(y, x) with this rank's features x [M, K_p] and the linear's y [M_p, N], to which it adds in
    place. State dict: "lora_A.weight" [r, K], cut along K, and "lora_B.weight" [N, r], replicated."""

    def __init__(self, linear: RowParallelLinear, rank: int, scale: float):
        super().__init__(linear, scale)
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        part = Part("lora_A.weight", (rank, linear.in_features), shares=linear.shares[""])
        self.add_parameter("A", 1, [part], **like)
        self.add_parameter("B", None, [Part("lora_B.weight", (linear.out_features, rank))], **like)

    def compute(self, y: Tensor, x: Tensor) -> Tensor:
        if self.group.size == 1:
            low, b = F.linear(x, self.A), self.B
        else:
            low = ops.matmul_reduce_scatter(x, self.A, self.group.name, tier=self.tier)
            b = ops.replicate_grad(self.B, self.group.name)
        return _Added.apply(y, low, b, [(0, y.shape[-1])], self.scale)

    @torch.no_grad()
    def deltas(self) -> Tensor:
        a, b = memory_of(self.A), memory_of(self.B)
        wide = statistics_dtype(a)
        return self.scale * (b.to(wide) @ a.to(wide))


class _Added(torch.autograd.Function):
    """Adds s low_i B_i^T to columns of y, in its memory: the product is rounded once, and y is not copied.

    y [M, N], low [M, n r], b [sum of widths, r]. spans: (first column, width) in y of each part i of n."""

    @staticmethod
    def forward(ctx, y: Tensor, low: Tensor, b: Tensor, spans: list[tuple[int, int]], scale: float) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(low, b)
        ctx.spans, ctx.scale = spans, scale
        for (begin, width), each, own in _parts(low, b, spans):
            y[:, begin : begin + width].addmm_(each, own.T, alpha=scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        low, b = ctx.saved_tensors
        b = memory_of(b)
        dlow, db = torch.empty_like(low), torch.empty_like(b)
        given, made = _parts(low, b, ctx.spans), _parts(dlow, db, ctx.spans)
        for ((begin, width), each, own), (_, of_low, of_b) in zip(given, made, strict=True):
            part = dy[:, begin : begin + width]
            torch.mm(part, own, out=of_low)
            torch.mm(part.T, each, out=of_b)
        return dy, dlow.mul_(ctx.scale), db.mul_(ctx.scale), None, None


def _parts(
    low: Tensor, b: Tensor, spans: list[tuple[int, int]]
) -> list[tuple[tuple[int, int], Tensor, Tensor]]:
    """Returns (span, low_i [M, r], B_i [width, r]) of each part."""
    of_b = b.split([width for _, width in spans])
    return list(zip(spans, low.split(b.shape[1], 1), of_b, strict=True))
