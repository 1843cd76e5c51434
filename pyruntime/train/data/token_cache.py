"""Caches finished token folders, found again by a hash of their content.

An entry is a folder that appears under its name only when it is complete, so runs may share a cache and may
be killed at any time. The next run that writes removes what a killed run left.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from pyruntime.train import disk
from pyruntime.train.errors import ConfigError
from pyruntime.tuning.cache import user_folder

PARTIAL = ".partial"


def default_folder() -> Path:
    """Returns pyruntime/tokens in the user's cache folder (XDG). Raises ConfigError if the user has none."""
    try:
        return user_folder() / "tokens"
    except RuntimeError:
        raise ConfigError("data.cache: there is no home folder to keep tokens in; name a folder.") from None


def entry(cache: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Returns the folder `name` (32 hexadecimal digits) of `cache`; if it is missing, `write` fills it. Runs
    that need it at the same time each write their own, and the first one stays. Raises OSError."""
    final = cache / name
    if final.is_dir():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    with _partial(cache, name) as partial:
        write(partial)
        for path in [*partial.iterdir(), partial]:
            disk.flush(path)
        try:
            partial.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        disk.flush(cache)
    return final


@contextlib.contextmanager
def _partial(cache: Path, name: str) -> Iterator[Path]:
    """Makes a new folder that is locked while in use; the lock ends with the process, however that ends."""
    _remove_left_behind(cache)
    unique = f"{name}.{uuid.uuid4().hex}"
    unseen, path = cache / f"{unique}.new", cache / f"{unique}{PARTIAL}"
    unseen.mkdir()
    with contextlib.ExitStack() as held:
        _try_lock(unseen, held)  # before others see it, since they remove what they can lock
        unseen.rename(path)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_left_behind(cache: Path) -> None:
    for path in cache.glob(f"*{PARTIAL}"):
        if not re.fullmatch(rf"[0-9a-f]{{32}}\.[0-9a-f]{{32}}\{PARTIAL}", path.name):
            continue  # a file of the user
        with contextlib.ExitStack() as held:
            if _try_lock(path, held):
                shutil.rmtree(path, ignore_errors=True)


def _try_lock(folder: Path, held: contextlib.ExitStack) -> bool:
    """Returns False if another process has the lock, the folder is gone, or its file system has no locks."""
    try:
        disk.lock(folder, held)
    except (disk.InUse, OSError):
        return False
    return True
