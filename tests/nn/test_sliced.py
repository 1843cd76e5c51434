"""Sliced linears under autograd's rules for graphs that are used again and weights that change."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyruntime import comm
from pyruntime.comm import group_rank
from pyruntime.nn import ColumnParallelLinear, RowParallelLinear
from pyruntime.nn.cut import memory_of
from pyruntime.nn.sliced import SlicedColumn, SlicedRow
from tests.transports import take

ROWS, IN, OUT = 10, 14, 18
"""Of each slice, over two ranks; features."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def column(group, wire="same") -> tuple[ColumnParallelLinear, Tensor, list[Tensor]]:
    """The linear, this rank's rows of x, and y of two slices of it, which follow each other."""
    torch.manual_seed(2)
    linear = ColumnParallelLinear(IN, OUT, group=group, bias=False, wire=wire)
    sliced = SlicedColumn(linear, [ROWS, ROWS])
    x = drawn(2, ROWS, IN)[:, 5 * group_rank(group) :][:, :5].clone().requires_grad_()
    found = []
    for part in range(2):
        sliced.begin(part, x[part])
        found.append(sliced.end(part))
    return linear, x, found


def row(group, wire="same") -> tuple[RowParallelLinear, Tensor, list[Tensor]]:
    torch.manual_seed(2)
    linear = RowParallelLinear(IN, OUT, group=group, bias=False, wire=wire)
    sliced = SlicedRow(linear, [ROWS, ROWS])
    x = drawn(2, ROWS, IN).tensor_split(2, 2)[group_rank(group)].clone().requires_grad_()
    found = []
    for part in range(2):
        sliced.begin(part, x[part])
        found.append(sliced.end(part))
    return linear, x, found


KINDS = {"column": column, "row": row}


def changed(group, kind: str) -> str:
    """What the backward pass says of a weight that was changed since its forward pass."""
    take(group, "symmetric_memory")
    linear, _, found = KINDS[kind](group)
    with torch.no_grad():
        linear.weight.mul_(2)
    try:
        sum(y.square().sum() for y in found).backward()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier(group)
        comm.close(group)  # a row linear's flight is open
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_was_changed_since_its_forward_pass_is_refused(ranks, kind):
    for message in ranks.run(changed, 2, kind):
        assert "modified by an inplace operation" in message, message


def taken_again(group, kind: str, transport: str) -> None:
    """A backward pass that fails on every rank between two slices, and the same again."""
    take(group, transport)
    linear, x, found = KINDS[kind](group)
    fails = False

    def fail(gradient: Tensor) -> None:
        if fails:
            raise RuntimeError("of this test")

    found[0].register_hook(fail)
    loss = sum(y.square().sum() for y in found)
    loss.backward(retain_graph=True)
    expected = linear.weight.grad, x.grad
    linear.weight.grad = x.grad = None
    fails = True
    with pytest.raises(RuntimeError, match="of this test"):
        loss.backward(retain_graph=True)
    assert linear.weight.grad is None
    fails = False
    loss.backward()
    assert torch.equal(linear.weight.grad, expected[0])
    assert torch.equal(x.grad, expected[1])


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_pass_that_failed_are_counted_once(ranks, kind, transport):
    ranks.run(taken_again, 2, kind, transport)


def gradient(group, kind: str, transport: str) -> tuple[Tensor, Tensor]:
    """Gradient of the weight, whole, and that of one rank in fp64."""
    take(group, transport)
    linear, _, found = KINDS[kind](group)
    sum(y.square().sum() for y in found).backward()
    torch.manual_seed(2)
    whole = (ColumnParallelLinear if kind == "column" else RowParallelLinear)(IN, OUT, group=None, bias=False)
    whole.double()
    x = drawn(2, ROWS, IN).double()
    (x @ whole.weight.T).square().sum().backward()
    expected = whole.weight.grad.tensor_split(2, 0 if kind == "column" else 1)[group_rank(group)]
    return memory_of(linear.weight.grad), expected


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_one_rank(ranks, kind, transport):
    for found, expected in ranks.run(gradient, 2, kind, transport):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def of_rounded_rows(group, kind: str, transport: str) -> None:
    """Slices whose rows are rounded, and the linear that takes them one after the other."""
    take(group, transport)
    linear, x, found = KINDS[kind](group, "fp8")
    sum(y.square().sum() for y in found).backward()
    sliced = linear.weight.grad, x.grad
    linear.weight.grad = x.grad = None
    whole = [linear(part, ROWS) if kind == "column" else linear(part) for part in x]
    sum(y.square().sum() for y in whole).backward()
    for one, other in zip((*found, *sliced), (*whole, linear.weight.grad, x.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    exact = KINDS[kind](group)[2]
    if kind == "column":
        assert not torch.allclose(found[0], exact[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_slices_are_rounded_as_those_of_the_whole(ranks, kind, transport):
    ranks.run(of_rounded_rows, 2, kind, transport)
