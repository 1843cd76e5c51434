"""Primitives of weights that are cut both ways: rows travel over one group, x, and sums over another, y."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pyruntime import comm, ops
from tests.transports import take

N, K = 6, 10  # of a rank's weight
MESHES = [(2, 2), (1, 4), (4, 1)]


@functools.cache
def axes(x: int, y: int):
    mesh = init_device_mesh("cpu", (x, y), mesh_dim_names=("sums_x", "sums_y"))
    return mesh["sums_x"], mesh["sums_y"]


def drawn(*shape: int) -> torch.Tensor:
    """The same on every rank: integers so small that every sum of products is exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).double()


def leaf(exact: torch.Tensor) -> torch.Tensor:
    return exact.clone().requires_grad_()


def columns(x, y, rows, dim, whole, tier):
    """Y = sum over y of gather(X) W^T + b of two weights, or of an X that every rank of x has: what differs
    from the exact products."""
    r, s = x.get_local_rank(), y.get_local_rank()
    shape = (rows,) if dim == 0 else (3, rows)
    full = drawn(y.size(), *shape, K)
    weights = [drawn(x.size(), y.size(), width, K) for width in (N, N + 1)]
    bias, grads = drawn(N), [drawn(x.size(), *shape, width) for width in (N, N + 1)]
    own = leaf(full[s] if whole else full[s].tensor_split(x.size(), dim)[r])
    mine, b = [leaf(weight[r, s]) for weight in weights], leaf(bias)
    options = {"bias": [b, None], "tier": tier, "sums": y}
    if whole:
        found = ops.replicated_matmul(own, mine, x, **options)
    else:
        found = ops.all_gather_matmul(own, mine, x, dim=dim, rows=rows, **options)
    torch.autograd.backward(found, [grad[r] for grad in grads])
    dx = sum(grads[i][p] @ weights[i][p, s] for i in range(2) for p in range(x.size()))
    results = {f"y {i}": each.detach() for i, each in enumerate(found)}
    exact = {
        f"y {i}": sum(full[q] @ weight[r, q].T for q in range(y.size())) + (bias if i == 0 else 0)
        for i, weight in enumerate(weights)
    }
    results |= {"dx": own.grad, "db": b.grad} | {f"dw {i}": w.grad for i, w in enumerate(mine)}
    exact |= {"dx": dx if whole else dx.tensor_split(x.size(), dim)[r]}
    exact |= {"db": grads[0][r].flatten(0, -2).sum(0)}
    exact |= {f"dw {i}": grads[i][r].flatten(0, -2).T @ full[s].flatten(0, -2) for i in range(2)}
    return [name for name, value in exact.items() if not torch.equal(results[name], value)]


def rows_(x, y, rows, dim, whole, tier):
    """Y = scatter(sum over x of X W^T) + b, or all of it, and dX = the sum over y of gather(dY) W."""
    r, s = x.get_local_rank(), y.get_local_rank()
    shape = (rows,) if dim == 0 else (3, rows)
    full, grad = drawn(x.size(), *shape, K), drawn(y.size(), *shape, N)
    weight, bias = drawn(x.size(), y.size(), N, K), drawn(y.size(), N)
    own, w, b = leaf(full[r]), leaf(weight[r, s]), leaf(bias[s])

    def mine(value):
        return value if whole else value.tensor_split(x.size(), dim)[r]

    if whole:
        found = ops.matmul_all_reduce(own, w, x, bias=b, tier=tier, sums=y)
    else:
        found = ops.matmul_reduce_scatter(own, w, x, dim=dim, bias=b, tier=tier, sums=y)
    found.backward(mine(grad[s]))
    results = {"y": found.detach(), "dx": own.grad, "dw": w.grad, "db": b.grad}
    exact = {
        "y": mine(sum(full[p] @ weight[p, s].T for p in range(x.size())) + bias[s]),
        "dx": sum(grad[q] @ weight[r, q] for q in range(y.size())),
        "dw": grad[s].flatten(0, -2).T @ full[r].flatten(0, -2),
        "db": grad[s].flatten(0, -2).sum(0),
    }
    return [name for name, value in exact.items() if not torch.equal(results[name], value)]


def differing(group, sizes, transport, tier):
    x, y = axes(*sizes)
    for axis in (x, y):
        take(axis, transport)
    return {
        (case.__name__, rows, dim, whole): wrong
        for case in (columns, rows_)
        for rows, dim in ((0, 0), (3, 0), (600, 0), (300, 1))
        for whole in (False, True)
        if rows > 0 or not whole
        if (wrong := case(x, y, rows, dim, whole, tier))
    }


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.second_tier(but=["(4, 1)-symmetric_memory", "(1, 4)-symmetric_memory"])
def test_products_and_gradients_are_the_exact_ones(ranks, sizes, transport):
    for tier in ("chunked", "unfused"):
        assert ranks.run(differing, 4, sizes, transport, tier, timeout=120) == [{}] * 4


def bytes_read(group, sizes):
    """Over x and y, by a column and by a row linear, forward and backward."""
    x, y = axes(*sizes)
    found = []
    for axis in (x, y):
        take(axis, "symmetric_memory")
    rows, like = 512, {"dtype": torch.float64, "requires_grad": True}
    for op, shape in ((ops.all_gather_matmul, (rows // x.size(), K)), (ops.matmul_reduce_scatter, (rows, K))):
        before = [comm.stats(axis).bytes for axis in (x, y)]
        options = {"rows": rows} if op is ops.all_gather_matmul else {}
        result = op(torch.ones(shape, **like), torch.ones(N, K, **like), x, sums=y, **options)
        result.backward(torch.ones_like(result))
        after = [comm.stats(axis).bytes for axis in (x, y)]
        found.append([int(late - early) for early, late in zip(before, after, strict=True)])
    return found


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_rows_in_parts_are_no_more_bytes(ranks, sizes):
    x, y = sizes
    of_stream, of_sums = 512 * 8 * (x - 1) // x, 2 * 512 * 8 * (y - 1) // y
    for column, row in ranks.run(bytes_read, 4, sizes):
        # Gathered, scattered, and on one host gathered again for dW.
        assert column == [3 * of_stream * K, of_sums * N]
        assert row == [2 * of_stream * N, of_sums * K]


def digests(group):
    x, y = axes(2, 2)
    for axis in (x, y):
        take(axis, "process_group")
    torch.manual_seed(group.rank())
    operands = torch.randn(300, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    found = []
    for _ in range(2):
        own, w = (leaf(each) for each in operands)
        result = ops.all_gather_matmul(own, w, x, rows=600, sums=y)
        back = ops.matmul_reduce_scatter(result, w.T.contiguous(), x, sums=y)
        back.backward(torch.ones_like(back))
        found.append([result.detach(), back.detach(), own.grad, w.grad])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_results_repeat_bitwise(ranks):
    assert ranks.run(digests, 4) == [True] * 4


def refusal(group):
    x, y = axes(2, 2)
    with pytest.raises(ValueError) as caught:
        ops.all_gather_matmul(torch.ones(4, K), torch.ones(N, K), x, rows=8, sums=y, tier="fused")
    return str(caught.value)


def test_there_is_no_fused_kernel_of_two_groups(ranks):
    for message in ranks.run(refusal, 4):
        assert "fused" in message
