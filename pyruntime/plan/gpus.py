"""Peaks of GPUs, and what their launches and loads take: the model of their GEMMs is built on them."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 64
"""Elements of k in a step of a tile: kDepth of both kinds of kernels."""
SHARED_BYTES_PER_CLOCK = 128
"""Bytes that a multiprocessor reads from shared memory in a clock."""
L2_BYTES_PER_CLOCK = 5120
"""Bytes that the whole GPU reads from L2 in a clock (NVIDIA A100 whitepaper; taken for Hopper too)."""
LAUNCH_S = 3e-6
FIRST_LOAD_S = 1e-6
"""From HBM into shared memory, with nothing else loading."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's peaks, from the vendor's data sheets; others measured `mma_share`."""

    name: str
    architecture: int
    """Number of the machine code that runs on it: 90 for sm_90."""
    multiprocessors: int
    clock_hz: float
    flops_per_clock: float
    """Operations that one multiprocessor's tensor cores do in a clock, in bf16."""
    mma_share: float
    """Share by mma.sync; on Hopper 0.63 (Luo et al. 2024, arXiv 2402.13499, table 9)."""
    hbm_bytes_per_s: float

    @property
    def peak_flops(self) -> float:
        return self.flops_per_clock * self.multiprocessors * self.clock_hz


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80, 108, 1.41e9, 2048, 1.0, 2.04e12),
        Gpu("H100", 90, 132, 1.83e9, 4096, 0.63, 3.35e12),
        Gpu("H200", 90, 132, 1.83e9, 4096, 0.63, 4.8e12),
    )
}
