"""The kernels on GPUs: `pytest -m gpu` where there is one, with a torch for CUDA and `make cuda`.

Ranks are processes. Where there are fewer GPUs than ranks they share one, by turns; symmetric memory allows
that when it is told to.
"""

from __future__ import annotations

import os

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.cuda import FusedGroup, Kernels, Library, why_not
from tests.cuda import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a GPU")]

SIZES = [(256, 512, 384), (1000, 777, 333), (3, 8, 70), (2048, 1024, 512), (130, 40, 30)]


@pytest.fixture
def kernels() -> Kernels:
    return Kernels(Library())


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmul_is_the_product_in_fp64(kernels, layout, dtype):
    for m, n, k in [*SIZES, (4096, 4096, 256)]:  # the last takes the large tiles
        cases.check_matmul(kernels, "cuda", layout, dtype, m, n, k)


def test_reduce_adds_in_order_and_rounds_once(kernels):
    cases.check_reduce(kernels, "cuda", 4, (9, 33))
    cases.check_reduce(kernels, "cuda", 8, (1024, 512))


def test_adamw_is_that_of_the_cpu_path(kernels):
    cases.check_adamw(kernels, "cuda", [(5, 7), (129,), (1,), (300, 700)])


def test_lse_merge_gives_attention_over_all_keys(kernels):
    cases.check_lse_merge(kernels, "cuda")


def fused_steps(group, calls):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # ranks may outnumber GPUs
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return cases.fused_steps(FusedGroup(Library(), group, device, deadline_s=60), group, calls)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fused_products(ranks, world_size):
    for errors in ranks.run(fused_steps, world_size, SIZES * 3):
        assert max(errors) < 1, errors


def chunked_steps(group, sizes):
    """Errors, in roundings, of the chunked tier: forward and gradients of both linears."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    comm.set_deadline(group, 60)
    rank, world_size, errors = group.rank(), group.size(), []
    for number, (m, n, k) in enumerate(sizes):
        torch.manual_seed(number)  # all ranks draw alike
        whole, grad = torch.randn(m, k).bfloat16(), torch.randn(world_size, m, n).bfloat16()
        weights = torch.randn(world_size, n, k).bfloat16()
        shard = whole.tensor_split(world_size)[rank].to(device).requires_grad_()
        weight = weights[rank].to(device).requires_grad_()
        y = ops.all_gather_matmul(shard, weight, group, rows=m, tier="chunked")
        y.backward(grad[rank].to(device))
        dx = sum(g.double() @ w.double() for g, w in zip(grad, weights, strict=True))
        z = ops.matmul_reduce_scatter(
            grad[rank].to(device), weight.detach().t().contiguous(), group, tier="chunked"
        )
        for found, wanted in (
            (y, whole.double() @ weights[rank].double().t()),
            (shard.grad, dx.tensor_split(world_size)[rank]),
            (weight.grad, grad[rank].double().t() @ whole.double()),
            (z, dx.tensor_split(world_size)[rank]),
        ):
            errors.append(cases.error_in_roundings(found.detach(), wanted, torch.bfloat16))
    return errors


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_chunked_tier(ranks, world_size):
    for errors in ranks.run(chunked_steps, world_size, SIZES * 3):
        assert max(errors) < 1 + world_size, errors  # the parts of a sum are rounded too


def replayed(group, replays):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    fused = FusedGroup(Library(), group, device, deadline_s=60)
    rank, world_size, m, n, k = group.rank(), group.size(), 192, 96, 64
    shard = torch.empty(m // world_size, k, dtype=torch.bfloat16, device=device)
    weight = torch.empty(n, k, dtype=torch.bfloat16, device=device)
    x, back = torch.empty(m, n, dtype=torch.bfloat16, device=device), torch.empty_like(weight)
    for _ in range(2):  # the workspaces grow, and every kernel is loaded, before the capture
        fused.all_gather_matmul(shard, weight, m)
        fused.matmul_reduce_scatter(x, back, "NN")
    fused.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered = fused.all_gather_matmul(shard, weight, m)
        scattered = fused.matmul_reduce_scatter(x, back, "NN")
    errors = []
    for number in range(replays):
        torch.manual_seed(number)
        whole, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        xs, backs = torch.randn(world_size, m, n).bfloat16(), torch.randn(world_size, n, k).bfloat16()
        for static, value in (
            (shard, whole.tensor_split(world_size)[rank]),
            (weight, w),
            (x, xs[rank]),
            (back, backs[rank]),
        ):
            static.copy_(value)
        gathered.fill_(float("nan"))
        scattered.fill_(float("nan"))
        graph.replay()
        wanted = sum(a.double() @ b.double() for a, b in zip(xs, backs, strict=True))
        errors.append(
            max(
                cases.error_in_roundings(gathered, whole.double() @ w.double().t(), torch.bfloat16),
                cases.error_in_roundings(scattered, wanted.tensor_split(world_size)[rank], torch.bfloat16),
            )
        )
    fused.check()
    return max(errors)


def test_a_captured_graph_gives_right_results_at_every_replay(ranks):
    for error in ranks.run(replayed, 2, 1000, timeout=300):
        assert error < 1
