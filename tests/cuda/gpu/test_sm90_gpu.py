"""The kernels for Hopper on a Hopper GPU, through the ops: `pytest -m gpu`.

What tests/cuda/gpu/test_gpu.py does in the fused tier, by tiles that only these kernels have. Both kinds of
kernels also meet in one flight.
"""

from __future__ import annotations

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.cuda import why_not
from tests.cuda.gpu.test_gpu import RUN_S, SIZES, absent, integers, on_a_gpu, replayed, steps


def reason() -> str:
    if why_not():
        return why_not()
    capability = torch.cuda.get_device_capability()
    return "" if capability == (9, 0) else f"the GPU has compute capability {capability}, not (9, 0)."


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(reason()), reason=reason() or "there is a Hopper")]

TIERS = ["fused:sm90-small", "fused:sm90-large"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gemms_are_those_in_fp64(ranks, world_size, tier):
    sizes = [*SIZES, (2050, 1032, 520), (129, 136, 72)]
    for errors in ranks.run(steps, world_size, tier, sizes, timeout=RUN_S):
        assert max(errors) < 1 + world_size, errors  # the parts of a sum are rounded too


MIXED = [[tier] for tier in TIERS] + [
    TIERS,
    ["fused:sm90-large", "fused:small"],
    ["fused:sm90-small", "chunked"],
]


@pytest.mark.parametrize("tiers", MIXED)
def test_ranks_of_both_kinds_of_kernels_get_the_same_bits(ranks, tiers):
    expected = ranks.run(integers, 3, ["chunked"], timeout=RUN_S)
    for mine, theirs in zip(ranks.run(integers, 3, tiers, timeout=RUN_S), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def repeated(group, tier):
    """Results of the same flight many times over."""
    device, generator = on_a_gpu(group), torch.Generator().manual_seed(group.rank())
    x, weight, back = (
        torch.randn(shape, generator=generator).bfloat16().to(device)
        for shape in ((500, 520), (776, 520), (520, 776))
    )
    found = []
    for _ in range(5):
        y = ops.all_gather_matmul(x, weight, group, rows=500 * group.size(), tier=tier)
        found.append((y.cpu(), ops.matmul_reduce_scatter(y, back, group, tier=tier).cpu()))
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_every_run_gives_the_same_bits(ranks, tier):
    for first, *others in ranks.run(repeated, 2, tier, timeout=RUN_S):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("tier", TIERS)
def test_parts_that_do_not_come_name_the_rank(ranks, tier):
    said = ranks.launch(absent, 2, tier, timeout=RUN_S)[0].value
    assert "matmul_reduce_scatter, rank 0 waiting for rank 1 to send chunk 0" in said, said


def without_rows(group, tier):
    device = on_a_gpu(group)
    x, weight = (torch.ones(shape).bfloat16().to(device) for shape in ((64, 64), (128, 64)))
    ops.all_gather_matmul(x, weight, group, rows=128, tier=tier)
    torch.cuda.synchronize()
    comm.set_deadline(group, 0.5)
    if group.rank() == 1:
        return ""
    try:
        for _ in range(2):
            ops.all_gather_matmul(x, weight, group, rows=128, tier=tier)
            torch.cuda.synchronize()
    except comm.CommTimeout as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("tier", TIERS)
def test_rows_that_do_not_come_name_the_rank(ranks, tier):
    said = ranks.launch(without_rows, 2, tier, timeout=RUN_S)[0].value
    assert "all_gather_matmul, rank 0 waiting for rank 1 to send chunk 0" in said, said


def test_a_captured_graph_gives_right_results_at_every_replay(ranks):
    replays = 1000 if torch.cuda.device_count() > 1 else 200  # ranks that share a GPU take turns
    for error in ranks.run(replayed, 2, replays, "fused:sm90-large", timeout=RUN_S):
        assert error < 1
