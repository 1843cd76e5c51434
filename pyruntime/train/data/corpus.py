"""The text of a run as tokens to learn from and tokens held out.

Text that `data.paths` name is tokenized once and kept in a cache (`token_cache`) under a name that is a hash
of all the text and of the tokenizer: another run with the same text reads it and compares, and tokenizes
nothing. A folder that `python -m pyruntime tokenize` has written is opened as it is.

In both, documents stand in the order of a hash of their text, so the held-out end is a random choice of whole
documents (and the tail of one more), the same on every machine that has the same text, and copies of a
document never land on both sides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from pyruntime.comm import rank_name
from pyruntime.comm.exchange import gather
from pyruntime.train import agreement
from pyruntime.train.config import Data, RunConfig
from pyruntime.train.data import token_cache, tokenizing
from pyruntime.train.data.documents import survey
from pyruntime.train.data.token_shards import DamagedShard, TokenShard, mark_of
from pyruntime.train.data.tokenizer import Tokenizer
from pyruntime.train.errors import ConfigError
from pyruntime.train.ranks import on_every_rank, on_rank_0

MAIN_SET = "held_out"
"""The name of what is held out of text that is one source."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Text that is one source, or one set to validate on."""

    name: str
    paths: tuple[str, ...]
    is_tokens: bool
    """Whether the path is a folder of tokens."""
    is_val: bool
    """Whether it is named in data.val_paths."""


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """Where the tokens of some text are."""

    wanted: Wanted
    folder: Path
    facts: tokenizing.CorpusFacts


class Tokens:
    """Tokens `begin` to `end` of some shards, which are one after the other."""

    def __init__(self, shards: Sequence[TokenShard], begin: int, end: int):
        self._shards = [shard for shard in shards if len(shard.tokens)]
        self._offsets = np.cumsum([0, *(len(shard.tokens) for shard in self._shards)])
        self._documents = np.cumsum([0, *(shard.index.shape[1] for shard in self._shards)])
        self._begin, self._end = begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def digest(self) -> str:
        """BLAKE2b of what the shards' headers say of their content, and of where these tokens are in it."""
        found = hashlib.blake2b(f"{self._begin} {self._end}".encode(), digest_size=16)
        for shard in self._shards:
            found.update(shard.digest)
        return found.hexdigest()

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens [end - begin], copied."""
        parts = [shard.tokens[low:high] for shard, _, low, high in self._parts(begin, end)]
        return np.concatenate(parts)

    def documents(self, begin: int, end: int) -> np.ndarray:
        """The number of the document of each of these tokens, int64 [end - begin], ascending."""
        found = []
        for shard, before, low, high in self._parts(begin, end):
            ends = shard.index[0]
            first = int(np.searchsorted(ends, np.int64(low), side="right"))
            last = int(np.searchsorted(ends, np.int64(high - 1), side="right"))
            within = np.searchsorted(ends[first:last], np.arange(low, high), side="right")
            found.append(before + first + within)
        return np.concatenate(found)

    def _parts(self, begin: int, end: int) -> list[tuple[TokenShard, int, int, int]]:
        """Shards in which these tokens are, the documents of those before, and from where to where."""
        begin, end = begin + self._begin, end + self._begin
        first = int(np.searchsorted(self._offsets, begin, side="right")) - 1
        found = []
        while first < len(self._shards) and self._offsets[first] < end:
            offset, shard = int(self._offsets[first]), self._shards[first]
            low, high = max(begin - offset, 0), min(end - offset, len(shard.tokens))
            found.append((shard, int(self._documents[first]), low, high))
            first += 1
        return found

    @property
    def bytes(self) -> int:
        """Of text that they stand for; of a document that is cut, its share."""
        return self._bytes_before(self._end) - self._bytes_before(self._begin)

    def _bytes_before(self, token: int) -> int:
        total = 0
        for shard, offset in zip(self._shards, self._offsets, strict=False):
            total += bytes_before(shard.index, min(max(token - int(offset), 0), len(shard.tokens)))
        return total


def bytes_before(index: np.ndarray, token: int) -> int:
    """Bytes of text that the first `token` tokens of a shard stand for."""
    ends, sizes = index
    document = int(np.searchsorted(ends, np.int64(token), side="right"))
    first, before = (int(ends[document - 1]), int(sizes[document - 1])) if document else (0, 0)
    if document == len(ends) or token == first:
        return before
    last, behind = int(ends[document]), int(sizes[document])
    return before + round((behind - before) * (token - first) / (last - first))


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Text to learn from."""

    name: str
    train: Tokens
    text: Tokenized


@dataclasses.dataclass(frozen=True)
class ValidationSet:
    """Text to validate on."""

    name: str
    tokens: Tokens

    @property
    def bytes_per_token(self) -> float:
        return self.tokens.bytes / len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a run learns from and is validated on."""

    sources: tuple[TextSource, ...]
    weights: tuple[float, ...]
    """Shares of the sources in what is learned from; empty: as many as their tokens."""
    sets: tuple[ValidationSet, ...]

    def digests(self) -> dict[str, str]:
        """Of the tokens of every source and set, by name, from the headers of their shards."""
        parts = [(f"the tokens of {each.name}", each.train) for each in self.sources]
        parts += [(f"the tokens of {each.name} to validate on", each.tokens) for each in self.sets]
        return {name: tokens.digest for name, tokens in parts}

    def __str__(self) -> str:
        """What there is, in a line for people."""
        facts = [source.text.facts for source in self.sources]
        files, documents = sum(each.files for each in facts), sum(each.documents for each in facts)
        skipped = sum(each.skipped for each in facts)
        of = f" of {documents:,} documents" if documents != files else ""
        left_out = f" ({skipped} without text left out)" if skipped else ""
        train, val = (
            sum(len(each.train) for each in self.sources),
            sum(len(each.tokens) for each in self.sets),
        )
        sources = f" of {len(self.sources)} sources" if len(self.sources) > 1 else ""
        sets = f" in {len(self.sets)} sets" if len(self.sets) > 1 else ""
        return f"{files} files{of}{left_out}, {train:,} tokens to learn from{sources}, {val:,} held out{sets}"


def cache_folder(data: Data) -> Path:
    """Where the tokens of runs are kept."""
    return Path(data.cache) if data.cache else token_cache.default_folder()


def wanted(data: Data) -> list[Wanted]:
    """What to open. With data.weights each of data.paths is a source of its own, without all text is one and
    each folder of tokens another. Raises ConfigError where two sets to validate on have one name."""
    for path in (*data.paths, *data.val_paths):
        if tokenizing.is_unfinished(Path(path)):
            raise ConfigError(
                f"data.paths: the tokens in {path} are not finished; call `python -m pyruntime tokenize` "
                "again as it was called."
            )
    found = []
    text = [path for path in data.paths if not tokenizing.is_tokens(Path(path))]
    if not data.paths or (text and not data.weights):
        found.append(Wanted(MAIN_SET, tuple(text), False, False))
    for path in data.paths:
        is_tokens = tokenizing.is_tokens(Path(path))
        if data.weights or is_tokens:
            found.append(Wanted(_name_of_path(path), (path,), is_tokens, False))
    for path in data.val_paths:
        found.append(Wanted(_name_of_path(path), (path,), tokenizing.is_tokens(Path(path)), True))
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"data.paths and data.val_paths: two of them are called {name}, and validation losses go by "
                "that name; rename one."
            )
    return found


def _name_of_path(path: str) -> str:
    return Path(path).resolve().stem or path


def build(
    data: Data, tokenizer: Tokenizer, say: Callable[[str], None] = lambda text: None
) -> list[Tokenized]:
    """The tokens of all text, from the cache or written there. One process does this; all then `open_corpus`.

    `say` is told before something is tokenized. Raises ConfigError where nothing can be read, a line of a
    .jsonl file holds no text or none has any, the tokens of a folder are another tokenizer's, or the cache
    cannot be written.
    """
    return [_found(each, tokenizer) if each.is_tokens else _built(each, data, tokenizer, say)
            for each in wanted(data)]  # fmt: skip


def _found(each: Wanted, tokenizer: Tokenizer) -> Tokenized:
    folder = Path(each.paths[0])
    facts = tokenizing.read_facts(folder)
    if facts.fingerprint != tokenizer.fingerprint.hex():
        raise ConfigError(
            f"{folder} holds tokens of another tokenizer than the run's; leave data.tokenizer out, or "
            "tokenize the text again."
        )
    return Tokenized(each, folder, facts)


def _built(each: Wanted, data: Data, tokenizer: Tokenizer, say: Callable[[str], None]) -> Tokenized:
    sources, skipped = survey(each.paths, data.pattern)
    cache, name = cache_folder(data), tokenizing.name_of(sources, tokenizer, data.field)

    def write(folder: Path) -> None:
        size = sum(source.size for source in sources)
        say(f"text   {size / 1e6:,.1f} MB become tokens, which are kept in {cache}")
        tokenizing.write(folder, sources, skipped, tokenizer, data.field)

    try:
        folder = token_cache.entry(cache, name, write)
    except OSError as error:
        raise ConfigError(
            f"data.cache: {error.filename or cache} cannot be written: {error.strerror}; name another folder "
            "for tokens."
        ) from error
    # Another folder may have had the same text.
    facts = dataclasses.replace(_facts(folder), files=len(sources), skipped=skipped)
    return Tokenized(each, folder, facts)


def _facts(folder: Path) -> tokenizing.CorpusFacts:
    try:
        return tokenizing.read_facts(folder)
    except ConfigError as error:
        raise _damaged(folder, str(error)) from error


def _damaged(folder: Path, finding: str) -> ConfigError:
    return ConfigError(f"The tokens in {folder} are damaged: {finding.rstrip('.')}; remove that folder and "
                       "tokenize the text again.")  # fmt: skip


def open_corpus(data: Data, texts: Sequence[Tokenized], tokenizer: Tokenizer, seq_len: int) -> Corpus:
    """The corpus that `build` found. Raises ConfigError where what is learned from or validated on is shorter
    than one sequence, or a file of tokens is damaged."""
    sources, sets = [], []
    for text in texts:
        shards, total = _shards(text, tokenizer, data.verify), text.facts.tokens
        name = text.wanted.name
        if text.wanted.is_val:
            _check_length(f"the {total} tokens of {text.wanted.paths[0]} to validate on", total, seq_len)
            sets.append(ValidationSet(name, Tokens(shards, 0, total)))
            continue
        held_out = round(total * data.val_fraction)
        split = total - held_out
        if min(split, held_out if data.val_fraction else split) <= seq_len:
            raise ConfigError(
                f"train.seq_len={seq_len} needs at least {seq_len + 1} tokens on both sides of the split, "
                f"but the text of {total} tokens leaves {held_out} for validation and {split} for training; "
                "give more text or a shorter train.seq_len."
            )
        sources.append(TextSource(name, Tokens(shards, 0, split), text))
        if held_out:
            sets.append(ValidationSet(name, Tokens(shards, split, total)))
    return Corpus(tuple(sources), data.weights, tuple(sets))


def _check_length(what: str, tokens: int, seq_len: int) -> None:
    if tokens <= seq_len:
        raise ConfigError(
            f"train.seq_len={seq_len} needs at least {seq_len + 1} tokens, and {what} are fewer; give more "
            "text or a shorter train.seq_len."
        )


def _shards(text: Tokenized, tokenizer: Tokenizer, verify: bool) -> list[TokenShard]:
    found = []
    for number, tokens in enumerate(text.facts.shards):
        path = text.folder / tokenizing.shard_name(number)
        try:
            shard = TokenShard.open(path)
            if verify:
                shard.check()
            if shard.mark != mark_of(tokenizer.fingerprint) or len(shard.tokens) != tokens:
                raise DamagedShard("it is of another text or tokenizer")
            if shard.index.shape[0] != 2:
                raise DamagedShard("it has no ends of documents")
        except DamagedShard as error:
            raise _damaged(text.folder, f"{path.name}: {error}") from error
        found.append(shard)
    return found


def open_everywhere(
    config: RunConfig, tokenizer: Tokenizer, group: dist.ProcessGroup, say: Callable[[str], None]
) -> Corpus:
    """Every rank of `group` calls this. Rank 0 tokenizes where the cache has nothing; then so does, of
    each host, the first rank that does not see what rank 0 wrote, because the cache lies on a disk of its
    own. `say` prints a line on rank 0. Raises the same ConfigError on every rank."""
    data, seq_len = config.data, config.train.seq_len

    def build_first() -> list[Tokenized]:
        texts = build(data, tokenizer, say)
        open_corpus(data, texts, tokenizer, seq_len)  # what is too short is refused by one rank
        return texts

    doing = "Building the corpus"
    texts = on_rank_0(group, doing, build_first, list[Tokenized])
    mine = on_every_rank(group, doing, lambda: [_as_seen_here(text, data) for text in texts])
    sees = all(text.folder.is_dir() for text in mine if not text.wanted.is_tokens)
    hosts = gather(group, doing, (host_name(), sees), tuple[str, bool])
    blind = [rank for rank, host in enumerate(hosts) if host == (host_name(), False)]

    def build_here() -> None:
        if group.rank() in blind[:1]:
            _build_the_same(mine, lambda: build(data, tokenizer))

    def open_here() -> Corpus:
        for text in mine:
            _check_seen(text, group)
        return open_corpus(data, mine, tokenizer, seq_len)

    on_every_rank(group, doing, build_here)
    opened = on_every_rank(group, "Opening the corpus", open_here)
    agreement.check(group, "Comparing the tokens", opened.digests())
    return opened


def _as_seen_here(text: Tokenized, data: Data) -> Tokenized:
    """Where that text is on this host."""
    if text.wanted.is_tokens:
        return text
    return dataclasses.replace(text, folder=cache_folder(data) / text.folder.name)


def _check_seen(text: Tokenized, group: dist.ProcessGroup) -> None:
    own = rank_name(group, group.rank())
    if text.wanted.is_tokens:
        if not text.folder.is_dir() or tokenizing.read_facts(text.folder).name != text.facts.name:
            raise ConfigError(
                f"data.paths: {own} does not see the tokens in {text.folder} that {rank_name(group, 0)} "
                "does; copy the folder to every host, or name one on shared storage."
            )
    elif not text.folder.is_dir():
        raise ConfigError(
            f"data.cache: {own} does not see {text.folder}, which another rank of its host wrote; "
            "name a folder that all ranks of a host see."
        )


def _build_the_same(texts: Sequence[Tokenized], build: Callable[[], list[Tokenized]]) -> None:
    host = os.uname().nodename
    try:
        built = build()
    except ConfigError as error:
        raise ConfigError(f"on host {host}: {error}") from error
    if [text.folder.name for text in built] != [text.folder.name for text in texts]:
        raise ConfigError(f"data.paths hold another text on host {host} than on that of rank 0.")


def host_name() -> str:
    """The same for ranks whose files are the same: the name and the boot of their machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot}"
