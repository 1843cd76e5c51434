"""inductor's micro-pipeline pass on CPU tensors: which graphs it rewrites, and that they compute the same.

The cases are those of PyTorch's test/distributed/tensor/parallel/test_micro_pipeline_tp.py; here the graphs
also run, on two ranks and more.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pyruntime.symm_mem  # noqa: F401
from pyruntime.comm import group_name, group_rank, group_size

try:
    from torch.distributed._functional_collectives import all_gather_single, reduce_scatter_single
except ImportError:  # before torch 2.13
    from torch.distributed._functional_collectives import all_gather_tensor as all_gather_single
    from torch.distributed._functional_collectives import reduce_scatter_tensor as reduce_scatter_single


def enable(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.distributed._symmetric_memory.enable_symm_mem_for_group(group_name(group))


def traced(function, *inputs):
    """As inductor has a graph when its pass comes to it."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(function, decompositions, tracing_mode="fake")(*inputs)
    remove_noop_ops(module.graph)
    view_to_reshape(module)
    return module


def rewritten(function, *inputs):
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    module = traced(function, *inputs)
    micro_pipeline_tp_pass(module.graph)
    module.recompile()
    return module


def operators(module):
    names = [node.target._opname for node in module.graph.nodes if hasattr(node.target, "_opname")]
    return [name for name in names if "gather" in name or "scatter" in name]


def gathered_product(group, dim, return_a):
    def product(shard, *bs):
        whole = all_gather_single(shard, gather_dim=dim, group=group)
        products = [whole @ b for b in bs]
        return (whole, *products) if return_a else products

    return product


def gather_case(group, return_a):
    enable(group)
    torch.manual_seed(group_rank(group))
    for shape, dim in (((4, 32), 0), ((4, 32), 1), ((2, 6, 32), 0), ((2, 6, 32), 1), ((2, 6, 32), 2)):
        product = gathered_product(group, dim, return_a)
        features = 32 * group_size(group) if dim == len(shape) - 1 else 32
        inputs = torch.randn(shape), torch.randn(features, 16), torch.randn(features, 5)
        module = rewritten(product, *inputs)
        if dim == len(shape) - 1:  # too few features for it, says the pass
            assert "fused_all_gather_matmul" not in operators(module)
        else:
            assert operators(module) == ["fused_all_gather_matmul"]
            (fused,) = (node for node in module.graph.nodes if "fused" in str(node.target))
            assert fused.kwargs["return_A"] == return_a
        for found, expected in zip(module(*inputs), product(*inputs), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("return_a", [True, False])
@pytest.mark.second_tier("True")
def test_a_gather_and_its_products_are_fused(ranks, return_a):
    ranks.run(gather_case, 2, return_a, timeout=120)


def wide_gather_case(group):
    enable(group)
    torch.manual_seed(group_rank(group))

    def product(shard, b):
        return all_gather_single(shard, gather_dim=1, group=group) @ b

    inputs = torch.randn(3, 1024), torch.randn(2048, 4)
    module = rewritten(product, *inputs)
    assert operators(module) == ["fused_all_gather_matmul"]
    torch.testing.assert_close(module(*inputs), product(*inputs), rtol=1e-4, atol=1e-3)


def test_many_features_are_gathered_with_their_product(ranks):
    ranks.run(wide_gather_case, 2, timeout=120)


def scattered_product(group, dim, reduce_op):
    def product(a, b):
        return reduce_scatter_single(a @ b, reduce_op, dim, group)

    return product


def scatter_case(group):
    enable(group)
    torch.manual_seed(group_rank(group))
    for shape, dim in (((4, 32), 0), ((4, 32), 1), ((2, 6, 32), 0), ((2, 6, 32), 1), ((2, 6, 32), 2)):
        inputs = torch.randn(shape), torch.randn(32, 16)
        sums = scattered_product(group, dim, "sum")(*inputs)
        for reduce_op, expected in (("sum", sums), ("avg", sums / group_size(group))):  # gloo has no "avg"
            module = rewritten(scattered_product(group, dim, reduce_op), *inputs)
            assert operators(module) == ["fused_matmul_reduce_scatter"]
            found = module(*inputs)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert found.stride() == expected.stride()


def test_a_product_and_its_scatter_are_fused(ranks):
    ranks.run(scatter_case, 2, timeout=120)


def named_groups_case(group):
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    tp = half[group_rank(group) // 2]

    def products(x, up, down):
        hidden = all_gather_single(x, 0, tp) @ up
        whole = all_gather_single(hidden, 0, group)
        whole = whole / whole.pow(2).sum().sqrt()
        hidden = reduce_scatter_single(whole, "sum", 0, group)
        return reduce_scatter_single(hidden @ down, "sum", 0, tp)

    torch.manual_seed(group_rank(group))
    inputs = torch.randn(8, 10), torch.randn(10, 7), torch.randn(7, 10)
    expected = products(*inputs)
    collectives = ["all_gather_into_tensor", "reduce_scatter_tensor"]
    fused = ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
    assert operators(rewritten(products, *inputs)) == [fused[0], *collectives, fused[1]]  # no group was named
    enable(group)
    assert operators(rewritten(products, *inputs)) == [collectives[0]] * 2 + [collectives[1]] * 2
    enable(tp)
    module = rewritten(products, *inputs)
    assert operators(module) == [fused[0], *collectives, fused[1]]
    torch.testing.assert_close(module(*inputs), expected)
    dist.barrier(group=group)


def test_of_groups_that_were_named_only_these_are_rewritten(ranks):
    for rank in ranks.launch(named_groups_case, 4, timeout=120):
        assert rank.error is None, rank.output


def scaled_case(group):
    enable(group)

    def product(shard, b, one):
        whole = all_gather_single(shard.view(torch.uint8), 0, group).view(torch.float8_e4m3fn)
        return torch._scaled_mm(whole, b, one, one, out_dtype=torch.float32)

    shard, b = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e4m3fn).t()
    inputs = shard, b, torch.tensor(1.0)
    assert operators(rewritten(product, *inputs)) == ["all_gather_into_tensor"]


def test_products_with_scales_stay_as_they_are(ranks):
    ranks.run(scaled_case, 2, timeout=120)


class MLP(torch.nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.up = torch.nn.Linear(features, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, features, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def dtensor_mlp_case(group, dim):
    """Compiled, on shards of the sequence: the operators in its code, output and gradients of one process."""
    import torch._inductor.config
    from torch._inductor.utils import run_fw_bw_and_get_code

    enable(group)
    rank, size = group_rank(group), group_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    whole, x = MLP(16, 24), torch.randn((8, 16) if dim == 0 else (3, 8, 16))
    expected = whole(x)
    expected.square().sum().backward()
    torch.manual_seed(0)
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(dim)),
        "down": RowwiseParallel(output_layouts=Shard(dim)),
    }
    model = parallelize_module(MLP(16, 24), mesh, plan)
    shard = x.chunk(size, dim)[rank].clone().requires_grad_()
    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        compiled = torch.compile(model)
        found, codes = run_fw_bw_and_get_code(lambda: compiled(shard))
    forward, backward = codes
    for code in (forward, backward):
        assert "symm_mem.fused_all_gather_matmul" in code and "symm_mem.fused_matmul_reduce_scatter" in code
        assert "reduce_scatter_tensor" not in code
    assert "all_gather_into_tensor" not in forward
    torch.testing.assert_close(found, expected.chunk(size, dim)[rank])
    model.zero_grad()
    shard.grad = None
    compiled(shard).square().sum().backward()
    local = x.clone().requires_grad_()
    whole.zero_grad()
    whole(local).square().sum().backward()
    torch.testing.assert_close(shard.grad, local.grad.chunk(size, dim)[rank])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradient = parameter.grad.redistribute(mesh, [Replicate()]).to_local()
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.second_tier
def test_a_compiled_dtensor_mlp_runs_on_our_engines(ranks, dim):
    for rank in ranks.launch(dtensor_mlp_case, 2, dim, timeout=240):
        assert rank.error is None, rank.output
