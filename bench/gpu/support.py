"""Part "support" of bench/gpu: kernels that move memory, beside a copy. Layers are in layers.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from bench.gpu.layers import layers
from bench.gpu.problem import Emit
from bench.gpu.ranks import Stopwatch, bf16, library_of, reduce
from pyruntime.ops.device_adamw import device_adamw_


def support(emit: Emit, quick: bool) -> None:
    library = library_of("portable")
    watch = Stopwatch(0.001)
    count = (1 << 24) if quick else (1 << 28)
    rounds = 5 if quick else 15
    made: dict[str, tuple[Callable[[], object], float]] = {}

    source, target = torch.randn(count, device="cuda"), torch.empty(count, device="cuda")
    size = count * 4
    made["torch copy"] = (lambda: target.copy_(source), 2 * size)

    for ranks in (2, 8):
        out, *parts = bf16(ranks + 1, count // 4)
        moved = 2.0 * (ranks + 1) * out.numel()
        made[f"pyruntime reduce of {ranks}"] = (
            lambda out=out, parts=parts: reduce(library, out, parts),
            moved,
        )

    made |= optimizers(count // 2)
    made |= layers(tokens=count >> 14, rows=count >> 16)
    samples = watch.interleave({name: run for name, (run, _) in made.items()}, rounds)
    copy = made["torch copy"][1] / samples["torch copy"].median
    for name, (_, moved) in made.items():
        seconds = samples[name].median
        emit(
            {
                "kind": "support",
                "name": name,
                "seconds": seconds,
                "spread": samples[name].spread,
                "gb_per_second": moved / seconds / 1e9,
                "of_copy": moved / seconds / copy,
            }
        )


def optimizers(count: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Returns steps of AdamW on `count` parameters in eight tensors: ours, and torch's fused one on fp32,
    alone and with the casts for bf16 weights (gradients to fp32, weights to bf16)."""
    pieces = 8
    masters = [torch.randn(count // pieces, device="cuda") for _ in range(pieces)]
    weights = [master.bfloat16() for master in masters]
    grads = [torch.randn_like(weight) for weight in weights]
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    settings = {"lr": 1e-4, "eps": 1e-8}
    step = itertools.count(1)

    def ours() -> None:
        device_adamw_(
            *(weights, grads, first, second, masters),
            beta1=0.9,
            beta2=0.95,
            weight_decay=[0.1] * pieces,
            step=next(step),
            **settings,
        )

    params = [torch.nn.Parameter(master.clone()) for master in masters]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.float()
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.1, fused=True, **settings)

    @torch.no_grad()
    def with_casts() -> None:
        torch._foreach_copy_([param.grad for param in params], grads)
        optimizer.step()
        torch._foreach_copy_(weights, params)

    return {
        "pyruntime adamw, bf16 with fp32 master": (ours, 30.0 * count),
        "torch fused adamw, fp32": (optimizer.step, 28.0 * count),
        "torch fused adamw, fp32, and casts": (with_casts, 40.0 * count),
    }
