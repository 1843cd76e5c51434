"""Placements of a layer's operands and results over its ranks, as pyruntime.ops.conversions writes them, and
the bytes that their conversions move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyruntime.comm.groups import crosses_hosts
from pyruntime.nn.tiers import OpUse
from pyruntime.ops.conversions import moved

if TYPE_CHECKING:
    from pyruntime.nn.module import ParallelModule


@dataclass(frozen=True)
class Operand:
    """An operand or a result: its placement, and that which it is converted to; "": none."""

    name: str
    placement: str
    converted: str = ""
    width: str = ""
    """The size of the operator that its rows have, n or k, if it is converted."""

    def __str__(self) -> str:
        return f"{self.name} {self.placement}" + (f" > {self.converted}" if self.converted else "")


_X_GATHERED = Operand("X", "S(0)", "B", "k")
SIGNATURES: dict[str, tuple[Operand, ...]] = {
    "all_gather_matmul": (_X_GATHERED, Operand("W", "S(0)"), Operand("Y", "S(1)")),
    "all_gather_matmul_backward": (Operand("dY", "S(1)"), _X_GATHERED, Operand("dX", "P", "S(0)", "k")),
    "replicated_matmul": (Operand("X", "B"), Operand("W", "S(0)"), Operand("Y", "S(1)")),
    "replicated_matmul_backward": (Operand("dY", "S(1)"), Operand("dX", "P", "B", "k")),
    "matmul_reduce_scatter": (Operand("X", "S(1)"), Operand("W", "S(1)"), Operand("Y", "P", "S(0)", "n")),
    "matmul_reduce_scatter_backward": (Operand("dY", "S(0)", "B", "n"), Operand("dX", "S(1)")),
    "matmul_all_reduce": (Operand("X", "S(1)"), Operand("W", "S(1)"), Operand("Y", "P", "B", "n")),
    "matmul_all_reduce_backward": (Operand("dY", "B"), Operand("dX", "S(1)")),
    # A table's rows are as wide as k.
    "reduce_scatter": (Operand("ids", "B"), Operand("W", "S(0)"), Operand("Y", "P", "S(0)", "k")),
    "reduce_scatter_backward": (Operand("dY", "S(0)", "B", "k"),),
    "all_reduce": (Operand("ids", "B"), Operand("W", "S(0)"), Operand("Y", "P", "B", "k")),
    "all_reduce_backward": (Operand("dY", "B"),),
}
"""By operator. W is stored [out, in] features, a table [ids, features]. Rows of experts go where the router
sends them, so experts have none."""


def signature_of(layer: ParallelModule, use: OpUse) -> tuple[Operand, ...]:
    """Returns the operands and results of one operator of a layer, as of its last call."""
    values = SIGNATURES.get(use.op, ())
    if use.op == "all_gather_matmul_backward" and _keeps_gathered(layer, use):
        return tuple(Operand("X", "B") if value is _X_GATHERED else value for value in values)
    return values


def bytes_moved(layer: ParallelModule, use: OpUse) -> int:
    """Returns the bytes that all ranks together receive in this operator, as of the layer's last call; rows
    that travel rounded count as they are in memory."""
    ranks = (use.group or layer.group).size
    elements = {"n": layer.last_rows * use.n, "k": layer.last_rows * use.k}
    return layer.weight.dtype.itemsize * sum(
        moved(value.placement, value.converted, elements[value.width], ranks)
        for value in signature_of(layer, use)
        if value.converted
    )


def _keeps_gathered(layer: ParallelModule, use: OpUse) -> bool:
    keeps, group = getattr(layer, "keep_gathered", None), use.group or layer.group
    if keeps is not None or not layer.last_rows or group.size == 1:
        return bool(keeps)
    return crosses_hosts(group.name, layer.weight.device)
