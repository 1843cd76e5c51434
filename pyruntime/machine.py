"""Describes this machine's hardware: each public function of `Rows` returns rows of (name, value).

All is read from files and tools that may be missing; then the value is "unknown" or "none".
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

Rows = list[tuple[str, str]]

SIMD = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve", "sve2", "i8mm")
"""The processor features (/proc/cpuinfo) that GEMMs use."""


def processor() -> Rows:
    facts = _key_values(Path("/proc/cpuinfo"))
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    found = [name for name in SIMD if name in flags]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("processor", facts.get("model name") or platform.processor() or platform.machine()),
        ("cores", f"{usable} usable of {os.cpu_count()}"),
        ("SIMD", ", ".join(found) if found else "unknown"),
    ]


def processor_name() -> str:
    """Returns the processor's name in /proc/cpuinfo, else the machine type."""
    return _key_values(Path("/proc/cpuinfo")).get("model name", platform.machine())


def memory() -> Rows:
    facts = _key_values(Path("/proc/meminfo"))
    rows = [
        (name, _kilobytes(facts[key]) if key in facts else "unknown")
        for name, key in (("memory", "MemTotal"), ("memory available", "MemAvailable"))
    ]
    try:
        size = shutil.disk_usage("/dev/shm").total
        rows.append(("/dev/shm", f"{size / 1e6:,.0f} MB (not needed: symmetric memory is memfd)"))
    except OSError:
        rows.append(("/dev/shm", "none (not needed: symmetric memory is memfd)"))
    return rows


def accelerators() -> Rows:
    """Returns the GPUs that torch sees, and NVLink between them."""
    import torch

    from pyruntime.cuda import cards

    if not cards.count():
        built = torch.version.cuda or torch.version.hip
        why = (
            f"torch is built for {built}, but no device answers" if built else "torch is built for CPUs only"
        )
        return [("GPU", f"none ({why})")]
    rows = [(f"GPU {index}", cards.describe(index)) for index in range(cards.count())]
    return rows if torch.version.hip else [*rows, ("NVLink", _nvlink())]


def network() -> Rows:
    """Returns the interfaces and RDMA devices that could carry traffic between hosts."""
    devices = _names(Path("/sys/class/infiniband"))
    interfaces = [name for name in _names(Path("/sys/class/net")) if name != "lo"]
    return [
        ("RDMA devices", ", ".join(devices) if devices else "none"),
        ("network", ", ".join(map(_interface, interfaces)) if interfaces else "loopback only"),
    ]


def _interface(name: str) -> str:
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        return name
    return f"{name} ({speed / 1000:g} Gbit/s)" if speed > 0 else name


def _nvlink() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (nvidia-smi is not installed)"
    done = subprocess.run(
        [tool, "nvlink", "--status"], capture_output=True, text=True, timeout=20, check=False
    )
    speeds = re.findall(r"Link \d+: ([\d.]+) GB/s", done.stdout)
    if not speeds:
        return "none"
    return f"{len(speeds)} links, {sum(map(float, speeds)):,.0f} GB/s over all GPUs"


def _key_values(path: Path) -> dict[str, str]:
    """The first value of every `key : value` line; empty where the file is missing."""
    facts: dict[str, str] = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return facts
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            facts.setdefault(key.strip(), value.strip())
    return facts


def _kilobytes(text: str) -> str:
    return f"{int(text.split()[0]) * 1024 / 1e9:,.1f} GB"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
