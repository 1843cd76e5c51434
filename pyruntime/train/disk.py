"""Files that are there whole after a crash, and what is said when they cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pyruntime.train.errors import ConfigError, TrainingError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def publish_folder(partial: Path, final: Path) -> None:
    """`partial` takes the name `final`, so that a crash at any moment leaves all of it there or nothing: its
    files reach the disk first, then its entries, and after the name the folder that the name stands in."""
    for path in [*filter(Path.is_file, sorted(partial.iterdir())), partial]:
        flush(path)
    replaced = final.with_name(final.name + ".replaced.partial")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def flush(path: Path) -> None:
    """What was written to that file or folder is on the disk when this returns; of a folder, where its file
    system can do that (FUSE and shares of Windows, as a rule, cannot)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path, so: str = "") -> Iterator[None]:
    """Raises TrainingError, a sentence that ends with `so`, where the disk that `path` is on refuses what is
    written inside."""
    try:
        yield
    except Exception as error:
        if not _is_of_disk(error):
            raise
        raise TrainingError(cannot_write(path, error, so)) from error


def cannot_write(path: Path, error: BaseException, so: str = "") -> str:
    return f"{path} cannot be written: {_cause(error)} ({free_space(path)}){so and '; ' + so}."


def free_space(path: Path) -> str:
    """How much there is where `path` would be, in words."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    return f"{shutil.disk_usage(there).free / 1e6:,.0f} MB are free there"


def _is_of_disk(error: BaseException | None) -> bool:
    # safetensors and torch's writer raise types of their own.
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(os.strerror(number) in str(error) for number in FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ConfigError):  # another rank's failure, in a sentence
        return str(error).rstrip(".")
    text = (str(error).strip().splitlines() or [""])[0]
    if "inline_container" in text:  # of torch's writer, where the file is shorter than it should be
        return "the disk took only a part of what was written"
    return f"{type(error).__name__}: {text}".rstrip(": .")
