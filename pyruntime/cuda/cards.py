"""Facts about GPUs of NVIDIA and AMD that only torch.cuda knows. All else asks torch.accelerator
and torch.get_device_module(), which know any accelerator."""

from __future__ import annotations

import torch


def name_of(device: torch.device) -> str:
    """The card's name, such as "NVIDIA H100 80GB HBM3"; the device's type where it is no GPU of these."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def count() -> int:
    """GPUs that torch sees; the first call starts the driver."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe(index: int) -> str:
    """A line for people: name, memory in GB, architecture."""
    device = torch.cuda.get_device_properties(index)
    kind = device.gcnArchName if torch.version.hip else f"compute capability {device.major}.{device.minor}"
    return f"{device.name}, {device.total_memory / 1e9:,.0f} GB, {kind}"


def architecture() -> str:
    """The current GPU's, such as "gfx90a" of AMD's or "9.0" of NVIDIA's."""
    if torch.version.hip:
        return torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def native_stream(device: torch.device) -> int:
    """The cudaStream_t of torch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream
