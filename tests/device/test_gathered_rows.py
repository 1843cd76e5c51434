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
from tests.transports import CHUNK_BYTES

pytestmark = pytest.mark.usefixtures("simulated")

ROWS, K, N = 7, 6, 4
WIDE = 64
OWN = 2
"""Copies of this rank's own rows, of x and of dz, to where they leave from."""


def drawn(*shape: int) -> torch.Tensor:
    """Integers, of which every sum is exact in whatever order."""
    return torch.randint(-8, 9, shape).float()


def multiplied(found, kept, name, dy, x, later) -> None:
    """Puts the product dY^T X into `found`, at once or, with `kept`, when the function there is called."""

    def multiply() -> None:
        found[name] = dy.T @ x

    if kept is None:
        multiply()
    else:
        kept.append(multiply)


def gradients(group, taker) -> tuple[bool, int]:
    """Whether the gradients of both linears are exact, and how often their backward passes copied in the
    second round, when the group has its memory. taker: "autograd", or a sink that multiplies "at once", or
    "later", when other rows have come where these came."""
    rank, size = sim.begin_rank(delays=2)
    sim.use_kernels(kernels.LIBRARY)
    exact, copies = True, 0
    with Runtime.start(tp=size, device=sim.DEVICE) as runtime:
        for _ in range(2):
            x, dy = drawn(ROWS, K), drawn(size, ROWS, N)
            hidden, dz = drawn(size, ROWS, N), drawn(ROWS, K)
            up, down = (drawn(*shape).to(sim.DEVICE).requires_grad_() for shape in ((N, K), (K, N)))
            found, kept = {}, []
            if taker != "autograd":
                take = partial(multiplied, found, kept if taker == "later" else None)
                for name, weight in (("up", up), ("down", down)):
                    _C.set_weight_gradient_sink(weight, partial(take, name), keeps=taker == "later")
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
            if taker == "autograd":
                found = {"up": up.grad, "down": down.grad}
            else:
                assert up.grad is None and down.grad is None
            exact &= torch.equal(found["up"].cpu(), dy[rank].T @ x)
            exact &= torch.equal(found["down"].cpu(), dz.T @ hidden[rank])
    return exact, copies


@pytest.mark.parametrize("taker", ["autograd", "at once", "later"])
def test_gradients_of_weights_are_exact_and_copy_no_row_that_came_unless_it_is_kept(ranks, taker):
    for rank in ranks.launch(gradients, 3, taker, init=False):
        assert rank.error is None, rank.error
        exact, copies = rank.value
        assert exact and (copies > OWN if taker == "later" else copies == OWN)


def few_rows(group) -> tuple[bool, int]:
    """Whether gathers around a ring, of fewer rows a rank than pieces, give all rows, and the bytes of the
    last one that this rank has waited for."""
    rank, size = sim.begin_rank(delays=4)
    sim.use_kernels(kernels.LIBRARY)
    right = True
    with Runtime.start(tp=size, device=sim.DEVICE) as runtime:
        pyruntime.comm.configure(runtime.tp, chunk_bytes=CHUNK_BYTES, rings=[list(range(size))])
        for number in range(4):
            all_rows = (100.0 * number + torch.arange(float(size)))[:, None].expand(size, WIDE)
            before = pyruntime.comm.stats(runtime.tp).bytes
            found = pyruntime.ops.all_gather(all_rows[rank : rank + 1].to(sim.DEVICE), runtime.tp)
            right &= torch.equal(found.cpu(), all_rows)
        return right, pyruntime.comm.stats(runtime.tp).bytes - before


def test_every_piece_around_a_ring_is_awaited_before_it_is_read(ranks):
    """Some pieces are empty, and begin where the next rank's first one does."""
    for rank in ranks.launch(few_rows, 4, init=False):
        assert rank.error is None, rank.error
        assert rank.value == (True, 3 * 4 * WIDE)
