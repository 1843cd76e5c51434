"""The parts of bench/gpu.py by name, each a function of `emit`, which takes one result (a dict) at a time.

Every part runs in a process of its own: after a fault on the device nothing else can be done in that process.
"""

from __future__ import annotations

from gpu_baselines import baselines
from gpu_machine import load
from gpu_overlap import gather_overlap, scatter_overlap
from gpu_problem import Emit
from gpu_products import products
from gpu_smoke import smoke
from gpu_support import support
from gpu_training import training


def run(name: str, emit: Emit, quick: bool) -> None:
    """The part of this name: one of gpu_problem.PARTS, which says what each is."""
    kind, _, which = name.rpartition("-")
    if name == "load":
        load(emit)
    elif name == "support":
        support(emit, quick)
    elif name == "baselines":
        baselines(emit, quick)
    elif name == "training":
        training(emit, quick)
    elif kind == "products":
        products(emit, which, quick)
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
