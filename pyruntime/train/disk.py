"""Files that are there whole after a crash, folders of one program at a time, and what is said when they
cannot be written."""

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
"""In a folder that one program uses at a time: who. It stays there; what counts is the kernel's lock on it,
which ends with the process however that ends."""


REMOVED = ".removed.partial"
"""How the name of a folder ends that is being removed."""


def publish_folder(partial: Path, final: Path, progress: Callable[[], None] = lambda: None) -> None:
    """`partial` takes the name `final`, so that a crash at any moment leaves all of it there or nothing: its
    files reach the disk first, then its entries, and after the name the folder that the name stands in.
    progress: called whenever the disk has taken one of these."""
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
    """Removes it and what is in it; of a link the link alone, wherever it leads. Raises OSError, unless
    `ignore_errors`."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=ignore_errors)


def remove_folder(folder: Path) -> None:
    """Removes it, its name first, so that a crash at any moment leaves all of it under its name or nothing.
    A warning says what cannot be removed."""
    gone, cause = folder, "not all of its files can be removed"
    try:
        if not folder.name.endswith(REMOVED):
            gone = folder.with_name(folder.name + REMOVED)
            remove_tree(gone, ignore_errors=True)  # of an earlier try
            folder.rename(gone)
        remove_tree(gone, ignore_errors=True)
    except OSError as error:
        gone, cause = folder, cause_of(error)
    if gone.exists():
        logging.getLogger("pyruntime").warning(f"{gone} stays: {cause}; remove it by hand.")


def without_links(path: str, flags: int) -> int:
    """An opener for `open` that refuses a link: what it leads to is somebody else's."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


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


def in_use(folder: Path, held: contextlib.ExitStack, key: str) -> None:
    """The folder is this process' until `held` is closed; where its file system has no locks (Lustre without
    flock), a warning says that nothing sees to it. Raises ConfigError, which begins with `key`, where another
    process has it, and OSError."""
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
    """Another process, which it names, has a folder."""


def lock(folder: Path, held: contextlib.ExitStack) -> None:
    """The folder is this process' until `held` is closed, by a lock on a file in it: NFS has none on folders.
    Raises InUse where another process has it, OSError, of `NO_LOCKS` where its file system has none."""
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
    """Raises TrainingError, a sentence that ends with `so`, where the disk that `path` is on refuses what is
    written inside."""
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
    """How much there is where `path` would be, in words."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    return f"{shutil.disk_usage(there).free / 1e6:,.0f} MB are free there"


def _refusal_of_disk(error: BaseException | None) -> BaseException | None:
    """What a file system said first, of an exception and its causes; None where it said nothing."""
    found = None
    while error is not None:
        # Connections are no files, and what nobody reads any more is none either.
        of_files = isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError)
        # safetensors raises a type of its own.
        if of_files or any(os.strerror(number) in str(error) for number in FULL):
            found = error
        error = error.__cause__ or error.__context__
    return found


def cause_of(error: BaseException) -> str:
    """Why something could not be written, in words that follow a colon."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ConfigError):  # another rank's failure, in a sentence
        return str(error).rstrip(".")
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}".rstrip(": .")
