"""Finds the tier on which a layer's primitives run, and raises where strict mode refuses it."""

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
    """One primitive that a layer runs: [rows, k] @ [n, k]^T on each rank, or its backward."""

    when: str  # "forward" or "backward"
    op: str  # as pyruntime.ops.tier_of takes it
    n: int
    k: int
    travels: bool = True  # False: this pass needs nothing from the other ranks
    group: TensorGroup | None = None  # None: the layer's group, or its first axis
    collective: str = ""  # why it is a collective alone, which has no tier; "": it is fused with a GEMM


def check_tier(tier: str) -> str:
    """Returns `tier`; raises ValueError where it is none of TIERS."""
    check_value("tier", tier, TIERS)
    return tier


def tier_of(layer: ParallelModule, use: OpUse) -> tuple[str, str]:
    """Asks the core for (tier, why not a faster one) at the rows of the layer's last call. The tier is
    "local" where nothing travels, "collective" where no GEMM is fused, "auto" before the group's first op."""
    if use.collective:
        return "collective", use.collective
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
    """Says why strict mode refuses `tier` where `asked` was requested; "" where it accepts. "auto" must not
    end in "unfused", and a tier requested by name must be the one that runs."""
    if tier in (asked, "local", "collective") or (asked == "auto" and tier != "unfused"):
        return ""
    return f"asked for {asked}, runs {tier}"


def refuse_slow_tier(layer: ParallelModule) -> bool:
    """Raises RuntimeError where strict mode refuses the tier of the layer's last call. Returns whether all
    tiers are known; before a group's first op they are not."""
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
