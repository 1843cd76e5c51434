"""Hands tuned choices to the ops: rank 0 looks up those of its machine, and all ranks use them."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import torch

import pyruntime
from pyruntime.comm.core import _C
from pyruntime.cuda import cards
from pyruntime.machine import processor_name
from pyruntime.nn.tiers import TIERS
from pyruntime.ops import gemm_tables
from pyruntime.tuning import cache
from pyruntime.tuning.cache import Cache, CacheError, Choices, Key
from pyruntime.tuning.gemms import is_of_gemm, tuned

AUTO = "auto"


@dataclass(frozen=True)
class Found:
    """The choices that rank 0 found for groups of one size on its device; the other ranks get them."""

    places: Cache
    words: str
    """A line for the log; empty if there is no file."""


def find(path: Path, device: str, world_size: int, library: str) -> Found:
    """Looks for choices that were measured with this device, world size and library. If a file cannot be
    read, `words` says so and no choices are used."""
    try:
        everything = cache.read(path)
    except CacheError as error:
        return Found({}, f"not used: {error}")
    if not everything:
        return Found({}, "")
    here = {
        place: usable(choices)
        for place, choices in everything.items()
        if (place.device, place.world_size, place.library) == (device, world_size, library)
    }
    fitting = {place: choices for place, choices in here.items() if choices}
    if not fitting:
        wanted = f"{world_size} ranks on {device} with {library}"
        return Found({}, f"not used: {path} holds nothing for {wanted}")
    return Found(fitting, describe(fitting, path))


def describe(places: Cache, path: Path) -> str:
    """Returns one line: how many choices, for which places, their dates, and the file."""
    parts = [
        f"{len(choices)} choices for {place.world_size} ranks over {place.transport}, {dates(choices)}"
        for place, choices in places.items()
    ]
    return f"{'; '.join(parts)}, from {path}"


def usable(choices: Choices) -> Choices:
    """Returns the choices whose tier this build has, and those of GEMMs."""
    return {
        key: choice
        for key, choice in choices.items()
        if is_of_gemm(key) or (choice.tier in TIERS and choice.tier != AUTO)
    }


def use(places: Cache) -> None:
    """Makes `tier="auto"` of this process take these choices, in groups of their size and transport, and its
    GEMMs follow them. Earlier choices are forgotten."""
    _C.clear_tuned_tiers()
    gemms = {key: one for choices in places.values() for key, one in choices.items() if is_of_gemm(key)}
    gemm_tables.use(tuned(gemm_tables.read(), gemms))
    for place, choices in places.items():
        for_the_core = [
            (core_key(key), (one.tier, one.chunks, one.tiles, sorted(one.seconds.items()), one.date))
            for key, one in choices.items()
            if not is_of_gemm(key)
        ]
        _C.set_tuned_tiers(place.world_size, place.transport, for_the_core)


def core_key(key: Key) -> tuple:
    """Returns the key in the form that the C++ core takes."""
    *shape, dtype, device = astuple(key)
    return *shape, getattr(torch, dtype), device


def dates(choices: Choices) -> str:
    days = sorted({choice.date for choice in choices.values()})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def device_name(device: str, threads: int) -> str:
    """Returns the GPU for "cuda"; for "cpu" processor and threads of a rank, which decide a GEMM's time."""
    if device == "cuda":
        return cards.name_of(torch.device(device))
    return f"{processor_name()}, {threads} thread(s) a rank"


def library() -> str:
    """Returns the versions that times depend on: torch for the GEMMs, pyruntime for everything else."""
    return f"pyruntime {pyruntime.__version__}, torch {torch.__version__}"
