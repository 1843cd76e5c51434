"""A device made of threads, `torch.device("sim")`, on which the product runs as it does on GPUs.

Most tests of this folder run as well on GPUs: with PYRUNTIME_TEST_DEVICE=cuda, which tools/gpu_check.py sets,
DEVICE is "cuda", ranks share the GPUs that there are, and what only a simulated device can do is refused.

The device itself is that of pyruntime/clock/sim_device.py; here is what tests add to it.
"""

from __future__ import annotations

import ctypes
import os
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyruntime.clock import sim_device
from pyruntime.comm.devices import SHARE

DEVICE = os.environ.get("PYRUNTIME_TEST_DEVICE", "sim")
"""What the tests of this folder run on: "sim", or "cuda"."""


def _core() -> Any:
    if DEVICE != "sim":
        raise RuntimeError(f"This test needs the simulated devices, and PYRUNTIME_TEST_DEVICE is {DEVICE}.")
    return sim_device.core()


def begin(devices: int = 1, *, gigabytes: float = 4.0, delays: int = 0) -> types.ModuleType:
    """Makes the devices known to torch in this process, once, and returns their module, torch.sim.

    `delays`: a seed, by which operations begin late; 0 for none."""
    if DEVICE != "sim":
        return torch.get_device_module(DEVICE)
    return sim_device.begin(devices, gigabytes=gigabytes, delays=delays)


def register_collectives() -> None:
    """Makes the process groups of the devices known to torch.distributed, as backend "sim"."""
    if DEVICE != "sim":
        return

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
        return _core().DeviceGroup(dist.ProcessGroupGloo(store, rank, size, timeout))

    if "sim" not in dist.Backend.backend_list:
        dist.Backend.register_backend("sim", create, devices=["sim"])


def use_kernels(library: Path) -> None:
    """From now on ops on the devices use the kernels of `library`, in the host dialect. GPUs have theirs."""
    if DEVICE != "sim":
        return
    from pyruntime.comm.core import _C

    _core().launch_on_streams(str(library))
    _C.use_device_library("privateuseone", str(library))


def begin_rank(*, delays: int = 0, gigabytes: float = 4.0) -> tuple[int, int]:
    """Makes a device for each rank of this host, and this rank's the current one, by torchrun's variables.
    Returns (its number, the number of ranks)."""
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    begin(ranks, gigabytes=gigabytes, delays=delays * 1000 + local if delays else 0)
    register_collectives()
    if DEVICE != "sim":
        os.environ[SHARE] = "1"
    torch.accelerator.set_device_index(local % torch.accelerator.device_count())
    return local, ranks


def block_streams(seconds: float) -> None:
    """Keeps the current stream busy for so long."""
    _core().block_stream(torch.accelerator.current_device_index(), seconds)


def touch(tensor: torch.Tensor) -> int:
    """Reads a tensor's first byte on the host."""
    return ctypes.string_at(tensor.data_ptr(), 1)[0]


def why_not_protected() -> str:
    """Why the host can touch device memory here; "" where it cannot."""
    return _core().why_not_protected()


def host_waits() -> dict[str, int]:
    """How often the host has waited for a device, by what made it wait."""
    return _core().host_waits()


def launches() -> dict[str, int]:
    """How many operations were enqueued, by name."""
    return _core().launches()


def reset_counts() -> None:
    """Begins to count anew what `host_waits` and `launches` say."""
    _core().reset_host_waits()
    _core().reset_launches()


def drop(place: str | None) -> None:
    """Leaves out each wait of a stream or of the host for an event, and each note that a stream uses memory,
    that the product asks for at that place; None: leaves out nothing."""
    _core().drop(place)


def asked() -> dict[str, int]:
    """How often the product has asked for one since `drop`, by the place in it."""
    return _core().counted()
