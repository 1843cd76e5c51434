"""The kernels on GPUs: `pytest -m gpu` where there is one, with a torch for CUDA and `make cuda`.

Ranks are processes. Where there are fewer GPUs than ranks they share one, by turns; symmetric memory allows
that when it is told to.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory

from pyruntime import comm, ops
from pyruntime.cuda import why_not
from tests.cuda import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a GPU")]

SIZES = [(256, 512, 384), (1000, 777, 336), (3, 8, 72), (2048, 1024, 512), (130, 40, 32)]
RAGGED_SIZES = [(256, 512, 384), (1000, 777, 333), (3, 8, 70), (2048, 1024, 512), (130, 40, 30)]
TIERS = ["fused", "chunked", "unfused"]
DEADLINE_S = 15.0
"""Of ranks in processes, which may share a GPU by turns; what hangs is known by then."""
RUN_S = 45.0
"""A test on ranks that takes longer tells where each of them is."""


def on_a_gpu(group) -> torch.device:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # ranks may outnumber GPUs
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.ones(1, device=device)  # what makes the context, which may take some ranks seconds more than others
    dist.barrier(group)
    comm.set_deadline(group, DEADLINE_S)
    return device


def steps(group, tier, calls):
    return cases.steps_in_tier(group, on_a_gpu(group), tier, calls)


@pytest.mark.parametrize("tiles", ["small", "large"])
def test_the_fused_tier_by_named_tiles(ranks, tiles):
    for errors in ranks.run(steps, 2, f"fused:{tiles}", [*SIZES, (4096, 4096, 256)], timeout=RUN_S):
        assert max(errors) < 3, errors


def integers(group, tiers):
    device = on_a_gpu(group)
    return cases.integers_case(group, device, lambda rank, call: tiers[(rank + call) % len(tiers)], 6)


def test_ranks_may_take_fused_kernels_of_other_tiles_and_get_the_same_bits(ranks):
    expected = ranks.run(integers, 2, ["chunked"], timeout=RUN_S)
    found = ranks.run(integers, 2, ["fused:small", "chunked", "fused:large"], timeout=RUN_S)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def sums(group):
    """Parts of all ranks, summed on the device and in rank order on the CPU."""
    device, generator = on_a_gpu(group), torch.Generator().manual_seed(3)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((9, 33), (1024, 512)):
            parts = torch.randn(group.size(), *shape, generator=generator).to(dtype)
            wanted = torch.zeros(shape)
            for part in parts:
                wanted = wanted + part.float()
            found.append((ops.all_reduce(parts[group.rank()].to(device), group).cpu(), wanted.to(dtype)))
    return found


def test_sums_are_taken_in_rank_order_and_rounded_once(ranks):
    for pairs in ranks.run(sums, 4, timeout=RUN_S):
        assert all(torch.equal(found, wanted) for found, wanted in pairs)


def mixed_steps(group, calls):
    return steps(group, TIERS[group.rank() % len(TIERS)], calls)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_fused_tier(ranks, world_size):
    for errors in ranks.run(steps, world_size, "fused", SIZES * 3, timeout=RUN_S):
        assert max(errors) < 1 + world_size, errors  # the parts of a sum are rounded too


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_chunked_tier(ranks, world_size):
    for errors in ranks.run(steps, world_size, "chunked", RAGGED_SIZES * 3, timeout=RUN_S):
        assert max(errors) < 1 + world_size, errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_fused_and_other_tiers_in_one_flight(ranks, world_size):
    for errors in ranks.run(mixed_steps, world_size, SIZES * 3, timeout=RUN_S):
        assert max(errors) < 1 + world_size, errors


def has_multicast() -> bool:
    """Whether two GPUs here or more can be reached through one address."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0  # which starts the driver
    return count > 1 and all(
        _SymmetricMemory.has_multicast_support(DeviceType.CUDA, index) for index in range(count)
    )


def multicast_steps(group, multicast, calls):
    """Rows and sums that go to all, by multicast and then by copies; the errors of the GEMMs too."""
    device = on_a_gpu(group)
    generator = torch.Generator().manual_seed(group.rank())
    parts = [torch.randn(rows, 37, generator=generator).to(device) for rows in (1, 50, 4096)]
    parts += [part.bfloat16() for part in parts]
    results = []
    for setting in (multicast, "off"):
        comm.close(group)
        comm.configure(group, multicast=setting)
        results.append([op(part, group).cpu() for part in parts for op in (ops.all_gather, ops.all_reduce)])
        if setting == multicast:
            assert "multicast of what goes to all" in comm.transport_of(group)
            errors = cases.steps_in_tier(group, device, "chunked", calls)
    return results, errors


@pytest.mark.skipif(
    not has_multicast(), reason="it needs several GPUs that have multicast, and all here must"
)
@pytest.mark.parametrize("multicast", ["gather", "gather_and_reduce"])
def test_multicast_gives_what_copies_give(ranks, multicast):
    world_size = min(torch.cuda.device_count(), 4)  # a GPU each: a multicast object takes each once
    for (found, expected), errors in ranks.run(
        multicast_steps, world_size, multicast, RAGGED_SIZES, timeout=RUN_S
    ):
        assert max(errors) < 1 + world_size, errors
        for one, other in zip(found, expected, strict=True):
            if multicast == "gather":
                assert torch.equal(one, other)
            else:
                unit = 2**-7 if one.dtype == torch.bfloat16 else 2**-21
                torch.testing.assert_close(one, other, rtol=unit, atol=8 * unit)


def auto_steps(group):
    errors = steps(group, "auto", [(512, 256, 128)] * 26)  # bf16 and fp16 by turns
    told = ops.tier_of(
        "all_gather_matmul",
        512,
        256,
        128,
        torch.bfloat16,
        group,
        device=f"cuda:{torch.cuda.current_device()}",
    )
    return max(errors), told


def test_auto_measures_the_fused_tier_too(ranks):
    for error, (tier, reason) in ranks.run(auto_steps, 2, timeout=RUN_S):
        assert error < 3 and tier in ("fused", "chunked", "unfused")
        assert ", fused " in reason, reason


def absent(group, tier="fused"):
    device = on_a_gpu(group)
    x, weight = torch.ones(8, 16), torch.ones(24, 16)
    x, weight = (tensor.bfloat16().to(device) for tensor in (x, weight))
    ops.matmul_reduce_scatter(x, weight, group, tier=tier)
    torch.cuda.synchronize()
    comm.set_deadline(group, 0.5)
    if group.rank() == 1:
        return ""
    try:
        for _ in range(2):
            ops.matmul_reduce_scatter(x, weight, group, tier=tier)
            torch.cuda.synchronize()
    except comm.CommTimeout as error:
        return str(error)
    return "no error"


def test_a_rank_that_stays_away_from_a_fused_op_is_named(ranks):
    said = ranks.launch(absent, 2, timeout=RUN_S)[0].value
    assert "matmul_reduce_scatter, rank 0 waiting for rank 1 to send chunk 0" in said, said


def replayed(group, replays, tier="fused"):
    device = on_a_gpu(group)
    rank, world_size, m, n, k = group.rank(), group.size(), 192, 96, 64
    shard = torch.empty(m // world_size, k, dtype=torch.bfloat16, device=device)
    weight = torch.empty(n, k, dtype=torch.bfloat16, device=device)
    x = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    back = torch.empty(k, n, dtype=torch.bfloat16, device=device)

    def gemms():
        gathered = ops.all_gather_matmul(shard, weight, group, rows=m, tier=tier)
        return gathered, ops.matmul_reduce_scatter(x, back, group, tier=tier)

    gemms()  # the workspace grows, and every kernel is loaded, before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered, scattered = gemms()
    errors = []
    for number in range(replays):
        torch.manual_seed(number)
        whole, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        xs, backs = torch.randn(world_size, m, n).bfloat16(), torch.randn(world_size, k, n).bfloat16()
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
        wanted = sum(a.double() @ b.double().t() for a, b in zip(xs, backs, strict=True))
        errors.append(
            max(
                cases.error_in_roundings(gathered, whole.double() @ w.double().t(), torch.bfloat16),
                cases.error_in_roundings(scattered, wanted.tensor_split(world_size)[rank], torch.bfloat16),
            )
        )
    gemms()  # raises what a replay has met
    return max(errors)


def test_a_captured_graph_gives_right_results_at_every_replay(ranks):
    # Ranks that share a GPU take turns of milliseconds, several in each replay.
    replays = 1000 if torch.cuda.device_count() > 1 else 200
    for error in ranks.run(replayed, 2, replays, timeout=RUN_S):
        assert error < 1
