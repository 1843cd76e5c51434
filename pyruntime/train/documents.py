"""The text of a run as documents: every file is one, and so is every line of a .jsonl or .ndjson file.

Files are read twice and never held whole: once to know their content (`survey`), which says whether they were
tokenized before, and once to be tokenized, in pieces (`Documents`).
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fnmatch
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pyruntime.train.config import Data
from pyruntime.train.errors import ConfigError

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LINES = {".jsonl", ".ndjson"}
COMPRESSED = {".gz", ".zst", ".xz", ".bz2"}
BLOCK_BYTES = 2**20
PIECE_BYTES = 2**16
"""A document that is longer is handed to the tokenizer in pieces of at most as many bytes."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file with text in it, as it was when it was read first."""

    path: Path
    digest: bytes
    """BLAKE2b of its content, 16 bytes."""
    size: int
    """Bytes."""
    modified_ns: int

    @property
    def is_lines(self) -> bool:
        """Whether every line is a document of its own."""
        return self.path.suffix.lower() in LINES


def list_files(data: Data) -> list[tuple[Path, bool]]:
    """Files to read, sorted within each path, and whether each was named itself rather than found in a
    folder. Raises ConfigError for a compressed one that was."""
    if not data.paths:
        return [(path, False) for path in _standard_library()]
    files = []
    for name in data.paths:
        path = Path(name)
        if path.is_dir():
            files += [(file, False) for file in _walk(path, data.pattern, lambda folder: False)]
        elif path.suffix.lower() in COMPRESSED:
            raise ConfigError(f"data.paths: {path} is compressed; unpack it first.")
        else:
            files.append((path, True))
    return files


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = list(_walk(root, "*.py", NOT_LIBRARY.__contains__))
    if not files:
        raise ConfigError(
            f"the Python standard library at {root} holds no source files to train on; name files or folders "
            "of text in data.paths."
        )
    return files


def _walk(root: Path, pattern: str, leave_out: Callable[[str], bool]) -> Iterator[Path]:
    """Regular files below `root`; pipes, sockets and links that lead nowhere are left out."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not leave_out(name))
        for name in sorted(files):
            if fnmatch.fnmatch(name, pattern) and os.path.isfile(os.path.join(folder, name)):
                yield Path(folder, name)


def survey(data: Data) -> tuple[list[Source], int]:
    """The files with text, and how many of folders were left out because they hold a zero byte, which text
    does not. Reads all of them, as many at a time as there are cores. Raises ConfigError where nothing is
    left or a file cannot be read."""
    files = list_files(data)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = list(threads.map(lambda file: _look(file[0]), files))
    binary = [has_zero and not named for (_, has_zero), (_, named) in zip(found, files, strict=True)]
    sources = [source for (source, _), left_out in zip(found, binary, strict=True) if not left_out]
    sources = [source for source in sources if source.size]
    if not sources:
        asked = ", ".join(data.paths)
        raise ConfigError(f"data.paths: there is no text in {asked} with names like {data.pattern}.")
    return sources, sum(binary)


def _look(path: Path) -> tuple[Source, bool]:
    """The file, and whether it holds a zero byte."""
    content, has_zero, size = hashlib.blake2b(digest_size=16), False, 0
    with _reading(path), open(path, "rb", buffering=0) as file:
        modified_ns = os.fstat(file.fileno()).st_mtime_ns
        while block := file.read(BLOCK_BYTES):
            content.update(block)
            has_zero = has_zero or b"\0" in block
            size += len(block)
    return Source(path, content.digest(), size, modified_ns), has_zero


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}.") from error


class Documents:
    """All documents of some files, in the order of a hash of their text: the same on every machine that has
    the same text, and copies of a document lie side by side.

    Holds 36 bytes a document, and one document of a .jsonl file at a time. Raises ConfigError for a line
    without text.
    """

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources
        places = array.array("Q")  # hash, source, offset, bytes on disk of every document
        for number, source in enumerate(sources):
            if source.is_lines:
                for offset, line, text in _lines(source.path):
                    digest = hashlib.blake2b(text, digest_size=16).digest()
                    places.extend((_as_number(digest), number, offset, len(line)))
            else:
                places.extend((_as_number(source.digest), number, 0, source.size))
        self._places = np.frombuffer(places, dtype=np.uint64).reshape(-1, 4)
        self._order = np.argsort(self._places[:, 0], kind="stable").astype(np.uint32)

    def __len__(self) -> int:
        return len(self._places)

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """The text of all documents, in order: pieces, and whether each is its document's last."""
        for document in self._order:
            _, source, offset, size = map(int, self._places[document])
            path = self._sources[source].path
            with _reading(path), open(path, "rb", buffering=0) as file:
                if self._sources[source].is_lines:
                    try:
                        text = _text_of(os.pread(file.fileno(), size, offset))
                    except _NoText:  # it had text when its place was noted
                        raise _written_to(path) from None
                    yield from cut(io.BytesIO(text))
                else:
                    yield from cut(file)

    def check_unchanged(self) -> None:
        """Raises ConfigError where a file is another one by now than when it was read first."""
        for source in self._sources:
            with _reading(source.path):
                now = source.path.stat()
            if (now.st_size, now.st_mtime_ns) != (source.size, source.modified_ns):
                raise _written_to(source.path)


def _written_to(path: Path) -> ConfigError:
    return ConfigError(f"data.paths: {path} was written to while it was read; start again.")


def _as_number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _lines(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Offset, content and text of every line that has text."""
    offset = 0
    with _reading(path), open(path, "rb", buffering=BLOCK_BYTES) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    text = _text_of(line)
                except _NoText as finding:
                    raise ConfigError(
                        f"data.paths: {path}, line {number} {finding}; a {path.suffix} file holds an object "
                        'with a string "text" in every line.'
                    ) from None
                if text:
                    yield offset, line, text
            offset += len(line)


class _NoText(ValueError):
    """What is wrong with a line."""


def _text_of(line: bytes) -> bytes:
    """The text of a line of a .jsonl file as UTF-8; surrogates that stand alone become `\\uNNNN`."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _NoText(f"is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise _NoText(f"holds no object but a {type(content).__name__}")
    text = content.get("text")
    if not isinstance(text, str):
        found = f"a {type(text).__name__}" if "text" in content else f"only {', '.join(content) or 'nothing'}"
        raise _NoText(f'holds no string "text", found {found}')
    if "\0" in text:  # the token that ends a document of bytes
        raise _NoText("holds a zero character")
    return text.encode("utf-8", errors="backslashreplace")


def cut(file: BinaryIO | io.RawIOBase) -> Iterator[tuple[bytes, bool]]:
    """What `file` holds in pieces of at most PIECE_BYTES that end where tokenizers see an end too, and
    whether each is the last."""
    piece = b""
    while True:
        read = file.read(PIECE_BYTES - len(piece) + 1) or b""
        piece += read
        if len(piece) <= PIECE_BYTES:
            if not read:
                yield piece, True
                return
            continue
        end = _end_of_piece(piece)
        yield piece[:end], False
        piece = piece[end:]


def _end_of_piece(text: bytes) -> int:
    """Where to cut `text`, at most at its last byte: before a single blank, where tokenizers begin a word,
    else behind a line, else between two characters."""
    last = len(text) - 1
    blank = text.rfind(b" ", 1, last)
    while blank > 0:
        if not text[blank - 1 : blank].isspace() and not text[blank + 1 : blank + 2].isspace():
            return blank
        blank = text.rfind(b" ", 1, blank)
    line = text.rfind(b"\n", 0, last) + 1
    if line > 0:
        return line
    starts = (at for at in range(last, max(0, last - 4), -1) if text[at] & 0xC0 != 0x80)
    return next(starts, last)  # what has no start of a character is no UTF-8
