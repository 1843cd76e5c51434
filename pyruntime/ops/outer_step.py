"""The passes of an outer optimizer over a tensor, each one loop in C++ (csrc/cpu/layers).

On the CPU. z and m are float32 (float64 with any of that); x, what travels and rounded copies may be float32,
bfloat16 or float16; all contiguous, of as many elements. Results are bitwise the same whatever the number of
threads and the processor: replicas compute them alike and never compare. Raises ValueError (sizes) and
TypeError (dtypes).
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.pyruntime


@torch.no_grad()
def outer_step_(
    x: Tensor,
    z: Tensor,
    m: Tensor,
    sent: Tensor,
    rounded: Tensor | None = None,
    *,
    step: float | None,
    pulls: bool,
    launches: bool,
    lr: float,
    momentum: float,
    nesterov: bool,
    clip: float,
    pull: float,
    restarts: bool,
) -> None:
    """What happens where a round ends, in place, in this order:

        d = z - x                          pull = 1: of z as x can hold it
        m = clip(momentum m + step sent, -clip, +clip)
        z = z - lr m                       nesterov: z - lr (step sent + momentum m)
        x = x + pull (z - x)               and rounded, a bfloat16 or float16 copy of x, where there is one
        sent = d                           without restarts: z - x of now

    step: None leaves out the second and third line; pulls, launches: whether there are the fourth and fifth.
    """
    _ops.outer_step_(
        x,
        z,
        m,
        sent,
        rounded,
        step=step,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        clip=clip,
        pull=pull,
        restarts=restarts,
        pulls=pulls,
        launches=launches,
    )


@torch.no_grad()
def squared_displacement(z: Tensor, x: Tensor, rounds: bool) -> float:
    """||z - x||^2 in float64; rounds: of z as x can hold it."""
    return _ops.squared_displacement(z, x, rounds)


@torch.no_grad()
def squared_gap(sent: Tensor, m: Tensor, mean: float, lr: float) -> float:
    """||mean sent - lr m||^2 in float64."""
    return _ops.squared_gap(sent, m, mean, lr)
