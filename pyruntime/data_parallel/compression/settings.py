"""What is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.choices import CompressionMethod, check_value, values


@dataclass(frozen=True)
class Compression:
    """How the gradients of matrices travel, or the displacements of an `OuterOptimizer`. Gradients of
    vectors, and the touched rows of embeddings, travel as they are.

    Raises ValueError for what is no such setting.
    """

    method: CompressionMethod
    bits: int = 4
    """Of a value that is quantised, 1 to 8."""
    density: float = 0.01
    """Share of the values that travels (top_k), above 0 and at most 1."""
    rank: int = 4
    """Of what stands for a matrix (power_sgd)."""
    error_feedback: bool = True
    """What is lost is added to the next gradient, and values are rounded to the nearest. Without it they are
    rounded at random, so that the mean is exact; top_k and power_sgd need it."""
    plan_every: int = 0
    """Steps between two plans that give each matrix bits, a density or a rank of its own, in as few bytes as
    the error of the setting above allows (L-GreCo); 0: that setting for all."""
    seed: int = 0
    """Of the random rounding, and of what power_sgd begins with."""

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
        """For a log."""
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
