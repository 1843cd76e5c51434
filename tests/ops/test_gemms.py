"""GEMMs in bf16 against fp64: every form of a linear, at sizes that no vector divides, and the promise that
how rows are cut changes no bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from pyruntime import _C
from pyruntime.ops import gemm_tables
from pyruntime.ops.primitives import linear

BF16 = torch.bfloat16
ROWS, DEPTHS, WIDTHS = (1, 5, 7, 8, 13, 97, 130), (1, 2, 31, 33, 64, 130), (1, 5, 63, 64, 65, 200)
OWN = _C.has_own_gemm()


@pytest.fixture(params=["ours", "library"], autouse=True)
def gemm(request):
    """Whose GEMM multiplies bf16, where both can."""
    _C.use_gemm(request.param == "ours")
    yield request.param
    gemm_tables.use(gemm_tables.read())


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def agree(found: Tensor, exact: Tensor, terms: int) -> None:
    """Rounded once from sums in fp32 of so many products."""
    allowed = 2**-8 * exact.abs() + 2**-20 * terms
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= allowed).all()), (found.double() - exact).abs().max()


@pytest.mark.parametrize("rows", ROWS)
def test_a_linear_and_its_gradients(rows):
    torch.manual_seed(rows)
    for depth in DEPTHS:
        for width in WIDTHS:
            x, weight, bias = (
                drawn(*shape).requires_grad_() for shape in ((rows, depth), (width, depth), (width,))
            )
            y, dy = linear(x, weight, bias), drawn(rows, width)
            y.backward(dy)
            wide_x, wide_weight, wide_dy = (t.detach().double() for t in (x, weight, dy))
            agree(y.detach(), wide_x @ wide_weight.t() + bias.detach().double(), depth)
            agree(x.grad, wide_dy @ wide_weight, width)
            agree(weight.grad, wide_dy.t() @ wide_x, rows)


@pytest.mark.parametrize(
    ("rows", "depth", "width"), [(390, 2049, 70), (770, 4101, 65), (2500, 130, 200), (1537, 70, 390)]
)
def test_sums_that_come_in_several_blocks(rows, depth, width):
    torch.manual_seed(rows)
    x, weight = drawn(rows, depth).requires_grad_(), drawn(width, depth).requires_grad_()
    y, dy = linear(x, weight), drawn(rows, width)
    y.backward(dy)
    wide_x, wide_weight, wide_dy = (t.detach().double() for t in (x, weight, dy))
    agree(y.detach(), wide_x @ wide_weight.t(), depth)
    agree(x.grad, wide_dy @ wide_weight, width)
    agree(weight.grad, wide_dy.t() @ wide_x, rows)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 50, 51, 700])
def test_a_weight_gradient_of_columns_of_a_wider_matrix(rows, accumulate):
    torch.manual_seed(rows)
    wider, x = drawn(rows, 150), drawn(rows, 65)
    dy = wider[:, 3:80]  # begins at an odd element
    held = drawn(79, 65)
    before = held.clone()
    _C.WeightGradientGemm(dy, x).write(held[1:78], 0, accumulate)
    old = before[1:78].double() if accumulate else 0
    agree(held[1:78], old + dy.double().t() @ x.double(), rows)
    assert torch.equal(held[0], before[0]) and torch.equal(held[78], before[78])


@pytest.mark.skipif(not OWN, reason="on this processor a library multiplies, which promises no such thing")
@pytest.mark.parametrize("depth", [33, 256, 2500])
@pytest.mark.parametrize("gemm", ["ours"], indirect=True)
def test_how_rows_are_cut_and_where_they_lie_changes_no_bit(depth):
    torch.manual_seed(depth)
    weight, bias, x = drawn(200, depth), drawn(200), drawn(64, depth)
    whole = linear(x, weight, bias)
    for cut in (8, 9, 31):
        assert torch.equal(torch.cat([linear(part, weight, bias) for part in (x[:cut], x[cut:])]), whole)
    strided = drawn(64, depth + 3)[:, 1 : depth + 1].copy_(x)
    assert torch.equal(linear(strided, weight, bias), whole)
    assert torch.equal(linear(x.view(4, 16, depth), weight, bias).view(64, 200), whole)


@pytest.mark.parametrize("cuts", [(100, 30), (8, 64, 58), (64, 57, 9)])
def test_a_weight_gradient_added_up_in_fp32(cuts, gemm):
    """By our GEMM with the bits of the whole, if all parts but the last are even."""
    rows = sum(cuts)
    torch.manual_seed(rows)
    dy, x = drawn(rows, 77), drawn(rows, 65)
    sums, narrow = torch.full((79, 65), 7.0), torch.empty(77, 65, dtype=BF16)
    for place, part in enumerate(zip(dy.split(cuts), x.split(cuts), strict=True)):
        _C.WeightGradientGemm(*part).write(sums[1:78], 0, place > 0)
    _C.WeightGradientGemm(dy, x).write(narrow, 0, False)
    assert (sums[0] == 7).all() and (sums[78] == 7).all()
    exact = dy.double().t() @ x.double()
    if gemm == "library" or not OWN:  # rounds each part
        assert (sums[1:78] - exact).abs().max() < 2**-8 * exact.abs().max()
        return
    agree(sums[1:78], exact, rows)
    if cuts[1] % 2 == 0:
        assert torch.equal(sums[1:78].bfloat16(), narrow)


def test_nan_and_infinity_stay_in_their_rows(gemm):
    """But for torch's own product on processors with AMX, which at an odd depth multiplies the first element
    of the row below by 0."""
    torch.manual_seed(0)
    weight, x = drawn(70, 33), drawn(20, 33)
    x[3, 32], x[9, 0] = float("nan"), float("inf")
    y = linear(x, weight, None)
    rows = torch.arange(20)
    assert y[3].isnan().all() and not y[9].isfinite().any()
    if gemm == "ours" and OWN:
        assert y[(rows != 3) & (rows != 9)].isfinite().all()
    else:
        assert torch.equal(y.isfinite(), torch.mm(x, weight.t()).isfinite())


def linear_in_fp32(dtype: torch.dtype) -> None:
    """A plain linear, forward and backward, has the bits of fp32 GEMMs, rounded once."""
    x, weight, bias = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((5, 33), (17, 33), (17,)))
    dy = torch.randn(5, 17).to(dtype)
    wide_x, wide_weight, wide_bias, wide_dy = (t.detach().float() for t in (x, weight, bias, dy))
    y = linear(x, weight, bias)
    assert torch.equal(y, torch.nn.functional.linear(wide_x, wide_weight, wide_bias).to(dtype))
    y.backward(dy)
    assert torch.equal(x.grad, (wide_dy @ wide_weight).to(dtype))
    assert torch.equal(weight.grad, (wide_dy.t() @ wide_x).to(dtype))


def test_a_linear_in_fp16_is_multiplied_in_fp32():
    linear_in_fp32(torch.float16)


@pytest.mark.second_tier
def test_a_linear_in_bf16_that_is_not_ours_is_multiplied_in_fp32_where_the_processor_has_no_bf16():
    """As on a processor without AVX-512, where torch's own bf16 takes a hundred times as long."""
    program = (
        "import torch; from tests.ops.test_gemms import _C, linear_in_fp32; "
        "_C.use_gemm(False); linear_in_fp32(torch.bfloat16)"
    )
    older = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    ran = subprocess.run([sys.executable, "-c", program], env=older, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
