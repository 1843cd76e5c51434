"""Layers for parts "support" and "training" of bench/gpu, in the sizes of Llama-3.2 1B: memory-bound layers
next to ATen's operations, and attention by torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.problem import Emit
from bench.gpu.ranks import Stopwatch

ops = torch.ops.pyruntime
COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8192, 32, 8, 64, 128256
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
SHAPES = {"1B": (4, 4096, 32, 8, 64), "8B": (2, 4096, 32, 8, 128)}
"""Attention's B, S, H, Hkv, hd, by model."""

Variant = tuple[Callable[[], Any], float]
"""A function to time, and the bytes that it must move."""


def layers(tokens: int, rows: int, vocab: int = VOCAB, device: str = "cuda") -> dict[str, Variant]:
    """Returns every memory-bound layer in bf16, for `tokens` tokens and `rows` rows of logits."""

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    cos, sin = torch.rand(2, tokens, HEAD_DIM, device=device).unbind()
    sizes = (1, tokens, HEADS, KV_HEADS)
    counts = (HEADS, KV_HEADS, KV_HEADS)
    dq, dk, dv = (bf16(1, tokens, count, HEAD_DIM).transpose(1, 2) for count in counts)
    gate_up, dy = bf16(tokens, 2 * FFN), bf16(tokens, FFN)
    qkv, logits = bf16(tokens, width), bf16(rows, vocab)
    labels = torch.randint(vocab, (rows,), device=device)
    lse, grad = torch.full((rows,), 12.0, device=device), torch.full((rows,), 1.0 / rows, device=device)
    tables = 8 * tokens * HEAD_DIM
    hidden, residual, dy_hidden = (bf16(tokens, HEADS * HEAD_DIM) for _ in range(3))
    weight, rstd = bf16(HEADS * HEAD_DIM), torch.rand(tokens, device=device)
    gating = (1.0, float("inf"), 0.0, False)  # SwiGLU's
    calls: dict[str, tuple[Any, tuple[Any, ...], float]] = {
        "rms_norm": (ops.add_rms_norm, (hidden, residual, weight, 1e-5), 8.0 * hidden.numel()),
        "rms_norm backward": (
            ops.rms_norm_backward,
            (dy_hidden, hidden, weight, rstd, residual),
            8.0 * hidden.numel(),
        ),
        "swiglu": (ops.swiglu, (gate_up,), 6.0 * dy.numel()),
        "swiglu backward": (ops.swiglu_backward, (dy, gate_up), 10.0 * dy.numel()),
        "weighted_gating": (ops.weighted_gating, (gate_up, rstd, *gating), 6.0 * dy.numel()),
        "weighted_gating backward": (
            ops.weighted_gating_backward_,
            (
                dy,
                gate_up,
                rstd,
                *gating,
                torch.empty_like(gate_up),
                torch.empty_like(dy),
                torch.empty_like(rstd),
            ),
            12.0 * dy.numel(),
        ),
        "rope in place": (
            ops.rotate_qkv_,
            (qkv, cos, sin, *sizes),
            4.0 * (dq.numel() + dk.numel()) + tables,
        ),
        "rope backward": (ops.apply_rope_qkv_backward, (dq, dk, dv, cos, sin), 4.0 * qkv.numel() + tables),
        "cross-entropy statistics": (ops.cross_entropy_stats, (logits, labels, 0), 2.0 * logits.numel()),
        "cross-entropy gradient": (
            ops.cross_entropy_backward_,
            (logits, labels, lse, grad, 0),
            4.0 * logits.numel(),
        ),
    }
    made: dict[str, Variant] = {}
    for name, (op, arguments, moved) in calls.items():
        made[f"pyruntime {name}"] = (lambda op=op, arguments=arguments: op(*arguments), moved)
        made[f"ATen's {name}"] = (
            lambda op=op, arguments=arguments: op.default._op_dk(COMPOSITE, *arguments),
            moved,
        )
    return made


def attention(emit: Emit, quick: bool) -> None:
    """Times forward and backward of flash and of cuDNN's attention, and notes which one torch chooses."""
    watch = Stopwatch(0.002)
    for model, (batch, seq, heads, kv_heads, head_dim) in SHAPES.items():
        seq = seq // 8 if quick else seq
        q, k, v = (
            torch.randn(batch, seq, count, head_dim, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        )
        taken = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
        variants = {}
        for name, backend in ATTENTION.items():
            try:
                passes(q, k, v, backend)
            except RuntimeError as error:
                emit({"kind": "note", "text": f"attention by {name}, {model}: {str(error)[:300]}"})
                continue
            variants[name] = lambda backend=backend, q=q, k=k, v=v: passes(q, k, v, backend)
        samples = watch.interleave(variants, 5 if quick else 15)
        # Two GEMMs forward and five backward; the causal mask leaves half of them.
        flops = 7 * batch * heads * seq * seq * head_dim
        for name, sample in samples.items():
            emit(
                {
                    "kind": "attention",
                    "name": name,
                    "model": model,
                    "head_dim": head_dim,
                    "taken": int(ATTENTION[name].value) == taken,
                    "seconds": sample.median,
                    "spread": sample.spread,
                    "tflops": flops / sample.median / 1e12,
                }
            )


def passes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of causal attention by only that kernel. Raises RuntimeError if it cannot run."""
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), out.detach())
