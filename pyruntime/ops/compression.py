"""Values in fewer bytes: quantised to 1 to 8 bits, or the largest alone, with what is lost kept.

Vectorised C++ (csrc/cpu/compression) on flat, contiguous CPU tensors. Values are float32, bfloat16 or
float16 [n]; what is packed is uint8; sums and residuals are float32 [n]. Where a residual is given,

    x = values + residual,    packed = Q(x),    residual = x - Q(x)

in one pass (error feedback: Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847), so that over any
steps the sum of what was packed, and the residual, is the sum of the values. Results are bitwise the same
from run to run, at any number of threads. Raises ValueError (sizes, devices) and TypeError (dtypes).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pyruntime.comm.core import _C

BLOCK = 512
"""Values that share a step, where they are quantised."""


def quantized_bytes(count: int, bits: int) -> int:
    """Bytes of `count` values: 4 for each block of 512, and `bits` bits a value."""
    return _C.quantized_bytes(count, bits)


def quantize(
    values: Tensor,
    bits: int,
    packed: Tensor,
    residual: Tensor | None = None,
    rounding: tuple[int, int] | None = None,
) -> None:
    """packed [quantized_bytes] = x in `bits` bits a value, as multiples of its block's step: max|x| /
    (2^(bits-1) - 1), of 2 bits at most twice the mean magnitude; of 1 bit + or - the mean magnitude.

    rounding: None, to the nearest: less is lost than there was, which error feedback asks for. Or (seed,
    index of the first value): at random so that the mean is exact (Alistarh et al. 2017, arXiv 1610.02132),
    by a generator that gives each seed and index one number (`pyruntime.ops.layers.random_rounding`); the
    step is then max|x| of 1 and 2 bits. A block in which a value is not finite is NaN where it is read, and
    leaves no residual.
    """
    _C.quantize(values, bits, packed, residual, rounding)


def dequantize(packed: Tensor, bits: int, out: Tensor, add: bool = False) -> None:
    """out [n] = the n values that `quantize` packed, or out += them."""
    _C.dequantize(packed, bits, out, add)


def quantization_errors(values: Tensor, bits: Sequence[int], residual: Tensor | None = None) -> list[float]:
    """||x - Q(x)||^2 at each of `bits`, to the nearest, in one pass that changes nothing; NaN where a value
    is not finite."""
    return _C.quantization_errors(values, bits, residual)


def top_k_bytes(k: int) -> int:
    """Bytes of k values: 8 each."""
    return _C.top_k_bytes(k)


def top_k(values: Tensor, k: int, packed: Tensor, residual: Tensor | None = None) -> None:
    """packed [top_k_bytes] = the k values of x of largest magnitude, exactly, with their places; of equal
    ones the first."""
    _C.top_k(values, k, packed, residual)


def top_k_errors(values: Tensor, ks: Sequence[int], residual: Tensor | None = None) -> list[float]:
    """||x - Q(x)||^2 of the k values of largest magnitude, for each of `ks`; nothing is changed. Not finite
    where a value is not."""
    return _C.top_k_errors(values, ks, residual)


def add_top_k(packed: Tensor, out: Tensor) -> None:
    """out [n] += what `top_k` packed, at its places."""
    _C.add_top_k(packed, out)
