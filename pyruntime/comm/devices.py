"""Chooses the device of this rank, and the backends of its process groups."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pyruntime.choices import DeviceName, check_value, values

SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's own switch that allows symmetric memory of several ranks on one GPU."""


@dataclass(frozen=True)
class Host:
    """A rank's host, as far as the rank knows it."""

    local_rank: int
    """Rank among the ranks of this host."""
    ranks: int
    """Ranks of the job on this host."""
    gpus: int
    """GPUs that torch can use."""
    may_share: bool
    """Whether ranks may share a GPU."""

    @classmethod
    def here(cls) -> Host:
        """Reads torchrun's environment, and torch; a process without a launcher is the only rank."""
        return cls(
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            ranks=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))),
            gpus=0 if accelerator() is None else torch.accelerator.device_count(),
            may_share=os.environ.get(SHARE) == "1",
        )


@dataclass(frozen=True)
class Placement:
    device: torch.device
    backend: str
    """Backend of the process group, as torch.distributed.init_process_group takes it."""
    why: str
    """The reason for this device, in words."""


def accelerator() -> str | None:
    """Returns the type of the devices beside the CPU: "cuda", or the name of a backend that has registered
    with torch. None: there are none, or only others."""
    found = torch.accelerator.current_accelerator(check_available=True)
    taken = ("cuda", torch._C._get_privateuse1_backend_name())
    return found.type if found is not None and found.type in taken else None


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a CPU tensor to the device; the host does not wait for the copy."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def place(asked: str, host: Host) -> Placement:
    """Returns the device of this rank. `asked`: "cpu", "cuda", or "auto": a GPU if every rank of the host has
    one of its own, else the CPU.

    Raises ValueError if that device is not there, or if ranks would have to share one.
    """
    kind = accelerator() or "cuda"
    check_value("device", asked, (*values(DeviceName), kind))
    if asked == "cpu":
        return Placement(torch.device("cpu"), "gloo", "asked for")
    if asked == "auto" and host.gpus < host.ranks:
        found = "no GPU that torch can use" if host.gpus == 0 else f"{host.gpus} GPU(s)"
        return Placement(torch.device("cpu"), "gloo", f"{found} for {host.ranks} rank(s) of this host")
    if host.gpus == 0 or asked not in ("auto", kind):
        gpus = torch.version.cuda or torch.version.hip
        built = "finds no device" if gpus else "is built without CUDA"
        raise ValueError(f"cuda was asked for, and this torch {built}; use cpu, or auto.")
    if host.gpus >= host.ranks:
        why = "asked for" if asked == kind else "a GPU for every rank"
        backends = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
        return Placement(torch.device(kind, host.local_rank), backends, why)
    if not host.may_share:
        raise ValueError(
            f"{host.ranks} ranks of this host were started, but it has {host.gpus} GPU(s); start no more "
            f"than that, or set {SHARE}=1 to let ranks share them."
        )
    # NCCL refuses two ranks of a group on one device.
    device = torch.device(kind, host.local_rank % host.gpus)
    return Placement(device, "gloo", f"{host.ranks} ranks share {host.gpus} GPU(s)")


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Returns the generators from which a model on `device` draws: the CPU's, and that of the device."""
    if device.type == "cpu":
        return [torch.default_generator]
    return [torch.default_generator, torch.get_device_module(device).default_generators[device.index]]
