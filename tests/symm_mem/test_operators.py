"""torch's symm_mem operators on CPU tensors: values, shapes, strides, errors, gradients.

References are computed in fp64 from what all ranks hold; strides are those that torch's own Meta functions
give, on which compiled code relies. The cases are those of PyTorch's
test/distributed/test_symmetric_memory.py, and more.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem

import pyruntime.symm_mem
from pyruntime import comm
from pyruntime.comm import group_name, group_rank, group_size
from tests.transports import TRANSPORTS, on_transport, take

OPS = torch.ops.symm_mem
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def drawn(sizes, dtype, seed, rank):
    """Of the rank's own draws, so that each rank can compute any other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(sizes, dtype=torch.float64, generator=generator).to(dtype)


def check(found, expected, dtype, contracted):
    scale = contracted**0.5
    torch.testing.assert_close(
        found.double() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype], check_stride=False
    )


def check_strides(found, expected):
    """Of dimensions of size 1 the stride says nothing."""
    of = lambda t: [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]  # noqa: E731
    assert found.shape == expected.shape and of(found) == of(expected)


def all_gather_matmul_case(group, dtype, seed):
    rank, size, name = group_rank(group), group_size(group), group_name(group)
    for shape, count in itertools.product([(6, 8), (3, 5, 8), (2, 3, 4, 8)], [1, 3]):
        for dim, return_a in itertools.product(range(len(shape)), [True, False]):
            shards = [drawn(shape, dtype, seed, peer) for peer in range(size)]
            whole = torch.cat([shard.double() for shard in shards], dim)
            bs = [drawn((whole.shape[-1], 4 + i), dtype, seed + 1 + i, rank) for i in range(count)]
            if count == 3:  # a weight's transpose, and columns of a wider matrix
                bs = [bs[0], bs[1].t().contiguous().t(), torch.cat([bs[2], bs[2]], 1)[:, : bs[2].shape[1]]]
            a, products = OPS.fused_all_gather_matmul(shards[rank], bs, dim, name, return_A=return_a)
            fallback_a, fallback = torch_symm_mem._fused_all_gather_matmul_fallback(
                shards[rank], bs, dim, name, return_A=return_a
            )
            assert (a is None) == (not return_a)
            if return_a:
                assert torch.equal(a.double(), whole)
                check_strides(a, fallback_a)
            assert len(products) == count
            for product, b, other in zip(products, bs, fallback, strict=True):
                assert product.dtype == dtype
                check(product, whole @ b.double(), dtype, whole.shape[-1])
                check_strides(product, other)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_matmul_along_every_dimension(ranks, world_size, dtype):
    ranks.run(all_gather_matmul_case, world_size, dtype, 7)


def reduce_scatter_case(group, dtype, seed):
    rank, size, name = group_rank(group), group_size(group), group_name(group)
    for shape in [(6, 8), (6, 12, 8), (6, 6, 12, 8)]:
        for dim, reduce_op in itertools.product(range(len(shape)), ["sum", "avg"]):
            columns = 6 * size if dim == len(shape) - 1 else 5
            all_a = [drawn(shape, dtype, seed, peer) for peer in range(size)]
            all_b = [drawn((8, columns), dtype, seed + 1, peer) for peer in range(size)]
            whole = sum(a.double() @ b.double() for a, b in zip(all_a, all_b, strict=True))
            expected = whole.chunk(size, dim)[rank] / (size if reduce_op == "avg" else 1)
            found = OPS.fused_matmul_reduce_scatter(all_a[rank], all_b[rank], reduce_op, dim, name)
            assert found.dtype == dtype
            check(found, expected, dtype, 8 * size)
            check_strides(found, expected.contiguous())
            # What inductor's pass makes of A, and a weight's transpose.
            a = torch_symm_mem.restride_A_for_fused_matmul_reduce_scatter(all_a[rank], dim)
            b = all_b[rank].t().contiguous().t()
            check(OPS.fused_matmul_reduce_scatter(a, b, reduce_op, dim, name), expected, dtype, 8 * size)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_matmul_reduce_scatter_along_every_dimension(ranks, world_size, dtype):
    ranks.run(reduce_scatter_case, world_size, dtype, 17)


def both_case(group):
    all_gather_matmul_case(group, torch.float32, 27)
    reduce_scatter_case(group, torch.float32, 37)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier("hierarchical")
def test_over_every_transport(ranks, transport):
    hierarchical = transport == "hierarchical"  # two hosts of two ranks each
    ranks.run(
        on_transport, 4 if hierarchical else 2, transport, four_ranks_case if hierarchical else both_case
    )


def four_ranks_case(group):
    all_gather_matmul_case(group, torch.float32, 47)


def repeated_case(group):
    rank, name = group_rank(group), group_name(group)
    a, b = drawn((64, 33), torch.float32, 1, rank), drawn((33, 48), torch.float32, 2, rank)

    def results():
        gathered, (product,) = OPS.fused_all_gather_matmul(a, [b], 0, name)
        return gathered, product, *(OPS.fused_matmul_reduce_scatter(a, b, "avg", dim, name) for dim in (0, 1))

    first = results()
    assert all(torch.equal(one, two) for _ in range(5) for one, two in zip(first, results(), strict=True))


def test_bits_are_the_same_from_call_to_call(ranks):
    ranks.run(repeated_case, 2)


def no_product_case(group):
    shard = drawn((2, 3), torch.float32, 1, group_rank(group))
    a, products = OPS.fused_all_gather_matmul(shard, [], 0, group_name(group))
    assert products == [] and a.shape == (4, 3)


def test_no_b_gathers_alone(ranks):
    ranks.run(no_product_case, 2)


def low_contention_case(group):
    rank, size, name = group_rank(group), group_size(group), group_name(group)
    for shape, dtype in itertools.product(
        [(4,), (4, 3), (2, 3, 5), (2, 0)],
        [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8],
    ):
        shards = [drawn(shape, torch.float64, 3, peer).mul(9).to(dtype) for peer in range(size)]
        waited = torch.ops._c10d_functional.wait_tensor(OPS._low_contention_all_gather(shards[rank], name))
        assert torch.equal(waited, torch.cat(shards)) and waited.is_contiguous()
    for shape, dtype in itertools.product([(4,), (4, 3), (4, 3, 5)], [torch.float32, torch.bfloat16]):
        shape = (shape[0] * size, *shape[1:])
        parts = [drawn(shape, dtype, 4, peer) for peer in range(size)]
        own = sum(part.double() for part in parts).chunk(size)[rank]
        for reduce_op, expected in (("sum", own), ("avg", own / size)):
            found = torch.ops._c10d_functional.wait_tensor(
                OPS._low_contention_reduce_scatter(parts[rank], reduce_op, name)
            )
            assert found.shape == own.shape and found.dtype == dtype
            check(found, expected, dtype, size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_low_contention_collectives(ranks, world_size):
    ranks.run(low_contention_case, world_size)


def remote_tensors_case(group):
    rank, size, name = group_rank(group), group_size(group), group_name(group)
    mine = torch_symm_mem.empty(3, 5, dtype=torch.float32, device="cpu")
    found = OPS.get_remote_tensors(mine, name)
    assert len(found) == size and all(peer.shape == mine.shape for peer in found)
    assert found[rank].data_ptr() == mine.data_ptr()
    mine.fill_(rank)
    handle = torch_symm_mem.rendezvous(mine, group)
    handle.barrier(channel=0)
    for peer, tensor in enumerate(found):
        assert torch.equal(tensor, torch.full((3, 5), float(peer)))
    row = OPS.get_remote_tensors(mine[1], name)[(rank + 1) % size]
    assert torch.equal(row, torch.full((5,), float((rank + 1) % size)))
    handle.barrier(channel=1)
    for wrong, told in (
        (mine.t(), "contiguous"),
        (torch.ones(3), "not the start of live CPU symmetric memory"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=told):
            OPS.get_remote_tensors(wrong, name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_remote_tensors_are_the_peers_memory(ranks, world_size):
    ranks.run(remote_tensors_case, world_size)


WRONG = [
    (ValueError, "A has shape \\[8\\]; it must be a matrix", lambda g: gathers(torch.ones(8), g)),
    (ValueError, "gather_dim=2 is not a dimension of A", lambda g: gathers(torch.ones(3, 8), g, dim=2)),
    (ValueError, "gather_dim=-1 is not a dimension of A", lambda g: gathers(torch.ones(3, 8), g, dim=-1)),
    (ValueError, "B has shape \\[1, 8, 4\\]", lambda g: gathers(torch.ones(3, 8), g, b=torch.ones(1, 8, 4))),
    (ValueError, "has 9 features", lambda g: gathers(torch.ones(3, 9), g)),
    (ValueError, "has 16 features", lambda g: gathers(torch.ones(3, 8), g, dim=1)),
    (
        TypeError,
        "x is Float and weight 0 is Double",
        lambda g: gathers(torch.ones(3, 8), g, b=torch.ones(8, 4).double()),
    ),
    (
        TypeError,
        "use float32, bfloat16",
        lambda g: gathers(torch.ones(3, 8).long(), g, b=torch.ones(8, 4).long()),
    ),
    (ValueError, "scatter_dim=3 is not a dimension", lambda g: scatters(torch.ones(4, 8), g, dim=3)),
    (ValueError, "A has shape \\[8\\]", lambda g: scatters(torch.ones(8), g)),
    (ValueError, "reduce_op 'max' is not computed", lambda g: scatters(torch.ones(4, 8), g, reduce_op="max")),
    (
        ValueError,
        "A of shape \\[3, 8\\] has 3 to scatter, which 2 ranks",
        lambda g: scatters(torch.ones(3, 8), g),
    ),
    (
        ValueError,
        "B of shape \\[8, 5\\] has 5 to",
        lambda g: scatters(torch.ones(3, 8), g, dim=1, b=torch.ones(8, 5)),
    ),
    (ValueError, "has 9 features", lambda g: scatters(torch.ones(4, 9), g)),
    (ValueError, "reduce_op 'min'", lambda g: OPS._low_contention_reduce_scatter(torch.ones(4), "min", g)),
    (ValueError, "has 3 to scatter", lambda g: OPS._low_contention_reduce_scatter(torch.ones(3), "sum", g)),
    (ValueError, "a scalar has no rows", lambda g: OPS._low_contention_all_gather(torch.tensor(1.0), g)),
    (NotImplementedError, "no scaled operands", lambda g: scaled_gathers(g)),
    (NotImplementedError, "no scaled operands", lambda g: scaled_scatters(g)),
]


def gathers(a, name, dim=0, b=None):
    return OPS.fused_all_gather_matmul(a, [torch.ones(8, 4) if b is None else b], dim, name)


def scatters(a, name, dim=0, b=None, reduce_op="sum"):
    return OPS.fused_matmul_reduce_scatter(a, torch.ones(8, 4) if b is None else b, reduce_op, dim, name)


def scaled_gathers(name):
    a, b = (torch.ones(4, 4).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.tensor(1.0)
    return OPS.fused_all_gather_scaled_matmul(a, [b], one, [one], 0, name, [None], [None], [None], [False])


def scaled_scatters(name):
    a, b = (torch.ones(4, 4).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.tensor(1.0)
    return OPS.fused_scaled_matmul_reduce_scatter(a, b, one, one, "sum", 0, 0, name, [4, 4])


def wrong_case(group):
    for error, told, call in WRONG:
        with pytest.raises(error, match=told):
            call(group_name(group))
    assert gathers(torch.ones(3, 8), group_name(group))[1][0].shape == (6, 4)  # and goes on


def test_wrong_operands_are_told_in_a_sentence(ranks):
    ranks.run(wrong_case, 2)


def disagreeing_case(group):
    rows = 3 + group_rank(group)
    return gathers(torch.ones(rows, 8), group_name(group))


def test_ranks_that_disagree_are_told_on_all(ranks):
    for error in ranks.run(disagreeing_case, 2, expect_errors=True):
        assert isinstance(error, ValueError), error


def late_case(group):
    if group_rank(group) == 1:
        time.sleep(4)
        return None
    comm.set_deadline(group, 1.0)
    began = time.monotonic()
    with pytest.raises(pyruntime.CommTimeout):
        gathers(torch.ones(3, 8), group_name(group))
    return time.monotonic() - began


def test_a_peer_that_does_not_call_is_waited_for_until_the_deadline(ranks):
    assert 0.9 < ranks.launch(late_case, 2)[0].value < 3.5


def gradients_case(group, transport):
    take(group, transport)
    rank, size, name = group_rank(group), group_size(group), group_name(group)
    for dim in range(3):
        shards = [drawn((2, 4, 8), torch.float64, 1, peer).requires_grad_() for peer in range(size)]
        all_b = [
            drawn((8 * size if dim == 2 else 8, 6), torch.float64, 2, peer).requires_grad_()
            for peer in range(size)
        ]
        down = [drawn((6, 4 * size), torch.float64, 3, peer).requires_grad_() for peer in range(size)]
        whole = torch.cat(shards, dim)
        sums = sum((whole @ b).tanh() @ d for b, d in zip(all_b, down, strict=True))
        weight = drawn(sums.shape, torch.float64, 4, 0)
        expected = torch.autograd.grad(
            (sums / size * weight).sum() + whole.pow(3).sum(), (shards[rank], all_b[rank], down[rank])
        )
        a, (hidden,) = OPS.fused_all_gather_matmul(shards[rank], [all_b[rank]], dim, name)
        part = OPS.fused_matmul_reduce_scatter(hidden.tanh(), down[rank], "avg", dim, name)
        own = (part * weight.chunk(size, dim)[rank]).sum() + a.chunk(size, dim)[rank].pow(3).sum()
        found = torch.autograd.grad(own, (shards[rank], all_b[rank], down[rank]))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
def test_gradients_are_those_of_one_process(ranks, transport):
    ranks.run(gradients_case, 2, transport)


def opcheck_case(group):
    name, rank = group_name(group), group_rank(group)
    a, b = drawn((4, 6, 8), torch.float32, 1, rank), drawn((8, 4), torch.float32, 2, rank)
    for dim in (0, 1):
        for op, arguments in (
            (OPS.fused_all_gather_matmul, (a, [b, b], dim, name)),
            (OPS.fused_matmul_reduce_scatter, (a, b, "sum", dim, name)),
            (OPS.fused_matmul_reduce_scatter, (a, b, "avg", 2, name)),
            (OPS._low_contention_all_gather, (a, name)),
            (OPS._low_contention_reduce_scatter, (a, "avg", name)),
        ):
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_opcheck(ranks):
    ranks.run(opcheck_case, 2, timeout=120)


def released_case(group):
    subgroup = dist.new_group([0, 1])
    gathers(torch.ones(64, 8), group_name(subgroup))
    held = pyruntime.comm.symmetric_memory_bytes()
    dist.barrier(group=group)  # nobody reads any more
    dist.destroy_process_group(subgroup)
    del subgroup
    return held, pyruntime.comm.symmetric_memory_bytes()


def test_what_a_group_holds_goes_with_it(ranks):
    for rank in ranks.launch(released_case, 2):
        assert rank.error is None and rank.exit_code == 0, rank.output
        held, after = rank.value
        assert held > 0 and after == 0


def on_devices_case(_):
    def kernels():
        return {
            line.split(":")[0]: line
            for line in torch._C._dispatch_dump("symm_mem::fused_all_gather_matmul").splitlines()
        }

    assert "symm_mem/operators.cpp" in kernels()["CPU"] and "symm_mem/operators.cpp" not in kernels()["CUDA"]
    pyruntime.symm_mem.use_on("cuda")
    pyruntime.symm_mem.use_on("cuda")
    assert "symm_mem/operators.cpp" in kernels()["CUDA"]
    with pytest.raises(RuntimeError, match="device"):
        pyruntime.symm_mem.use_on("abacus")


def test_devices_are_taken_on_request_only(ranks):
    (rank,) = ranks.launch(on_devices_case, 1, init=False)
    assert rank.error is None, rank.output
