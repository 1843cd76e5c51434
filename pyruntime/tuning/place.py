"""Where a process runs, in the words that choices are kept under."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import pyruntime


def device_name(device: str, threads: int) -> str:
    """ "cpu": the processor and the threads of a rank, which decide how long a product takes; "cuda": the
    GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{_processor()}, {threads} thread(s) a rank"


def library() -> str:
    """Products are torch's, everything else is ours."""
    return f"pyruntime {pyruntime.__version__}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
