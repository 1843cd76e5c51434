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
    """The features that its rows hold, if it is converted: the operator's n or k features, or of experts the
    ids and weights ("routes") or the weights alone, of a loss the terms of all ranks."""

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
    # Every rank gets all rows, computes what its experts make of them, and the sum over ranks is each row's.
    "experts": (
        _X_GATHERED,
        Operand("routes", "S(0)", "B", "routes"),
        Operand("W", "S(0)"),
        Operand("Y", "P", "S(0)", "k"),
    ),
    "experts_backward": (
        Operand("dY", "S(0)", "B", "k"),
        _X_GATHERED,
        Operand("dX", "P", "S(0)", "k"),
        Operand("dweights", "P", "S(0)", "weights"),
    ),
    # A rank has its terms of each row's maximum, sum of exponentials and label's logit. Every rank gets all
    # ranks' terms, stacked, and takes the maximum and the sums itself: one exchange in place of three.
    "cross_entropy": (
        Operand("logits", "S(1)"),
        Operand("max", "P(max)"),
        Operand("sums", "P"),
        Operand("terms", "S(0)", "B", "terms"),
        Operand("loss", "B"),
    ),
}
"""By operator. W is stored [out, in] features, a table [ids, features], experts [experts, ...]; routes are
the ids and weights of a row's experts; terms [ranks, rows, 3]."""
WHOLE_ROWS: dict[str, tuple[Operand, ...]] = {
    "experts": (
        Operand("X", "B"),
        Operand("routes", "B"),
        Operand("W", "S(0)"),
        Operand("Y", "P", "B", "k"),
    ),
    "experts_backward": (
        Operand("dY", "B"),
        Operand("dX", "P", "B", "k"),
        Operand("dweights", "P", "B", "weights"),
    ),
}
"""Those of experts whose rows all ranks have."""


def signature_of(layer: ParallelModule, use: OpUse) -> tuple[Operand, ...]:
    """Returns the operands and results of one operator of a layer, as of its last call."""
    values = SIGNATURES.get(use.op, ())
    if use.op in WHOLE_ROWS and not layer.last_cut_rows:
        return WHOLE_ROWS[use.op]
    if use.when == "backward" and _X_GATHERED in values and _keeps_gathered(layer, use):
        return tuple(Operand("X", "B") if value is _X_GATHERED else value for value in values)
    return values


def bytes_moved(layer: ParallelModule, use: OpUse) -> int:
    """Returns the bytes that all ranks together receive in this operator, as of the layer's last call; rows
    that travel rounded count as they are in memory."""
    ranks, rows, item = (use.group or layer.group).size, layer.last_rows, layer.weight.dtype.itemsize
    of_route = max(4, item)  # routes and terms are at least fp32
    routes = rows * getattr(layer, "last_per_token", 0)
    sizes = {
        "n": (rows * use.n, item),
        "k": (rows * use.k, item),
        "routes": (2 * routes, of_route),
        "weights": (routes, of_route),
        "terms": (3 * rows * ranks, of_route),
    }
    return sum(
        nbytes * moved(value.placement, value.converted, elements, ranks)
        for value in signature_of(layer, use)
        if value.converted
        for elements, nbytes in [sizes[value.width]]
    )


def _keeps_gathered(layer: ParallelModule, use: OpUse) -> bool:
    if getattr(layer, "last_loss", "") == "by chunks":
        return True
    keeps, group = getattr(layer, "keep_gathered", None), use.group or layer.group
    if keeps is not None or not layer.last_rows or group.size == 1:
        return bool(keeps)
    return crosses_hosts(group.name, layer.weight.device)
