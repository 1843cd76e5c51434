"""The primitives against fp64 references on one rank: values, gradients, ragged shapes, repeatability,
errors."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pyruntime
from pyruntime import ops
from pyruntime.comm import group_name, group_rank, group_size
from tests.ranks import RankError, without_processes
from tests.transports import TRANSPORTS, on_transport

# A sum of products of unit size may cancel to nearly nothing; the parts that were rounded on the way (80
# products a rank, about 9 in size) do not.
LEAST_SCALE = 10.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# How far a product of the given dtype may be from the exact one, relative to the largest exact value: a few
# roundings of the product, and one per rank of what travels.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_close(found: Tensor, exact: Tensor, dtype: torch.dtype, what: str) -> None:
    assert found.shape == exact.shape, (what, found.shape, exact.shape)
    assert found.dtype == dtype
    if exact.numel():
        error = (found.double() - exact).abs().max() / exact.abs().max().clamp_min(LEAST_SCALE)
        assert error <= TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def operand(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers that `dtype` holds exactly, in fp64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()


def leaf(exact: Tensor, dtype: torch.dtype) -> Tensor:
    return exact.to(dtype).contiguous().requires_grad_()


def activation_shape(rows: int, width: int, dim: int, batch: int) -> tuple[int, ...]:
    return (rows, width) if dim == 0 else (batch, rows, width)


# --- functions that run on every rank. All ranks draw the same operands: each can compute the exact answer
# alone.


def column_case(group, seed, rows, dim, n, k, dtype, tier, keep_gathered, with_bias, give_rows):
    """all_gather_matmul of two weights, forward and backward, against the exact products."""
    rank, world_size = group_rank(group), group_size(group)
    generator = torch.Generator().manual_seed(seed)
    x = operand(generator, dtype, *activation_shape(rows, k, dim, 3))
    weights = [operand(generator, dtype, world_size, n, k), operand(generator, dtype, world_size, n + 1, k)]
    biases = [operand(generator, dtype, world_size, n), None]
    grads = [operand(generator, dtype, world_size, *x.shape[:-1], n + i) for i in range(2)]

    x_shard = leaf(x.tensor_split(world_size, dim)[rank], dtype)
    own_weights = [leaf(weight[rank], dtype) for weight in weights]
    own_bias = leaf(biases[0][rank], dtype)
    outputs = ops.all_gather_matmul(
        x_shard,
        own_weights,
        group,
        dim=dim,
        rows=rows if give_rows else None,
        bias=[own_bias, None] if with_bias else None,
        keep_gathered=keep_gathered,
        tier=tier,
    )
    for i, output in enumerate(outputs):
        exact = x @ weights[i][rank].T + (biases[0][rank] if with_bias and i == 0 else 0)
        assert_close(output, exact, dtype, f"output {i}")

    torch.autograd.backward(outputs, [grad[rank].to(dtype) for grad in grads])
    dx = sum(grads[i][r] @ weights[i][r] for i in range(2) for r in range(world_size))
    assert_close(x_shard.grad, dx.tensor_split(world_size, dim)[rank], dtype, "dX")
    for i, weight in enumerate(own_weights):
        dw = grads[i][rank].reshape(-1, n + i).T @ x.reshape(-1, k)
        assert_close(weight.grad, dw, dtype, f"dW {i}")
    if with_bias:
        assert_close(own_bias.grad, grads[0][rank].reshape(-1, n).sum(0), dtype, "db")
    return [output.detach() for output in outputs] + [x_shard.grad] + [weight.grad for weight in own_weights]


def row_case(group, seed, rows, dim, n, k, dtype, tier, with_bias):
    """matmul_reduce_scatter, forward and backward."""
    rank, world_size = group_rank(group), group_size(group)
    generator = torch.Generator().manual_seed(seed)
    x = operand(generator, dtype, world_size, *activation_shape(rows, k, dim, 3))
    weight = operand(generator, dtype, world_size, n, k)
    bias = operand(generator, dtype, n)
    grad = operand(generator, dtype, *activation_shape(rows, n, dim, 3))

    own_x, own_weight, own_bias = leaf(x[rank], dtype), leaf(weight[rank], dtype), leaf(bias, dtype)
    y = ops.matmul_reduce_scatter(
        own_x, own_weight, group, dim=dim, bias=own_bias if with_bias else None, tier=tier
    )
    exact = sum(x[r] @ weight[r].T for r in range(world_size)) + (bias if with_bias else 0)
    assert_close(y, exact.tensor_split(world_size, dim)[rank], dtype, "y")

    y.backward(grad.tensor_split(world_size, dim)[rank].to(dtype))
    assert_close(own_x.grad, grad @ weight[rank], dtype, "dX")
    assert_close(own_weight.grad, grad.reshape(-1, n).T @ x[rank].reshape(-1, k), dtype, "dW")
    if with_bias:
        assert_close(own_bias.grad, grad.reshape(-1, n).sum(0), dtype, "db")
    return [y.detach(), own_x.grad, own_weight.grad]


def all_reduce_case(group, seed, rows, n, k, dtype, tier):
    """matmul_all_reduce and replicated_matmul, the pair of a model whose activations are replicated."""
    rank, world_size = group_rank(group), group_size(group)
    generator = torch.Generator().manual_seed(seed)
    x = operand(generator, dtype, rows, 2, k)
    up = operand(generator, dtype, world_size, n, k)
    hidden = operand(generator, dtype, world_size, rows, 2, n)
    down = operand(generator, dtype, world_size, k, n)
    grad_up = operand(generator, dtype, world_size, rows, 2, n)
    grad_down = operand(generator, dtype, rows, 2, k)

    own_x, own_up = leaf(x, dtype), leaf(up[rank], dtype)
    y = ops.replicated_matmul(own_x, own_up, group, tier=tier)
    assert_close(y, x @ up[rank].T, dtype, "column y")
    y.backward(grad_up[rank].to(dtype))
    assert_close(own_x.grad, sum(grad_up[r] @ up[r] for r in range(world_size)), dtype, "column dX")
    assert_close(own_up.grad, grad_up[rank].reshape(-1, n).T @ x.reshape(-1, k), dtype, "column dW")

    own_hidden, own_down = leaf(hidden[rank], dtype), leaf(down[rank], dtype)
    z = ops.matmul_all_reduce(own_hidden, own_down, group, tier=tier)
    assert_close(z, sum(hidden[r] @ down[r].T for r in range(world_size)), dtype, "row y")
    z.backward(grad_down.to(dtype))
    assert_close(own_hidden.grad, grad_down @ down[rank], dtype, "row dX")
    assert_close(own_down.grad, grad_down.reshape(-1, k).T @ hidden[rank].reshape(-1, n), dtype, "row dW")
    return z.detach()


def plain_case(group, seed, rows, dim, dtype):
    """The collectives without a GEMM, with their gradients."""
    rank, world_size = group_rank(group), group_size(group)
    generator = torch.Generator().manual_seed(seed)
    x = operand(generator, dtype, world_size, *activation_shape(rows, 5, dim, 2))
    own = leaf(x[rank], dtype)
    scattered = ops.reduce_scatter(own, group, dim=dim)
    assert_close(scattered, x.sum(0).tensor_split(world_size, dim)[rank], dtype, "reduce_scatter")
    gathered = ops.all_gather(scattered, group, dim=dim, rows=rows)
    assert_close(gathered, x.sum(0), dtype, "all_gather")
    gathered.backward(x[rank].to(dtype))  # d/dx of gather(scatter(x)): the same sum again
    assert_close(own.grad, x.sum(0), dtype, "gradient")

    summed = ops.all_reduce(own, group)
    assert_close(summed, x.sum(0), dtype, "all_reduce")
    own.grad = None
    ops.replicate_grad(own, group).backward(x[rank].to(dtype))
    assert_close(own.grad, x.sum(0), dtype, "replicate_grad")
    stats = ops.all_gather_stats(own.detach(), group)
    assert torch.equal(stats.double(), x)


def returned_gathered_case(group, rows):
    """The gathered x is an output like any other: right, and differentiable."""
    rank, world_size = group_rank(group), group_size(group)
    generator = torch.Generator().manual_seed(3)
    x, weight = (
        operand(generator, torch.float64, rows, 4),
        operand(generator, torch.float64, world_size, 3, 4),
    )
    shard = leaf(x.tensor_split(world_size)[rank], torch.float64)
    y, gathered = ops.all_gather_matmul(
        shard, weight[rank], group, rows=rows, return_gathered=True, tier="chunked"
    )
    assert torch.equal(gathered.detach(), x)
    (y.sum() + 2 * gathered.sum()).backward()
    exact = weight.sum((0, 1)) + 2 * world_size
    assert_close(shard.grad, exact.expand(rows, 4).tensor_split(world_size)[rank], torch.float64, "dX")


def gradcheck_case(group, tier):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # All ranks perturb the same element of the same operands at the same time, so they stay in step.
    world_size = group_size(group)
    shard = random(5, 3).tensor_split(world_size)[group_rank(group)].requires_grad_()
    x, weight = random(5, 3).requires_grad_(), random(4, 3).requires_grad_()

    def column(weight):
        return ops.all_gather_matmul(shard.detach(), weight, group, rows=5, tier=tier)

    def row(x, weight):
        return ops.all_gather(ops.matmul_reduce_scatter(x, weight, group, tier=tier), group, rows=5)

    def scaled_row(
        x, weight
    ):  # all ranks move together, so the analytic gradient counts each rank's output once per rank
        return row(x, weight) / world_size

    assert torch.autograd.gradcheck(column, (weight,))
    if world_size == 1:
        assert torch.autograd.gradcheck(
            lambda s, w: ops.all_gather_matmul(s, w, group, rows=5, tier=tier), (shard, weight)
        )
        assert torch.autograd.gradcheck(row, (x, weight))
        assert torch.autograd.gradcheck(lambda x, w: ops.matmul_all_reduce(x, w, group), (x, weight))
        assert torch.autograd.gradcheck(lambda x, w: ops.replicated_matmul(x, w, group), (x, weight))


# --- tests


sizes = st.integers(1, 40)


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    world_size=st.integers(1, 4),
    rows=st.integers(0, 50),
    dim=st.integers(0, 1),
    n=sizes,
    k=sizes,
    dtype=st.sampled_from(DTYPES),
    tier=st.sampled_from(["chunked", "unfused"]),
    keep_gathered=st.booleans(),
    with_bias=st.booleans(),
    give_rows=st.booleans(),
)
@pytest.mark.second_tier(but=["process_group"])
def test_column_linear_equals_exact_products(
    ranks, transport, seed, world_size, rows, dim, n, k, dtype, tier, keep_gathered, with_bias, give_rows
):
    ranks.run(
        on_transport,
        world_size,
        transport,
        column_case,
        seed,
        rows,
        dim,
        n,
        k,
        dtype,
        tier,
        keep_gathered,
        with_bias,
        give_rows,
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    world_size=st.integers(1, 4),
    rows=st.integers(0, 50),
    dim=st.integers(0, 1),
    n=sizes,
    k=sizes,
    dtype=st.sampled_from(DTYPES),
    tier=st.sampled_from(["chunked", "unfused"]),
    with_bias=st.booleans(),
)
@pytest.mark.second_tier("symmetric_memory")
def test_row_linear_equals_exact_products(
    ranks, transport, seed, world_size, rows, dim, n, k, dtype, tier, with_bias
):
    ranks.run(on_transport, world_size, transport, row_case, seed, rows, dim, n, k, dtype, tier, with_bias)


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    world_size=st.integers(1, 4),
    rows=st.integers(1, 30),
    n=sizes,
    k=sizes,
    dtype=st.sampled_from(DTYPES),
    tier=st.sampled_from(["chunked", "unfused"]),
)
def test_replicated_pair_equals_exact_products(ranks, transport, seed, world_size, rows, n, k, dtype, tier):
    ranks.run(on_transport, world_size, transport, all_reduce_case, seed, rows, n, k, dtype, tier)


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**31),
    world_size=st.integers(1, 4),
    rows=st.integers(0, 20),
    dim=st.integers(0, 1),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
)
def test_plain_collectives(ranks, transport, seed, world_size, rows, dim, dtype):
    ranks.run(on_transport, world_size, transport, plain_case, seed, rows, dim, dtype)


@pytest.mark.parametrize("world_size", [1, 3])
def test_gathered_operand_can_be_returned(ranks, world_size):
    ranks.run(returned_gathered_case, world_size, 7)


@pytest.mark.parametrize("world_size", [5, 8])
@pytest.mark.second_tier("5")
def test_more_ranks_than_cores(ranks, world_size):
    ranks.run(
        column_case, world_size, 5, 21, 0, 6, 10, torch.float32, "chunked", False, True, True, timeout=120
    )
    ranks.run(row_case, world_size, 6, 21, 1, 6, 10, torch.bfloat16, "chunked", True, timeout=120)
    ranks.run(all_reduce_case, world_size, 7, 3, 6, 10, torch.float32, "chunked", timeout=120)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("tier", ["chunked", "unfused"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.second_tier("1-chunked-symmetric_memory")
def test_gradcheck(ranks, world_size, tier, transport):
    ranks.run(on_transport, world_size, transport, gradcheck_case, tier)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.second_tier(but=["dtype0-symmetric_memory"])
def test_results_repeat_bitwise(ranks, dtype, transport):
    """The same call again gives the same bits, forward and backward, in either tier."""
    for tier in ("chunked", "unfused"):
        for case, arguments in (
            (column_case, (11, 257, 0, 96, 160, dtype, tier, False, False, True)),
            (row_case, (11, 257, 0, 96, 160, dtype, tier, False)),
        ):
            first, again = (ranks.run(on_transport, 4, transport, case, *arguments) for _ in range(2))
            for one, other in zip(first, again, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), (case, tier)


def auto_case(group):
    """What auto says before the group's first op and after, and the flights of a call."""
    # Small integers, whose products are exact in any order; widths may differ over the ranks.
    x = torch.randint(-3, 4, (12, 8), generator=torch.Generator().manual_seed(0)).float()
    weight = torch.randint(-3, 4, (6 + group_rank(group), 8)).float()
    shard = x.tensor_split(group_size(group))[group_rank(group)]
    pyruntime.comm.close(group)

    def told():
        return ops.tier_of("all_gather_matmul", 12, weight.shape[0], 8, torch.float32, group)

    tiers = [told()]
    assert torch.equal(ops.all_gather_matmul(shard, weight, group, rows=12), x @ weight.T)
    return *tiers, told()


def test_auto_is_chunked_from_the_first_call_and_says_why(ranks):
    for before, after in ranks.run(auto_case, 2):
        assert before == ("auto", "no op of the group has run yet")
        assert after[0] == "chunked"
        assert after[1].startswith("chunked is the rule where nothing was tuned (python -m pyruntime tune)")
        assert "; fused: there are fused kernels for devices of one host only" in after[1]


def process_group_case(group, dtype):
    pyruntime.comm.close(group)
    pyruntime.comm.configure(group, transport="collectives")
    try:
        column_case(group, 1, 7, 0, 3, 4, dtype, "auto", False, True, False)
        row_case(group, 2, 7, 1, 3, 4, dtype, "unfused", True)
        all_reduce_case(group, 3, 5, 4, 6, dtype, "auto")
        plain_case(group, 4, 5, 0, dtype)
        with pytest.raises(ValueError, match=r"tier='chunked' was asked for .* transport='collectives' was"):
            ops.matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 2), group, tier="chunked")
        return ops.tier_of("matmul_all_reduce", 1, 1, 1, torch.float32, group)
    finally:
        pyruntime.comm.core._C.close_group(group_name(group))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_without_shared_memory_use_their_process_group(ranks, dtype):
    tiers = ranks.run(process_group_case, 3, dtype)
    assert all(tier == ("unfused", "transport='collectives' was asked for") for tier in tiers)


# --- bad input


def bad_input_case(group, what):
    x, w = torch.ones(4, 3), torch.ones(5, 3)
    if what == "width":
        ops.all_gather_matmul(x, torch.ones(5, 2), group)
    elif what == "dtype":
        ops.matmul_reduce_scatter(x, w.double(), group)
    elif what == "integer":
        ops.all_gather_matmul(x.long(), w.long(), group)
    elif what == "dim":
        ops.matmul_reduce_scatter(x, w, group, dim=1)
    elif what == "no dim":
        ops.matmul_reduce_scatter(x, w, group, dim=3)
    elif what == "tier":
        ops.matmul_all_reduce(x, w, group, tier="fastest")
    elif what == "fused":
        ops.matmul_all_reduce(x, w, group, tier="fused")
    elif what == "bias":
        ops.all_gather_matmul(x, [w, w], group, bias=[torch.ones(5)])
    elif what == "rows":
        ops.all_gather_matmul(x, w, group, rows=100)
    elif what == "no weights":
        ops.all_gather_matmul(x, [], group)
    elif what == "integer sum":
        ops.all_reduce(x.long(), group)
    elif what == "vector":
        ops.matmul_all_reduce(torch.ones(3), w, group)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("width", ValueError, r"x has 3 features .* takes 2"),
        ("dtype", TypeError, r"x is Float and weight 0 is Double"),
        ("integer", TypeError, r"use float32"),
        ("dim", ValueError, r"dim=1 is the feature dimension of x with shape \[4, 3\]"),
        ("no dim", ValueError, r"dim=3 is not a dimension of x"),
        ("tier", ValueError, r"tier='fastest' is no tier; use"),
        ("fused", ValueError, r"tier=.fused. was asked for .* but no fused kernel computes it; use tier="),
        ("bias", ValueError, r"1 biases for 2 weights"),
        ("rows", ValueError, r"holds 4 rows, and its share of rows=100 is 50"),
        ("no weights", ValueError, r"was given no weights"),
        ("integer sum", TypeError, r"all_reduce was given dtype"),
        ("vector", ValueError, r"at least two dimensions"),
    ],
)
@pytest.mark.second_tier(but=["width-ValueError-x has 3 features .* takes 2"])
def test_bad_input_is_one_clear_sentence(ranks, what, error, message):
    for raised in ranks.run(bad_input_case, 2, what, expect_errors=True):
        assert isinstance(raised, error)
        assert re.search(message, without_processes(str(raised))), str(raised)


def disagreement_case(group, what):
    second = group_rank(group) == 1
    x, w = torch.ones(4, 3), torch.ones(5, 3)
    if what == "rows":
        ops.all_gather_matmul(torch.ones(9 if second else 4, 3), w, group, tier="chunked")
    elif what == "dtype":
        dtype = torch.bfloat16 if second else torch.float32
        ops.matmul_reduce_scatter(x.to(dtype), w.to(dtype), group, tier="chunked")
    elif what == "shape":
        ops.matmul_all_reduce(torch.ones(6 if second else 4, 3), w, group, tier="chunked")
    elif what == "bias":
        ops.matmul_all_reduce(x, w, group, bias=None if second else torch.ones(5), tier="chunked")
    elif what == "empty shard":  # rank 0 needs nothing from rank 1, which does something else
        if second:
            ops.matmul_reduce_scatter(torch.ones(1, 3), w, group, tier="chunked")
        else:
            ops.all_gather_matmul(torch.ones(1, 3), w, group, tier="chunked", rows=1)
    elif second:
        ops.matmul_reduce_scatter(x, w, group, tier="chunked")
    else:
        ops.all_gather_matmul(x, w, group, tier="chunked", rows=8)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows", r"hold \[4, 9\] rows, 13 in all; rank 0 should hold 7"),
        ("dtype", r"rank . called matmul_reduce_scatter with .* (Float|BFloat16) and rank"),
        ("shape", r"called matmul_all_reduce with (4|6) rows in all"),
        ("bias", r"called matmul_all_reduce with 4 rows .* and a bias"),
        ("empty shard", r"called all_gather_matmul with 1 rows"),
        ("op", r"rank . called (all_gather_matmul|matmul_reduce_scatter) with"),
    ],
)
@pytest.mark.second_tier(but=["dtype-rank . called matmul_reduce_scatter with .* (Float|BFloat16) and rank"])
def test_ranks_that_disagree_are_told_so(ranks, what, message):
    for raised in ranks.run(disagreement_case, 2, what, expect_errors=True):
        assert isinstance(raised, ValueError), repr(raised)
        assert re.search(message, without_processes(str(raised))), str(raised)


def test_rank_error_names_the_rank(ranks):
    with pytest.raises(RankError, match="feature dimension"):
        ranks.run(bad_input_case, 2, "dim")
