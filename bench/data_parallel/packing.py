"""Times packing of gradients and of fp8 rows on one core, in bytes a second, next to a copy of as many.

    python -m bench.data_parallel.packing [--json FILE] [--elements 30000000]

Each array that is read or written counts once a direction. Packing reads a gradient, reads and writes its
residual, and writes the message. Unpacking reads the message and adds it to fp32 sums, which it reads and
writes. A copy reads and writes. Rows of fp8 have 2048 values.
"""

from __future__ import annotations

import torch

from bench.common.beside_copy import Contender, main
from pyruntime.comm.wire import Wire
from pyruntime.ops import compression

BITS = (1, 2, 3, 4, 6, 8)
DENSITY = 0.01
WIDTH = 2048


def quantizing(count: int, dtype: torch.dtype, bits: int, at_random: bool) -> Contender:
    gradient, residual = torch.randn(count).to(dtype), torch.zeros(count)
    packed = torch.empty(compression.quantized_bytes(count, bits), dtype=torch.uint8)
    rounding = (1, 0) if at_random else None

    def run() -> None:
        compression.quantize(gradient, bits, packed, residual, rounding)

    return run, gradient.nbytes + 2 * residual.nbytes + packed.nbytes


def dequantizing(count: int, bits: int) -> Contender:
    packed = torch.empty(compression.quantized_bytes(count, bits), dtype=torch.uint8)
    compression.quantize(torch.randn(count), bits, packed)
    sums = torch.zeros(count)
    return lambda: compression.dequantize(packed, bits, sums, add=True), packed.nbytes + 2 * sums.nbytes


def taking_top_k(count: int, dtype: torch.dtype) -> Contender:
    gradient, residual = torch.randn(count).to(dtype), torch.zeros(count)
    packed = torch.empty(compression.top_k_bytes(int(count * DENSITY)), dtype=torch.uint8)

    def run() -> None:
        residual.zero_()  # else the largest would be sent at once, and the rest would grow equal
        compression.top_k(gradient, int(count * DENSITY), packed, residual)

    return run, gradient.nbytes + 3 * residual.nbytes + packed.nbytes


def as_fp8(count: int, dtype: torch.dtype, reads: bool) -> Contender:
    wire = Wire("fp8", WIDTH, dtype)
    rows = torch.randn(count // WIDTH, WIDTH).to(dtype)
    packed = wire.packed(rows)

    def run() -> None:
        if reads:
            wire.read(packed, rows)
        else:
            wire.write(rows, packed)

    return run, rows.nbytes + packed.nbytes


def contenders(count: int) -> dict[str, Contender]:
    found = {}
    for bits in BITS:
        found[f"quantize bf16 to {bits} bits"] = quantizing(count, torch.bfloat16, bits, at_random=False)
    found["quantize fp32 to 4 bits"] = quantizing(count, torch.float32, 4, at_random=False)
    found["quantize bf16 to 4 bits, at random"] = quantizing(count, torch.bfloat16, 4, at_random=True)
    for bits in BITS:
        found[f"add {bits} bits"] = dequantizing(count, bits)
    found[f"top_k {DENSITY:.0%} of bf16"] = taking_top_k(count, torch.bfloat16)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        found[f"{name} to fp8"] = as_fp8(count, dtype, reads=False)
        found[f"fp8 to {name}"] = as_fp8(count, dtype, reads=True)
    return found


if __name__ == "__main__":
    main(__doc__, contenders)
