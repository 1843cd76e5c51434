"""Text becomes one memory-mapped array of tokens, its end held out for validation.

Documents are ordered by a hash of their text, so the held-out end is a random choice of whole documents (and
the tail of one more), the same on every machine that has the same text, and copies of a document never land
on both sides.

Tokens are kept in a cache (`token_cache`) under a name that is a hash of all the text and of the tokenizer:
another run with the same text reads it and compares, and tokenizes nothing.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pyruntime.train import token_cache
from pyruntime.train.config import Data, RunConfig
from pyruntime.train.documents import Documents, Source, survey
from pyruntime.train.errors import ConfigError
from pyruntime.train.ranks import gather, on_every_rank, on_rank_0
from pyruntime.train.tokenizer import Tokenizer

FORMAT = b"2"
"""Of an entry; another one is another name."""
TOKENS_FILE, ENDS_FILE, FACTS_FILE = "tokens.bin", "documents.bin", "corpus.json"
BATCH_BYTES = 2**22
"""Text that the tokenizer is given at a time, in pieces that it shares out over the cores. It takes about a
hundred times as much memory."""


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """Where the tokens of some text are, and which files it came from."""

    folder: Path
    files: int
    skipped: int
    """Files of folders that were left out because they hold a zero byte, which text does not."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens to learn from and tokens held out, each a read-only memory-mapped array [n]."""

    train: np.ndarray
    val: np.ndarray
    text: Tokenized
    documents: int
    val_bytes: int
    """Bytes of text that the held-out tokens stand for."""

    @property
    def val_bytes_per_token(self) -> float:
        return self.val_bytes / len(self.val)


def cache_folder(data: Data) -> Path:
    """Where the tokens of runs are kept."""
    return Path(data.cache) if data.cache else token_cache.default_folder()


def build(data: Data, tokenizer: Tokenizer, say: Callable[[str], None] = lambda text: None) -> Tokenized:
    """The tokens of all text, from the cache or written there. One process does this; all then `open_corpus`.

    `say` is told before something is tokenized. Raises ConfigError where nothing can be read, a line of a
    .jsonl file holds no text or none has any, or the cache cannot be written.
    """
    sources, skipped = survey(data)
    cache, name = cache_folder(data), _name(sources, tokenizer)

    def write(folder: Path) -> None:
        size = sum(source.size for source in sources)
        say(f"text   {size / 1e6:,.1f} MB become tokens, which are kept in {cache}")
        documents = Documents(sources)
        if not len(documents):
            raise ConfigError(f"data.paths: no line of {', '.join(data.paths)} holds text.")
        _write(documents, tokenizer, folder)
        documents.check_unchanged()

    try:
        folder = token_cache.entry(cache, name, write)
    except OSError as error:
        raise ConfigError(
            f"data.cache: {error.filename or cache} cannot be written: {error.strerror}; name another folder "
            "for tokens."
        ) from error
    return Tokenized(folder, len(sources), skipped)


def _name(sources: Iterable[Source], tokenizer: Tokenizer) -> str:
    content = hashlib.blake2b(FORMAT + tokenizer.fingerprint, digest_size=16)
    for digest in sorted(bytes([source.is_lines]) + source.digest for source in sources):
        content.update(digest)
    return content.hexdigest()


def _write(documents: Documents, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokens, where each document ends (tokens and bytes of text, separators included), and their number."""
    kind = np.min_scalar_type(tokenizer.vocab_size - 1)
    separator = np.asarray([] if tokenizer.separator is None else [tokenizer.separator], dtype=kind)
    tokens = size = 0
    ends = array.array("Q")
    with open(folder / TOKENS_FILE, "wb") as out:
        for batch in _batches(documents.pieces()):
            encoded = tokenizer.encode_batch([piece for piece, _ in batch])
            for (piece, is_last), ids in zip(batch, encoded, strict=True):
                out.write(ids.astype(kind, copy=False).tobytes())
                tokens, size = tokens + len(ids), size + len(piece)
                if is_last:
                    out.write(separator.tobytes())
                    tokens, size = tokens + len(separator), size + len(separator)
                    ends.extend((tokens, size))
    (folder / ENDS_FILE).write_bytes(ends.tobytes())
    facts = {"documents": len(documents), "tokens": tokens, "dtype": kind.name}
    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def _batches(pieces: Iterable[tuple[bytes, bool]]) -> Iterator[list[tuple[bytes, bool]]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def open_corpus(text: Tokenized, val_fraction: float, seq_len: int) -> Corpus:
    """The corpus that `build` found. Raises ConfigError where either side is shorter than one sequence, or
    what is in the cache is damaged."""
    tokens, ends = _map(text.folder)
    total = len(tokens)
    val_tokens = round(total * val_fraction)
    split = total - val_tokens
    if min(val_tokens, split) <= seq_len:
        raise ConfigError(
            f"train.seq_len={seq_len} needs at least {seq_len + 1} tokens on both sides of the split, but "
            f"the text of {total} tokens leaves {val_tokens} for validation and {split} for training; give "
            "more text or a shorter train.seq_len."
        )
    return Corpus(tokens[:split], tokens[split:], text, len(ends), _bytes_behind(ends, split))


def _map(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n] and the ends of documents [documents, 2] of an entry."""
    try:
        facts = json.loads((folder / FACTS_FILE).read_text())
        tokens = np.memmap(folder / TOKENS_FILE, dtype=facts["dtype"], mode="r")
        ends = np.memmap(folder / ENDS_FILE, dtype=np.uint64, mode="r").reshape(-1, 2)
        whole = (len(tokens), len(ends)) == (facts["tokens"], facts["documents"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise ConfigError(f"data.cache: the tokens in {folder} are damaged; remove that folder.")
    return tokens, ends


def _bytes_behind(ends: np.ndarray, token: int) -> int:
    """Bytes of text that the tokens from `token` on stand for; of the document that is cut, its share."""
    document = int(np.searchsorted(ends[:, 0], token, side="right"))
    if document == len(ends):
        return 0
    first, before = map(int, ends[document - 1]) if document else (0, 0)
    last, behind = map(int, ends[document])
    whole = int(ends[-1, 1])
    return round(whole - before - (behind - before) * (token - first) / (last - first))


def open_everywhere(
    config: RunConfig, tokenizer: Tokenizer, group: dist.ProcessGroup, say: Callable[[str], None]
) -> Corpus:
    """Every rank of `group` calls this. Rank 0 tokenizes where the cache has nothing; then so does, of
    each host, the first rank that does not see what rank 0 wrote, because the cache lies on a disk of its
    own. `say` prints a line on rank 0. Raises the same ConfigError on every rank."""
    data, seq_len = config.data, config.train.seq_len

    def build_first() -> Tokenized:
        text = build(data, tokenizer, say)
        open_corpus(text, data.val_fraction, seq_len)  # what is too short is refused by one rank
        return text

    doing = "Building the corpus"
    text = on_rank_0(group, doing, build_first)
    mine = on_every_rank(group, doing, lambda: cache_folder(data) / text.folder.name)
    hosts = gather(group, doing, (host_name(), mine.is_dir()))
    blind = [rank for rank, host in enumerate(hosts) if host == (host_name(), False)]

    def build_here() -> None:
        if group.rank() in blind[:1]:
            _build_the_same(mine, lambda: build(data, tokenizer))

    def open_here() -> Corpus:
        if not mine.is_dir():
            raise ConfigError(
                f"data.cache: rank {group.rank()} does not see {mine}, which another rank of its host wrote; "
                "name a folder that all ranks of a host see."
            )
        return open_corpus(Tokenized(mine, text.files, text.skipped), data.val_fraction, seq_len)

    on_every_rank(group, doing, build_here)
    return on_every_rank(group, "Opening the corpus", open_here)


def _build_the_same(wanted: Path, build: Callable[[], Tokenized]) -> None:
    host = os.uname().nodename
    try:
        built = build()
    except ConfigError as error:
        raise ConfigError(f"on host {host}: {error}") from error
    if built.folder.name != wanted.name:
        raise ConfigError(f"data.paths hold another text on host {host} than on that of rank 0.")


def host_name() -> str:
    """The same for ranks whose files are the same: the name and the boot of their machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot}"


def training_batch(
    tokens: np.ndarray, step: int, seed: int, batch_size: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of step `step`: ids and labels, each int64 [batch_size, seq_len], labels one token
    further on.

    A counter-based generator keyed by (seed, step) draws the starts: all ranks draw the same without a
    message, and a resumed run goes on with the batches that the uninterrupted one would have seen.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(tokens) - seq_len, size=batch_size)
    return _windows(tokens, starts, seq_len)


def validation_batches(
    tokens: np.ndarray, sequences: int, batch_size: int, seq_len: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """At most `sequences` windows that do not overlap, evenly spread over the tokens, `batch_size` at a time.

    Returns the same ids and labels every time; the last batch may be smaller.
    """
    count = min(sequences, (len(tokens) - 1) // seq_len)
    starts = np.arange(count) * ((len(tokens) - 1) // count)
    return [_windows(tokens, starts[i : i + batch_size], seq_len) for i in range(0, count, batch_size)]


def _windows(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
