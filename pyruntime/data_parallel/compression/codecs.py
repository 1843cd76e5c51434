"""Turns values into bytes, by one number for each matrix: its bits, or how many of a million values travel.

A codec packs a stretch of values, with what was lost of it before, and adds packed values to a sum. Plans are
made from what it would lose with other numbers.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pyruntime.data_parallel.compression.settings import Compression
from pyruntime.ops import compression

MILLION = 1_000_000


class Codec(Protocol):
    """Packs values, flat and of any of the dtypes. number: that of the matrix that they belong to."""

    uniform: int
    """The number that the settings ask for."""
    finest: int
    """The number of matrices that are too small to be worth a loss."""

    def candidates(self) -> list[int]:
        """Returns the numbers that a plan may give, `uniform` among them."""

    def nbytes(self, count: int, number: int) -> int:
        """Returns the bytes of `count` packed values."""

    def pack(
        self,
        values: Tensor,
        number: int,
        packed: Tensor,
        residual: Tensor | None,
        rounding: tuple[int, int] | None,
    ) -> None:
        """Packs values; the arguments are those of `pyruntime.ops.compression.quantize`."""

    def add(self, packed: Tensor, number: int, out: Tensor) -> None:
        """Adds packed values to `out`, fp32."""

    def errors(self, values: Tensor, residual: Tensor | None) -> list[float]:
        """Returns ||x - Q(x)||^2 of x = values + residual for each candidate, and changes nothing. Not finite
        if x is not."""


class Quantized:
    """Packs a value in `number` bits."""

    finest = 8

    def __init__(self, settings: Compression):
        self.uniform = settings.bits
        # With random rounding, fewer bits lose far more than is measured.
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
    """Packs the largest `number` of a million values, at least one."""

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
    """Returns the codec; None if the method needs the whole matrix (power_sgd.py)."""
    if settings.method == "power_sgd":
        return None
    return Quantized(settings) if settings.method == "quantize" else TopK(settings)
