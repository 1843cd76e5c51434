"""Part "load" of bench/gpu.py: the library is loaded, a GPU is there, and what both are."""

from __future__ import annotations

from typing import Any

import torch
from common import facts
from gpu_problem import Emit

from pyruntime.cuda import Library, why_not


def here() -> dict[str, Any]:
    """Where this runs; what cannot be found out is left out."""
    found: dict[str, Any] = {}
    try:
        found = facts()
    except Exception as error:
        found["facts_error"] = f"{type(error).__name__}: {error}"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda_of_torch": torch.version.cuda,
            "is_hopper": (properties.major, properties.minor) == (9, 0),
        }
    return found


def load(emit: Emit) -> None:
    """Raises RuntimeError where the kernels cannot be used."""
    emit({"kind": "machine", **here()})
    if reason := why_not():
        raise RuntimeError(reason)
    library = Library()
    emit({"kind": "note", "text": f"load: {library.path.name}, {library.dialect}, is loaded"})
