"""Reads text as documents: a file is one, and so is every line of a .jsonl or .ndjson file and every row of a
.parquet or .arrow file. Lines and rows without text may be conversations (`conversations`).

Files are read twice and never held as a whole: once to hash their content (`survey`), which shows whether
they were tokenized before; and once to be tokenized, in pieces, one `Unit` of work at a time.
"""

from __future__ import annotations

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
from typing import Any, BinaryIO

from pyruntime.train.data import tables
from pyruntime.train.data.chat_template import BadConversation
from pyruntime.train.data.conversations import KEYS, SHAPES, conversation_of, is_conversation, is_example
from pyruntime.train.data.preferences import PAIR_KEYS, is_pair, pair_of
from pyruntime.train.errors import ConfigError

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LINES = {".jsonl", ".ndjson"}
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files that `save_to_disk` of Hugging Face `datasets` writes beside the tables of a Dataset, and beside the
folders of a DatasetDict."""
COMPRESSED = {".gz", ".zst", ".xz", ".bz2"}
BLOCK_BYTES = 2**20
PIECE_BYTES = 2**16
"""Most bytes of a document that the tokenizer gets as one piece."""
LEAST_UNIT, MOST_UNITS = 2**22, 4096
"""Bytes of a unit of work; it grows if there would be more than MOST_UNITS."""


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file with text, as it was when it was first read."""

    path: Path
    digest: bytes
    """BLAKE2b of its content, 16 bytes."""
    size: int
    """Bytes."""
    modified_ns: int
    is_chat: bool = False
    """Whether its lines or rows are conversations, or pairs of them."""
    is_pairs: bool = False
    """Whether they are pairs of answers."""

    @property
    def is_lines(self) -> bool:
        """Whether every line is a document."""
        return self.path.suffix.lower() in LINES

    @property
    def is_table(self) -> bool:
        """Whether every row is a document."""
        return self.path.suffix.lower() in tables.SUFFIXES

    @property
    def holds(self) -> str:
        """The name, in errors, of what its lines or rows hold."""
        return "pairs of answers" if self.is_pairs else "conversations" if self.is_chat else "text"

    @property
    def kind(self) -> int:
        return (2 if self.is_table else int(self.is_lines)) + 4 * self.is_chat + 4 * self.is_pairs


@dataclasses.dataclass(frozen=True)
class FileSpan:
    """A part of a file: a range of bytes, or row groups of a table."""

    source: int
    """Number of the file."""
    begin: int
    end: int
    size: int
    """Bytes of the file in this part; for a table an estimate."""


Unit = tuple[FileSpan, ...]
"""Work that one process tokenizes at a time."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A document, or a part of one that is a whole file."""

    digest: bytes
    """Hash of the whole document's text, 16 bytes; documents are ordered by it."""
    source: int
    place: int
    """Its place in the file; parts of a document have ascending places."""
    is_begin: bool
    is_end: bool
    """Whether the document begins, and ends, in this part."""
    pieces: Iterator[bytes]
    """Its text, each piece at most PIECE_BYTES; read before the next document."""


def list_files(paths: Sequence[str], pattern: str) -> list[tuple[Path, bool]]:
    """Returns the files to read, sorted within each path, and whether each was named itself, not found in a
    folder. Raises ConfigError for a compressed file that was named."""
    if not paths:
        return [(path, False) for path in _standard_library()]
    files = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            files += [(file, False) for file in _walk(path, pattern, lambda folder: False)]
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
    """Yields the regular files below `root`, without pipes, sockets and broken links. From a folder that
    `datasets` saved, yields only the tables that its state.json names."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not leave_out(name))
        if STATE in files and INFO in files:
            files = _tables_of_dataset(Path(folder, STATE))
        if SPLITS in files:
            splits = ", ".join(str(Path(folder, name)) for name in names)
            raise ConfigError(
                f"data.paths: {folder} holds several splits of a dataset; name one of {splits}."
            )
        for name in sorted(files):
            if fnmatch.fnmatch(name, pattern) and os.path.isfile(os.path.join(folder, name)):
                yield Path(folder, name)


def _tables_of_dataset(state: Path) -> list[str]:
    with reading(state):
        content = state.read_bytes()
    try:
        names = [file["filename"] for file in json.loads(content)["_data_files"]]
        whole = all(isinstance(name, str) and os.path.basename(name) == name for name in names)
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ConfigError(f"data.paths: {state} is damaged: it does not name the tables of its folder.")
    if missing := next((name for name in names if not state.with_name(name).is_file()), ""):
        raise ConfigError(
            f"data.paths: {state.parent} has no {missing}, which its {STATE} names; copy the folder again."
        )
    return names


def survey(paths: Sequence[str], pattern: str, field: str = "text") -> tuple[list[SourceFile], int]:
    """Returns the files with text, and how many files of folders were left out because they hold a zero byte,
    which text does not. Reads all of them, on all cores. Raises ConfigError if nothing is left, a file
    cannot be read, or some hold conversations and others text."""
    files = list_files(paths, pattern)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = list(threads.map(lambda file: _look(file[0]), files))
    left_out = [
        has_zero and not named and not source.is_table
        for (source, has_zero), (_, named) in zip(found, files, strict=True)
    ]
    sources = [source for (source, _), out in zip(found, left_out, strict=True) if not out]
    sources = [source for source in sources if source.size]
    if not sources:
        asked = ", ".join(paths)
        raise ConfigError(f"data.paths: there is no text in {asked} with names like {pattern}.")
    sources = [_with_kind(each, field) for each in sources]
    first = sources[0]
    other = next((each for each in sources if each.holds != first.holds), None)
    if other is not None:
        raise ConfigError(
            f"data.paths: {first.path} holds {first.holds} and {other.path} {other.holds}; give each a path "
            "of its own, with data.weights, or choose by data.pattern."
        )
    return sources, sum(left_out)


def _with_kind(source: SourceFile, field: str) -> SourceFile:
    """Returns the file with what its first line, or its columns, say that it holds."""
    if source.is_table:
        with reading(source.path):
            keys: dict[str, object] = dict.fromkeys(tables.columns(source.path), "")
    elif source.is_lines:
        with reading(source.path), open(source.path, "rb") as file:
            first = next((line for line in file if line.strip()), b"")
        try:
            keys = json.loads(first)
        except (ValueError, RecursionError):
            return source
    else:
        _check_no_examples(source.path)
        return source
    if not isinstance(keys, dict) or isinstance(keys.get(field), str):
        return source
    pairs = is_pair(keys)
    return dataclasses.replace(source, is_chat=pairs or is_conversation(keys), is_pairs=pairs)


def _check_no_examples(path: Path) -> None:
    """Raises ConfigError for a .json or .csv file whose first object or columns are examples to learn from,
    which would be read as plain text."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".csv"):
        return
    with reading(path), open(path, "rb") as file:
        begin = file.read(BLOCK_BYTES).decode("utf-8-sig", errors="replace")
    keys: object = None
    if suffix == ".csv":
        keys = [name.strip(' "\r') for name in begin.partition("\n")[0].split(",")]
    else:
        with contextlib.suppress(ValueError, RecursionError):
            keys, _ = json.JSONDecoder().raw_decode(begin.lstrip().removeprefix("[").lstrip())
            keys = keys if isinstance(keys, dict) else None
    if isinstance(keys, list | dict) and is_example(keys):
        raise ConfigError(
            f"data.paths: {path} holds {', '.join(list(keys)[:4])}, but a {suffix} file is plain text; write "
            f"each as a line of a .jsonl file, with the keys {SHAPES}."
        )


def _look(path: Path) -> tuple[SourceFile, bool]:
    """Returns the file, and whether it holds a zero byte."""
    content, has_zero, size = hashlib.blake2b(digest_size=16), False, 0
    with reading(path), open(path, "rb", buffering=0) as file:
        modified_ns = os.fstat(file.fileno()).st_mtime_ns
        while block := file.read(BLOCK_BYTES):
            content.update(block)
            has_zero = has_zero or b"\0" in block
            size += len(block)
    return SourceFile(path, content.digest(), size, modified_ns), has_zero


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises ConfigError if a file cannot be read inside."""
    try:
        yield
    except OSError as error:
        first = (str(error).splitlines() or [""])[0].rstrip(".")  # pyarrow's have several lines
        raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror or first}.") from error


def units(sources: Sequence[SourceFile]) -> list[Unit]:
    """Cuts all files into units of about as many bytes; the same files always give the same units."""
    size = max(LEAST_UNIT, sum(source.size for source in sources) // MOST_UNITS)
    found: list[Unit] = []
    unit: list[FileSpan] = []
    filled = 0
    for number, source in enumerate(sources):
        for span in _spans(number, source, size):
            if unit and filled + span.size > size:
                found.append(tuple(unit))
                unit, filled = [], 0
            unit.append(span)
            filled += span.size
    return [*found, tuple(unit)]


def _spans(number: int, source: SourceFile, size: int) -> Iterator[FileSpan]:
    """Cuts a file into parts of at most `size` bytes."""
    if source.is_table:
        with reading(source.path):
            groups = tables.groups(source.path)
        for group in range(groups):
            yield FileSpan(number, group, group + 1, source.size // groups)
        return
    for begin in range(0, source.size, size):
        end = min(begin + size, source.size)
        yield FileSpan(number, begin, end, end - begin)


def documents(sources: Sequence[SourceFile], unit: Unit, field: str) -> Iterator[Document]:
    """Yields the documents of a unit; of a long file only the part. A conversation is one piece, in the form
    of `conversation_of`. field: key of a line's object, or column of a table, that holds text. Raises
    ConfigError for a line or row without text, or without a conversation where others have one."""
    for span in unit:
        source = sources[span.source]
        with reading(source.path):
            if source.is_lines:
                yield from _lines(source, span, field)
            elif source.is_table and source.is_chat:
                yield from _chat_rows(source, span)
            elif source.is_table:
                yield from _rows(source.path, span, field)
            else:
                yield _part(source, span)


def _part(source: SourceFile, span: FileSpan) -> Document:
    """Returns the part of a file that is one document."""

    def pieces() -> Iterator[bytes]:
        with reading(source.path), open(source.path, "rb", buffering=0) as file:
            begin = _part_begin(file, span.begin)
            end = source.size if span.end == source.size else _part_begin(file, span.end)
            file.seek(begin)
            yield from cut(file, end - begin)

    is_end = span.end == source.size
    return Document(source.digest, span.source, span.begin, span.begin == 0, is_end, pieces())


def _part_begin(file: BinaryIO | io.FileIO, offset: int) -> int:
    """Returns the last good place for a cut at or before `offset`."""
    if offset == 0:
        return 0
    file.seek(max(0, offset - PIECE_BYTES))
    text = file.read(min(offset, PIECE_BYTES) + 1) or b""
    return offset + 1 - len(text) + _end_of_piece(text)


def _lines(source: SourceFile, span: FileSpan, field: str) -> Iterator[Document]:
    """Yields the lines that begin in a span."""
    path = source.path
    with open(path, "rb", buffering=BLOCK_BYTES) as file:
        offset = span.begin
        if offset:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1  # the rest of a line that began before
        while offset < span.end and (line := file.readline()):
            if line.strip() and source.is_chat:
                try:
                    yield _conversation(source, _object_of(line), span.source, offset)
                except _NoText as finding:
                    raise ConfigError(f"{place_of(source, offset)} {finding}.") from None
                except BadConversation as finding:
                    raise ConfigError(f"{place_of(source, offset)}: {finding}.") from None
            elif line.strip():
                try:
                    text = text_of(line, field)
                except _NoText as finding:
                    raise ConfigError(
                        f"data.paths: {path}, line {_line_number(path, offset)} {finding}; every line of a "
                        f'{path.suffix} file must be an object with a string "{field}" (data.field), or a '
                        f"conversation, with the keys {SHAPES}."
                    ) from None
                if text:
                    yield _whole(text, span.source, offset)
            offset += len(line)


def place_of(source: SourceFile, place: int) -> str:
    """Returns words for the place of a document in its file, as an error begins."""
    number = f"row {place}" if source.is_table else f"line {_line_number(source.path, place)}"
    return f"data.paths: {source.path}, {number}"


def _conversation(source: SourceFile, content: dict[str, Any], number: int, place: int) -> Document:
    text = pair_of(content) if source.is_pairs else conversation_of(content)
    digest = hashlib.blake2b(text, digest_size=16).digest()
    return Document(digest, number, place, True, True, iter([text]))


def _chat_rows(source: SourceFile, span: FileSpan) -> Iterator[Document]:
    keys = PAIR_KEYS if source.is_pairs else KEYS
    for row, content in tables.objects(source.path, range(span.begin, span.end), keys):
        try:
            yield _conversation(source, content, span.source, row)
        except BadConversation as finding:
            raise ConfigError(f"{place_of(source, row)}: {finding}.") from None


def _line_number(path: Path, offset: int) -> int:
    lines = 1
    with open(path, "rb", buffering=0) as file:
        while offset > 0 and (block := file.read(min(BLOCK_BYTES, offset))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


def _rows(path: Path, span: FileSpan, field: str) -> Iterator[Document]:
    for row, value in tables.rows(path, range(span.begin, span.end), field):
        if value is None:
            continue
        if "\0" in value:
            raise ConfigError(f"data.paths: {path}, row {row} of its {field} holds a zero character.")
        if value:
            yield _whole(value.encode("utf-8", errors="backslashreplace"), span.source, row)


def _whole(text: bytes, source: int, place: int) -> Document:
    digest = hashlib.blake2b(text, digest_size=16).digest()
    return Document(digest, source, place, True, True, cut(io.BytesIO(text), len(text)))


def check_unchanged(sources: Sequence[SourceFile]) -> None:
    """Raises ConfigError if a file has changed since it was first read."""
    for source in sources:
        with reading(source.path):
            now = source.path.stat()
        if (now.st_size, now.st_mtime_ns) != (source.size, source.modified_ns):
            raise ConfigError(f"data.paths: {source.path} was written to while it was read; start again.")


class _NoText(ValueError):
    """A line without text; the message says what is wrong."""


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name == "int" else f"a {name}"


def _object_of(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        where = f", character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        raise _NoText(f"is no JSON ({getattr(error, 'msg', error)}{where})") from None
    if not isinstance(content, dict):
        raise _NoText(f"holds no object but {_kind(content)}")
    return content


def text_of(line: bytes, field: str) -> bytes:
    """Returns the text of a .jsonl line as UTF-8; unpaired surrogates become `\\uNNNN`."""
    content = _object_of(line)
    text = content.get(field)
    if not isinstance(text, str):
        found = _kind(text) if field in content else f"only {', '.join(content) or 'nothing'}"
        raise _NoText(f'holds no string "{field}", found {found}')
    if "\0" in text:  # the token that ends a document of bytes
        raise _NoText("holds a zero character")
    return text.encode("utf-8", errors="backslashreplace")


def cut(file: BinaryIO | io.RawIOBase, size: int) -> Iterator[bytes]:
    """Yields the next `size` bytes of `file` in pieces of at most PIECE_BYTES, cut where tokenizers also
    cut."""
    piece = b""
    while True:
        read = file.read(min(size, PIECE_BYTES - len(piece) + 1)) or b""
        piece += read
        size -= len(read)
        if len(piece) <= PIECE_BYTES:
            if not read or not size:
                yield piece
                return
            continue
        end = _end_of_piece(piece)
        yield piece[:end]
        piece = piece[end:]


def _end_of_piece(text: bytes) -> int:
    """Returns where to cut `text`, at most at its last byte: before a single blank, where tokenizers begin a
    word; else after a line; else between two characters."""
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
    return next(starts, last)  # no start of a character: not UTF-8
