"""Part "support" of bench/gpu.py: kernels that move memory, beside what a copy reaches. Layers are in
gpu_layers.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from ctypes import c_void_p

import torch
from gpu_layers import layers
from gpu_problem import Emit
from gpu_ranks import Stopwatch, bf16, load, stream

from pyruntime.cuda.kernels import Kernels


def support(emit: Emit, quick: bool) -> None:
    library = load(hopper=False)
    kernels = Kernels(library)
    watch = Stopwatch(0.001)
    count = (1 << 24) if quick else (1 << 28)
    rounds = 5 if quick else 15
    made: dict[str, tuple[Callable[[], object], float]] = {}

    source, target = torch.randn(count, device="cuda"), torch.empty(count, device="cuda")
    size = count * 4
    made["torch copy"] = (lambda: target.copy_(source), 2 * size)
    addresses = c_void_p(target.data_ptr()), c_void_p(source.data_ptr())
    made["pyruntime copy"] = (lambda: library.call("copy", *addresses, size, 0, stream()), 2 * size)

    for dtype, ranks in itertools.product((torch.bfloat16, torch.float32), (2, 8)):
        elements = count // 4
        parts = [torch.randn(elements, device="cuda").to(dtype) for _ in range(ranks)]
        moved = (ranks + 1) * elements * parts[0].element_size()
        label = f"pyruntime reduce of {ranks}, {str(dtype).removeprefix('torch.')}"
        made[label] = (lambda parts=parts: kernels.reduce(parts), moved)

    tokens, heads, width = count // 8192, 32, 128
    out, block = torch.randn(1, tokens, heads, width, device="cuda"), bf16(1, tokens, heads, width)
    lse, block_lse = torch.randn(2, 1, heads, tokens, device="cuda").unbind()
    moved = out.numel() * 10 + lse.numel() * 12
    made["pyruntime lse_merge"] = (lambda: kernels.lse_merge_(out, lse, block, block_lse), moved)

    made |= optimizers(kernels, count // 2)
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


def optimizers(kernels: Kernels, count: int) -> dict[str, tuple[Callable[[], object], float]]:
    """AdamW on `count` parameters in eight tensors: ours; torch's fused one on fp32, alone and with what it
    takes to train bf16 weights by it (gradients to fp32, weights to bf16)."""
    pieces = 8
    masters = [torch.randn(count // pieces, device="cuda") for _ in range(pieces)]
    weights = [master.bfloat16() for master in masters]
    grads = [torch.randn_like(weight) for weight in weights]
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    settings = {"lr": 1e-4, "eps": 1e-8}
    step = itertools.count(1)

    def ours() -> None:
        kernels.adamw_(
            weights,
            grads,
            masters,
            first,
            second,
            betas=(0.9, 0.95),
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
