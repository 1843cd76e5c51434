"""A weight's gradient is multiplied from gathered rows where they arrived, without a copy of them."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

import pyruntime
from pyruntime.comm import Runtime
from pyruntime.comm.core import _C
from tests.cuda import build as kernels
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")

ROWS, K, N = 7, 6, 4
OWN = 2
"""Copies of this rank's own rows, of x and of dz, to where they leave from."""


def drawn(*shape: int) -> torch.Tensor:
    """Integers, of which every sum is exact in whatever order."""
    return torch.randint(-8, 9, shape).float()


def gradients(group) -> tuple[bool, Counter]:
    """Whether the gradients of both linears are exact, and what their backward passes launched in the second
    round, when the group has its memory."""
    rank, size = sim.begin_rank(delays=2)
    sim.use_kernels(kernels.LIBRARY)
    exact = True
    with Runtime.start(tp=size, device=sim.DEVICE) as runtime:
        for _ in range(2):
            x, dy = drawn(ROWS, K), drawn(size, ROWS, N)
            hidden, dz = drawn(size, ROWS, N), drawn(ROWS, K)
            up, down = (drawn(*shape).to(sim.DEVICE).requires_grad_() for shape in ((N, K), (K, N)))
            own = [each.tensor_split(size)[rank].to(sim.DEVICE) for each in (x, dz)]
            y = pyruntime.all_gather_matmul(own[0].requires_grad_(), up, runtime.tp, rows=ROWS)
            z = pyruntime.matmul_reduce_scatter(hidden[rank].to(sim.DEVICE), down, runtime.tp)
            dy_own = dy[rank].to(sim.DEVICE)
            torch.accelerator.synchronize()
            sim.reset_counts()
            y.backward(dy_own)
            z.backward(own[1])
            launched = Counter(sim.launches())
            exact &= torch.equal(up.grad.cpu(), dy[rank].T @ x)
            exact &= torch.equal(down.grad.cpu(), dz.T @ hidden[rank])
    return exact, launched


def test_gradients_of_weights_are_exact_and_copy_no_row_that_came(ranks):
    for rank in ranks.launch(gradients, 3, init=False):
        assert rank.error is None, rank.error
        exact, launched = rank.value
        assert exact
        assert launched["copy"] == OWN


def multiplied(found, kept, name, dy, x, later) -> None:
    """Puts the product dY^T X into `found`, at once or, with `kept`, when the function there is called."""

    def multiply() -> None:
        found[name] = dy.T @ x

    if kept is None:
        multiply()
    else:
        kept.append(multiply)


def products(group, keeps) -> tuple[bool, int]:
    """Whether sinks got the operands of both gradients, and what the backward passes copied in the second
    round. Sinks that keep them multiply after other rows have come where these came."""
    rank, size = sim.begin_rank(delays=2)
    sim.use_kernels(kernels.LIBRARY)
    exact, copies = True, 0
    with Runtime.start(tp=size, device=sim.DEVICE) as runtime:
        for _ in range(2):
            x, dy = drawn(ROWS, K), drawn(size, ROWS, N)
            hidden, dz = drawn(size, ROWS, N), drawn(ROWS, K)
            up, down = (drawn(*shape).to(sim.DEVICE).requires_grad_() for shape in ((N, K), (K, N)))
            found, kept = {}, []
            take = partial(multiplied, found, kept if keeps else None)
            for name, weight in (("up", up), ("down", down)):
                _C.set_weight_gradient_sink(weight, partial(take, name), keeps=keeps)
            own = [each.tensor_split(size)[rank].to(sim.DEVICE) for each in (x, dz)]
            y = pyruntime.all_gather_matmul(own[0].requires_grad_(), up, runtime.tp, rows=ROWS)
            z = pyruntime.matmul_reduce_scatter(hidden[rank].to(sim.DEVICE), down, runtime.tp)
            dy_own = dy[rank].to(sim.DEVICE)
            torch.accelerator.synchronize()
            sim.reset_counts()
            y.backward(dy_own)
            z.backward(own[1])
            copies = Counter(sim.launches())["copy"]
            for _ in range(4):  # in every slot
                pyruntime.all_gather_matmul(own[0].detach(), up.detach(), runtime.tp, rows=ROWS)
            for multiply in kept:
                multiply()
            exact &= torch.equal(found["up"].cpu(), dy[rank].T @ x)
            exact &= torch.equal(found["down"].cpu(), dz.T @ hidden[rank])
            assert up.grad is None and down.grad is None
    return exact, copies


@pytest.mark.parametrize("keeps", [False, True])
def test_a_sink_that_keeps_no_operands_gets_rows_where_they_came(ranks, keeps):
    for rank in ranks.launch(products, 3, keeps, init=False):
        assert rank.error is None, rank.error
        exact, copies = rank.value
        assert exact and (copies > OWN if keeps else copies == OWN)
