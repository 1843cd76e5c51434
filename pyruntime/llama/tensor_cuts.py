"""How a Llama is cut over tensor-parallel ranks of unequal speed.

A rank holds MLP features in units of 16, whole groups of heads (a key/value head and its queries), and rows
of the vocabulary in units of 64. Each unit goes to the rank that would finish it first (`least_largest`).
Rows of activations stay equal, so that the ranks exchange as much as with equal cuts; only GEMMs and
attention differ.

Source: derived. Zero-resizing and migration of columns (arXiv 2401.11469) are for the same problem, but
change the result, or move weights in every call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyruntime.llama.config import LlamaConfig
from pyruntime.pipeline.split import least_largest

FEATURES = 16
"""MLP features of a unit."""
VOCABULARY = 64
"""Rows of the vocabulary of a unit."""


@dataclass(frozen=True)
class TensorCuts:
    """What each tensor-parallel rank holds of the dimensions that are cut. (): equal parts, as DTensor's
    `Shard` cuts them."""

    features: tuple[int, ...] = ()
    """MLP features."""
    groups: tuple[int, ...] = ()
    """Key/value heads, each with its query heads."""
    vocabulary: tuple[int, ...] = ()
    """Rows of embedding and head."""

    def groups_of(self, config: LlamaConfig, tp: int) -> tuple[int, ...]:
        """Returns the key/value heads of each of `tp` ranks."""
        return self.groups or (config.num_key_value_heads // tp,) * tp

    def heads(self, features: int) -> tuple[int, ...]:
        """Returns the features of each rank where a group of heads has so many."""
        return tuple(features * groups for groups in self.groups)

    def largest_share(self, config: LlamaConfig, tp: int) -> float:
        """Returns the largest share that one of `tp` ranks holds of a dimension."""
        sizes = config.intermediate_size, config.num_key_value_heads, config.vocab_size
        cuts = self.features, self.groups, self.vocabulary
        shares = [max(cut) / size for cut, size in zip(cuts, sizes, strict=True) if cut]
        return max([1 / tp, *shares])

    def __str__(self) -> str:
        return ", ".join(
            f"{'+'.join(map(str, cut))} {what}"
            for cut, what in (
                (self.features, "MLP features"),
                (self.groups, "groups of heads"),
                (self.vocabulary, "rows of the vocabulary"),
            )
            if cut
        )


def tensor_cuts(
    config: LlamaConfig, tp: int, speeds: Sequence[float] = (), ep: int | None = None
) -> TensorCuts:
    """Returns how a model of that shape is cut over `tp` ranks of these relative speeds. Empty or equal
    speeds give equal parts, which `config.check_tp` checks; ep: as there.

    Raises ValueError for speeds that are not `tp` positive numbers, for a model with experts, and where a
    rank would hold nothing of a dimension.
    """
    asked = f"tp_speeds={list(speeds)}"
    if speeds and len(speeds) != tp:
        raise ValueError(
            f"{asked} are {len(speeds)} numbers for {tp} tensor-parallel ranks; give one for each."
        )
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"{asked} must be positive numbers; a rank of half the others' speed has 0.5.")
    if len(set(speeds)) <= 1:
        config.check_tp(tp, ep)
        return TensorCuts()
    if config.mixture is not None:
        raise ValueError(
            f"{asked} do not support a model with experts, which are cut equally; leave them out."
        )

    def cut(size: int, unit: int, what: str) -> tuple[int, ...]:
        counts = least_largest([1 / speed for speed in speeds], [0.0] * tp, 0, -(-size // unit))
        if min(counts) < 1:
            raise ValueError(
                f"{asked} leave rank {counts.index(0)} without any of the {size} {what}, which are dealt in "
                f"units of {unit}; use speeds that differ less, or fewer tensor-parallel ranks."
            )
        ends = [min(size, unit * sum(counts[: rank + 1])) for rank in range(tp)]
        shares = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
        return () if shares == _equal(size, tp) else shares

    return TensorCuts(
        cut(config.intermediate_size, FEATURES, "MLP features"),
        cut(config.num_key_value_heads, 1, "key/value heads"),
        cut(config.vocab_size, VOCABULARY, "rows of the vocabulary"),
    )


def _equal(size: int, tp: int) -> tuple[int, ...]:
    """Returns what `Shard` gives each rank."""
    chunk = -(-size // tp)
    return tuple(max(0, min(chunk, size - rank * chunk)) for rank in range(tp))
