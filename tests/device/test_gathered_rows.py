"""A weight's gradient is multiplied from gathered rows where they arrived, without a copy of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import pyruntime
from pyruntime.comm import Runtime
from tests.cuda import build as kernels
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")

ROWS, K, N = 7, 6, 4


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
        assert launched["copy"] == 2  # this rank's own rows of x and dz, to where they leave from
