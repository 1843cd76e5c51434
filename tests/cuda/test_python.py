"""The kernels' Python face, on tensors in the CPU's memory through the host dialect; tests/cuda/test_gpu.py
has the same on GPUs."""

from __future__ import annotations

import pytest
import torch

from pyruntime.cuda import CudaLibraryError, Kernels, Library, why_not
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
