"""The settings of compression."""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.choices import CompressionMethod, check_value, values


@dataclass(frozen=True)
class Compression:
    """Settings for the gradients of matrices, or for the displacements of an `OuterOptimizer`, that travel in
    fewer bytes. Gradients of vectors, and the touched rows of embeddings, travel as they are.

    Raises ValueError for another value.
    """

    method: CompressionMethod
    bits: int = 4
    """Bits of a quantised value, 1 to 8."""
    density: float = 0.01
    """Share of the values that travel (top_k), above 0 and at most 1."""
    rank: int = 4
    """Rank of the matrix that stands for a gradient (power_sgd)."""
    error_feedback: bool = True
    """Whether what is lost is added to the next gradient; values are then rounded to the nearest. Without it
    they are rounded at random, so that the mean is exact. top_k and power_sgd need it."""
    plan_every: int = 0
    """Steps between two plans (L-GreCo), which give each matrix its own bits, density or rank, in as few
    bytes as the error of the setting above allows; 0: that setting for all."""
    seed: int = 0
    """Seed of the random rounding, and of power_sgd's first Q."""

    def __post_init__(self) -> None:
        check_value("method", self.method, values(CompressionMethod))
        _require(self.method != "none", "method='none' compresses nothing; leave the compression out.")
        _require(1 <= self.bits <= 8, f"bits={self.bits}; a value takes 1 to 8 bits.")
        _require(0 < self.density <= 1, f"density={self.density}; use a share above 0 and at most 1.")
        _require(self.rank >= 1, f"rank={self.rank}; use at least 1.")
        _require(
            self.plan_every >= 0, f"plan_every={self.plan_every}; use at least 1 step, or 0 for no plan."
        )
        _require(
            self.error_feedback or self.method == "quantize",
            f"method={self.method} without error_feedback never sends most of a gradient; leave it on, or "
            "use method=quantize.",
        )

    def words(self) -> str:
        """Returns the settings in words, for a log."""
        if self.method == "quantize":
            return f"in {self.bits} bits a value"
        return (
            f"by the largest {self.density:.2%} of their values"
            if self.method == "top_k"
            else f"of rank {self.rank}"
        )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
