"""Logits that a head computes only if something reads them.

Where a rank's logits [T, V/P] would take much memory, a model that is called with labels does without them in
training: the loss takes the head's input and computes logits and gradients by chunks of rows
(nn/chunked_head.py). What the model's code and its caller get as logits has their shape and no elements. What
reads it, on every rank, has them all computed, with their gradient; after backward() it is an error, because
the weights may have changed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pyruntime.any_model.activations.row_shard import RowGroup, RowShard, cut_rows, to_rows
from pyruntime.any_model.activations.shared_input import products
from pyruntime.any_model.activations.when_read import GatheredWhenRead
from pyruntime.nn.chunked_head import chunk_rows
from pyruntime.nn.cut import as_plain
from pyruntime.nn.gather import gather_features
from pyruntime.nn.head_loss import loss_of_input
from pyruntime.nn.linear import ColumnParallelLinear
from pyruntime.nn.parameters import own_of, ranges_of


def rows_of_chunk(head: ColumnParallelLinear, x: Tensor) -> int:
    """Returns by how many rows the loss of a head's input x [.., K] is computed; 0: the head computes its
    logits. That is so where they are few or not trained, where hooks read them or free the weight after the
    call (ZeRO 3), under autocast and torch.compile, with a bias, where the features of x are cut, and in
    fp16, whose gradients need the loss's scale from the first. The same on every rank."""
    if is_compiling() or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return 0
    if head.bias is not None or head.group.y is not None or head._forward_hooks or "forward" in vars(head):
        return 0
    if x.dtype != head.weight.dtype or x.dtype == torch.float16:
        return 0
    width = head.out_features // head.group.size
    return chunk_rows(x.shape[:-1].numel(), width * x.element_size(), x.device.type)


class HeadInput:
    """The input x [.., K] of a head, whole on every rank or a RowShard, whose logits nothing has computed.
    `head.hook.passes` counts the backward passes of such losses."""

    def __init__(self, head: ColumnParallelLinear, x: Tensor):
        self.head, self.x = head, x
        self._when = self._moment()
        self._is_old = False
        own = weakref.ref(self)

        def grow_old(*_: Any) -> None:
            if (held := own()) is not None:
                held._is_old = True

        # pyruntime's optimizers write weights in memory, which their versions do not count.
        weakref.finalize(self, register_optimizer_step_pre_hook(grow_old).remove)

    def _moment(self) -> tuple[int, int]:
        return self._hook.passes, self.head.weight._version

    @property
    def _hook(self) -> Any:
        return self.head.hook

    def logits(self) -> Tensor:
        """Returns the whole logits [.., V]; they are computed when they are read."""
        return _LaterLogits.apply(self.x, self.head.weight, self)

    def computed(self) -> Tensor:
        """Returns them computed, without a gradient. Raises RuntimeError if the weight may have changed."""
        if self._is_old or self._moment() != self._when:
            raise RuntimeError(
                f"The logits of {self.head.label} were asked for after backward(), but their loss was "
                "computed by chunks of rows, which keeps none, and the weights may have changed; read "
                "outputs.logits before backward(), or call the model without labels."
            )
        with as_plain():
            (own,) = products([self.head], self.x.detach())
            return gather_features(own, self.head.group, *self.head.sizes)

    def loss(self, targets: Tensor, count: Tensor | int, ignore_index: int) -> Tensor:
        """Returns the sum of the cross-entropies of all rows, divided by count, fp32 (fp64 for
        fp64). targets [T]: of all rows, the same on every rank."""
        head, x = self.head, self.x
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = to_rows(x if isinstance(x, RowShard) else cut_rows(x, RowGroup(head.group)))
        found = loss_of_input(
            head,
            rows,
            targets,
            ignore_index=ignore_index,
            token_weights=torch.ones(len(targets), dtype=precise, device=targets.device) / count,
            chunk_rows=rows_of_chunk(head, x),
        )
        if found.requires_grad:
            found.register_hook(self._pass)
        return found

    def _pass(self, _: Tensor) -> None:
        self._hook.passes += 1


class _LaterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, held: HeadInput) -> Tensor:
        ctx.save_for_backward(x)
        ctx.head = held.head
        like = x.rows() if isinstance(x, RowShard) else x
        return GatheredWhenRead((*x.shape[:-1], held.head.out_features), like, held.computed)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        head, (x,) = ctx.head, ctx.saved_tensors
        needed = ctx.needs_input_grad
        own = own_of(grad, -1, ranges_of(head.sizes, head.group.size, head.group.rank)).contiguous()
        with torch.enable_grad(), as_plain():
            again = x.detach().requires_grad_(needed[0])
            (y,) = products([head], again)
        inputs = [each for each, is_needed in zip((again, head.weight), needed, strict=False) if is_needed]
        found = list(torch.autograd.grad(y, inputs, own, allow_unused=True))
        return *(found.pop(0) if is_needed else None for is_needed in needed[:2]), None
