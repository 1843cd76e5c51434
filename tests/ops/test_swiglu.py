"""SwiGLU against float64 references in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyruntime.ops import layers
from tests.ops.cases import ROWS, WIDTHS, assert_close, dtypes, implementations, randn, wide

ops = torch.ops.pyruntime


def reference_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


@implementations
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_and_its_gradient_match_float64(run, dtype, width, rows):
    gate_up, grad = randn(rows, 2 * width, dtype=dtype) * 4, randn(rows, width, dtype=dtype)
    (gate_up64,) = wide(gate_up)
    expected = reference_swiglu(gate_up64)
    assert_close(run(ops.swiglu, gate_up), expected, dtype)
    (expected_grad,) = torch.autograd.grad(expected, gate_up64, grad.double())
    assert_close(run(ops.swiglu_backward, grad, gate_up), expected_grad, dtype)


@dtypes
def test_swiglu_of_extreme_values_is_finite_and_of_nan_is_nan(dtype):
    gate = torch.tensor(
        [-3e4, -200.0, -100.0, -88.0, 0.0, 88.0, 100.0, 200.0, 3e4, float("nan")], dtype=dtype
    )
    y = layers.swiglu(torch.cat((gate, torch.ones_like(gate))))
    assert_close(y[:-1], reference_swiglu(torch.cat((gate[:-1], torch.ones_like(gate[:-1]))).double()), dtype)
    assert y[-1].isnan()
