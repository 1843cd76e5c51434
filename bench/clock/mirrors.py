"""A process that stands for all ranks of a mesh, in virtual time (mirrors.h and clock.h in the backend)."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pyruntime.comm import Runtime, messages
from pyruntime.comm import exchange as exchange_module
from pyruntime.comm.core import _C
from pyruntime.comm.exchange import Exchange
from tests.builds import Build, jobs_at_once
from tests.device import build, sim

DEADLINE_S = 30.0
BACKEND = "mirror"


def build_device() -> None:
    """Compiles the device if its sources have changed. Raises RuntimeError with the compiler's output."""
    Build(build.recipe(), jobs_at_once()).finish()


def begin(seconds: Callable[[str, Sequence[int]], float], memory_bytes: float) -> Any:
    """Makes torch know one device, which takes `seconds` for each kind of work, and returns the module that
    keeps the clock. Once in a process, after `build_device`."""
    core = sim._core()
    core.begin_clock(seconds)
    sim.begin(gigabytes=memory_bytes / 2**30)
    _C.use_device_library("privateuseone", str(build.LIBRARY))
    dist.Backend.register_backend(BACKEND, _group, extended_api=True, devices=["cpu", "sim"])
    return core


def _group(options: Any, _: object) -> dist.Backend:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    inner = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return sim._core().MirrorGroup(options.group_rank, options.group_size, inner)


@contextlib.contextmanager
def mirrored(axes: Mapping[str, int]) -> Iterator[Runtime]:
    """Opens a Runtime of rank 0 of a mesh, whose other ranks do the same as it. `axes`: ranks by name, in the
    order of Runtime.start."""
    core, ranks = sim._core(), math.prod(axes.values())
    store = core.MirrorStore(0, ranks)
    dist.init_process_group(f"cpu:{BACKEND},sim:{BACKEND}", store=store, rank=0, world_size=ranks)
    try:
        mesh = DeviceMesh("sim", torch.arange(ranks).view(tuple(axes.values())), mesh_dim_names=tuple(axes))
        with Runtime(mesh, deadline_s=DEADLINE_S) as runtime, _mirrors_that_agree():
            yield runtime
    finally:
        _C.leave_job()
        dist.destroy_process_group()


@contextlib.contextmanager
def _mirrors_that_agree() -> Iterator[None]:
    """Lets this rank hear what it has told, as that of every rank. What it has not told yet it asks of the
    others first, to compare or to learn of a refusal: they have nothing to add. Weights are not compared."""
    told: weakref.WeakKeyDictionary[Exchange, object] = weakref.WeakKeyDictionary()

    def tell(exchange: Exchange, value: object, to: int | None = None) -> None:
        told[exchange] = value

    def hear(
        exchange: Exchange, rank: int, kind: Any, beside: bool = False, to_this_rank: bool = False
    ) -> Any:
        value = told[exchange] if exchange in told else _nothing(kind)
        return messages.decode(messages.encode(value), kind)

    def checksum(tensor: torch.Tensor) -> tuple[int, int]:
        return 0, 0

    with (
        mock.patch.object(Exchange, "tell", tell),
        mock.patch.object(Exchange, "hear", hear),
        mock.patch.object(exchange_module, "_checksum", checksum),
    ):
        yield


def _nothing(kind: Any) -> object:
    """Returns the value of that type that says nothing."""
    if get_origin(kind) is tuple:
        return tuple(_nothing(each) for each in get_args(kind) if each is not Ellipsis)
    return (get_origin(kind) or kind)()
