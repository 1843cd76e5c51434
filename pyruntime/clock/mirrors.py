"""A process that stands for all ranks of a program, in virtual time (csrc/sim/clock/programs.h)."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import bias

from pyruntime import ops
from pyruntime.clock import sim_device
from pyruntime.clock.device_build import library
from pyruntime.clock.sim_device import core
from pyruntime.comm import Runtime, group_name, messages
from pyruntime.comm import exchange as exchange_module
from pyruntime.comm.core import _C
from pyruntime.comm.exchange import Exchange
from pyruntime.comm.runtime import merge_context
from pyruntime.context import flash

DEADLINE_S = 1e5
"""The deadline of waits in real time, so long that no simulation meets it."""
BACKEND = "mirror"
DIFFERING = ("pp", "cp")
"""Axes whose ranks do not do the same."""


@dataclass(frozen=True)
class ProgramPlace:
    """The program of a job that this process runs: that of the ranks with these numbers on DIFFERING axes."""

    at: Mapping[str, int]
    gpus_per_host: int
    board: dist.Store | None = None
    """On which programs say when their messages leave; None where there is one program."""


def begin(seconds: Callable[[str, Sequence[int]], float], memory_bytes: float) -> Any:
    """Makes torch know one device, which takes `seconds` for each kind of work, and returns the module that
    keeps the clock. Once in a process, after `device_build.build`."""
    core().begin_clock(seconds)
    sim_device.begin(gigabytes=memory_bytes / 2**30)
    _C.use_device_library("privateuseone", str(library()))
    bias.can_use_flash_attention = lambda *_: True  # as GPUs do; torch knows it of CUDA only
    flash.is_there = lambda q: q.dtype == torch.bfloat16 and q.device.type == "sim"
    dist.Backend.register_backend(BACKEND, _group, extended_api=True, devices=["cpu", "sim"])
    return core()


def _group(options: Any, _: object) -> dist.Backend:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    core().know_group(options.group_id, ranks)
    return core().MirrorGroup(options.group_id, options.group_rank, ranks)


def places(axes: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns the programs of a mesh, as the numbers of their ranks on DIFFERING axes."""
    found: list[dict[str, int]] = [{}]
    for name in DIFFERING:
        found = [each | {name: at} for each in found for at in range(axes.get(name, 1))]
    return found


def _programs(axes: Mapping[str, int], at: Mapping[str, int]) -> tuple[list[int], int]:
    """Returns the program of each rank, and of the ranks with these numbers."""
    programs, own = torch.zeros(tuple(axes.values()), dtype=torch.int64), 0
    for dimension, (name, size) in enumerate(axes.items()):
        if name in DIFFERING:
            shape = [size if each == dimension else 1 for each in range(len(axes))]
            programs = programs * size + torch.arange(size).view(shape)
            own = own * size + at.get(name, 0)
    return programs.flatten().tolist(), own


@contextlib.contextmanager
def mirrored(
    axes: Mapping[str, int],
    place: ProgramPlace | None = None,
    exchanged: Callable[[int], float] | None = None,
    ep: int | None = None,
) -> Iterator[Runtime]:
    """Opens a Runtime of the first rank of a program.

    axes: ranks by name, in the order of Runtime.start. place: the program; by default the only one, on one
    host. exchanged: the seconds of an exchange of numbers through processors of so many hosts; by default 0.
    ep: ranks among which experts are dealt out, as of Runtime.start.
    """
    clock, ranks = core(), math.prod(axes.values())
    place = place or ProgramPlace({}, ranks)
    board = place.board or dist.HashStore()
    programs, own = _programs(axes, place.at)
    ranks_of = _RanksOfGroups()
    rank = programs.index(own)
    clock.begin_programs(own, programs, place.gpus_per_host, board)
    store = clock.MirrorStore()
    dist.init_process_group(f"cpu:{BACKEND},sim:{BACKEND}", store=store, rank=rank, world_size=ranks)
    try:
        grid = torch.arange(ranks).view(tuple(axes.values()))
        mesh = DeviceMesh("sim", grid, mesh_dim_names=tuple(axes))
        if axes.get("dp", 1) > 1 and axes.get("cp", 1) > 1:
            merge_context(mesh, DEADLINE_S)
        with _known_companions(clock, ranks_of), Runtime(mesh, ep=ep, deadline_s=DEADLINE_S) as runtime:
            _place_on_hosts(ranks_of, place.gpus_per_host)
            with (
                _mirrors_that_agree(programs, own, board, ranks_of),
                _numbers_exchanged(clock, place.gpus_per_host, exchanged, ranks_of),
            ):
                yield runtime
    finally:
        _C.leave_job()
        dist.destroy_process_group()


def _groups() -> list[tuple[dist.ProcessGroup, dict[int, int]]]:
    """Returns the process groups of this rank, each with its job's ranks and their places in it."""
    known = dist.distributed_c10d._world.pg_group_ranks.items()
    return [(group, ranks) for group, ranks in known if isinstance(group, dist.ProcessGroup)]


class _RanksOfGroups(dict[str, list[int]]):
    """The job's ranks of process groups, by the name of the group or of a companion of all its ranks."""

    def __missing__(self, name: str) -> list[int]:
        for group, ranks in _groups():
            if group.group_name == name.partition(" (")[0]:
                self[name] = sorted(ranks, key=ranks.__getitem__)
        return self.get(name, [])


def _place_on_hosts(ranks_of: _RanksOfGroups, gpus_per_host: int) -> None:
    """Makes groups whose ranks are on several hosts know it."""
    for group, _ in _groups():
        name = group.group_name
        hosts = [f"host {rank // gpus_per_host}" for rank in ranks_of[name]]
        if len(set(hosts)) > 1:
            _C.configure(name, None, hosts, None, None, None, None)


@contextlib.contextmanager
def _known_companions(clock: Any, ranks_of: _RanksOfGroups) -> Iterator[None]:
    """Tells the clock the ranks of companions."""
    make = _C.make_companion

    def known(served: str, traffic_class: str, edge: tuple[int, int] | None, within: int) -> str:
        name = make(served, traffic_class, edge, within)
        ranks = ranks_of[served]
        clock.know_group(name, ranks if edge is None else [ranks[end] for end in edge])
        return name

    with mock.patch.object(_C, "make_companion", known):
        yield


@contextlib.contextmanager
def _numbers_exchanged(
    clock: Any, gpus_per_host: int, exchanged: Callable[[int], float] | None, ranks_of: _RanksOfGroups
) -> Iterator[None]:
    """Exchanges a step's few numbers between processors as all ranks' own, when the last program has come."""
    gathered = ops.all_gather_stats

    def all_gather_stats(x: torch.Tensor, group: Any) -> torch.Tensor:
        name = group_name(group)
        if x.device.type != "cpu":
            return gathered(x, name)
        of_group = ranks_of[name]
        hosts = len({rank // gpus_per_host for rank in of_group})
        clock.meet_on_host(name, exchanged(hosts) if exchanged else 0.0)
        return x.expand(len(of_group), *x.shape).clone()

    with mock.patch.object(ops, "all_gather_stats", all_gather_stats):
        yield


@contextlib.contextmanager
def _mirrors_that_agree(
    programs: Sequence[int], own: int, board: dist.Store, ranks_of: _RanksOfGroups
) -> Iterator[None]:
    """Lets this rank hear what it has told, as that of every rank of its program. What it has not told yet it
    asks of the others first, to compare or to learn of a refusal: they have nothing to add. What ranks of
    other programs tell is on the board. Weights are not compared."""
    told: weakref.WeakKeyDictionary[Exchange, object] = weakref.WeakKeyDictionary()
    heard: weakref.WeakKeyDictionary[Exchange, dict[int, bytes]] = weakref.WeakKeyDictionary()

    def key(exchange: Exchange, program: int) -> str:
        return f"{exchange._name}/{exchange._topic}/{program}"

    def tell(exchange: Exchange, value: object, to: int | None = None) -> None:
        told[exchange] = value
        board.set(key(exchange, own), messages.encode(value))

    def hear(
        exchange: Exchange, rank: int, kind: Any, beside: bool = False, to_this_rank: bool = False
    ) -> Any:
        program = programs[ranks_of[exchange._name][rank]]
        if program == own:
            value = told[exchange] if exchange in told else _nothing(kind)
            return messages.decode(messages.encode(value), kind)
        known = heard.setdefault(exchange, {})
        if program not in known:
            known[program] = board.get(key(exchange, program))
        return messages.decode(known[program], kind)

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
