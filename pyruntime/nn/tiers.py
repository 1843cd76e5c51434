"""Which tier a layer's primitives run on, and what strict mode makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyruntime import ops
from pyruntime.choices import Tier, check_value, values

if TYPE_CHECKING:
    from pyruntime.nn.module import ParallelModule
    from pyruntime.nn.parameters import TensorGroup

TIERS = values(Tier)


@dataclass(frozen=True)
class OpUse:
    """One primitive that a layer runs, [rows, k] @ [n, k]^T on each rank, or the backward of that."""

    when: str  # "forward" or "backward"
    op: str  # as pyruntime.ops.tier_of takes it
    n: int
    k: int
    travels: bool = True  # False: this pass needs nothing from the other ranks
    group: TensorGroup | None = None  # whose ranks; None: the layer's, of two axes the first


def check_tier(tier: str) -> str:
    """`tier` itself; ValueError where it is none of TIERS."""
    check_value("tier", tier, TIERS)
    return tier


def tier_of(layer: ParallelModule, use: OpUse) -> tuple[str, str]:
    """(tier, why not a faster one) at the rows of the layer's last call: the core's own answer.

    The tier is "local" where nothing travels, and "auto" before the group's first op.
    """
    if not use.travels:
        return "local", "the operand is whole on every rank, so nothing travels"
    group = use.group or layer.group
    if not group.name:
        return "local", "the layer has no group, so nothing travels"
    weight = layer.weight
    return ops.tier_of(
        use.op,
        layer.last_rows,
        use.n,
        use.k,
        weight.dtype,
        group.name,
        layer.tier,
        str(weight.device),
    )


def strict_refusal(asked: str, tier: str) -> str:
    """Why strict mode refuses `tier` where `asked` was asked; "" where it does not.

    "auto" must not end in "unfused", and a tier asked for by name must be the one that runs.
    """
    if tier in (asked, "local") or (asked == "auto" and tier != "unfused"):
        return ""
    return f"asked for {asked}, runs {tier}"


def refuse_slow_tier(layer: ParallelModule) -> bool:
    """Raises RuntimeError where strict mode refuses what the layer's last call ran on. Returns whether every
    pass is known: none that travels is before the group's first op."""
    known = True
    for use in layer.op_uses():
        tier, reason = tier_of(layer, use)
        known &= tier != "auto"
        if refusal := strict_refusal(layer.tier, tier):
            raise RuntimeError(
                f"strict: {layer.label or type(layer).__name__}, {use.op} with rows={layer.last_rows}, "
                f"n={use.n}, k={use.k}: {refusal} ({reason}); ask for tier={tier!r} or leave strict off."
            )
    return known
