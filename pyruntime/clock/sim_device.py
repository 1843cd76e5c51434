"""A device made of threads, `torch.device("sim")`, on which programs for GPUs run without one.

`begin()` makes torch know it in this process: streams and events, memory that the host cannot touch, random
numbers, all operators of torch (csrc/sim). The module's functions are those of torch.cuda that torch itself
asks of a device.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
import torch._meta_registrations  # shapes of operators that have them in Python only

from pyruntime.clock.device_build import library

NAME = "_sim"


def core() -> Any:
    """Returns the compiled module, after `device_build.build`."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, library())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[NAME] = module
    return sys.modules[NAME]


class SimulatedDevices(types.ModuleType):
    """torch.sim."""

    def is_available(self) -> bool:
        return core().device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return core().device_count()

    def current_device(self) -> int:
        return core().current_device()

    def set_device(self, device: torch.device | int) -> None:
        core().set_device(device if isinstance(device, int) else torch.device(device).index or 0)

    def synchronize(self, device: torch.device | int | None = None) -> None:
        torch.accelerator.synchronize(device)

    def current_stream(self, device: torch.device | int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def Stream(self, priority: int = 0) -> torch.Stream:
        return torch.Stream("sim", priority=priority)

    def Event(self, **_: object) -> torch.Event:
        return torch.Event("sim")

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def manual_seed(self, seed: int) -> None:
        core().default_generator(core().current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for device in range(core().device_count()):
            core().default_generator(device).manual_seed(seed)

    def get_rng_state(self, device: torch.device | int | str = "sim") -> torch.Tensor:
        return core().default_generator(self._index(device)).get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | int | str = "sim") -> None:
        core().default_generator(self._index(device)).set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(map(core().default_generator, range(core().device_count())))

    def _index(self, device: torch.device | int | str) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return core().current_device() if index is None else index


def begin(devices: int = 1, *, gigabytes: float = 4.0, delays: int = 0) -> Any:
    """Makes the devices known to torch in this process, once, and returns their module, torch.sim.

    `delays`: a seed, by which operations begin late; 0 for none."""
    if hasattr(torch, "sim"):
        return torch.sim
    core().begin(devices, int(gigabytes * 2**30), delays)
    torch.utils.rename_privateuse1_backend("sim")
    module = SimulatedDevices("torch.sim")
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module
