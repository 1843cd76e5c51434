"""Times AdamW on one core, in bytes a second, next to a plain copy and to PyTorch's fused AdamW.

    python -m bench.training.adamw [--json FILE] [--elements 30000000]

Each array that a step reads or writes counts once a direction: 28 bytes an element in fp32 (weight and both
moments read and written, gradient read), 30 for bf16 weight and gradient with fp32 master. A copy reads and
writes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.common.beside_copy import Contender, main
from pyruntime.ops.layers import adamw_

SETTINGS = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.1}


def ours(elements: int, dtype: torch.dtype) -> Contender:
    weight, gradient = (torch.randn(elements).to(dtype) for _ in range(2))
    first, second = torch.zeros(elements), torch.zeros(elements)
    masters = [] if dtype == torch.float32 else [weight.float()]
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        adamw_([weight], [gradient], [first], [second], masters, beta1=0.9, beta2=0.95, step=step, **SETTINGS)

    width = weight.element_size()
    # A low-precision weight is only written: its master is read.
    return run, elements * (16 + width + (8 + width if masters else 8))


def theirs(elements: int) -> Callable[[], None]:
    weight = torch.nn.Parameter(torch.randn(elements))
    weight.grad = torch.randn(elements)
    return torch.optim.AdamW([weight], betas=(0.9, 0.95), fused=True, **SETTINGS).step


def contenders(elements: int) -> dict[str, Contender]:
    return {
        "pyruntime fp32": ours(elements, torch.float32),
        "pyruntime bf16, fp32 master": ours(elements, torch.bfloat16),
        "PyTorch fused fp32": (theirs(elements), 28 * elements),
    }


if __name__ == "__main__":
    main(__doc__, contenders)
