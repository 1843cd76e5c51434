"""What the trainer knows of the device that a rank computes on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from pyruntime.comm.core import _C
from pyruntime.comm.devices import Host
from pyruntime.train.config import RunConfig
from pyruntime.train.errors import ConfigError
from pyruntime.train.metrics import peak_memory_bytes
from pyruntime.train.validate.gpus import check_between_hosts, check_on_gpus

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
"""Dense bf16 GEMMs with fp32 sums, FLOP/s, by a part of the device's name: NVIDIA's data sheets, and AMD's
("AMD Instinct MI300X Accelerator Data Sheet" and so on: compute units times peak engine clock times the FLOP
of a unit in a cycle). A device of an MI250X is one of its two dies: half of that data sheet's 383 TFLOP/s."""


@dataclass(frozen=True)
class Device:
    """The device, and why it is that one."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    why: str = "asked for"

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def describe(self) -> str:
        """One line for people."""
        if not self.is_cuda:
            return f"{self.device} ({self.why})"
        reason = _C.why_no_device_library("cuda")
        layers = "SwiGLU, rotary embedding, loss and AdamW"
        by = f"by torch's operations, which is slow: {reason}" if reason else "in fused launches"
        return f"{self.device}, {torch.cuda.get_device_name(self.device)} ({self.why}); {layers} {by}"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU, on the device; the host does not wait for it to be there."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.is_cuda else tensor

    def peak_memory_bytes(self) -> int:
        """Most that this rank has held so far: of the device's memory in tensors, or resident on the CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else peak_memory_bytes()

    def peak_flops(self, dtype: str) -> float | None:
        """FLOP/s of one device at its best; None where that is not known: no MFU rather than a wrong one."""
        if not self.is_cuda or dtype != "bf16":
            return None
        return peak_flops_of(torch.cuda.get_device_name(self.device))


def peak_flops_of(name: str) -> float | None:
    """Of the device of that name, by the longest entry of the table whose words it has."""
    words = name.replace("-", " ").split()
    known = [entry for entry in PEAK_BF16 if all(word in words for word in entry.split())]
    return PEAK_BF16[max(known, key=len)] if known else None


def check_device(config: RunConfig, device: Device) -> None:
    """Raises ConfigError for what a configuration asks for and that device cannot do yet."""
    fused = config.comm.tier == "fused"
    if fused and not (device.is_cuda and config.train.dtype == "bf16"):
        raise ConfigError(
            f"comm.tier=fused has kernels for bf16 on GPUs alone, and this is {config.train.dtype} on "
            f"{device.device} ({device.why}); use chunked, or auto."
        )
    if config.comm.rings and not device.is_cuda:
        raise ConfigError(
            f"comm.rings={list(config.comm.rings)} is for GPUs of one host, and this is {device.device} "
            f"({device.why}); leave it out."
        )
    if not device.is_cuda:
        return
    check_on_gpus(config)
    if Host.here().ranks != int(os.environ.get("WORLD_SIZE", "1")):
        check_between_hosts(config)
    elif reason := _C.why_no_device_library("cuda"):
        parallel = config.parallel
        for name, size in (("dp", parallel.dp), ("cp", parallel.cp), ("pp", parallel.pp)):
            if size > 1:
                raise ConfigError(f"parallel.{name}={size} on GPUs: {reason}.")
