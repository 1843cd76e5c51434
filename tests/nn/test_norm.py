"""RMSNorm over sequence shards, and the norm of gradients over shards, against torch on one rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyruntime.nn import ColumnParallelLinear, RMSNorm, RowParallelLinear, clip_grad_norm_, grad_norm
from pyruntime.nn.cut import memory_of
from tests.nn.cases import assert_near, my_rows, same_on_all_ranks, seeded_linear


def norm_matches(group, rows: int) -> None:
    torch.manual_seed(0)
    x_full, weight, grad = torch.randn(rows, 10), torch.rand(10) + 0.5, torch.randn(rows, 10)
    x_reference, w_reference = x_full.double().requires_grad_(), weight.double().requires_grad_()
    y_reference = F.rms_norm(x_reference, (10,), w_reference, 1e-5)
    y_reference.backward(grad.double())
    norm = RMSNorm(10, 1e-5, group=group)
    norm.load_full({"weight": weight})
    x = my_rows(x_full, group).requires_grad_()
    y = norm(x)
    y.backward(my_rows(grad, group))
    assert_near(y, my_rows(y_reference, group), "y")
    assert_near(x.grad, my_rows(x_reference.grad, group), "dx")
    assert_near(norm.weight.grad, w_reference.grad, "dw")  # every rank's rows, on every rank
    assert same_on_all_ranks(norm.weight.grad, group)


def gradients(group) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of a parallel column, row (with a replicated bias) and norm after a backward, and those
    of the same model on one rank."""
    up, down = seeded_linear(8, 12, True, 1), seeded_linear(12, 8, True, 2)
    x = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    norm, whole_norm = RMSNorm(8, group=group), nn.RMSNorm(8, 1e-6)
    column, row = ColumnParallelLinear.from_linear(up, group), RowParallelLinear.from_linear(down, group)
    row(column(norm(my_rows(x, group)), rows=10).relu()).square().sum().backward()
    down(up(whole_norm(x)).relu()).square().sum().backward()
    mine = [*norm.parameters(), *column.parameters(), *row.parameters()]
    return mine, [*whole_norm.parameters(), *up.parameters(), *down.parameters()]


def clipping_matches(group) -> None:
    for max_norm in (1e-2, 1.0, 1e6):
        mine, whole = gradients(group)
        before = [p.grad.clone() for p in mine]
        expected = nn.utils.clip_grad_norm_(whole, max_norm)
        assert_near(grad_norm(mine, group), expected, "norm alone")
        assert all(torch.equal(p.grad, b) for p, b in zip(mine, before, strict=True)), (
            "grad_norm must not scale"
        )
        total = clip_grad_norm_(mine, max_norm, group)
        assert_near(total, expected, "norm")
        assert same_on_all_ranks(total, group)
        for p, reference in zip(mine, whole, strict=True):
            layout = p.tp_layout
            assert_near(p.grad, layout.local_part(layout.parts[0], reference.grad), f"clipped to {max_norm}")


def odd_gradients(group) -> tuple[float, float, str, str, str]:
    mine, _ = gradients(group)
    none = grad_norm([nn.Parameter(torch.ones(3))], group).item()
    memory_of(mine[1].grad)[0] = torch.nan
    total = clip_grad_norm_(mine, 1.0, group).item()
    messages = []
    for kwargs in ({"max_norm": 1.0, "error_if_nonfinite": True}, {"max_norm": 0.0}):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            clip_grad_norm_(mine, group=group, **kwargs)
        messages.append(str(caught.value))
    mine[1].tp_group_name = "another"
    with pytest.raises(ValueError) as caught:
        grad_norm(mine, group)
    return none, total, *messages, str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
class TestAgainstOneRank:
    @pytest.mark.parametrize("rows", [12, 7, 2])
    def test_norm_sums_the_weight_gradient(self, ranks, world_size, rows):
        ranks.run(norm_matches, world_size, rows)

    def test_clipping(self, ranks, world_size):
        ranks.run(clipping_matches, world_size)


def test_odd_gradients(ranks):
    none, total, nonfinite, zero, other = ranks.run(odd_gradients, 2)[0]
    assert none == 0 and math.isnan(total)
    assert "norm is nan" in nonfinite
    assert "max_norm=0.0" in zero
    assert "'another'" in other
