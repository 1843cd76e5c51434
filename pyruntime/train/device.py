"""The device that a rank computes on: its memory, its peak FLOP/s and its restrictions."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from pyruntime.comm.core import _C
from pyruntime.comm.devices import Host, put
from pyruntime.cuda import cards
from pyruntime.train.config import RunConfig
from pyruntime.train.errors import ConfigError
from pyruntime.train.metrics import peak_memory_bytes

PEAK_BF16 = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI250X": 191.5e12,
    "MI300X": 1307.4e12,
    "MI325X": 1307.4e12,
    "MI355X": 2516.6e12,
}
"""FLOP/s of dense bf16 GEMMs with fp32 sums, by a part of the device's name. Sources: NVIDIA's data sheets,
and AMD's ("AMD Instinct MI300X Accelerator Data Sheet" and so on: compute units times peak engine clock times
FLOP per unit and cycle). An MI250X shows as two devices, its dies; each has half of the data sheet's 383
TFLOP/s."""


@dataclass(frozen=True)
class Device:
    """The device, and why it was chosen."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    why: str = "asked for"

    @property
    def is_gpu(self) -> bool:
        """Whether it is an accelerator: what it is asked for, it does later."""
        return self.device.type != "cpu"

    def describe(self) -> str:
        """Describes the device in one line."""
        if not self.is_gpu:
            return f"{self.device} ({self.why})"
        reason = _C.why_no_device_library(self.device.type)
        layers = "norms, SwiGLU, rotary embedding, loss and AdamW"
        by = f"by torch's operations, which is slow: {reason}" if reason else "in fused launches"
        return f"{self.device}, {cards.name_of(self.device)} ({self.why}); {layers} {by}"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a CPU tensor to the device; the host does not wait for the copy."""
        return put(tensor, self.device)

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes that this rank has held so far: on a GPU in tensors, on the CPU resident."""
        return torch.accelerator.max_memory_allocated(self.device) if self.is_gpu else peak_memory_bytes()

    def peak_flops(self, dtype: str) -> float | None:
        """Peak FLOP/s of one GPU; None if it is not known: no MFU rather than a wrong one."""
        if not self.is_gpu or dtype != "bf16":
            return None
        return peak_flops_of(cards.name_of(self.device))


def peak_flops_of(name: str) -> float | None:
    """The peak of a device, by the longest entry of PEAK_BF16 whose words its name contains."""
    words = name.replace("-", " ").split()
    known = [entry for entry in PEAK_BF16 if all(word in words for word in entry.split())]
    return PEAK_BF16[max(known, key=len)] if known else None


def check_device(config: RunConfig, device: Device) -> None:
    """Raises ConfigError if the configuration asks for something that the device cannot do yet."""
    fused = config.comm.tier == "fused"
    if fused and not (device.is_gpu and config.train.dtype == "bf16"):
        raise ConfigError(
            f"comm.tier=fused has kernels only for bf16 on GPUs, and this is {config.train.dtype} on "
            f"{device.device} ({device.why}); use chunked, or auto."
        )
    if config.comm.rings and not device.is_gpu:
        raise ConfigError(
            f"comm.rings={list(config.comm.rings)} is for GPUs of one host, and this is {device.device} "
            f"({device.why}); leave comm.rings out."
        )
    if not device.is_gpu:
        return
    is_one_host = Host.here().ranks == int(os.environ.get("WORLD_SIZE", "1"))
    if is_one_host and (reason := _C.why_no_device_library(device.device.type)):
        parallel = config.parallel
        for name, size in (("dp", parallel.dp), ("cp", parallel.cp), ("pp", parallel.pp)):
            if size > 1:
                raise ConfigError(f"parallel.{name}={size} on GPUs: {reason}.")
