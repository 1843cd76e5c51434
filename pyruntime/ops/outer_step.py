"""The passes of an outer optimizer over a tensor: each one loop in C++ on the CPU (csrc/cpu/layers), on other
devices torch's operators, by the same equations in the same order.

z and m are float32 (float64 if any tensor is); x, `sent` and rounded copies may be float32, bfloat16 or
float16. All are contiguous, with the same number of elements. Results have the same bits for any number of
threads and on any processor, because replicas compute them alike and never compare. On the CPU all functions
raise ValueError (sizes) and TypeError (dtypes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_ops = torch.ops.pyruntime

BLOCK = 1 << 24
"""Elements that torch's operators take at once, so that intermediate results stay small."""
ROW = 256
"""Numbers that are summed at once on a device. The order in which torch sums long rows depends on the number
of multiprocessors, in which replicas may differ."""


@torch.no_grad()
def outer_step_(
    x: Tensor,
    z: Tensor,
    m: Tensor,
    sent: Tensor,
    rounded: Tensor | None = None,
    *,
    step: float | Tensor | None,
    pulls: bool,
    launches: bool,
    lr: float,
    momentum: float,
    nesterov: bool,
    clip: float,
    pull: float,
    restarts: bool,
) -> None:
    """Updates the tensors at the end of a round, in place, in this order:

        d = z - x                          pull = 1: z is first rounded to x's dtype
        m = clip(momentum m + step sent, -clip, +clip)
        z = z - lr m                       nesterov: z - lr (step sent + momentum m)
        x = x + pull (z - x)               also writes `rounded`, a bfloat16 or float16 copy of x, if given
        sent = d                           without restarts: z - x after the lines above

    step: None leaves out the second and third line; on a device it may be a number there, which the host does
    not read. pulls, launches: whether the fourth and fifth line run.
    """
    if x.device.type == "cpu":
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
        return
    for x_, z_, m_, sent_ in _blocks(x, z, m, sent):
        before = _displacement(z_, x_, pull == 1) if launches and restarts else None
        if step is not None:
            g = sent_.to(z.dtype) * (step.to(z.dtype) if isinstance(step, Tensor) else step)
            torch.add(g, m_, alpha=momentum, out=m_)
            if math.isfinite(clip):
                m_.clamp_(-clip, clip)
            z_.add_(torch.add(g, m_, alpha=momentum) if nesterov else m_, alpha=-lr)
        if pulls:
            own = x_.to(z.dtype)
            x_.copy_(z_ if pull == 1 else torch.add(own, z_ - own, alpha=pull))
        if launches:
            sent_.copy_(_displacement(z_, x_, pull == 1) if before is None else before)
    if pulls and rounded is not None:
        rounded.view(-1).copy_(x.view(-1))


@torch.no_grad()
def squared_displacement(z: Tensor, x: Tensor, rounds: bool) -> float | Tensor:
    """Returns ||z - x||^2 in float64; rounds: z is first rounded to x's dtype. On a device, a tensor."""
    if x.device.type == "cpu":
        return _ops.squared_displacement(z, x, rounds)
    squares = (_displacement(z_, x_, rounds).double().square_() for z_, x_ in _blocks(z, x))
    return _sum(torch.stack([_sum(each) for each in squares]))


@torch.no_grad()
def squared_gap(sent: Tensor, m: Tensor, mean: float, lr: float) -> float | Tensor:
    """Returns ||mean sent - lr m||^2 in float64. On a device, a tensor."""
    if m.device.type == "cpu":
        return _ops.squared_gap(sent, m, mean, lr)
    gaps = ((sent_.double() * mean).add_(m_.double(), alpha=-lr) for sent_, m_ in _blocks(sent, m))
    return _sum(torch.stack([_sum(each.square_()) for each in gaps]))


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.view(-1).split(BLOCK) for tensor in tensors), strict=True)


def _displacement(z: Tensor, x: Tensor, rounds: bool) -> Tensor:
    """Returns z - x in z's dtype; rounds: z is first rounded to x's dtype."""
    return (z.to(x.dtype).to(z.dtype) if rounds else z) - x.to(z.dtype)


def _sum(values: Tensor) -> Tensor:
    """Returns the sum of a flat tensor, in an order that depends on its length alone."""
    while len(values) > 1:
        padded = torch.nn.functional.pad(values, (0, -len(values) % ROW))
        values = padded.view(-1, ROW).sum(1)
    return values.sum()
