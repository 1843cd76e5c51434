"""torch's symm_mem operators on devices, by our primitives: values and gradients are those of one process."""

from __future__ import annotations

import pytest
import torch

import pyruntime.symm_mem
from pyruntime.comm import Runtime
from tests.cuda import build as kernels
from tests.device import sim
from tests.symm_mem.test_operators import OPS, check_strides, drawn

pytestmark = pytest.mark.usefixtures("simulated")


def close(found, expected):
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=1e-4, atol=1e-4)


def multiply(rank: int, name: str, dim: int) -> None:
    shards, all_b, down = (
        [drawn(shape, torch.float32, seed, peer).requires_grad_() for peer in range(2)]
        for seed, shape in ((1, (2, 4, 8)), (2, (16 if dim == 2 else 8, 6)), (3, (6, 8)))
    )
    whole = torch.cat(shards, dim)
    sums = sum((whole @ b).tanh() @ d for b, d in zip(all_b, down, strict=True)) / 2
    weight = drawn(sums.shape, torch.float32, 4, 0)
    of_rank = (shards[rank], all_b[rank], down[rank])
    expected = torch.autograd.grad((sums * weight).sum() + whole.pow(3).sum(), of_rank)
    own = [each.detach().to("sim").requires_grad_() for each in of_rank]
    a, (hidden,) = OPS.fused_all_gather_matmul(own[0], [own[1]], dim, name)
    part = OPS.fused_matmul_reduce_scatter(hidden.tanh(), own[2], "avg", dim, name)
    check_strides(part, sums.chunk(2, dim)[rank].contiguous())
    close(a.detach(), whole.detach())
    close(part.detach(), sums.chunk(2, dim)[rank].detach())
    loss = (part * weight.chunk(2, dim)[rank].to("sim")).sum() + a.chunk(2, dim)[rank].pow(3).sum()
    for found, gradient in zip(torch.autograd.grad(loss, own), expected, strict=True):
        close(found, gradient)


def collect(rank: int, name: str) -> None:
    parts = [drawn((4, 5), torch.float32, 5, peer) for peer in range(2)]
    own = parts[rank].to("sim")
    gathered = OPS._low_contention_all_gather(own, name)
    scattered = OPS._low_contention_reduce_scatter(own, "avg", name)
    wait = torch.ops._c10d_functional.wait_tensor
    assert torch.equal(wait(gathered).cpu(), torch.cat(parts))
    close(wait(scattered), (sum(parts) / 2).chunk(2)[rank])


def run(group):
    sim.begin_rank(delays=3)
    sim.use_kernels(kernels.LIBRARY)
    pyruntime.symm_mem.use_on("sim")
    with Runtime.start(tp=2, device="sim") as runtime:
        name = runtime.tp.mesh.get_group().group_name
        for dim in range(3):
            multiply(runtime.rank, name, dim)
        collect(runtime.rank, name)
        with pytest.raises(NotImplementedError, match="get_remote_tensors has no kernel"):
            OPS.get_remote_tensors(torch.ones(3, device="sim"), name)  # torch's own, for CUDA alone


def test_values_and_gradients_are_those_of_one_process(ranks):
    for rank in ranks.launch(run, 2, init=False):
        assert rank.error is None, rank.error
