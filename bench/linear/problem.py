"""The cases of bench/linear, their operands, and the check of their results.

With P ranks, M rows, hidden size H and inner size I:

    mlp      x_r [M/P, H]  -> gate, up [M, I/P] -> silu(gate) * up -> down -> y_r [M/P, H]
    column   x_r [M/P, H]  -> y [M, I/P]      one column-parallel linear, W [I, H]
    row      x [M, I/P]    -> y_r [M/P, H]    one row-parallel linear, W [H, I]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-5}  # as a share of a row's norm
SAMPLED = 16  # rows and inner features that are checked


@dataclass(frozen=True)
class Case:
    kind: str
    rows: int
    hidden: int
    inner: int
    dtype: torch.dtype

    @classmethod
    def parse(cls, text: str, dtype: torch.dtype) -> Case:
        """Parses `KIND:MxHxI`, such as mlp:512x2048x5632."""
        found = re.fullmatch(r"(mlp|column|row):(\d+)x(\d+)x(\d+)", text)
        if not found or "0" in found.groups():
            raise ValueError(
                f"{text!r} is not a shape; write KIND:MxHxI with KIND mlp, column or row and positive "
                "numbers, such as mlp:512x2048x5632."
            )
        kind, rows, hidden, inner = found.groups()
        return cls(kind, int(rows), int(hidden), int(inner), dtype)

    def __str__(self) -> str:
        return f"{self.kind}:{self.rows}x{self.hidden}x{self.inner}"

    def check(self, ranks: int) -> None:
        for name, size in (("M", self.rows), ("I", self.inner)):
            if size % ranks:
                raise ValueError(
                    f"{self}: {name}={size} is not a multiple of the {ranks} ranks, and DTensor, which "
                    "this benchmark compares with, cuts ragged sizes differently; use a multiple."
                )


@dataclass(frozen=True)
class Operands:
    """The full tensors, the same on every rank. weights are [out, in] as in nn.Linear."""

    x: Tensor
    weights: dict[str, Tensor]
    dy: Tensor

    @classmethod
    def random(cls, case: Case, seed: int) -> Operands:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=draw) * scale).to(case.dtype)

        m, h, i = case.rows, case.hidden, case.inner
        if case.kind == "mlp":
            weights = {
                "gate": normal(i, h, scale=h**-0.5),
                "up": normal(i, h, scale=h**-0.5),
                "down": normal(h, i, scale=i**-0.5),
            }
            return cls(normal(m, h), weights, normal(m, h))
        if case.kind == "column":
            return cls(normal(m, h), {"column": normal(i, h, scale=h**-0.5)}, normal(m, i))
        return cls(normal(m, i), {"row": normal(h, i, scale=i**-0.5)}, normal(m, h))

    def inner_part(self, part: slice | Tensor) -> Operands:
        """Returns the operands for some of the I inner features; no kind of case mixes these."""
        cut = {name: w[:, part] if name in ("down", "row") else w[part] for name, w in self.weights.items()}
        x = self.x[:, part] if "row" in cut else self.x
        dy = self.dy[:, part] if "column" in cut else self.dy
        return Operands(x, cut, dy)


@dataclass(frozen=True)
class Outcome:
    """The results of an implementation on this rank, as local shards: y, dx and every weight's gradient."""

    y: Tensor
    dx: Tensor
    dw: dict[str, Tensor]


def function(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    if "gate" in weights:
        return F.linear(F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"]), weights["down"])
    (weight,) = weights.values()
    return F.linear(x, weight)


def check(case: Case, operands: Operands, outcome: Outcome, rank: int, world_size: int, name: str) -> float:
    """Returns the largest relative error against fp64 in sampled rows of y, dx and the weights' gradients.

    Raises RuntimeError with tensor and row if an error is larger than the dtype explains.
    """
    rows, features = _part(case.rows, rank, world_size), _part(case.inner, rank, world_size)
    worst = 0.0

    def compare(what: str, found: Tensor, wanted: Tensor, index: Tensor) -> None:
        nonlocal worst
        error = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        worst = max(worst, error.max().item())
        if not error.max().item() <= TOLERANCE[case.dtype]:
            row = int(index[error.nan_to_num(torch.inf).argmax()])
            raise RuntimeError(
                f"{name}, {case}, rank {rank}: {what} is wrong by {error.max().item():.2e} of its norm in "
                f"row {row}, where {case.dtype} allows {TOLERANCE[case.dtype]:.0e}."
            )

    # Rows of y and dx, from all inner features. A tensor with cut features has all rows, others a share.
    all_rows = slice(0, case.rows)
    y_rows, dx_rows = (all_rows if case.kind == kind else rows for kind in ("column", "row"))
    for what, found, held in (("y", outcome.y, y_rows), ("dx", outcome.dx, dx_rows)):
        index = _sample(held)
        x = operands.x[index].double().requires_grad_()
        y = function(x, {key: w.double() for key, w in operands.weights.items()})
        wanted = y if what == "y" else torch.autograd.grad(y, x, operands.dy[index].double())[0]
        cut = features if case.kind == {"y": "column", "dx": "row"}[what] else slice(None)
        compare(what, found[index - held.start], wanted.detach()[:, cut], index)

    # Gradients of the weights of some inner features, from all rows.
    index = _sample(features)
    part = operands.inner_part(index)
    leaves = {key: w.double().requires_grad_() for key, w in part.weights.items()}
    function(part.x.double(), leaves).backward(part.dy.double())
    local = index - features.start
    for key, leaf in leaves.items():
        by_inner = leaf.grad.t() if key in ("down", "row") else leaf.grad
        found = outcome.dw[key][:, local].t() if key in ("down", "row") else outcome.dw[key][local]
        compare(f"gradient of {key}", found, by_inner, index)
    return worst


def _part(size: int, rank: int, world_size: int) -> slice:
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


def _sample(held: slice) -> Tensor:
    """Returns some indices of `held`: its ends, and random ones between them."""
    inside = torch.randint(held.start, held.stop, (SAMPLED - 2,))
    return torch.cat([torch.tensor([held.start, held.stop - 1]), inside])
