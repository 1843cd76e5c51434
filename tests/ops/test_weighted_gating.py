"""The gating of experts' rows against float64 references in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyruntime.ops.experts import SWIGLU, ExpertForm
from tests.ops.cases import assert_close, cpu, dtypes, implementations, randn, statistics_dtype, wide

ops = torch.ops.pyruntime

FORMS = {
    "swiglu": SWIGLU,
    "in turns": ExpertForm(interleaved=True),
    "gpt-oss": ExpertForm(interleaved=True, alpha=1.702, limit=7.0, shift=1.0),
    "tight": ExpertForm(alpha=1.702, limit=0.5, shift=1.0),
}
SIZES = [(0, 7), (1, 1), (5, 33), (130, 24), (3, 1000)]


def settings(form: ExpertForm) -> tuple[float, float, float, bool]:
    return form.alpha, form.limit, form.shift, form.interleaved


def reference(gate_up: Tensor, p: Tensor, form: ExpertForm) -> Tensor:
    return p[:, None] * form.join(gate_up)


def operands(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """grad, gate_up and p; the second row's weight is that of a place without a row."""
    p = torch.randn(rows, dtype=statistics_dtype(dtype))
    p[1:2] = 0
    return randn(rows, width, dtype=dtype), randn(rows, 2 * width, dtype=dtype) * 4, p


def backward(run, grad: Tensor, gate_up: Tensor, p: Tensor, form: ExpertForm) -> list[Tensor]:
    """dgate_up, y and dp, written over NaN."""
    written = [torch.full_like(like, float("nan")) for like in (gate_up, grad, p)]
    run(ops.weighted_gating_backward_, grad, gate_up, p, *settings(form), *written)
    return written


def check_gating(run, dtype: torch.dtype, rows: int, width: int, form: ExpertForm) -> None:
    """`run` calls an implementation of an operator."""
    grad, gate_up, p = operands(rows, width, dtype)
    gate_up64, p64 = wide(gate_up, p)
    expected = reference(gate_up64, p64, form)
    y = run(ops.weighted_gating, gate_up, p, *settings(form))
    dgate_up, y_again, dp = backward(run, grad, gate_up, p, form)
    assert_close(y, expected, dtype)
    assert_close(y_again, expected, dtype)
    wanted = torch.autograd.grad(expected, (gate_up64, p64), grad.double())
    assert_close(dgate_up, wanted[0], dtype)
    parts = grad.double() * reference(gate_up64, torch.ones_like(p64), form)
    assert_close(dp, wanted[1], statistics_dtype(dtype), terms=width, parts=parts)
    again = backward(run, grad, gate_up, p, form)
    assert all(map(torch.equal, again, (dgate_up, y_again, dp)))


@implementations
@dtypes
@pytest.mark.parametrize("form", FORMS)
def test_gating_and_its_gradients_match_float64(run, dtype, form):
    for rows, width in SIZES:
        check_gating(run, dtype, rows, width, FORMS[form])


@dtypes
def test_gating_of_extreme_values_is_finite_and_of_nan_is_nan(dtype):
    values = torch.tensor([-3e4, -200.0, -88.0, 0.0, 88.0, 200.0, 3e4, float("nan")], dtype=dtype)
    p = torch.ones(1, dtype=statistics_dtype(dtype))
    for form in FORMS.values():
        both = torch.stack((values, torch.ones_like(values)), int(form.interleaved))
        gate_up = both.view(1, -1)
        y = ops.weighted_gating(gate_up, p, *settings(form))[0]
        assert_close(y[:-1], reference(gate_up.double(), p.double(), form)[0, :-1], dtype)
        dgate_up = backward(cpu, torch.ones_like(y)[None], gate_up, p, form)[0].view(both.shape)
        dgate = dgate_up.select(int(form.interleaved), 0)
        assert dgate[:-1].isfinite().all() and y[-1].isnan() and dgate[-1].isnan()


def test_operands_that_do_not_fit_are_refused_in_a_sentence():
    grad, gate_up, p = operands(4, 3, torch.float32)
    form = FORMS["swiglu"]
    for error, words, given in (
        (ValueError, r"gate_up has shape \[4, 5\]", (gate_up[:, :5], p)),
        (ValueError, r"must be \[m, 2F\] and contiguous", (gate_up.t().contiguous().t(), p)),
        (ValueError, r"p has shape \[3\].* it must be \[4\]", (gate_up, p[:3])),
        (TypeError, "p has dtype Double; for gate_up of Float it must be Float", (gate_up, p.double())),
    ):
        with pytest.raises(error, match=words):
            ops.weighted_gating(*given, *settings(form))
    written = gate_up.clone(), grad.clone(), p.clone()
    for number, name in enumerate(("dgate_up", "y", "dp")):
        wrong = list(written)
        wrong[number] = written[number][:2]
        with pytest.raises(ValueError, match=f"weighted_gating_backward_: {name} has shape"):
            ops.weighted_gating_backward_(grad, gate_up, p, *settings(form), *wrong)
