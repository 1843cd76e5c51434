"""Slices of linears on devices: rows of a slice are read together, in one GEMM and behind one wait."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pyruntime.comm import Runtime
from pyruntime.nn import ColumnParallelLinear, RowParallelLinear
from pyruntime.nn.sliced import SlicedColumn, SlicedRow
from tests.cuda import build as kernels
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")

ROWS, IN, OUT = (7, 8), 6, 9
"""Rows of each slice over all ranks, and features of the linear's two sides."""


def drawn(*shape: int) -> torch.Tensor:
    """Integers, of which every sum is exact in whatever order."""
    return torch.randint(-8, 9, shape).float()


def both_slices(sliced, xs) -> list[torch.Tensor]:
    for part, x in enumerate(xs):
        sliced.begin(part, x)
    return [sliced.end(part) for part in range(len(xs))]


def exact_and_counts(group, kind: str, keeps: bool | None) -> tuple[bool, Counter[str]]:
    """Whether results and gradients are exact, and what the devices were asked in the second round, when the
    group has its memory."""
    rank, size = sim.begin_rank(delays=3)
    sim.use_kernels(kernels.LIBRARY)
    column, exact = kind == "column", True
    with Runtime.start(tp=size, device=sim.DEVICE) as runtime:
        options = {"group": runtime.tp, "bias": False, "device": sim.DEVICE}
        if column:
            linear = ColumnParallelLinear(IN, OUT, keep_gathered=keeps, **options)
        else:
            linear = RowParallelLinear(OUT, IN, **options)
        weight = drawn(*((OUT, IN) if column else (IN, OUT)))
        own_weight = weight.tensor_split(size, 0 if column else 1)[rank]
        with torch.no_grad():
            linear.weight.copy_(own_weight.to(sim.DEVICE))
        for _ in range(2):
            x = [drawn(rows, weight.shape[1]) for rows in ROWS]
            dy = [drawn(rows, weight.shape[0]) for rows in ROWS]
            cut_x, cut_y = (0, 1) if column else (1, 0)
            own_x, own_dy = (
                [each.tensor_split(size, dim)[rank].to(sim.DEVICE) for each in all]
                for all, dim in ((x, cut_x), (dy, cut_y))
            )
            xs = [each.requires_grad_() for each in own_x]
            linear.weight.grad = None
            torch.accelerator.synchronize()
            sim.reset_counts()
            ys = both_slices((SlicedColumn if column else SlicedRow)(linear, ROWS), xs)
            torch.autograd.backward(ys, own_dy)
            counts = Counter(sim.launches())
            for part in range(2):
                y, dx = x[part] @ weight.T, dy[part] @ weight
                exact &= torch.equal(ys[part].detach().cpu(), y.tensor_split(size, cut_y)[rank])
                exact &= torch.equal(xs[part].grad.cpu(), dx.tensor_split(size, cut_x)[rank])
            dw = sum(d.T @ each for d, each in zip(dy, x, strict=True))
            exact &= torch.equal(linear.weight.grad.cpu(), dw.tensor_split(size, 0 if column else 1)[rank])
    return exact, counts


@pytest.mark.parametrize(
    ("kind", "keeps", "copies"),
    # For each slice: this rank's rows to where they leave from, once or twice, and all rows for dW.
    [("column", True, 2 * 2), ("column", False, 2 * 3), ("row", None, 2 * 2)],
)
def test_slices_are_exact_and_each_takes_one_gemm_in_each_direction(ranks, kind, keeps, copies):
    for rank in ranks.launch(exact_and_counts, 3, kind, keeps, init=False):
        assert rank.error is None, rank.error
        exact, counts = rank.value
        assert exact
        assert counts["aten::mm"] == 2 + 2 + 1  # y, dX, and dW of both
        assert counts["copy"] == copies
        assert counts["aten::cat"] == 1  # of this rank's own operand of dW
