"""RMSNorm, alone and behind an addition, against float64 references in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime.ops import layers
from tests.ops.cases import (
    EPS,
    ROWS,
    WIDTHS,
    assert_close,
    dtypes,
    implementations,
    randn,
    statistics_dtype,
    wide,
)

ops = torch.ops.pyruntime


def reference_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@implementations
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_and_its_gradients_match_float64(run, dtype, width, rows):
    x, weight, grad = (
        randn(rows, width, dtype=dtype),
        randn(width, dtype=dtype),
        randn(rows, width, dtype=dtype),
    )
    y, rstd = run(ops.rms_norm, x, weight, EPS)
    dx, dweight = run(ops.rms_norm_backward, grad, x, weight, rstd, None)

    x64, weight64 = wide(x, weight)
    expected = reference_rms_norm(x64, weight64)
    expected_dx, expected_dweight = torch.autograd.grad(expected, (x64, weight64), grad.double())
    assert_close(y, expected, dtype, width)
    assert_close(dx, expected_dx, dtype, width, parts=grad.double() * weight64 * rstd[:, None])
    assert_close(dweight, expected_dweight, dtype, rows)
    assert rstd.dtype == statistics_dtype(dtype)


@implementations
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm_and_its_gradients_match_float64(run, dtype, width, rows):
    x, residual, weight = (
        randn(rows, width, dtype=dtype),
        randn(rows, width, dtype=dtype),
        randn(width, dtype=dtype),
    )
    grad, grad_sum = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    y, summed, rstd = run(ops.add_rms_norm, x, residual, weight, EPS)
    dx, dweight = run(ops.rms_norm_backward, grad, summed, weight, rstd, grad_sum)

    assert torch.equal(
        summed, (x.float() + residual.float()).to(dtype) if dtype != torch.float64 else x + residual
    )
    summed64, weight64 = wide(summed, weight)
    expected = reference_rms_norm(summed64, weight64)
    expected_dx, expected_dweight = torch.autograd.grad(expected, (summed64, weight64), grad.double())
    assert_close(y, expected, dtype, width)
    parts = grad.double() * weight64 * rstd[:, None]
    assert_close(dx, expected_dx + grad_sum.double(), dtype, width, parts)
    assert_close(dweight, expected_dweight, dtype, rows)


def test_add_rms_norm_differentiates_through_either_output_alone():
    x, residual, weight = randn(5, 33, grad=True), randn(5, 33, grad=True), randn(33, grad=True)
    normed, summed = layers.add_rms_norm(x, residual, weight, EPS)
    dx, dresidual, dweight = torch.autograd.grad(
        summed.sum(), (x, residual, weight), allow_unused=True, retain_graph=True
    )
    assert torch.equal(dx, torch.ones_like(x)) and torch.equal(dresidual, dx) and dweight is None
    found = torch.autograd.grad(normed.sum(), (x, residual, weight))
    expected = torch.autograd.grad(reference_rms_norm(x + residual, weight).sum(), (x, residual, weight))
    torch.testing.assert_close(found, expected)


def test_rms_norm_takes_any_strides_and_leading_dimensions():
    x, weight = randn(4, 6, 3, dtype=torch.float32).transpose(0, 2), randn(8, dtype=torch.float32)[::2]
    torch.testing.assert_close(layers.rms_norm(x, weight, EPS), F.rms_norm(x, (4,), weight, EPS))
