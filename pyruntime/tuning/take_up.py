"""From the file to the ops: rank 0 reads, all ranks take up the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyruntime.comm.core import _C
from pyruntime.nn.tiers import TIERS
from pyruntime.tuning import cache
from pyruntime.tuning.cache import Cache, CacheError, Choice, Choices

AUTO = "auto"


@dataclass(frozen=True)
class Found:
    """What rank 0 found for groups of one size on its device, to be handed to the other ranks."""

    places: Cache
    words: str
    """For the log; empty where there is no file."""


def find(path: Path, device: str, world_size: int, library: str) -> Found:
    """Looks for choices that were measured with this device, world size and library. A file that cannot be
    read is said in `words` and otherwise ignored."""
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
    """One line: how many choices, for what, of when, from where."""
    parts = [
        f"{len(choices)} choices for {place.world_size} ranks over {place.transport}, {dates(choices)}"
        for place, choices in places.items()
    ]
    return f"{'; '.join(parts)}, from {path}"


def usable(choices: Choices) -> Choices:
    """Those whose tier this build has."""
    return {key: choice for key, choice in choices.items() if choice.tier in TIERS and choice.tier != AUTO}


def hand_over(places: Cache) -> None:
    """From now on `tier="auto"` of this process starts settled by these, in groups of their size whose chunks
    travel that way; others, and what was handed over before, are forgotten. Groups that have settled a shape
    keep what they have."""
    _C.clear_tier_presets()
    for place, choices in places.items():
        presets = {key: _preset(choice) for key, choice in choices.items()}
        _C.set_tier_presets(place.world_size, place.transport, presets)


def _preset(choice: Choice) -> tuple[str, int, str, list[tuple[str, float]], str]:
    return choice.tier, choice.chunks, choice.tiles, sorted(choice.seconds.items()), choice.date


def dates(choices: Choices) -> str:
    """Of when choices are."""
    days = sorted({choice.date for choice in choices.values()})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
