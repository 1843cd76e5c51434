"""Files of text become one memory-mapped array of tokens, its end held out for validation.

Documents are ordered by a hash of their content, so the held-out end is a random choice of whole documents
(and the tail of one more), the same on every machine that has the same files, and copies of a file never land
on both sides.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pyruntime.train.config import Data
from pyruntime.train.errors import ConfigError
from pyruntime.train.tokenizer import Tokenizer

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TOKENS_FILE, FACTS_FILE = "tokens.bin", "corpus.json"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a corpus besides its tokens."""

    files: int
    skipped: int
    """Files of folders that were left out because they hold a zero byte, which text does not."""
    tokens: int
    val_tokens: int
    """Tokens at the end that are held out."""
    val_bytes: int
    """Bytes of text that those stand for."""
    dtype: str
    """Type of the stored tokens: uint8, uint16 or uint32."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens to learn from and tokens held out, each a read-only memory-mapped array [n]."""

    train: np.ndarray
    val: np.ndarray
    facts: Facts

    @property
    def val_bytes_per_token(self) -> float:
        return self.facts.val_bytes / self.facts.val_tokens


def list_files(data: Data) -> list[tuple[Path, bool]]:
    """Files to read, sorted within each path, and whether each was named itself rather than found in a
    folder."""
    if not data.paths:
        return [(path, False) for path in _standard_library()]
    files = []
    for name in data.paths:
        path = Path(name)
        if path.is_dir():
            files += [(file, False) for file in _walk(path, data.pattern, lambda folder: False)]
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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}.") from error


def build(data: Data, tokenizer: Tokenizer, folder: Path) -> Facts:
    """Writes the tokens of all files and their `Facts` into `folder`. One process does this; all then
    `open_corpus`.

    Holds one file in memory at a time. Raises ConfigError where nothing can be read.
    """
    order, skipped = [], 0
    for path, named in list_files(data):
        content = _read(path)
        if b"\0" in content and not named:
            skipped += 1
        elif content:
            order.append((hashlib.blake2b(content, digest_size=16).digest(), path))
    if not order:
        asked = ", ".join(data.paths)
        raise ConfigError(f"data.paths: there is no text in {asked} with names like {data.pattern}.")
    order.sort()
    kind = np.min_scalar_type(tokenizer.vocab_size - 1)
    separator = np.asarray([] if tokenizer.separator is None else [tokenizer.separator], dtype=kind)
    lengths = []  # (tokens, bytes) of each document with its separator
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / TOKENS_FILE, "wb") as out:
        for _, path in order:
            content = _read(path)
            tokens = tokenizer.encode(content).astype(kind, copy=False)
            out.write(tokens.tobytes() + separator.tobytes())
            lengths.append((len(tokens) + len(separator), len(content) + len(separator)))
    total = sum(tokens for tokens, _ in lengths)
    val_tokens = round(total * data.val_fraction)
    facts = Facts(
        files=len(order),
        skipped=skipped,
        tokens=total,
        val_tokens=val_tokens,
        val_bytes=_bytes_of_last(lengths, val_tokens),
        dtype=kind.name,
    )
    (folder / FACTS_FILE).write_text(json.dumps(dataclasses.asdict(facts), indent=2) + "\n")
    return facts


def _bytes_of_last(lengths: list[tuple[int, int]], wanted: int) -> int:
    """Bytes of the last `wanted` tokens; of the document that is cut, its share."""
    size = 0.0
    for tokens, length in reversed(lengths):
        taken = min(tokens, wanted)
        size += length * taken / tokens if tokens else 0
        wanted -= taken
        if not wanted:
            break
    return round(size)


def open_corpus(folder: Path, seq_len: int) -> Corpus:
    """The corpus that `build` wrote. Raises ConfigError where either side is shorter than one sequence."""
    facts = Facts(**json.loads((folder / FACTS_FILE).read_text()))
    shorter = min(facts.val_tokens, facts.tokens - facts.val_tokens)
    if shorter <= seq_len:
        raise ConfigError(
            f"train.seq_len={seq_len} needs at least {seq_len + 1} tokens on both sides of the split, but "
            f"the text of {facts.tokens} tokens leaves {facts.val_tokens} for validation and "
            f"{facts.tokens - facts.val_tokens} for training; give more text or a shorter train.seq_len."
        )
    tokens = np.memmap(folder / TOKENS_FILE, dtype=facts.dtype, mode="r")
    split = facts.tokens - facts.val_tokens
    return Corpus(train=tokens[:split], val=tokens[split:], facts=facts)
