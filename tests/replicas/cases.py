"""Replicas on quadratics, each with one of its own, and the methods written out by hand for them, in numpy.

Replica i minimises 1/2 sum_j a_ij (x_j - c_ij)^2 by gradient descent. A trajectory is x after every inner
step, once what happens there between replicas has happened: {name: [steps, ...]} for each replica.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime.replicas import Method, averaging
from tests.transports import take

LR, STEPS, RUN_BYTES = 0.1, 14, 2048
SIZES = {"layers.0.weight": (7, 11), "layers.1.weight": (700,), "layers.1.bias": ()}


def start() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {name: draw.standard_normal(size) for name, size in SIZES.items()}


def quadratic(replica: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """a, c by name."""
    draw = np.random.default_rng(100 + replica)
    return {name: (draw.uniform(0.2, 2.0, size), draw.standard_normal(size)) for name, size in SIZES.items()}


class Layer(nn.Module):
    def __init__(self, parameters: dict[str, torch.Tensor], replica: dict):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))
        self.of = replica

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        for name, p in self.named_parameters():
            a, c = self.of[name]
            loss = loss + (0.5 * a * (p - c) ** 2).sum().to(loss.dtype)
        return loss


class Quadratic(nn.Module):
    def __init__(self, replica: int, dtype: torch.dtype):
        super().__init__()
        values = {name: torch.tensor(value).to(dtype) for name, value in start().items()}
        terms = {
            name: tuple(torch.tensor(each).to(dtype) for each in pair)
            for name, pair in quadratic(replica).items()
        }
        self.layers = nn.ModuleList(
            Layer(
                {name.rpartition(".")[2]: v for name, v in values.items() if f".{number}." in name},
                {name.rpartition(".")[2]: v for name, v in terms.items() if f".{number}." in name},
            )
            for number in range(2)
        )

    def forward(self) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for layer in self.layers:
            loss = layer(loss)
        return loss


def made(group, method: Method, dtype: torch.dtype, transport: str = "symmetric_memory", compression=None):
    """(model, inner optimizer, outer optimizer) of this rank, in runs so short that there are many."""
    take(group, transport)
    model = Quadratic(group.rank(), dtype)
    mesh = DeviceMesh.from_group(group, "cpu") if group.size() > 1 else None
    with patch.object(averaging, "RUN_BYTES", RUN_BYTES):
        outer = pyruntime.OuterOptimizer(model, mesh, method, compression=compression)
    return model, torch.optim.SGD(model.parameters(), lr=LR), outer


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def trajectory(
    group, method: Method, dtype=torch.float64, transport="symmetric_memory", before_step=None, steps=STEPS
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """This replica's, and its parameters after finish(). before_step(step, outer) is called in every step."""
    model, optimizer, outer = made(group, method, dtype, transport)
    found: dict[str, list] = {name: [] for name in SIZES}
    for step in range(steps):
        if before_step is not None:
            before_step(step, outer)
        inner_step(model, optimizer)
        outer.step()
        for name, p in model.named_parameters():
            found[name].append(p.detach().double().numpy().copy())
    outer.finish()
    last = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    outer.close()
    return {name: np.stack(each) for name, each in found.items()}, last


# -- the methods by hand, of one parameter x [replicas, ...] or a list of them


class Replicas:
    """All replicas of all parameters in one process, flat."""

    def __init__(self, count: int):
        terms = [quadratic(replica) for replica in range(count)]
        flat = [
            [np.concatenate([np.ravel(term[name][which]) for name in SIZES]) for term in terms]
            for which in (0, 1)
        ]
        self.a, self.c = (np.stack(each) for each in flat)
        self.x = np.stack([np.concatenate([np.ravel(value) for value in start().values()])] * count)
        self.layer = np.concatenate(
            [np.full(int(np.prod(size)), int(name.split(".")[1])) for name, size in SIZES.items()]
        )
        self.found: list[np.ndarray] = []

    def inner(self) -> None:
        self.x = self.x - LR * self.a * (self.x - self.c)

    def keep(self) -> None:
        self.found.append(self.x.copy())

    def mean(self) -> np.ndarray:
        return self.x.mean(0)


def local_sgd(count: int, tau: int, steps: int = STEPS) -> np.ndarray:
    r = Replicas(count)
    for step in range(1, steps + 1):
        r.inner()
        if step % tau == 0:
            r.x[:] = r.mean()
        r.keep()
    return np.stack(r.found, 1)


def slowmo(count: int, tau: int, lr: float, momentum: float) -> np.ndarray:
    r = Replicas(count)
    begin, u = r.x[0].copy(), 0.0
    for step in range(1, STEPS + 1):
        r.inner()
        if step % tau == 0:
            u = momentum * u + (begin - r.mean())
            begin = begin - lr * u
            r.x[:] = begin
        r.keep()
    return np.stack(r.found, 1)


def diloco(count: int, tau: int, lr: float, momentum: float) -> np.ndarray:
    """The outer optimizer is torch's."""
    r = Replicas(count)
    whole = nn.Parameter(torch.tensor(r.x[0]))
    outer = torch.optim.SGD([whole], lr=lr, momentum=momentum, nesterov=True)
    for step in range(1, STEPS + 1):
        r.inner()
        if step % tau == 0:
            whole.grad = whole.detach() - torch.tensor(r.mean())
            outer.step()
            r.x[:] = whole.detach().numpy()
        r.keep()
    return np.stack(r.found, 1)


def overlapped_local_sgd(count: int, tau: int, pull: float, momentum: float) -> np.ndarray:
    r = Replicas(count)
    anchor, v = r.x[0].copy(), 0.0
    coming = None
    for step in range(1, STEPS + 1):
        r.inner()
        if step % tau == 0:
            if coming is not None:
                v = momentum * v + (coming - anchor)
                anchor = anchor + v
            r.x = r.x - pull * (r.x - anchor)
            coming = r.mean()
        r.keep()
    return np.stack(r.found, 1)


def streaming_diloco(
    count: int, tau: int, fragments: int, delay: int, pull: float, lr: float, momentum: float
) -> np.ndarray:
    r = Replicas(count)
    shared = r.x[0].copy()
    m, coming = np.zeros_like(shared), np.zeros_like(shared)
    for step in range(1, STEPS + 1):
        r.inner()
        for fragment in range(fragments):
            own = r.layer % fragments == fragment
            offset = fragment * tau // fragments
            begun = step - delay + offset  # the step at which what is due now left
            if begun % tau == 0 and begun >= tau and delay > 0:
                m[own] = momentum * m[own] + coming[own]
                shared[own] -= lr * (coming[own] + momentum * m[own])
                r.x[:, own] = (1 - pull) * r.x[:, own] + pull * shared[own]
            if (step + offset) % tau == 0:
                coming[own] = (shared - r.x).mean(0)[own]
        r.keep()
    return np.stack(r.found, 1)


def co2(
    count: int, tau: int, lr: float, momentum: float, clip: float = np.inf, penalised: bool = False
) -> tuple[np.ndarray, list[float]]:
    """As the paper has it, by averages of parameters; and the penalties."""
    r = Replicas(count)
    begin, m = r.x[0].copy(), np.zeros_like(r.x[0])
    before = None  # (x_{t-1,0}, average of x_{t-1,tau}, reach of round t-1)
    first, penalties = None, []
    for step in range(1, STEPS + 1):
        r.inner()
        if step % tau == 1 or tau == 1:
            first = np.sqrt(np.square(r.x - begin).sum(1).mean())
        if step % tau == 0:
            now = begin, r.mean(), tau * first
            if before is not None:
                penalty = 1.0
                if penalised:
                    penalty = 1 + np.linalg.norm(begin - before[1]) / before[2]
                    penalties.append(penalty)
                m = momentum * m + (before[0] - before[1]) / penalty
                m = np.clip(m, -clip, clip)
                begin = begin - lr * m
            before = now
            r.x[:] = begin
        r.keep()
    return np.stack(r.found, 1), penalties


def flat(found: dict[str, np.ndarray]) -> np.ndarray:
    """[steps, elements]."""
    return np.concatenate([each.reshape(STEPS, -1) for each in found.values()], 1)
