"""A Llama in plain PyTorch, the baseline of the training benchmarks.

It uses nothing of pyruntime. It is the model that a competent user would write: `nn.Linear`, `nn.RMSNorm`,
scaled dot-product attention with `is_causal` and `enable_gqa`, `F.cross_entropy`, fused AdamW, and
`clip_grad_norm_`. `shard_with_dtensor` applies PyTorch's own tensor and sequence parallelism (DTensor) to it,
laid out as torchtitan does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama and of one training step."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int
    """Sequences in one micro-batch."""
    accumulate: int
    """Micro-batches in one step."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def tokens_per_step(self) -> int:
        return self.seq * self.micro_batch * self.accumulate

    @property
    def gemm_flops_per_step(self) -> float:
        """Floating-point operations of linears and causal attention in a step, forward and backward."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        linears = self.layers * (attention + 3 * self.dim * self.ffn) + self.vocab * self.dim
        causal_attention = self.layers * 2 * self.dim * self.seq / 2
        return 6.0 * self.tokens_per_step * (linears + causal_attention)


LONGER = {
    f"dim{dim}-{seq}": Shape(dim, 4, dim // 64, dim // 128, dim * 11 // 4, 8192, seq, 1, 1)
    for dim in (1024, 2048)
    for seq in (512, 2048, 4096)
}
"""Shapes with one sequence a step, for every training benchmark; weights and rows exceed a core's cache."""


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        # -1 heads: under tensor parallelism a rank has only its own.
        q = rotate(self.q(x).view(batch, seq, -1, self.head_dim), cos, sin).transpose(1, 2)
        k = rotate(self.k(x).view(batch, seq, -1, self.head_dim), cos, sin).transpose(1, 2)
        v = self.v(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class PlainLlama(nn.Module):
    """Llama with an untied head. `forward(ids [B, S])` returns logits [B, S, V]."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.to(dtype)
        cos, sin = rotary_table(shape.seq, shape.head_dim)
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def rotary_table(seq: int, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [S, 1, head_dim], equal in the two halves of a head (Hugging Face's layout)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seq, dtype=torch.float64), frequency)
    angle = torch.cat([angle, angle], dim=-1)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x_bshd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [B, S, H, head_dim] (Su et al. 2021, eq. 34)."""
    first, second = x_bshd.chunk(2, dim=-1)
    return x_bshd * cos + torch.cat([-second, first], dim=-1) * sin


def shard_with_dtensor(model: PlainLlama, mesh: DeviceMesh) -> Callable[[], AbstractContextManager]:
    """Shards `model` in place with PyTorch's tensor and sequence parallelism.

    Compute the loss and run its backward inside a context that the returned function makes.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    block_plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
    return loss_parallel


class PlainStep:
    """One training step of a plain model: micro-batches forward and backward, clipping, AdamW."""

    def __init__(
        self,
        model: nn.Module,
        settings: dict[str, Any],
        *,
        clip: float,
        loss_context: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """`settings` are those of `torch.optim.AdamW`, `clip` the largest norm of the gradient."""
        self.model = model
        # fused: the fastest of its three variants on CPUs.
        self.optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=True)
        self.clip = clip
        self.loss_context = loss_context

    def __call__(self, ids: Tensor, labels: Tensor) -> float:
        """ids and labels [micro-batches, B, S]; returns the mean loss in nats per token."""
        total: Tensor | float = 0.0
        for micro_ids, micro_labels in zip(ids, labels, strict=True):
            with self.loss_context():
                logits = self.model(micro_ids)
                loss = F.cross_entropy(logits.flatten(0, 1), micro_labels.flatten()) / len(ids)
                loss.backward()
            total = total + loss.detach()  # read at the end: reading waits for the device
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)
