"""What the ranks of a run could compute at their best, which MFU is a share of.

    MFU = tokens/s * model FLOPs per token / FLOP/s of all ranks at their best

after PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), with the FLOPs of
`LlamaConfig.flops_per_token`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from pyruntime.comm import Runtime
from pyruntime.ops.primitives import linear
from pyruntime.train.config import RunConfig
from pyruntime.train.device import Device
from pyruntime.train.figures import exchange
from pyruntime.train.model_of_run import DTYPES
from pyruntime.tuning.timing import start_together

SIDE = 512
"""Of the GEMMs that are timed as a run starts: some milliseconds each on one core."""
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Peak:
    """flops: FLOP/s of all ranks together."""

    flops: float
    words: str
    """Where it is from."""


def peak_of(config: RunConfig, runtime: Runtime) -> Peak | None:
    """Of the ranks of a run, the same on all of them: what train.peak_flops states, or a GPU's data sheet, or
    of ranks on CPUs what GEMMs of train.dtype reach, which all of them time now at the same moments. None for
    a GPU that is not known, and for fp32 on one. Every rank calls it."""
    ranks, dtype = runtime.world.size(), config.train.dtype
    device = Device(runtime.device, runtime.why_device)
    if config.train.peak_flops is not None:
        stated = config.train.peak_flops
        return Peak(ranks * stated, f"{amount(stated)} a rank, as train.peak_flops states")
    if device.is_cuda:
        known = device.peak_flops(dtype)
        name = torch.cuda.get_device_name(runtime.device)
        return None if known is None else Peak(ranks * known, f"{amount(known)} a rank, {name}'s data sheet")
    mine = gemm_flops(SIDE, DTYPES[dtype], lambda: start_together(runtime.world))
    flops = float(exchange([mine], runtime).sum())
    words = (
        f"{amount(flops / ranks)} a rank, measured just now: {dtype} GEMMs of {SIDE}, on all ranks at once"
    )
    return Peak(flops, words)


def gemm_flops(side: int, dtype: torch.dtype, together: Callable[[], object]) -> float:
    """FLOP/s of square GEMMs on the CPU, as the trainer runs them. together: returns on all ranks that
    measure at the same moment."""
    own = torch.Generator().manual_seed(0)  # the run draws from the other
    x, w = (torch.randn(side, side, generator=own).to(dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: linear(x, w), together)


def median_seconds(run: Callable[[], object], together: Callable[[], object]) -> float:
    """Seconds of `run`, on all ranks at the same time."""
    run()
    seconds = []
    for _ in range(ROUNDS):
        together()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def amount(flops: float) -> str:
    """FLOP/s for people."""
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.1f} GFLOP/s"
