"""Rows that are rounded where they are gathered: products of the rounded rows on every rank, as one process
makes them by hand, in fewer bytes. Sums are exact."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pyruntime import comm, ops
from pyruntime.comm import group_rank, group_size
from pyruntime.comm.wire import Wire
from tests.ops.test_primitives import activation_shape, assert_close, leaf, operand
from tests.ops.test_sums import axes
from tests.transports import take

N, K = 9, 130  # two blocks of fp8, one of them with 2 values
FORMATS = ["bf16", "fp8"]
MESHES = [
    (2, "symmetric_memory"),
    (3, "symmetric_memory"),
    (2, "process_group"),
    (3, "process_group"),
    (4, "hierarchical"),
]
CASES = [
    *itertools.product([2, 7, 50], [0, 1], [torch.float32], ["chunked"]),
    (11, 0, torch.float32, "unfused"),
    (11, 0, torch.bfloat16, "chunked"),
    (11, 1, torch.float16, "chunked"),
]
"""Rows, of which two are fewer than ranks; dim; dtype; tier."""


def rounded(rows: Tensor, wire: str) -> Tensor:
    travel = Wire(wire, rows.size(-1), rows.dtype)
    return travel.unpacked(travel.packed(rows))


def matrix(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def columns(group, transport, wire) -> None:
    """all_gather_matmul of two weights, forward and backward, whether X is kept or gathered again."""
    take(group, transport)
    rank, size = group_rank(group), group_size(group)
    for (rows, dim, dtype, tier), keep in itertools.product(CASES, [True, False]):
        generator = torch.Generator().manual_seed(rows)
        x = operand(generator, dtype, *activation_shape(rows, K, dim, 3))
        weights = [operand(generator, dtype, size, width, K) for width in (N, N + 1)]
        grads = [operand(generator, dtype, size, *x.shape[:-1], width) for width in (N, N + 1)]
        shard = leaf(x.tensor_split(size, dim)[rank], dtype)
        own = [leaf(weight[rank], dtype) for weight in weights]
        options = {"dim": dim, "rows": rows, "tier": tier, "wire": wire}
        found = ops.all_gather_matmul(shard, own, group, keep_gathered=keep, **options)
        with torch.no_grad():
            gathered = ops.all_gather_matmul(shard, own, group, return_gathered=True, **options)[-1]
        read = rounded(x.to(dtype), wire)
        assert torch.equal(gathered, read)  # on every rank, its own rows too
        assert dtype == torch.bfloat16 or not torch.equal(read, x.to(dtype))
        torch.autograd.backward(found, [grad[rank].to(dtype) for grad in grads])
        dx = sum(grads[i][r] @ weights[i][r] for i in range(2) for r in range(size))
        assert_close(shard.grad, dx.tensor_split(size, dim)[rank], dtype, "dX")
        for i in range(2):
            assert_close(found[i].detach(), read.double() @ weights[i][rank].T, dtype, f"y {i}")
            dw = matrix(grads[i][rank]).T @ matrix(read.double())
            assert_close(own[i].grad, dw, dtype, f"dW {i}")


def rows_(group, transport, wire) -> None:
    """matmul_reduce_scatter, forward and backward; dW asked for by name, and as a pass leaves it in .grad."""
    take(group, transport)
    rank, size = group_rank(group), group_size(group)
    for (rows, dim, dtype, tier), by_name in itertools.product(CASES, [True, False]):
        generator = torch.Generator().manual_seed(rows)
        x = operand(generator, dtype, size, *activation_shape(rows, N, dim, 3))
        weight, bias = operand(generator, dtype, size, K, N), operand(generator, dtype, K)
        grad = operand(generator, dtype, *activation_shape(rows, K, dim, 3))
        leaves = [leaf(x[rank], dtype), leaf(weight[rank], dtype), leaf(bias, dtype)]
        y = ops.matmul_reduce_scatter(*leaves[:2], group, dim=dim, bias=leaves[2], tier=tier, wire=wire)
        exact = sum(x[r] @ weight[r].T for r in range(size)) + bias
        assert_close(y.detach(), exact.tensor_split(size, dim)[rank], dtype, "y")
        dy = grad.tensor_split(size, dim)[rank].to(dtype)
        if by_name:
            dx, dw, db = torch.autograd.grad(y, leaves, dy)
        else:
            y.backward(dy)
            dx, dw, db = (each.grad for each in leaves)
        read = rounded(grad.to(dtype), wire).double()
        assert_close(dx, read @ weight[rank], dtype, "dX")
        assert_close(dw, matrix(read).T @ matrix(x[rank]), dtype, "dW")
        assert_close(db, matrix(read).sum(0), dtype, "db")


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize(("world", "transport"), MESHES)
@pytest.mark.parametrize("linear", [columns, rows_], ids=["column", "row"])
@pytest.mark.second_tier(but=["column-2-symmetric_memory-fp8"])
def test_it_is_the_linear_of_rows_rounded_by_hand(ranks, linear, world, transport, wire):
    ranks.run(linear, world, transport, wire)


def by_collectives(group) -> None:
    """Rows that the process group's own collectives move, whole."""
    comm.close(group)
    comm.configure(group, transport="collectives")
    rank, size, rows = group_rank(group), group_size(group), 7
    generator = torch.Generator().manual_seed(rows)
    x, weight = operand(generator, torch.float32, rows, K), operand(generator, torch.float32, size, N, K)
    shard, own = leaf(x.tensor_split(size)[rank], torch.float32), leaf(weight[rank], torch.float32)
    y = ops.all_gather_matmul(shard, own, group, rows=rows, wire="fp8")
    y.sum().backward()
    read = rounded(x.float(), "fp8").double()
    assert_close(y.detach(), read @ weight[rank].T, torch.float32, "y")
    assert_close(own.grad, read.sum(0).expand(N, K), torch.float32, "dW")


def test_they_are_rounded_where_they_travel_whole_too(ranks):
    ranks.run(by_collectives, 3)


def bytes_taken(group, transport, wire) -> tuple[int, int, int]:
    """That this rank reads of 37 rows of 256 features: X forward, X and dX backward, dY backward."""
    take(group, transport)
    rows, width, size = 37, 256, group_size(group)
    shard = torch.randn(rows, width).tensor_split(size)[group_rank(group)].requires_grad_()
    hidden = torch.randn(rows, 24, requires_grad=True)
    up, down = (torch.randn(*shape, requires_grad=True) for shape in ((24, width), (width, 24)))
    taken, before = [], comm.bytes_read("tp")

    def counted() -> None:
        nonlocal before
        now = comm.bytes_read("tp")
        taken.append(now - before)
        before = now

    y = ops.all_gather_matmul(shard, up, group, rows=rows, keep_gathered=False, wire=wire)
    counted()
    y.backward(torch.randn_like(y))
    counted()
    z = ops.matmul_reduce_scatter(hidden, down, group, wire=wire)
    before = comm.bytes_read("tp")
    z.backward(torch.randn_like(z))
    counted()
    return tuple(taken)


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
def test_the_bytes_of_gathers_fall_as_the_values_do(ranks, transport):
    same, bf16, fp8 = (ranks.run(bytes_taken, 2, transport, wire)[0] for wire in ("same", *FORMATS))
    rows = 18  # of the other rank
    assert same[0] == same[2] == rows * 256 * 4
    assert bf16[0] == bf16[2] == rows * 256 * 2
    assert fp8[0] == fp8[2] == rows * (256 + 2)
    sums = same[1] - same[0]  # of dX, which travel as they are
    assert (bf16[1], fp8[1]) == (bf16[0] + sums, fp8[0] + sums)


def over_two_axes(group, wire) -> None:
    """Of weights that are cut both ways: rows over x are rounded, sums over y are not."""
    x, y = axes(2, 2)
    r, s, rows, dtype = x.get_local_rank(), y.get_local_rank(), 7, torch.float32
    generator = torch.Generator().manual_seed(3)
    full, hidden = operand(generator, dtype, 2, rows, K), operand(generator, dtype, 2, rows, N)
    up, down = operand(generator, dtype, 2, 2, N, K), operand(generator, dtype, 2, 2, K, N)
    read = rounded(full.float(), wire).double()  # also what travels of the row linear's dY

    shard, weight = leaf(full[s].tensor_split(2)[r], dtype), leaf(up[r, s], dtype)
    found = ops.all_gather_matmul(shard, weight, x, rows=rows, sums=y, wire=wire)
    assert_close(found.detach(), sum(read[q] @ up[r, q].T for q in range(2)), dtype, "column y")
    found.backward(hidden[r].float())
    dx = sum(hidden[p] @ up[p, s] for p in range(2))
    assert_close(shard.grad, dx.tensor_split(2)[r], dtype, "column dX")
    assert_close(weight.grad, hidden[r].T @ read[s], dtype, "column dW")

    own, weight = leaf(hidden[r], dtype), leaf(down[r, s], dtype)
    found = ops.matmul_reduce_scatter(own, weight, x, sums=y, wire=wire)
    found.backward(full[s].tensor_split(2)[r].float())
    assert_close(own.grad, sum(read[q] @ down[r, q] for q in range(2)), dtype, "row dX")
    assert_close(weight.grad, read[s].T @ hidden[r], dtype, "row dW")


@pytest.mark.parametrize("wire", FORMATS)
def test_weights_that_are_cut_both_ways_take_rounded_rows(ranks, wire):
    ranks.run(over_two_axes, 4, wire)


def refused(group) -> None:
    x, weight = torch.randn(4, 6), torch.randn(5, 6)
    hidden, down = torch.randn(4, 6), torch.randn(5, 6)
    for call in (
        lambda *operands, **options: ops.all_gather_matmul(*operands, group, **options),
        lambda *operands, **options: ops.matmul_reduce_scatter(*operands, group, **options),
    ):
        with pytest.raises(ValueError, match="wire='fp4' is no format of rows; use 'same', 'bf16' or 'fp8'"):
            call(x, weight, wire="fp4")
        with pytest.raises(ValueError, match=r"and rows are Double; use 'same'"):
            call(hidden.double(), down.double(), wire="fp8")


def test_what_cannot_be_rounded_is_refused_before_anything_travels(ranks):
    ranks.run(refused, 2)


def refused_alone(group) -> None:
    x, weight = torch.randn(4, 6), torch.randn(5, 6)
    for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter):
        with pytest.raises(ValueError, match="one rank alone gathers nothing; leave it out"):
            op(x, weight, group, wire="fp8")


def test_one_rank_alone_rounds_nothing(ranks):
    ranks.run(refused_alone, 1)


def disagreeing(group) -> None:
    wire = "fp8" if group_rank(group) == 1 else "same"
    ops.all_gather_matmul(torch.ones(4, 6), torch.ones(5, 6), group, wire=wire)


def test_ranks_that_disagree_are_told_so(ranks):
    for raised in ranks.run(disagreeing, 2, expect_errors=True):
        assert isinstance(raised, ValueError), repr(raised)
        assert "called all_gather_matmul with 8 rows" in str(raised)
