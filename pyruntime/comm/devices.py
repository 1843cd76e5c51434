"""Which device this rank computes on, and which backends its process groups talk through."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from pyruntime.choices import DeviceName, check_value, values

SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's own switch: symmetric memory of several ranks on one GPU."""


@dataclass(frozen=True)
class Host:
    """What this rank knows of its host."""

    local_rank: int
    """Among the ranks of this host."""
    ranks: int
    """Of the job on this host."""
    gpus: int
    """That torch can use."""
    may_share: bool
    """Whether ranks may share a GPU."""

    @classmethod
    def here(cls) -> Host:
        """As torchrun and torch say; a process without a launcher is alone."""
        return cls(
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            ranks=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))),
            gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            may_share=os.environ.get(SHARE) == "1",
        )


@dataclass(frozen=True)
class Placement:
    device: torch.device
    backend: str
    """Of the process group, as torch.distributed.init_process_group takes it."""
    why: str
    """For people: why this device."""


def place(asked: str, host: Host) -> Placement:
    """The device of this rank, where `asked` is "cpu", "cuda", or "auto": a GPU where every rank of the host
    has one of its own, else the CPU.

    Raises ValueError, a sentence, where that device is not there, or ranks would have to share one.
    """
    check_value("device", asked, values(DeviceName))
    if asked == "cpu":
        return Placement(torch.device("cpu"), "gloo", "asked for")
    if asked == "auto" and host.gpus < host.ranks:
        found = "no GPU that torch can use" if host.gpus == 0 else f"{host.gpus} GPU(s)"
        return Placement(torch.device("cpu"), "gloo", f"{found} for {host.ranks} rank(s) of this host")
    if host.gpus == 0:
        gpus = torch.version.cuda or torch.version.hip
        built = "finds no device" if gpus else "is built without CUDA"
        raise ValueError(f"cuda was asked for, and this torch {built}; use cpu, or auto.")
    if host.gpus >= host.ranks:
        why = "asked for" if asked == "cuda" else "a GPU for every rank"
        return Placement(torch.device("cuda", host.local_rank), "cpu:gloo,cuda:nccl", why)
    if not host.may_share:
        raise ValueError(
            f"{host.ranks} ranks of this host were started and it has {host.gpus} GPU(s); start no more than "
            f"that, or set {SHARE}=1 to let ranks share them."
        )
    # NCCL refuses two ranks of a group on one device.
    device = torch.device("cuda", host.local_rank % host.gpus)
    return Placement(device, "gloo", f"{host.ranks} ranks share {host.gpus} GPU(s)")


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Those from which a model on `device` draws: the CPU's, and that of the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index]]
