"""Reads and writes the file of measured choices; needs only the standard library.

    {"format": "pyruntime tuning", "version": 2, "places": [
      {"device": .., "world_size": .., "transport": .., "library": ..,
       "choices": [{"op": "all_gather_matmul", "rows": 2048, .., "tier": "chunked", ..}]}]}

One file serves several machines that share a home folder. A place says where its choices were measured; they
are used nowhere else.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT, VERSION = "pyruntime tuning", 2
VARIABLE = "PYRUNTIME_TUNING"


class CacheError(ValueError):
    """A file cannot be read as a cache; the message is a sentence. `old`: its version is another one."""

    def __init__(self, sentence: str, *, old: bool = False) -> None:
        super().__init__(sentence)
        self.old = old


@dataclass(frozen=True)
class Place:
    """The place of a measurement; its choices are used only there."""

    device: str
    """In words: a processor and the threads of a rank, or a GPU."""
    world_size: int
    """Ranks of the group."""
    transport: str
    """How the group's chunks travel: "symmetric memory", "ring over gloo", .."""
    library: str
    """Versions of pyruntime and torch."""


@dataclass(frozen=True, order=True)
class Key:
    """A measured op on the shapes of one rank, [rows, k] @ [n, k]^T, with rows over all ranks."""

    op: str
    """Name of a primitive, or that name with "_backward"."""
    rows: int
    n: int
    k: int
    dtype: str
    """Torch's name of it: "bfloat16"."""
    device: str
    """ "cpu" or "cuda"."""


@dataclass(frozen=True)
class Choice:
    """The measurements of one op at one shape, and the tier to take."""

    tier: str
    """The tier to take."""
    seconds: dict[str, float]
    """Median over rounds of the slowest rank, by the name for `tier`: "unfused", "chunked:4", .."""
    rounds: int
    date: str
    """Date of the measurement, as 2026-11-21."""
    tiles: str = ""
    """Tiles of the fused kernel, by name; empty: by the kernel's own rule."""
    chunks: int = 0
    """Chunks that each rank's rows travel in; 0: as the transport chooses."""

    @property
    def name(self) -> str:
        """The name that ops take as `tier`."""
        return ":".join(
            [self.tier, *([str(self.chunks)] if self.chunks else []), *filter(None, [self.tiles])]
        )

    @classmethod
    def of(cls, name: str, seconds: dict[str, float], rounds: int, date: str) -> Choice:
        tier, _, detail = name.partition(":")
        if tier == "fused":
            return cls(tier, seconds, rounds, date, tiles=detail)
        return cls(tier, seconds, rounds, date, chunks=int(detail or 0))


Choices = dict[Key, Choice]
Cache = dict[Place, Choices]


def default_path() -> Path:
    """Returns the file that PYRUNTIME_TUNING names, else tuning.json in `user_folder`."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return user_folder() / "tuning.json"


def user_folder() -> Path:
    """Returns pyruntime in the user's cache folder (XDG). Raises RuntimeError without a home folder."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    return base / "pyruntime"


def read(path: Path) -> Cache:
    """Returns the choices in a file; none if it does not exist. Raises CacheError for any other content."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CacheError(f"the tuning file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CacheError(f"the tuning file {path} is damaged: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CacheError(f"{path} is no tuning file of pyruntime")
    if document.get("version") != VERSION:
        raise CacheError(
            f"the tuning file {path} has version {document.get('version')!r}, and this pyruntime reads "
            f"version {VERSION}: run `python -m pyruntime tune` again",
            old=True,
        )
    try:
        return dict(_place(entry) for entry in document["places"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CacheError(f"the tuning file {path} is damaged: {error!r}") from error


def write(path: Path, cache: Cache) -> None:
    """Replaces the whole file at once: a reader sees the old one or the new one. Raises OSError."""
    places = [
        asdict(place) | {"choices": [asdict(key) | asdict(choice) for key, choice in sorted(choices.items())]}
        for place, choices in cache.items()
    ]
    document = {"format": FORMAT, "version": VERSION, "places": places}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def merged(cache: Cache, place: Place, choices: Choices) -> Cache:
    """Returns `cache` with new choices for a place; older ones stay unless measured again."""
    return cache | {place: cache.get(place, {}) | choices}


def _place(entry: dict[str, Any]) -> tuple[Place, Choices]:
    place = Place(**{field.name: entry[field.name] for field in fields(Place)})
    if not isinstance(place.world_size, int) or not all(
        isinstance(text, str) for text in (place.device, place.transport, place.library)
    ):
        raise TypeError(f"{place} is no valid place")
    return place, dict(_choice(values) for values in entry["choices"])


def _choice(values: dict[str, Any]) -> tuple[Key, Choice]:
    of_key = {field.name for field in fields(Key)}
    key = Key(**{name: value for name, value in values.items() if name in of_key})
    choice = Choice(**{name: value for name, value in values.items() if name not in of_key})
    texts = (key.op, key.dtype, key.device, choice.tier, choice.date, choice.tiles)
    numbers = (key.rows, key.n, key.k, choice.rounds, choice.chunks)
    if not all(isinstance(text, str) for text in texts) or not all(type(one) is int for one in numbers):
        raise TypeError(f"the choice of {key} has a value of the wrong type")
    if choice.chunks < 0 or (choice.tiles and choice.chunks):
        raise ValueError(f"the choice of {key} has {choice.chunks} chunks and the tiles {choice.tiles!r}")
    _check_seconds(key, choice.seconds)
    if choice.name not in choice.seconds:
        raise ValueError(f"the choice of {key} is {choice.name!r}, which was not measured")
    return key, choice


def _check_seconds(key: Key, seconds: Mapping[str, float]) -> None:
    if not all(isinstance(value, (int, float)) and 0 < value < math.inf for value in seconds.values()):
        raise ValueError(f"the times of {key} are no positive seconds: {dict(seconds)}")
