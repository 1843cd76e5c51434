"""Norms, rotary embedding and SwiGLU of a layer, by this project's kernels or by torch.compile.

The compiled regions are pure functions of tensors, without modules, parameter hooks or communication, so they
compile alike on every mesh. Sizes are symbolic: micro-batches and slices of all sizes share one compiled
region, except that a size of 1 makes another. Norms of features that are cut over y exchange data in their
middle and are never compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyruntime.nn.norm import Normed, is_cut, normed_by, rms_norm
from pyruntime.nn.parameters import TensorGroup
from pyruntime.ops import layers
from pyruntime.ops.attention import statistics_dtype
from pyruntime.text import short_repr


class NoCompiler(RuntimeError):
    """Raised if torch.compile has no working compiler; the message says why."""


@dataclass(frozen=True)
class Elementwise:
    """The functions that a layer uses. Fields are as in `pyruntime.ops.layers`; the norms below also take
    features that are cut over y."""

    of_norm: Callable[[Tensor, Tensor, float], Tensor]
    of_sum: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    rope: Callable[..., tuple[Tensor, Tensor, Tensor]]
    latent_heads: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, features: int, y: TensorGroup | None) -> Normed:
        """See `pyruntime.nn.norm.rms_norm`."""
        return rms_norm(x, weight, eps, features, y, self.of_norm)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, features: int, y: TensorGroup | None
    ) -> tuple[Normed, Tensor]:
        """Returns (the `rms_norm` of summed, summed), where summed = x + residual."""
        if is_cut(y):
            summed = x + residual
            return self.rms_norm(summed, weight, eps, features, y), summed
        rows, summed = self.of_sum(x, residual, weight, eps)
        return Normed(rows, None), summed

    def rms_norm_again(self, x: Tensor, rstd: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Computes `Normed.rows` again, bitwise the same, from the x and weight of the first time."""
        return self.of_norm(x, weight, eps) if rstd is None else normed_by(x, rstd, weight)


def for_this_pass(chosen: Elementwise) -> Elementwise:
    """Returns `chosen` if gradients are enabled, else the kernels: validation and generation have other sizes
    and must not start a compilation."""
    return chosen if torch.is_grad_enabled() else KERNELS


def latent_heads(
    q: Tensor, kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes the heads of latent attention (`latent_layer.py`), [B, S, H, n + r], contiguous.

    q [B, S, H, n + r] and shared [B, S, 1, r] are rotated by cos and sin [S, r], of a query its last r
    features. kv [B, S, H, n + v] has the first n features of keys, behind them values, which get zeros."""
    plain, rotated = q.shape[-1] - shared.shape[-1], shared.shape[-1]
    queries = torch.cat([q[..., :plain], _turned(q[..., plain:], cos, sin, interleaved)], -1)
    key = _turned(shared, cos, sin, interleaved).expand(*kv.shape[:-1], rotated)
    keys = torch.cat([kv[..., :plain], key], -1)
    return queries, keys, torch.nn.functional.pad(kv[..., plain:], [0, 2 * plain + rotated - kv.shape[-1]])


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates x [B, S, heads, r], whose channels turn in pairs of neighbours, or of its halves. A result has
    the first channels of all pairs, then the second: queries and keys are permuted alike."""
    half = x.shape[-1] // 2
    wide = x.to(statistics_dtype(x))
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.split(half, -1)
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


KERNELS = Elementwise(
    layers.rms_norm, layers.add_rms_norm, layers.swiglu, layers.apply_rope_qkv, latent_heads
)


def compiled(device: torch.device | str) -> Elementwise:
    """Returns functions made by torch.compile. Raises NoCompiler if it cannot compile for `device`."""

    def of(region: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(region, fullgraph=True, dynamic=True)

    try:
        torch.compile(_probe)(torch.zeros(64, device=device))
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise NoCompiler(
            f"torch.compile has no working compiler for {device} ({short_repr(reason)}); install g++, and "
            "for GPUs triton, or do not ask for torch.compile."
        ) from error
    return Elementwise(
        of(_rms_norm), of(_add_rms_norm), of(_swiglu), _rope_by(of(_rotated)), of(latent_heads)
    )


def _probe(x: Tensor) -> Tensor:
    return x.sin() + 1


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(statistics_dtype(x))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * weight).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return _rms_norm(summed, weight, eps), summed


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(statistics_dtype(gate_up)).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Takes qkv [B, S, H + 2 G, d], cos and sin [S, d]; returns q, k and v, each contiguous."""
    qk = qkv[:, :, : queries + keys].to(cos.dtype)
    first, second = qk.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    qk = (qk * cos[:, None] + turned * sin[:, None]).to(qkv.dtype)
    return qk[:, :, :queries].clone(), qk[:, :, queries:].clone(), qkv[:, :, queries + keys :].clone()


def _rope_by(rotated: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def rope(
        qkv: Tensor, cos: Tensor, sin: Tensor, batch: int, seq: int, queries: int, keys: int, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(batch, seq, queries + 2 * keys, -1)
        # Copies: for a view, torch.compile would also specialize on the sizes of its base.
        q, k, v = rotated(heads, cos[:seq].clone(), sin[:seq].clone(), queries, keys)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    return rope
