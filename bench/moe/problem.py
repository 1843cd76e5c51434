"""The cases of bench/moe, their operands, and the check of results.

P ranks with T rows each; E experts of width F, of which rank r holds E_r as torch.chunk cuts them; k a row:

    x_r [T, D], ids_r [T, k], p_r [T, k]  ->  y_r [T, D],  y = sum over j of p_j E_{i_j}(x)

The imbalance is the rows of the busiest rank's experts over the mean of ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = 3e-2  # of a row's norm: bf16 results, and the gradients' long sums
SAMPLED = 16  # rows of y and dx that are checked
GRADIENTS = ("y", "dx", "dp", "dgate_up", "ddown")


@dataclass(frozen=True)
class Case:
    rows: int
    """Rows of each rank."""
    features: int
    width: int
    experts: int
    k: int
    imbalance: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parses `TxDxF:EkK[:IMBALANCE]`, such as 1024x1024x768:32k4 or 1024x1024x768:32k4:2."""
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+):(\d+)k(\d+)(?::(\d+(?:\.\d+)?))?", text)
        numbers = [int(number) for number in found.groups()[:5]] if found else []
        if not found or 0 in numbers or numbers[4] > numbers[3]:
            raise ValueError(
                f"{text!r} is not a shape; write TxDxF:EkK[:IMBALANCE], positive numbers with K at most E, "
                "such as 1024x1024x768:32k4."
            )
        return cls(*numbers, imbalance=float(found[6] or 1))

    def __str__(self) -> str:
        skew = f":{self.imbalance:g}" if self.imbalance != 1 else ""
        return f"{self.rows}x{self.features}x{self.width}:{self.experts}k{self.k}{skew}"

    def check(self, ranks: int) -> None:
        """Raises ValueError if experts or the imbalance do not fit the ranks."""
        if self.experts % ranks:
            raise ValueError(f"{self}: {self.experts} experts are no multiple of the {ranks} ranks.")
        if not 1 <= self.imbalance <= ranks or (self.imbalance > 1 and self.k > self.experts // ranks):
            raise ValueError(
                f"{self}: {ranks} ranks with {self.experts // ranks} experts each cannot have an "
                f"imbalance of {self.imbalance:g} with {self.k} experts a row."
            )

    def rows_per_expert(self, ranks: int) -> float:
        return self.rows * ranks * self.k / self.experts


@dataclass(frozen=True)
class Operands:
    """One rank's tensors: its rows, its experts, and the gradient of its rows of y; bf16, p in fp32."""

    x: Tensor
    ids: Tensor
    p: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor

    @classmethod
    def random(cls, case: Case, rank: int, ranks: int) -> Operands:
        draw = torch.Generator().manual_seed(1000 * case.rows + rank)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=draw) * scale).bfloat16()

        rows, d, f, held = case.rows, case.features, case.width, case.experts // ranks
        scores = torch.randn(rows, case.experts, generator=draw)
        if case.imbalance > 1:  # some rows choose among rank 0's experts only
            hot = torch.rand(rows, generator=draw) < (case.imbalance - 1) / (ranks - 1)
            scores[:, held:] -= 100 * hot.unsqueeze(1)
        logits, ids = scores.topk(case.k, dim=1)
        return cls(
            normal(rows, d),
            ids,
            logits.softmax(1),
            normal(held, 2 * f, d, scale=d**-0.5),
            normal(held, d, f, scale=f**-0.5),
            normal(rows, d),
        )


def everyones(case: Case, ranks: int) -> list[Operands]:
    return [Operands.random(case, rank, ranks) for rank in range(ranks)]


def check(case: Case, all_ranks: list[Operands], found: list[Tensor], rank: int, name: str) -> float:
    """Returns the largest relative error of `found`, in the order of GRADIENTS, against fp32 from bf16
    operands: of some rows of y and dx, of their dp, and of the gradients of this rank's first expert.

    Raises RuntimeError with the tensor's name if an error is larger than bf16 explains."""
    own, held = all_ranks[rank], case.experts // len(all_ranks)
    index = torch.randint(case.rows, (SAMPLED,))
    x, p = own.x[index].float().requires_grad_(), own.p[index].clone().requires_grad_()
    y = torch.zeros_like(x)
    for expert in own.ids[index].unique().tolist():
        holder = all_ranks[expert // held]
        weights = holder.gate_up[expert % held].float(), holder.down[expert % held].float()
        row, slot = (own.ids[index] == expert).nonzero(as_tuple=True)
        y = y.index_add(0, row, p[row, slot].unsqueeze(1) * _expert(x[row], *weights))
    y.backward(own.dy[index].float())
    pairs = [(found[0][index], y.detach()), (found[1][index], x.grad), (found[2][index], p.grad)]
    chosen = [(each.ids == rank * held).nonzero(as_tuple=True) for each in all_ranks]
    x, p, dy = (
        torch.cat([take(each, *at).float() for each, at in zip(all_ranks, chosen, strict=True)])
        for take in (
            lambda each, row, slot: each.x[row],
            lambda each, row, slot: each.p[row, slot],
            lambda each, row, slot: each.dy[row],
        )
    )
    leaves = [weights[0].float().requires_grad_() for weights in (own.gate_up, own.down)]
    (p.unsqueeze(1) * _expert(x, *leaves)).backward(dy)
    pairs += [(found[3 + i][0], leaf.grad) for i, leaf in enumerate(leaves)]
    worst = 0.0
    for what, (one, wanted) in zip(GRADIENTS, pairs, strict=True):
        error = float((one.float() - wanted).norm() / wanted.norm().clamp_min(1e-9))
        if not error <= TOLERANCE:
            raise RuntimeError(f"{name}, {case}, rank {rank}: {what} is wrong by {error:.2e} of its norm.")
        worst = max(worst, error)
    return worst


def _expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)
