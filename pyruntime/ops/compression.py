"""Compresses values: quantised to 1 to 8 bits, or only the largest, with the error kept for the next step.

Flat, contiguous tensors of one device: vectorised C++ on the CPU (csrc/cpu/compression), kernels on others
(csrc/cuda/portable/compression) and, for the largest values and for errors, torch's operations. Values are
float32, bfloat16 or float16 [n]; packed bytes are uint8; sums and residuals are float32 [n]. If a residual is
given, one pass computes (error feedback: Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847)

    x = values + residual,    packed = Q(x),    residual = x - Q(x)

so that over any number of steps the sum of the packed values plus the residual is the sum of the values.
Results are bitwise the same in every run, with any number of threads. Packed bytes and residuals are the
same on all devices, if the CPU has FMA. The host waits for a device only for errors. All functions raise
ValueError (sizes, devices) and TypeError (dtypes), and NotImplementedError for a device without kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyruntime.comm.core import _C

BLOCK = 512
"""Number of quantised values that share a step."""


def quantized_bytes(count: int, bits: int) -> int:
    """Returns the bytes of `count` values: 4 for each block of 512, and `bits` bits a value."""
    return _C.quantized_bytes(count, bits)


def quantize(
    values: Tensor,
    bits: int,
    packed: Tensor,
    residual: Tensor | None = None,
    rounding: tuple[int, int] | None = None,
) -> None:
    """Writes packed [quantized_bytes]: x in `bits` bits a value, as multiples of its block's step.

    The step is max|x| / (2^(bits-1) - 1), with 2 bits at most twice the block's mean magnitude. With 1 bit a
    value becomes plus or minus the mean magnitude.

    rounding: None: to the nearest; the error is then at most the block's norm, which error feedback requires.
    Or (seed, index of the first value): at random, so that the mean is exact (Alistarh et al. 2017, arXiv
    1610.02132). The generator gives one number for each seed and index
    (`pyruntime.ops.layers.random_rounding`), and the step is max|x| with 1 and 2 bits. A block with a value
    that is not finite is read as NaN and leaves no residual.
    """
    _C.quantize(values, bits, packed, residual, rounding)


def dequantize(packed: Tensor, bits: int, out: Tensor, add: bool = False) -> None:
    """Writes the n values that `quantize` packed into out [n]; add: adds them to out."""
    _C.dequantize(packed, bits, out, add)


def quantization_errors(values: Tensor, bits: Sequence[int], residual: Tensor | None = None) -> list[float]:
    """Returns ||x - Q(x)||^2 for each of `bits`, rounded to the nearest, in one pass that changes nothing;
    NaN if a value is not finite."""
    if values.device.type == "cpu":
        return _C.quantization_errors(values, bits, residual)
    errors = []
    for each in bits:
        packed = values.new_empty(quantized_bytes(len(values), each), dtype=torch.uint8)
        lost = _sum(values, residual)
        is_finite = lost.isfinite().all()
        quantize(torch.zeros_like(values), each, packed, lost)
        errors.append(torch.where(is_finite, lost.double().square().sum(), torch.nan))
    return torch.stack(errors).tolist() if errors else []


def top_k_bytes(k: int) -> int:
    """Returns the bytes of k values: 8 each."""
    return _C.top_k_bytes(k)


def top_k(values: Tensor, k: int, packed: Tensor, residual: Tensor | None = None) -> None:
    """Writes packed [top_k_bytes]: exactly the k values of x of largest magnitude, with their places; of
    equal values the first. The residual becomes zero if a value is not finite."""
    if values.device.type == "cpu":
        _C.top_k(values, k, packed, residual)
        return
    x = _sum(values, residual)
    places = _places_of_largest(x, k)
    largest = x[places]
    packed[: 4 * k] = places.int().view(torch.uint8)
    packed[4 * k :] = largest.view(torch.uint8)
    if residual is not None:
        # The largest magnitude tells of a value that is not finite.
        rest = x.index_fill_(0, places, 0)
        torch.where(largest.isfinite().all(), rest, x.new_zeros(()), out=residual)


def top_k_errors(values: Tensor, ks: Sequence[int], residual: Tensor | None = None) -> list[float]:
    """Returns ||x - Q(x)||^2 of the k values of largest magnitude, for each of `ks`, and changes nothing. The
    result is not finite if a value is not."""
    if values.device.type == "cpu":
        return _C.top_k_errors(values, ks, residual)
    squares = _sum(values, residual).double().square()
    lost = torch.cat((squares.new_zeros(1), squares.sort().values.cumsum(0)))  # of so many of the smallest
    errors = lost[len(values) - torch.tensor(ks, dtype=torch.int64, device=values.device)]
    return torch.where(squares.isfinite().all(), errors, torch.nan).tolist()


def add_top_k(packed: Tensor, out: Tensor) -> None:
    """Adds the values that `top_k` packed to out [n], at their places."""
    if out.device.type == "cpu":
        _C.add_top_k(packed, out)
        return
    # In memory of their own, which wider types can view.
    places, values = (half.clone() for half in packed.view(2, len(packed) // 2))
    out.index_add_(0, places.view(torch.int32), values.view(torch.float32))


def _sum(values: Tensor, residual: Tensor | None) -> Tensor:
    """Returns values + residual in new memory, fp32."""
    return values.to(torch.float32, copy=True) if residual is None else residual + values


def _places_of_largest(x: Tensor, k: int) -> Tensor:
    """Returns the places, int64 [k] ascending, of the largest magnitudes of x, fp32 [n] with n < 2^31; of
    equal ones the first. Each value's key is its own: the magnitude's bits, then the place from the end."""
    last = len(x) - 1
    magnitudes = (x.view(torch.int32) & 0x7FFFFFFF).long()
    keys = (magnitudes << 31) | torch.arange(last, -1, -1, device=x.device)
    largest = keys.topk(k, sorted=False).values
    return (last - (largest & 0x7FFFFFFF)).sort().values
