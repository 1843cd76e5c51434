"""Part "load" of bench/gpu: loads the library, finds the GPU, and describes both."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from bench.common.measuring import facts
from bench.gpu.problem import Emit
from pyruntime.cuda import library_path, why_not


def here() -> dict[str, Any]:
    """Returns facts about this machine, without those that cannot be found."""
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
            "driver": driver(),
            "is_hopper": (properties.major, properties.minor) == (9, 0),
        }
    return found


def driver() -> str:
    """Returns the version of NVIDIA's driver from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"


def load(emit: Emit) -> None:
    """Loads the library. Raises RuntimeError if the kernels cannot be used."""
    emit({"kind": "machine", **here()})
    if reason := why_not():
        raise RuntimeError(reason)
    emit({"kind": "note", "text": f"load: {library_path().name} is loaded"})
