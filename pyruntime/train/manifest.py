"""Checksums of a checkpoint's files: computed when it is saved, compared before anything is loaded.

CHECKPOINT/manifest.json lists every other file with its size and SHA-256. It is written last, so a folder
without one was never finished, or was only partly copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from pyruntime.train.errors import ConfigError

MANIFEST = "manifest.json"
ADVICE = "copy the checkpoint again from where it is whole, or resume from an older one"


class DamagedError(ConfigError):
    """A checkpoint is not what was saved; an older one may be whole."""


@dataclasses.dataclass(frozen=True)
class Checksum:
    """Size and hash of a file when it was saved."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal, as sha256sum prints it."""


def checksum(path: Path) -> Checksum:
    """Returns the checksum of the file as it is now. Raises OSError."""
    with open(path, "rb") as file:
        return Checksum(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """Returns the files that `rank` reads, so that all ranks read about as many bytes: each file, largest
    first, goes to the rank with the fewest bytes."""
    loads = [0] * ranks
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        to = loads.index(min(loads))
        loads[to] += sizes[name]
        if to == rank:
            mine.append(name)
    return mine


def write(folder: Path, sums: Mapping[str, Checksum]) -> None:
    content = {name: dataclasses.asdict(sums[name]) for name in sorted(sums)}
    (folder / MANIFEST).write_text(json.dumps({"files": content}, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Checksum]:
    """Returns the manifest of a checkpoint. Raises DamagedError if there is none or it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedError(
            f"checkpoint.resume: {folder} holds no {MANIFEST}, so its files cannot be checked; it was only "
            f"partly copied; {ADVICE}."
        )
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        found = {str(name): Checksum(**content) for name, content in files.items()}
        whole = all(type(each.size) is int and isinstance(each.sha256, str) for each in found.values())
        whole = whole and all(Path(name).name == name for name in found)  # only files of this folder
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise DamagedError(f"checkpoint.resume: {path} is damaged: it is no list of checksums; {ADVICE}.")
    return found


def check(folder: Path, name: str, expected: Mapping[str, Checksum]) -> None:
    """Reads one file of a checkpoint completely. Raises DamagedError if it is not what was saved."""
    finding = finding_of(folder, name, expected)
    if finding:
        raise refusal(folder, name, finding)


def finding_of(folder: Path, name: str, expected: Mapping[str, Checksum]) -> str:
    """Reads one file of a checkpoint completely and says what is wrong with it; empty: nothing."""
    if name not in expected:
        return f"{MANIFEST} does not name it"
    saved = expected[name]
    try:
        size = (folder / name).stat().st_size
        if size != saved.size:
            return f"it has {size} bytes and was saved with {saved.size}"
        return "" if checksum(folder / name) == saved else "its content is not what was saved (SHA-256)"
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return f"it cannot be read: {getattr(error, 'strerror', error)}"


def refusal(folder: Path, name: str, finding: str) -> DamagedError:
    return DamagedError(f"checkpoint.resume: {folder / name} is damaged: {finding}; {ADVICE}.")
