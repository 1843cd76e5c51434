"""Runs the parts of bench/gpu by name; each calls `emit` with one result (a dict) at a time.

Every part runs in its own process, because a fault on the device makes the process useless.
"""

from __future__ import annotations

from bench.gpu.baselines import baselines
from bench.gpu.gemms import gemms
from bench.gpu.machine import load
from bench.gpu.overlap import gather_overlap, scatter_overlap
from bench.gpu.problem import Emit
from bench.gpu.smoke import smoke
from bench.gpu.support import support
from bench.gpu.training import training


def run(name: str, emit: Emit, quick: bool) -> None:
    """Runs the part of this name, one of problem.PARTS."""
    kind, _, which = name.rpartition("-")
    if name == "load":
        load(emit)
    elif name == "support":
        support(emit, quick)
    elif name == "baselines":
        baselines(emit, quick)
    elif name == "training":
        training(emit, quick)
    elif kind == "gemms":
        gemms(emit, which, quick)
    elif kind == "gather-host":
        gather_overlap(emit, "host", which, quick)
    elif kind == "gather-throttled":
        gather_overlap(emit, "380 GB/s", which, quick)
    elif kind == "scatter-host":
        scatter_overlap(emit, which, quick)
    elif kind == "smoke":
        smoke(emit, which)
    else:
        raise ValueError(f"there is no part {name!r}.")
