"""Writes files that survive a crash whole, locks folders, and explains why a disk refused a write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from pyruntime.train.errors import ConfigError, TrainingError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
LOCK = "lock"
"""File in a locked folder; it names the owner. The file stays there. Only the kernel's lock on it counts,
which ends with the process, however that ends."""


REMOVED = ".removed.partial"
"""Suffix of a folder that is being removed."""


def publish_folder(partial: Path, final: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Renames `partial` to `final` so that a crash at any moment leaves all of it there or nothing. The disk
    gets the files first, then their folder, then the name, then the parent folder. Calls `progress` after
    each."""
    for path in [*filter(Path.is_file, sorted(partial.iterdir())), partial]:
        flush(path)
        progress()
    replaced = final.with_name(final.name + ".replaced.partial")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    flush(final.parent)
    progress()
    remove_tree(replaced, ignore_errors=True)
    progress()


def remove_tree(folder: Path, ignore_errors: bool = False) -> None:
    """Removes `folder` and its content; of a link only the link. Raises OSError, unless `ignore_errors`."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=ignore_errors)


def remove_folder(folder: Path) -> None:
    """Removes `folder`. Renames it first, so that a crash at any moment leaves all of it under its name or
    nothing. Warns about what cannot be removed."""
    gone, cause = folder, "not all of its files can be removed"
    try:
        if not folder.name.endswith(REMOVED):
            gone = folder.with_name(folder.name + REMOVED)
            remove_tree(gone, ignore_errors=True)  # left by an earlier try
            folder.rename(gone)
        remove_tree(gone, ignore_errors=True)
    except OSError as error:
        gone, cause = folder, cause_of(error)
    if gone.exists():
        logging.getLogger("pyruntime").warning(f"{gone} stays: {cause}; remove it by hand.")


def without_links(path: str, flags: int) -> int:
    """Opener for `open` that refuses a link, since its target may belong to somebody else."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def flush(path: Path) -> None:
    """Returns when the content of a file or folder is on the disk. Does nothing for a folder whose file
    system cannot do that (FUSE and Windows shares, usually)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def in_use(folder: Path, held: contextlib.ExitStack, key: str) -> None:
    """Locks `folder` for this process until `held` is closed. Only warns if the file system has no locks
    (Lustre without flock). Raises ConfigError, beginning with `key`, if another process has it, and
    OSError."""
    try:
        lock(folder, held)
    except InUse as error:
        raise ConfigError(
            f"{key}: {folder} is in use by {error}; wait until it has ended, or name another folder."
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logging.getLogger("pyruntime").warning(
            f"{key}: {error.filename} cannot be locked ({error.strerror}); let no other process use {folder}."
        )


class InUse(Exception):
    """Another process, named in the message, has a folder."""


def lock(folder: Path, held: contextlib.ExitStack) -> None:
    """Locks `folder` for this process until `held` is closed, by a file in it: NFS cannot lock folders.
    Raises InUse if another process has it, OSError (of `NO_LOCKS` if the file system has no locks)."""
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise OSError(error.errno, error.strerror, str(path)) from error
        who = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        raise InUse(who) from error


@contextlib.contextmanager
def writing(path: Path, so: str = "") -> Iterator[None]:
    """Raises TrainingError, ending with `so`, if the disk of `path` refuses a write inside the block."""
    try:
        yield
    except Exception as error:
        cause = _refusal_of_disk(error)
        if cause is None:
            raise
        raise TrainingError(cannot_write(path, cause_of(cause), so)) from error


def cannot_write(path: Path, cause: str, so: str = "") -> str:
    return f"{path} cannot be written: {cause} ({free_space(path)}){so and '; ' + so}."


def free_space(path: Path) -> str:
    """Says how many MB are free where `path` would be."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    return f"{shutil.disk_usage(there).free / 1e6:,.0f} MB are free there"


def _refusal_of_disk(error: BaseException | None) -> BaseException | None:
    """Returns the first file-system error among an exception and its causes; None if there is none."""
    found = None
    while error is not None:
        # Errors of connections, broken pipes included, are not the disk's.
        of_files = isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError)
        # safetensors raises its own type, so look for the text of a full disk.
        if of_files or any(os.strerror(number) in str(error) for number in FULL):
            found = error
        error = error.__cause__ or error.__context__
    return found


def cause_of(error: BaseException) -> str:
    """Says why something could not be written, in words that follow a colon."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ConfigError):  # another rank's failure, in a sentence
        return str(error).rstrip(".")
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}".rstrip(": .")
