"""Fused layer kernels: norms, SwiGLU, rotary embedding, cross-entropy and the optimizer's passes.

Each is a torch op of namespace `pyruntime` (csrc/cpu/layers): a vectorised C++ kernel on CPU, a composite of
ATen ops on every other device, differentiable, and traceable by `torch.compile(fullgraph=True)`. On CUDA with
the kernels built (`make cuda`), norms, SwiGLU, rotary embedding and the cross-entropy's passes over the
logits are one launch each, a norm's backward two (csrc/cuda/portable), except for float64. Inputs are
float32, bfloat16, float16 or float64; arithmetic and statistics are float32 (float64 for float64). Results
have the same bits for any number of threads. Bad arguments raise ValueError (shapes, values), TypeError
(dtypes) or IndexError (labels); the message says what was found and what is needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from pyruntime.ops.attention import statistics_dtype

_ops = torch.ops.pyruntime


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, eq. 4).

    x [..., D], weight [D] in x's dtype; returns [..., D]. The backward keeps x, weight and one float a row.
    """
    return _ops.rms_norm(x, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes `summed = x + residual` and `normed = rms_norm(summed, weight, eps)` in one pass.

    x and residual [..., D], weight [D], all of one dtype; returns (normed [..., D], summed [..., D]).
    Gradients flow through both. The statistics are those of `summed` after rounding.
    """
    normed, summed, _ = _ops.add_rms_norm(x, residual, weight, eps)
    return normed, summed


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [..., F] of gate_up [..., 2F] = [gate | up] (Shazeer 2020, eq. 6).

    The backward keeps only gate_up.
    """
    return _ops.swiglu(gate_up)


def apply_rope_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    batch: int,
    seq: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    overwrite_qkv: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection into heads and rotates q and k by position.

    Hugging Face's half-rotated convention: a head [a | b] becomes [a cos - b sin | b cos + a sin].
    qkv [batch * seq, (num_heads + 2 * num_kv_heads) * hd], each row [q heads | k heads | v heads];
    cos, sin [seq or more, hd] in float32 (float64 for float64 qkv), not differentiated.
    Returns q [batch, num_heads, seq, hd], k and v [batch, num_kv_heads, seq, hd]: transposed views of
    contiguous [batch, seq, heads, hd] tensors, which torch's CPU flash attention takes. The backward keeps
    only cos and sin.

    overwrite_qkv: rotates q and k in place; all three may then be views of qkv, which nothing else may read
    afterwards. Raises ValueError if qkv is a leaf that requires a gradient.
    """
    return _ops.apply_rope_qkv(qkv, cos, sin, batch, seq, num_heads, num_kv_heads, overwrite_qkv)


def cross_entropy_stats(logits: Tensor, labels: Tensor, vocab_start: int) -> Tensor:
    """Returns the statistics of one vocabulary shard for a cross-entropy.

    logits [M, V_r] are columns vocab_start .. vocab_start + V_r of the vocabulary; labels [M] int64 count
    from the vocabulary's start.
    Returns [M, 3] float32: a row's maximum, its sum of exp(logit - maximum), and its label's logit, 0 if the
    label is in another shard. Columns of -inf are allowed. No gradient: `cross_entropy_loss` has it.
    """
    return _ops.cross_entropy_stats(logits, labels, vocab_start)


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    vocab_start: int,
    vocab_size: int,
    *,
    ignore_index: int = -100,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns loss and log-sum-exp of every row, from the statistics of all shards.

    stats [shards, M, 3] is `cross_entropy_stats` of every shard in rank order; vocab_size is the size of the
    whole vocabulary.
    Returns (loss [M], log-sum-exp [M]) in float32, both differentiable in this shard's logits. The loss of a
    row labelled `ignore_index` is 0, and so is its gradient.

    The backward recomputes the softmax from the logits. overwrite_logits: it writes their gradient into the
    logits' memory; autograd then refuses a second backward, and any other use of the logits in a backward.
    Raises IndexError for a label outside the vocabulary (on CPU; elsewhere the device asserts).
    """
    return _ops.cross_entropy_loss(
        logits, labels, stats, vocab_start, vocab_size, ignore_index, overwrite_logits
    )


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    masters: Sequence[Tensor] = (),
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float | Sequence[float],
    step: int,
    grad_scale: Tensor | float | None = None,
    rounding: Sequence[tuple[int, int]] = (),
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019, algorithm 2) on all parameters, in place.

    params and grads may have any of the dtypes, also different ones; exp_avg and exp_avg_sq are float32.
    `masters` is empty, or has each parameter's float32 master copy (an empty tensor for a parameter without
    one: float32 needs none); a low-precision parameter becomes its rounded master. weight_decay is decoupled,
    one for all or one for each parameter. grads are multiplied by grad_scale (a clip coefficient); if that is
    NaN, nothing is updated. step counts from 1. The caller must keep out gradients that are not finite.
    On devices with the kernels built (`make cuda`) one launch updates up to 48 tensors of one dtype, and the
    host does not wait; without them ATen's operations do it.

    rounding: empty, or (seed, index of its first element) for each parameter. bfloat16 parameters, which then
    have no masters, are rounded up or down at random so that the mean is exact. The generator gives one
    number for each (seed, index), the same on every device.
    """
    decay = list(weight_decay) if isinstance(weight_decay, Sequence) else [weight_decay] * len(params)
    if isinstance(grad_scale, float | int):
        # Filled on the device: a copy from the host would wait for it.
        device = params[0].device if params else "cpu"
        scale = torch.full((), float(grad_scale), dtype=torch.float64, device=device)
        grad_scale = None if grad_scale == 1 else scale
    _ops.adamw_(
        params,
        grads,
        exp_avg,
        exp_avg_sq,
        masters,
        grad_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=decay,
        step=step,
        seeds=[seed for seed, _ in rounding],
        firsts=[first for _, first in rounding],
    )


@torch.no_grad()
def adamw_ahead_(
    ahead: Sequence[Tensor],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    masters: Sequence[Tensor] = (),
    earlier_grads: Sequence[Tensor] = (),
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: Sequence[float],
    step: int,
    grad_scale: float,
    earlier_lr: float = 0.0,
    rounding: Sequence[tuple[int, int]] = (),
) -> None:
    """Writes into `ahead`, bitwise, the parameters that `adamw_` would make, for a step that may be dropped
    (Qi et al. 2023, arXiv 2401.10241). Parameters, moments and masters stay unchanged. Other arguments as in
    `adamw_`.

    earlier_grads: gradients of the step before, if it was computed ahead with `earlier_lr` and is kept. The
    same pass first applies them to moments and masters. Only for parameters with masters.
    """
    _ops.adamw_ahead_(
        ahead,
        params,
        grads,
        exp_avg,
        exp_avg_sq,
        masters,
        earlier_grads,
        grad_scale=grad_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        earlier_lr=earlier_lr,
        seeds=[seed for seed, _ in rounding],
        firsts=[first for _, first in rounding],
    )


def random_rounding(name: str, step: int, first: int = 0) -> tuple[int, int]:
    """Returns `rounding` of `adamw_` for a parameter. It depends only on the name, the step and the index of
    the first element, not on the data-parallel rank that holds it."""
    return zlib.crc32(f"{name}/{step}".encode()), first


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """Returns the sum of the squares of all elements, a float64 scalar; 0 on `device` for no tensors."""
    return _ops.sum_of_squares(tensors) if tensors else torch.zeros((), dtype=torch.float64, device=device)


@torch.no_grad()
def add_(sum: Tensor, other: Tensor) -> None:
    """sum += other, two tensors of one shape and any floating dtypes: added in float32 (float64 for float64)
    and rounded once, as torch adds. Raises ValueError if the shapes differ."""
    _ops.add_(sum, other)


# ---- fake kernels: shapes, dtypes and strides of the results, for torch.compile ----


def _heads(x: Tensor, batch: int, seq: int, heads: int, head_dim: int) -> Tensor:
    return x.new_empty(batch, seq, heads, head_dim).transpose(1, 2)


@torch.library.register_fake("pyruntime::rms_norm")
def _(x, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=statistics_dtype(x))


@torch.library.register_fake("pyruntime::add_rms_norm")
def _(x, residual, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=statistics_dtype(x))


@torch.library.register_fake("pyruntime::rms_norm_backward")
def _(grad, x, weight, rstd, grad_sum):
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:])


@torch.library.register_fake("pyruntime::swiglu")
def _(gate_up):
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.register_fake("pyruntime::swiglu_backward")
def _(grad, gate_up):
    return gate_up.new_empty(gate_up.shape)


@torch.library.register_fake("pyruntime::weighted_gating")
def _(gate_up, *_):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.register_fake("pyruntime::apply_rope_qkv")
def _(qkv, cos, sin, batch, seq, num_heads, num_kv_heads, overwrite_qkv=False):
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    q = _heads(qkv, batch, seq, num_heads, head_dim)
    return q, *(_heads(qkv, batch, seq, num_kv_heads, head_dim) for _ in range(2))


@torch.library.register_fake("pyruntime::apply_rope_qkv_backward")
def _(dq, dk, dv, cos, sin):
    return dq.new_empty(dq.shape[0] * dq.shape[2], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[3])


@torch.library.register_fake("pyruntime::cross_entropy_stats")
def _(logits, labels, vocab_start):
    return logits.new_empty(logits.shape[0], 3, dtype=statistics_dtype(logits))


@torch.library.register_fake("pyruntime::cross_entropy_loss")
def _(logits, labels, stats, vocab_start, vocab_size, ignore_index=-100, overwrite_logits=False):
    return stats.new_empty(logits.shape[0]), stats.new_empty(logits.shape[0])


@torch.library.register_fake("pyruntime::cross_entropy_backward")
def _(logits, labels, lse, grad, vocab_start):
    return logits.new_empty(logits.shape)


@torch.library.register_fake("pyruntime::sum_of_squares")
def _(tensors):
    device = tensors[0].device if tensors else "cpu"
    return torch.empty((), dtype=torch.float64, device=device)
