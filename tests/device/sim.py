"""A device made of threads, `torch.device("sim")`, on which the product runs as it does on GPUs.

Most tests of this folder run as well on GPUs: with PYRUNTIME_TEST_DEVICE=cuda, which tools/gpu_check.py sets,
DEVICE is "cuda", ranks share the GPUs that there are, and what only a simulated device can do is refused.

`begin()` makes torch know it in this process: streams and events, memory that the host cannot touch, random
numbers, all operators of torch (backend/). Its functions are those of torch.cuda that torch
itself asks of a device.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import types
from datetime import timedelta
from pathlib import Path

import torch
import torch._meta_registrations  # shapes of operators that have them in Python only
import torch.distributed as dist

from pyruntime.comm.devices import SHARE
from tests.device.build import LIBRARY

DEVICE = os.environ.get("PYRUNTIME_TEST_DEVICE", "sim")
"""What the tests of this folder run on: "sim", or "cuda"."""


@functools.cache
def _core() -> types.ModuleType:
    if DEVICE != "sim":
        raise RuntimeError(f"This test needs the simulated devices, and PYRUNTIME_TEST_DEVICE is {DEVICE}.")
    spec = importlib.util.spec_from_file_location("_sim", LIBRARY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Module(types.ModuleType):
    """torch.sim."""

    def is_available(self) -> bool:
        return _core().device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return _core().device_count()

    def current_device(self) -> int:
        return _core().current_device()

    def set_device(self, device: torch.device | int) -> None:
        _core().set_device(device if isinstance(device, int) else torch.device(device).index or 0)

    def synchronize(self, device: torch.device | int | None = None) -> None:
        torch.accelerator.synchronize(device)

    def current_stream(self, device: torch.device | int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def manual_seed(self, seed: int) -> None:
        _core().default_generator(_core().current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for device in range(_core().device_count()):
            _core().default_generator(device).manual_seed(seed)

    def get_rng_state(self, device: torch.device | int | str = "sim") -> torch.Tensor:
        return _core().default_generator(self._index(device)).get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | int | str = "sim") -> None:
        _core().default_generator(self._index(device)).set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(map(_core().default_generator, range(_core().device_count())))

    def _index(self, device: torch.device | int | str) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return _core().current_device() if index is None else index


def begin(devices: int = 1, *, gigabytes: float = 4.0, delays: int = 0) -> types.ModuleType:
    """Makes the devices known to torch in this process, once, and returns their module, torch.sim.

    `delays`: a seed, by which operations begin late; 0 for none."""
    if DEVICE != "sim":
        return torch.get_device_module(DEVICE)
    if hasattr(torch, "sim"):
        return torch.sim
    _core().begin(devices, int(gigabytes * 2**30), delays)
    torch.utils.rename_privateuse1_backend("sim")
    module = _Module("torch.sim")
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


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
