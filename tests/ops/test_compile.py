"""The primitives under torch.compile and opcheck."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pyruntime import ops
from pyruntime.comm import group_name, group_rank, group_size

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck_case(group):
    name, rank, size = group_name(group), group_rank(group), group_size(group)

    def random(*shape):
        generator = torch.Generator().manual_seed(len(shape))
        return torch.randn(*shape, generator=generator, requires_grad=True)

    shard = random(3, 8)
    weights = [random(5, 8), random(4, 8)]
    bias = random(5)
    namespace = torch.ops.pyruntime
    rows = 3 * size
    cases = [
        (namespace.all_gather_matmul, (shard, weights, [bias, None], name, 0, rows, False, False, "chunked")),
        (namespace.all_gather_matmul, (shard, weights, [], name, 0, rows, True, True, "chunked")),
        (namespace.matmul_reduce_scatter, (random(7, 8), weights[0], bias, name, 0, "chunked")),
        (namespace.matmul_all_reduce, (random(7, 8), weights[0], bias, name, "chunked")),
        (namespace.replicated_matmul, (random(7, 8), weights, [bias, None], name, "chunked")),
        (namespace.all_gather, (shard, name, 0, rows)),
        (namespace.reduce_scatter, (random(7, 8), name, 0)),
        (namespace.all_reduce, (random(7, 8), name)),
        (namespace.all_gather_stats, (random(7, 8).detach(), name)),
    ]
    del rank
    for op, arguments in cases:
        torch.library.opcheck(op, arguments, test_utils=OPCHECKS)
    return len(cases)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.second_tier("2")
def test_opcheck(ranks, world_size):
    assert set(ranks.run(opcheck_case, world_size, timeout=120)) == {9}


def mlp(x, up, down, name, rows, wire):
    hidden = ops.all_gather_matmul(x, up, name, rows=rows, tier="chunked", wire=wire)
    return ops.matmul_reduce_scatter(F.silu(hidden), down, name, tier="chunked", wire=wire)


def compile_case(group, backend, wire):
    size = group_size(group)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, generator=generator, requires_grad=True)
    up = torch.randn(6, 8, generator=generator, requires_grad=True)
    down = torch.randn(8, 6, generator=generator, requires_grad=True)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)
    expected = mlp(x, up, down, group_name(group), 4 * size, wire)
    expected_grads = torch.autograd.grad(expected.square().sum(), (x, up, down))
    found = compiled(x, up, down, group_name(group), 4 * size, wire)
    grads = torch.autograd.grad(found.square().sum(), (x, up, down))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize(("backend", "wire"), [("aot_eager", "fp8"), ("inductor", "same")])
@pytest.mark.second_tier("inductor-same")
def test_compiled_mlp_equals_eager(ranks, backend, wire):
    ranks.run(compile_case, 2, backend, wire, timeout=180)
