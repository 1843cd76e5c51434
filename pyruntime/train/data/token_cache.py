"""A folder of finished work, found again by the name of its content.

An entry is a folder that appears under its name only when it is whole, so runs may share a cache and may be
killed at any time. What a killed run leaves is removed by the next that writes.
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
    """pyruntime/tokens in the user's cache folder (XDG). Raises ConfigError where the user has none."""
    try:
        return user_folder() / "tokens"
    except RuntimeError:
        raise ConfigError("data.cache: there is no home folder to keep tokens in; name a folder.") from None


def entry(cache: Path, name: str, write: Callable[[Path], None]) -> Path:
    """The folder `name` (32 hexadecimal digits) of `cache`; where there is none yet, `write` fills it. Runs
    that want the same at the same time each write their own, and the first one stays. Raises OSError."""
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
    """A new folder that is locked while it is in use: the lock ends with the process, however that ends."""
    _remove_left_behind(cache)
    unique = f"{name}.{uuid.uuid4().hex}"
    unseen, path = cache / f"{unique}.new", cache / f"{unique}{PARTIAL}"
    unseen.mkdir()
    with contextlib.ExitStack() as held:
        _try_lock(unseen, held)  # before others can see it: what they can lock they remove
        unseen.rename(path)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_left_behind(cache: Path) -> None:
    for path in cache.glob(f"*{PARTIAL}"):
        if not re.fullmatch(rf"[0-9a-f]{{32}}\.[0-9a-f]{{32}}\{PARTIAL}", path.name):
            continue  # a user's own
        with contextlib.ExitStack() as held:
            if _try_lock(path, held):
                shutil.rmtree(path, ignore_errors=True)


def _try_lock(folder: Path, held: contextlib.ExitStack) -> bool:
    """False where another process has it, the folder is gone, or its file system has no locks."""
    try:
        disk.lock(folder, held)
    except (disk.InUse, OSError):
        return False
    return True
