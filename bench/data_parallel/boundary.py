"""Times the passes at the end of a CO2 round on one core, in bytes a second, next to a plain copy and to the
same by torch's operations.

    python -m bench.data_parallel.boundary [--json FILE] [--elements 30000000]

Weights are bf16 with fp32 masters. Each array that is read or written counts once a direction. The pass reads
and writes master, outer iterate, outer momentum and the message, and writes the bf16 weight (30 bytes an
element). The norms of the penalty read two arrays each: the received message and the momentum (6), and once a
round, after its first step, outer iterate and master (8).
"""

from __future__ import annotations

import torch

from bench.common.beside_copy import Contender, main
from pyruntime.ops.outer_step import outer_step_, squared_displacement, squared_gap

LR, MOMENTUM, STEP, CLIP = 1.0, 0.2, 0.4, 1.0
BLOCK = 1 << 16
"""Elements that torch's operations process at once, so that they stay in the cache."""


def contenders(elements: int) -> dict[str, Contender]:
    x, z, m = (torch.randn(elements) for _ in range(3))
    sent, weight = (torch.randn(elements).bfloat16() for _ in range(2))

    def one_pass() -> None:
        outer_step_(
            x, z, m, sent, weight, step=STEP, pulls=True, launches=True, lr=LR, momentum=MOMENTUM,
            nesterov=False, clip=CLIP, pull=1.0, restarts=True,
        )  # fmt: skip

    def by_torch() -> None:
        blocks = zip(*(each.split(BLOCK) for each in (x, z, m, sent)), strict=True)
        for x_block, z_block, m_block, sent_block in blocks:
            moved = z_block - x_block
            m_block.mul_(MOMENTUM).add_(sent_block.float() * STEP).clamp_(-CLIP, CLIP)
            z_block.sub_(m_block, alpha=LR)
            x_block.copy_(z_block)
            sent_block.copy_(moved)
        weight.copy_(x)

    def gap_by_torch() -> None:
        for sent_block, m_block in zip(sent.split(BLOCK), m.split(BLOCK), strict=True):
            (sent_block.float() * 0.5).sub_(m_block, alpha=LR).double().square().sum().item()

    def first_step_by_torch() -> None:
        for z_block, x_block in zip(z.split(BLOCK), x.split(BLOCK), strict=True):
            (z_block - x_block).double().square().sum().item()

    return {
        "the pass": (one_pass, 30 * elements),
        "by torch": (by_torch, 30 * elements),
        "gap": (lambda: squared_gap(sent, m, 0.5, LR), 6 * elements),
        "gap, by torch": (gap_by_torch, 6 * elements),
        "first step": (lambda: squared_displacement(z, x, True), 8 * elements),
        "first step, by torch": (first_step_by_torch, 8 * elements),
    }


if __name__ == "__main__":
    main(__doc__, contenders)
