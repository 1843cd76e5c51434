"""How values become bytes, by one number for each matrix: its bits, or how many of a million values travel.

A codec packs a stretch of values with what was lost of it before, and adds what was packed to a sum. What it
would lose at other numbers is what plans are made of.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pyruntime.data_parallel.compression.settings import Compression
from pyruntime.ops import compression

MILLION = 1_000_000


class Codec(Protocol):
    """values: flat, of any of the dtypes. number: of the matrix that they are of."""

    uniform: int
    """The number that the settings ask for."""
    finest: int
    """Of matrices that are too small to be worth a loss."""

    def candidates(self) -> list[int]:
        """Numbers that a plan may give, `uniform` among them."""

    def nbytes(self, count: int, number: int) -> int:
        """Of so many values, packed."""

    def pack(
        self,
        values: Tensor,
        number: int,
        packed: Tensor,
        residual: Tensor | None,
        rounding: tuple[int, int] | None,
    ) -> None:
        """As `pyruntime.ops.compression.quantize` takes them."""

    def add(self, packed: Tensor, number: int, out: Tensor) -> None:
        """out, fp32, += what was packed."""

    def errors(self, values: Tensor, residual: Tensor | None) -> list[float]:
        """||x - Q(x)||^2 of x = values + residual, by candidate; nothing is changed. Not finite where x is
        not."""


class Quantized:
    """`number` bits a value."""

    finest = 8

    def __init__(self, settings: Compression):
        self.uniform = settings.bits
        # Rounded at random, fewer bits lose far more than is measured.
        self._least = 1 if settings.error_feedback else min(4, settings.bits)

    def candidates(self) -> list[int]:
        return list(range(self._least, 9))

    def nbytes(self, count: int, number: int) -> int:
        return compression.quantized_bytes(count, number)

    def pack(
        self,
        values: Tensor,
        number: int,
        packed: Tensor,
        residual: Tensor | None,
        rounding: tuple[int, int] | None,
    ) -> None:
        compression.quantize(values, number, packed, residual, rounding)

    def add(self, packed: Tensor, number: int, out: Tensor) -> None:
        compression.dequantize(packed, number, out, add=True)

    def errors(self, values: Tensor, residual: Tensor | None) -> list[float]:
        return compression.quantization_errors(values, self.candidates(), residual)


class TopK:
    """`number` of a million values, and at least one of any."""

    finest = MILLION

    def __init__(self, settings: Compression):
        self.uniform = max(1, round(settings.density * MILLION))

    def candidates(self) -> list[int]:
        factors = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
        return sorted({min(MILLION, max(1, round(self.uniform * factor))) for factor in factors})

    def _k(self, count: int, number: int) -> int:
        return -(-count * number // MILLION)

    def nbytes(self, count: int, number: int) -> int:
        return compression.top_k_bytes(self._k(count, number))

    def pack(
        self,
        values: Tensor,
        number: int,
        packed: Tensor,
        residual: Tensor | None,
        rounding: tuple[int, int] | None,
    ) -> None:
        compression.top_k(values, self._k(len(values), number), packed, residual)

    def add(self, packed: Tensor, number: int, out: Tensor) -> None:
        compression.add_top_k(packed, out)

    def errors(self, values: Tensor, residual: Tensor | None) -> list[float]:
        ks = [self._k(len(values), number) for number in self.candidates()]
        return compression.top_k_errors(values, ks, residual)


def codec_of(settings: Compression) -> Codec | None:
    """None: the method needs the whole matrix (power_sgd.py)."""
    if settings.method == "power_sgd":
        return None
    return Quantized(settings) if settings.method == "quantize" else TopK(settings)
