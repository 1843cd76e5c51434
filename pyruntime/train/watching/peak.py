"""The peak FLOP/s of a run's ranks, the denominator of MFU.

    MFU = tokens/s * model FLOPs per token / peak FLOP/s of all ranks

as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), with the FLOPs of
`LlamaConfig.flops_per_token`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from pyruntime.comm import Runtime
from pyruntime.cuda import cards
from pyruntime.ops.primitives import linear
from pyruntime.train.config import RunConfig
from pyruntime.train.device import Device
from pyruntime.train.figures import exchange
from pyruntime.train.model_of_run import DTYPES
from pyruntime.tuning.timing import start_together

SIDE = 512
"""Size of the square GEMMs that are timed when a run starts: some milliseconds each on one core."""
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of all ranks together (`flops`), and its source."""

    flops: float
    words: str
    """Source of the figure, for the log."""


def peak_of(config: RunConfig, runtime: Runtime) -> Peak | None:
    """Returns the peak of a run's ranks, the same on all of them: from train.peak_flops, else a GPU's data
    sheet, else, on CPUs, from GEMMs of train.dtype that all ranks time now, at the same moments. None for an
    unknown GPU, and for fp32 on a GPU. Every rank calls it."""
    ranks, dtype = runtime.world.size(), config.train.dtype
    device = Device(runtime.device, runtime.why_device)
    if config.train.peak_flops is not None:
        stated = config.train.peak_flops
        return Peak(ranks * stated, f"{amount(stated)} a rank, as train.peak_flops states")
    if device.is_gpu:
        known = device.peak_flops(dtype)
        name = cards.name_of(runtime.device)
        return None if known is None else Peak(ranks * known, f"{amount(known)} a rank, {name}'s data sheet")
    mine = gemm_flops(SIDE, DTYPES[dtype], lambda: start_together(runtime.world))
    flops = float(exchange([mine], runtime).sum())
    words = (
        f"{amount(flops / ranks)} a rank, measured just now: {dtype} GEMMs of {SIDE}, on all ranks at once"
    )
    return Peak(flops, words)


def gemm_flops(side: int, dtype: torch.dtype, together: Callable[[], object]) -> float:
    """Returns the FLOP/s of square GEMMs on the CPU, as the trainer runs them. together: returns at the same
    moment on all ranks that measure."""
    own = torch.Generator().manual_seed(0)  # does not advance the run's generator
    x, w = (torch.randn(side, side, generator=own).to(dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: linear(x, w), together)


def median_seconds(run: Callable[[], object], together: Callable[[], object]) -> float:
    """Returns the median seconds of `run`, on all ranks at the same time."""
    run()
    seconds = []
    for _ in range(ROUNDS):
        together()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def amount(flops: float) -> str:
    """Formats FLOP/s."""
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.1f} GFLOP/s"
