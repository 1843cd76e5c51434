"""The text of a run, as tokens to learn from and held-out tokens.

Text that `data.paths` names is tokenized once and kept in a cache (`token_cache`) under a hash of all the
text and of the tokenizer: another run with the same text finds it there and tokenizes nothing. A folder
written by `python -m pyruntime tokenize` is opened as it is.

In both, documents are ordered by a hash of their text. So the held-out end is a random choice of whole
documents (and the tail of one more), the same on every machine with the same text, and copies of a document
are never on both sides.
"""

from __future__ import annotations

import dataclasses
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
from pyruntime.train.data.corpus_tokens import Tokens
from pyruntime.train.data.documents import survey
from pyruntime.train.data.packed_conversations import PackedConversations
from pyruntime.train.data.packed_pairs import PackedPairs
from pyruntime.train.data.token_shards import DamagedShard, TokenShard, mark_of
from pyruntime.train.data.tokenizer import Tokenizer
from pyruntime.train.errors import ConfigError
from pyruntime.train.ranks import on_every_rank, on_rank_0

MAIN_SET = "held_out"
"""Name of the tokens held out of text that is one source."""
Packed = PackedConversations | PackedPairs
"""Samples of whole conversations, or of pairs of answers."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Text that is one source, or one validation set."""

    name: str
    paths: tuple[str, ...]
    is_tokens: bool
    """Whether the path is a folder of tokens."""
    is_val: bool
    """Whether it is in data.val_paths."""


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """The folder with the tokens of some text."""

    wanted: Wanted
    folder: Path
    facts: tokenizing.CorpusFacts


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Text to learn from."""

    name: str
    train: Tokens
    text: Tokenized
    packed: Packed | None = None
    """The samples of conversations or pairs."""


@dataclasses.dataclass(frozen=True)
class ValidationSet:
    """Text to validate on."""

    name: str
    tokens: Tokens
    packed: Packed | None = None

    @property
    def bytes_per_token(self) -> float:
        return self.tokens.bytes / len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All text of a run: sources to learn from, and validation sets."""

    sources: tuple[TextSource, ...]
    weights: tuple[float, ...]
    """Shares of the sources in the samples; empty: in proportion to their tokens."""
    sets: tuple[ValidationSet, ...]

    @property
    def pairs(self) -> dict[str, PackedPairs]:
        """The samples of pairs of answers, by the names of `digests`."""
        parts = [(f"the tokens of {each.name}", each.packed) for each in self.sources]
        parts += [(f"the tokens of {each.name} to validate on", each.packed) for each in self.sets]
        return {name: packed for name, packed in parts if isinstance(packed, PackedPairs)}

    def digests(self) -> dict[str, str]:
        """Digests of the tokens of every source and set, by name, from their shards' headers."""
        parts = [(f"the tokens of {each.name}", each.train) for each in self.sources]
        parts += [(f"the tokens of {each.name} to validate on", each.tokens) for each in self.sets]
        return {name: tokens.digest for name, tokens in parts}

    def __str__(self) -> str:
        """Describes the text in one line."""
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
        return (
            f"{files} files{of}{left_out}, {train:,} tokens to learn from{sources}, {val:,} held out{sets}"
            f"{self._of_conversations()}"
        )

    def _of_conversations(self) -> str:
        """Says what the conversations lost."""
        every = [*(each.packed for each in self.sources), *(each.packed for each in self.sets)]
        packed = [each for each in every if each is not None]
        if not packed:
            return ""
        lost = {
            "without a turn to learn were left out": sum(
                source.text.facts.empty or 0 for source in self.sources
            ),
            "too long for train.seq_len lost their end": sum(each.cut for each in packed),
            "without a token to learn before that end were left out": sum(each.left_out for each in packed),
        }
        said = "".join(f"; {count:,} {what}" for what, count in lost.items() if count)
        taken, samples = sum(each.conversations for each in packed), sum(map(len, packed))
        if self.pairs:
            return f"; {taken:,} pairs of answers in {samples:,} samples{said}"
        targets = sum(int(each.targets.sum()) for each in packed)
        return f"; {taken:,} conversations in {samples:,} samples with {targets:,} targets{said}"


def cache_folder(data: Data) -> Path:
    """Returns the folder of cached tokens."""
    return Path(data.cache) if data.cache else token_cache.default_folder()


def wanted(data: Data) -> list[Wanted]:
    """Returns the text to open. With data.weights each of data.paths is a source, else all text is one and
    each folder of tokens another. Raises ConfigError if two validation sets have one name."""
    for path in (*data.paths, *data.val_paths):
        if tokenizing.is_unfinished(Path(path)):
            raise ConfigError(
                f"data.paths: the tokens in {path} are not finished; repeat the same call of `python -m "
                "pyruntime tokenize`."
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
                f"data.paths and data.val_paths: two of them are called {name}, which names their validation "
                "losses; rename one."
            )
    return found


def _name_of_path(path: str) -> str:
    return Path(path).resolve().stem or path


def build(
    data: Data, tokenizer: Tokenizer, say: Callable[[str], None] = lambda text: None
) -> list[Tokenized]:
    """Returns the tokens of all text, from the cache or written there. One process does this; then all call
    `open_corpus`.

    Calls `say` before it tokenizes. Raises ConfigError if nothing can be read, a line of a .jsonl file holds
    no text or none has any, the tokens of a folder are another tokenizer's, or the cache cannot be written.
    """
    texts = [_found(each, tokenizer) if each.is_tokens else _built(each, data, tokenizer, say)
             for each in wanted(data)]  # fmt: skip
    is_asked = data.targets != "all" or data.chat_template
    if is_asked and not any(each.facts.targets and not each.wanted.is_tokens for each in texts):
        raise ConfigError(
            "data.targets and data.chat_template say how conversations become tokens, but data.paths names "
            "no conversations that are not tokens yet; leave them out, or name the files."
        )
    return texts


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
    sources, skipped = survey(each.paths, data.pattern, data.field)
    encoder = tokenizing.encoder_of(sources, tokenizer, data.chat_template, data.targets)
    cache, name = cache_folder(data), tokenizing.name_of(sources, encoder, data.field)

    def write(folder: Path) -> None:
        size = sum(source.size for source in sources)
        say(f"text   {size / 1e6:,.1f} MB become tokens, which are kept in {cache}")
        tokenizing.write(folder, sources, skipped, encoder, data.field)

    try:
        folder = token_cache.entry(cache, name, write)
    except OSError as error:
        raise ConfigError(
            f"data.cache: {error.filename or cache} cannot be written: {error.strerror}; name another folder "
            "for tokens."
        ) from error
    # The cached tokens may come from another folder with the same text.
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
    """Opens the corpus that `build` found. Raises ConfigError if the text to learn from or to validate on is
    shorter than one sequence, or a file of tokens is damaged."""
    sources, sets = [], []
    for text in texts:
        shards, total = _shards(text, tokenizer, data.verify), text.facts.tokens
        name = text.wanted.name
        if text.facts.targets is not None:
            train, val = _conversations(text, Tokens(shards, 0, total), shards, data.val_fraction, seq_len)
            sources += [] if train is None else [train]
            sets += [] if val is None else [val]
            continue
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


def _conversations(
    text: Tokenized, whole: Tokens, shards: Sequence[TokenShard], val_fraction: float, seq_len: int
) -> tuple[TextSource | None, ValidationSet | None]:
    """Returns the source and the validation set that some conversations are, cut between two of them.

    Raises ConfigError if nothing can be learned on a side."""
    name, paths = text.wanted.name, ", ".join(text.wanted.paths)
    packed = _packed_pairs if text.facts.pairs else _packed
    if text.wanted.is_val:
        return None, ValidationSet(name, whole, packed(whole, seq_len, paths))
    if not val_fraction:
        return TextSource(name, whole, text, packed(whole, seq_len, paths)), None
    ends, _ = whole.conversations()
    ends = ends[1::2] if text.facts.pairs else ends
    inner = ends[ends < len(whole)]
    if not len(inner):
        what = "pairs" if text.facts.pairs else "conversations"
        raise ConfigError(
            f"data.val_fraction={val_fraction:g} needs at least two {what}, but {paths} has one; give "
            "more, or others in data.val_paths with data.val_fraction=0."
        )
    split = int(inner[np.argmin(np.abs(inner - round(len(whole) * (1 - val_fraction))))])
    train, val = Tokens(shards, 0, split), Tokens(shards, split, len(whole))
    return (
        TextSource(name, train, text, packed(train, seq_len, paths)),
        ValidationSet(name, val, packed(val, seq_len, f"the held-out part of {paths}")),
    )


def _packed(tokens: Tokens, seq_len: int, what: str) -> PackedConversations:
    packed = PackedConversations(tokens, seq_len)
    if not len(packed):
        raise ConfigError(
            f"train.seq_len={seq_len} cuts all {packed.left_out} conversations of {what} before the first "
            "token to learn; give a longer train.seq_len."
        )
    return packed


def _packed_pairs(tokens: Tokens, seq_len: int, what: str) -> PackedPairs:
    packed = PackedPairs(tokens, seq_len)
    if not len(packed):
        raise ConfigError(
            f"train.seq_len={seq_len} holds both answers of a pair, and cuts all {packed.left_out} pairs of "
            f"{what} before the first token to learn of one; give a longer train.seq_len."
        )
    return packed


def _check_length(what: str, tokens: int, seq_len: int) -> None:
    if tokens <= seq_len:
        raise ConfigError(
            f"train.seq_len={seq_len} needs at least {seq_len + 1} tokens, but {what} are fewer; give more "
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
            if shard.index.shape[0] != (2 if text.facts.targets is None else 3):
                raise DamagedShard("it has no ends of documents")
        except DamagedShard as error:
            raise _damaged(text.folder, f"{path.name}: {error}") from error
        found.append(shard)
    return found


def open_everywhere(
    config: RunConfig, tokenizer: Tokenizer, group: dist.ProcessGroup, say: Callable[[str], None]
) -> Corpus:
    """Opens the corpus on every rank of `group`. Rank 0 tokenizes what the cache lacks. Then, on each host
    that does not see what rank 0 wrote, because its cache is on a disk of its own, its first rank does the
    same. `say` prints a line on rank 0. Raises the same ConfigError on every rank."""
    data, seq_len = config.data, config.train.seq_len

    def build_first() -> list[Tokenized]:
        texts = build(data, tokenizer, say)
        check_pairs(config, texts)
        open_corpus(data, texts, tokenizer, seq_len)  # so that rank 0 refuses a text that is too short
        return texts

    doing = "Building the corpus"
    texts = on_rank_0(group, doing, build_first, list[Tokenized])
    check_pairs(config, texts)
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


def check_pairs(config: RunConfig, texts: Sequence[Tokenized]) -> None:
    """Raises ConfigError unless all text is pairs of answers if the run learns preferences, else none."""
    for text in texts:
        what = ", ".join(text.wanted.paths) or text.wanted.name
        if text.facts.pairs and not config.dpo.beta:
            raise ConfigError(
                f"data.paths: {what} holds pairs of answers (chosen, rejected), which are learned by DPO; "
                "set dpo.beta, such as 0.1, or give conversations."
            )
        if config.dpo.beta and not text.facts.pairs:
            raise ConfigError(
                f"dpo.beta={config.dpo.beta:g} learns from pairs of answers, and {what} holds none; give "
                'files whose lines have "chosen" and "rejected", or leave out dpo.beta.'
            )


def _as_seen_here(text: Tokenized, data: Data) -> Tokenized:
    """Returns that text with its folder on this host."""
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
        raise ConfigError(f"data.paths: host {host} has another text than rank 0's; give all the same.")


def host_name() -> str:
    """Returns the name and the boot id of this machine: the same for ranks that see the same files."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot}"
