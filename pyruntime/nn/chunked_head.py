"""A language-model head and its cross-entropy, by chunks of rows, so that only some logits are in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyruntime.comm.groups import group_name
from pyruntime.nn.cross_entropy import ANY_VOCABULARY
from pyruntime.nn.cut import memory_of
from pyruntime.nn.parameters import Group, TensorGroup
from pyruntime.ops.attention import statistics_dtype

CHUNK_ROWS = 512
"""Rows that are multiplied together at least: each chunk reads the weight and dW once more."""
DEVICE_CHUNK_ROWS = 1024
"""The same on a GPU, where adding fewer rows to a dW in fp32 takes longer than multiplying them."""
CHUNKS = 16
"""Chunks at most."""
LEAST_LOGITS = 1 << 29
"""Bytes of a rank's logits from which the trainer computes its loss by chunks. With fewer, the time that
chunks cost matters more than memory."""

_ROWS_OF_DW = 2048
"""Rows of dW that are scaled and rounded together, without a copy of all."""


def chunk_rows(rows: int, row_bytes: int, device_type: str) -> int:
    """Returns by how many rows the trainer computes the loss of so many rows of all ranks, whose logits take
    `row_bytes` bytes each on a rank; 0: not by chunks."""
    many = max(CHUNK_ROWS if device_type == "cpu" else DEVICE_CHUNK_ROWS, -(-rows // CHUNKS))
    return many if rows > many and rows * row_bytes >= LEAST_LOGITS else 0


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: Group | TensorGroup | None,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    token_weights: Tensor | None = None,
    z_loss: float = 0.0,
    chunk_rows: int = CHUNK_ROWS,
    tier: str = "auto",
    wire: str = "same",
) -> Tensor:
    """Returns sum_i w_i loss_i, a scalar in fp32 (fp64 for doubles), the same on every rank; loss_i is
    `vocab_parallel_cross_entropy` of the logits gather(x) @ W^T.

    x [M_r, K]: this rank's rows, as torch.tensor_split cuts the M rows of all ranks. weight [V_r, K]: this
    rank's part of the vocabulary, [vocab_start, vocab_start + V_r). labels [M] int64 and token_weights [M]
    (None: all 1), of all rows, are the same on every rank; token_weights have no gradient. vocab_size,
    ignore_index and z_loss: as for `vocab_parallel_cross_entropy`. tier, wire: as for
    `pyruntime.ops.all_gather_matmul`.

    chunk_rows: rows of all ranks whose logits are in memory at once; with several ranks twice as many. The
    gradients are computed in the forward pass, chunk by chunk, as in Liger Kernel (Hsu et al. 2024, arXiv
    2410.10989, section 3.2):

        dX_r = scatter(sum over ranks of dL @ W)     dW = dL^T @ gather(X),  summed over the chunks in fp32

    and the backward pass multiplies them by the scalar's gradient. What does not require a gradient costs
    nothing. A scale that keeps fp16 gradients in range belongs into token_weights.

    Rows of a chunk travel while the previous one is multiplied, and so do the statistics of its losses. On
    one rank, where the project's own bf16 GEMM runs, loss and gradients have the same bits for every
    chunk_rows from 20 on. Otherwise dW depends on it by rounding.

    Raises ValueError or TypeError for shapes and dtypes that do not fit, IndexError for a label outside the
    vocabulary (on CPU; elsewhere the device asserts), NotImplementedError for second derivatives.
    """
    wide = statistics_dtype(x)
    if token_weights is None:
        token_weights = torch.ones(labels.shape, dtype=wide, device=labels.device)
    numbers = _numbers(group, vocab_start, vocab_size, ignore_index, z_loss, chunk_rows)
    return _HeadLoss.apply(
        x, weight, labels, token_weights.detach().to(wide), numbers, torch.is_grad_enabled(), tier, wire
    )


@torch.no_grad()
def linear_token_losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: Group | TensorGroup | None,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    chunk_rows: int = CHUNK_ROWS,
    tier: str = "auto",
    wire: str = "same",
) -> Tensor:
    """Returns loss_i of `linear_cross_entropy`, [M] fp32 (fp64 for doubles), without a gradient."""
    scale = torch.ones(labels.shape, dtype=statistics_dtype(x), device=labels.device)
    numbers = _numbers(group, vocab_start, vocab_size, ignore_index, 0.0, chunk_rows)
    losses, *_ = torch.ops.pyruntime.linear_cross_entropy(
        x, memory_of(weight), labels, scale, *numbers, False, False, tier, wire
    )
    return losses


def _numbers(
    group: Group | TensorGroup | None,
    vocab_start: int,
    vocab_size: int | None,
    ignore_index: int,
    z_loss: float,
    chunk_rows: int,
) -> tuple[str, int, int, int, float, int]:
    """Returns the operator's arguments besides tensors."""
    name = "" if group is None else group.name if isinstance(group, TensorGroup) else group_name(group)
    size = ANY_VOCABULARY if vocab_size is None else vocab_size
    return name, vocab_start, size, ignore_index, z_loss, chunk_rows


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, scale, numbers, with_grad: bool, tier: str, wire: str) -> Tensor:
        need_dx, need_dw = (with_grad and each for each in ctx.needs_input_grad[:2])
        losses, *gradients = torch.ops.pyruntime.linear_cross_entropy(
            x, memory_of(weight), labels, scale, *numbers, need_dx, need_dw, tier, wire
        )
        ctx.save_for_backward(gradients.pop(0) if need_dx else None, gradients.pop(0) if need_dw else None)
        ctx.dtype = weight.dtype
        return (losses * scale).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        dx, dw = ctx.saved_tensors
        is_one = grad.device.type == "cpu" and grad.item() == 1  # elsewhere the host would wait
        if dx is not None and not is_one:
            dx = dx * grad.to(dx.dtype)
        if dw is not None and not (is_one and dw.dtype == ctx.dtype):
            scaled = torch.empty_like(dw, dtype=ctx.dtype)
            for rows, out in zip(dw.split(_ROWS_OF_DW), scaled.split(_ROWS_OF_DW), strict=True):
                out.copy_(rows if is_one else rows * grad)
            dw = scaled
        return dx, dw, None, None, None, None, None, None
