"""The kernels' Python face, on tensors in the CPU's memory through the host dialect; tests/cuda/test_gpu.py
has the same on GPUs."""

from __future__ import annotations

import pytest
import torch

from pyruntime import CommTimeout
from pyruntime.cuda import CudaLibraryError, FusedGroup, Kernels, Library, why_not
from pyruntime.ops import matmul_reduce_scatter
from tests.cuda import build, cases


@pytest.fixture
def kernels(host_kernels) -> Kernels:
    return Kernels(Library(build.LIBRARY))


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmul_is_the_product_in_fp64(kernels, layout, dtype):
    cases.check_matmul(kernels, "cpu", layout, dtype, 70, 45, 83)


def test_reduce_adds_in_order_and_rounds_once(kernels):
    cases.check_reduce(kernels, "cpu", 4, (9, 33))


def test_adamw_is_that_of_the_cpu_path(kernels):
    cases.check_adamw(kernels, "cpu", [(5, 7), (129,), (1,)])


def test_lse_merge_gives_attention_over_all_keys(kernels):
    cases.check_lse_merge(kernels, "cpu")


def test_what_does_not_fit_is_refused(kernels):
    a, b = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(6, 9, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"A \[4, 8\] and B \[6, 9\] do not share k"):
        kernels.matmul(a, b)
    with pytest.raises(ValueError, match="use 'NT', 'NN' or 'TN'"):
        kernels.matmul(a, b, "TT")
    with pytest.raises(ValueError, match=r"A has shape .* rows are contiguous"):
        kernels.matmul(torch.zeros(8, 4, dtype=torch.bfloat16).t(), torch.zeros(6, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="matmul: dtype=2; use 0"):
        kernels.matmul(torch.zeros(4, 8), torch.zeros(6, 8))


def test_a_missing_library_says_how_to_get_it(tmp_path):
    with pytest.raises(CudaLibraryError, match="run `make cuda`"):
        Library(tmp_path / "libmissing.so")
    assert why_not()  # this test runs on machines without a GPU, or without the library


def fused_steps(group, calls):
    return cases.fused_steps(FusedGroup(Library(build.LIBRARY), group, "cpu", deadline_s=60), group, calls)


@pytest.mark.parametrize("world_size", [2, 3])
def test_fused_products_of_growing_sizes(host_kernels, ranks, world_size):
    for errors in ranks.run(fused_steps, world_size, [(20, 33, 17), (3, 8, 70), (140, 40, 30), (20, 33, 17)]):
        assert max(errors) < 1, errors


def scattered_by_both(group, x, weight):
    fused = FusedGroup(Library(build.LIBRARY), group, "cpu", deadline_s=60)
    y = fused.matmul_reduce_scatter(x[group.rank()], weight)
    fused.check()
    return y, matmul_reduce_scatter(x[group.rank()], weight, group, tier="chunked")


def test_a_scatter_adds_in_the_order_of_the_cpu_path(host_kernels, ranks):
    # Small integers, whose products are exact on both sides: what is left is the order and rounding of sums.
    x = torch.randint(-40, 41, (3, 25, 16)).bfloat16()
    weight = torch.randint(-40, 41, (11, 16)).bfloat16()
    for fused, chunked in ranks.run(scattered_by_both, 3, x, weight):
        assert torch.equal(fused, chunked)


def without_the_second_call_of_rank_1(group):
    fused = FusedGroup(Library(build.LIBRARY), group, "cpu", deadline_s=60)
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    fused.matmul_reduce_scatter(x, x)  # both make the workspace
    fused.check()
    if group.rank() == 1:
        return ""
    fused.deadline_s = 0.2
    fused.matmul_reduce_scatter(x, x)
    try:
        fused.check()
    except CommTimeout as error:
        return str(error)
    return "no error"


def test_a_peer_that_does_not_come_is_named(host_kernels, ranks):
    said = ranks.run(without_the_second_call_of_rank_1, 2)[0]
    assert said == (
        "matmul_reduce_scatter, rank 0 waiting for rank 1 to send chunk 0 into slot 2 "
        "(expected epoch 1, seen 0): the deadline has passed."
    )
