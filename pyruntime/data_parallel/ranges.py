"""What data parallelism shows in torch.profiler: one range for each thing that it does with a unit."""

from __future__ import annotations

import contextlib

import torch
from torch.autograd import _profiler_enabled

NOTHING = contextlib.nullcontext()


def marked(what: str, unit: str = "") -> contextlib.AbstractContextManager:
    """A range "dp WHAT UNIT" while somebody is profiling; costs about 0.1 us when nobody is."""
    return torch.profiler.record_function(f"dp {what} {unit}".rstrip()) if _profiler_enabled() else NOTHING
