"""Tokenizes files into shards, in parallel, in memory that does not grow with them.

A folder of tokens holds tokens-00000.bin, tokens-00001.bin, .. (`token_shards`), the tokenizer, and
corpus.json, which is written last: without it the folder is not finished.

1. Each unit of work becomes a run: the tokens of its documents in file order, and an index of where each is.
2. A hash of its text assigns each document to a shard, and each shard is written from all runs, in the order
   of that hash. So the order is random, the same on every machine and with any number of processes, and
   copies of a document are adjacent.

A later call with the same input reuses complete runs and shards of an interrupted one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pyruntime.choices import LearnedTurns
from pyruntime.train import disk
from pyruntime.train.data.chat_template import BadConversation
from pyruntime.train.data.conversations import ChatEncoder, chat_encoder
from pyruntime.train.data.documents import (
    Document,
    SourceFile,
    Unit,
    check_unchanged,
    documents,
    place_of,
    units,
)
from pyruntime.train.data.preferences import PairEncoder
from pyruntime.train.data.token_shards import PARTIAL, DamagedShard, ShardWriter, TokenShard, dtype_of
from pyruntime.train.data.tokenizer import CONFIG_NAME, FACTS_FILE, FILE_NAME, Tokenizer
from pyruntime.train.data.workers import Workers
from pyruntime.train.disk import LOCK
from pyruntime.train.errors import ConfigError

FORMAT = 4
"""Format of a folder, in FACTS_FILE; it is part of the name in the cache."""
RUNS_FOLDER, PLAN_FILE = "runs", "plan"
NEW_FACTS = FACTS_FILE + ".partial"
OUR_SHARD = re.compile(rf"tokens-[0-9]{{5,}}\.bin(\.[0-9a-f]{{32}}{re.escape(PARTIAL)})?")
"""The name of a shard, or of one that is being written."""
OUR_RUN = re.compile(rf"[0-9]{{6,}}\.run(\.[0-9a-f]{{32}}{re.escape(PARTIAL)})?")
BATCH_BYTES = 2**22
"""Bytes of text that the tokenizer gets at a time, in pieces. It takes about a hundred times as much
memory."""
SMALL_BYTES = 2**23
"""Bytes of text up to which this process tokenizes, on the threads of the tokenizer's library: starting
processes would take longer."""
SHARD_TOKENS = 2**27
"""Approximate tokens of a shard."""
CONTINUES = 2**62
"""Added to the place of a part that is not the last of its document."""
OPEN_RUNS = 128
"""Files that are kept open while a shard is written."""
BLOCK_TOKENS = 2**18


@dataclasses.dataclass(frozen=True)
class CorpusFacts:
    """The content of corpus.json in a folder of tokens."""

    name: str
    """Hash of all text and of the tokenizer."""
    fingerprint: str
    """Fingerprint of the tokenizer, hexadecimal."""
    vocab_size: int
    tokens: int
    documents: int
    bytes: int
    """Bytes of text, separators included."""
    files: int
    skipped: int
    """Files of folders left out because they hold a zero byte."""
    shards: tuple[int, ...]
    """Tokens of each shard."""
    format: int = FORMAT
    targets: int | None = None
    """Tokens of conversations that are learned; None for text, all of whose tokens are."""
    empty: int | None = None
    """Conversations, or pairs, that were left out because they have no turn to learn."""
    pairs: bool | None = None
    """True for pairs of answers, which are stored as two conversations each."""


def shard_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


TextEncoder = Tokenizer | ChatEncoder
"""An encoder makes the tokens of text, or of conversations."""


def encoder_of(
    sources: Sequence[SourceFile], tokenizer: Tokenizer, template: str, learned: LearnedTurns
) -> TextEncoder:
    """Returns what makes the tokens of these files. template: file of a chat template; empty: that of the
    tokenizer's folder. Raises ConfigError if conversations have no template."""
    if not any(source.is_chat for source in sources):
        return tokenizer
    kind = PairEncoder if any(source.is_pairs for source in sources) else ChatEncoder
    return chat_encoder(tokenizer, template, learned, kind)


def name_of(sources: Iterable[SourceFile], tokenizer: TextEncoder, field: str) -> str:
    """Returns 32 hexadecimal digits, the same for the same text, tokenizer and chat template, wherever the
    files are."""
    content = hashlib.blake2b(bytes([FORMAT]) + tokenizer.fingerprint, digest_size=16)
    sources = list(sources)
    if isinstance(tokenizer, ChatEncoder):
        content.update(tokenizer.recipe)
    elif any(source.kind for source in sources):
        content.update(field.encode())
    for digest in sorted(bytes([source.kind]) + source.digest for source in sources):
        content.update(digest)
    return content.hexdigest()


@dataclasses.dataclass(frozen=True)
class Task:
    """A run or a shard to write."""

    number: int
    shards: int = 0
    """Number of shards, once all runs are written; 0: the task is a run."""


@dataclasses.dataclass(frozen=True)
class Done:
    """Number of tokens in a finished run or shard."""

    task: Task
    tokens: int


@dataclasses.dataclass(frozen=True)
class Work:
    """The state that the processes share; each calls it with its tasks."""

    sources: tuple[SourceFile, ...]
    units: tuple[Unit, ...]
    field: str
    tokenizer: TextEncoder
    folder: Path

    def __call__(self, task: Task) -> Done:
        """Writes that run or shard. Raises ConfigError for text that cannot be read, OSError,
        DamagedShard."""
        return Done(task, self._write_shard(task) if task.shards else self._write_run(task.number))

    def run(self, number: int) -> Path:
        return self.folder / RUNS_FOLDER / f"{number:06d}.run"

    def shard(self, number: int) -> Path:
        return self.folder / shard_name(number)

    def _write_run(self, number: int) -> int:
        """Returns its tokens. The index has a row for each document or part, sorted by hash, and the columns
        hash, source, place, first token, tokens, bytes; and of a conversation targets."""
        rows: list[tuple[int, ...]] = []
        separator = [] if self.tokenizer.separator is None else [self.tokenizer.separator]
        begin = np.asarray(self.tokenizer.begin, dtype=np.uint32)
        with self._writer(self.run(number)) as out:
            found = documents(self.sources, self.units[number], self.field)
            first, size = 0, 0
            for document, is_last, ids, length in self._encoded(found):
                if document.is_begin and first == out.tokens and len(begin):
                    out.write(begin)
                out.write(ids)
                size += length
                if not is_last:
                    continue
                place = document.place
                if document.is_end:
                    out.write(np.asarray(separator, dtype=np.uint32))
                    size += len(separator)
                else:
                    place += CONTINUES
                digest = int.from_bytes(document.digest[:8], "big") >> 1  # below 2**63
                targets = (int((ids & 1).sum()),) if self.is_chat else ()
                rows.append((digest, document.source, place, first, out.tokens - first, size, *targets))
                first, size = out.tokens, 0
            index = np.array(rows, dtype=np.int64).reshape(-1, 6 + self.is_chat)
            out.publish(list(index[np.argsort(index[:, 0], kind="stable")].T))
            return out.tokens

    def _write_shard(self, task: Task) -> int:
        low, high = (-(-(each * 2**63) // task.shards) for each in (task.number, task.number + 1))
        parts = []
        for run in range(len(self.units)):
            index = TokenShard.open(self.run(run)).index
            begin = np.searchsorted(index[0], np.int64(low))
            end = index.shape[1] if high == 2**63 else np.searchsorted(index[0], np.int64(high))
            parts.append(np.vstack([np.full((1, end - begin), run), index[:, begin:end]]))
        runs, digest, source, place, first, tokens, *counts = np.hstack(parts)
        order = np.lexsort((place % CONTINUES, source, digest))
        with self._writer(self.shard(task.number)) as out:
            opened: dict[int, np.ndarray] = {}
            for row in order:
                run = int(runs[row])
                if run not in opened:
                    if len(opened) >= OPEN_RUNS:
                        opened.clear()
                    opened[run] = TokenShard.open(self.run(run)).tokens
                behind = int(first[row] + tokens[row])
                for at in range(int(first[row]), behind, BLOCK_TOKENS):
                    out.write(opened[run][at : min(behind, at + BLOCK_TOKENS)])
            is_end = place[order] < CONTINUES
            out.publish([np.cumsum(each[order])[is_end] for each in (tokens, *counts)])
            return out.tokens

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations."""
        return isinstance(self.tokenizer, ChatEncoder)

    @property
    def of_each(self) -> int:
        """Rows of the index for a document."""
        return self.tokenizer.of_each if isinstance(self.tokenizer, ChatEncoder) else 1

    def _writer(self, path: Path) -> ShardWriter:
        values = self.tokenizer.vocab_size << self.is_chat
        return ShardWriter(path, dtype_of(values), self.tokenizer.fingerprint)

    def _encoded(self, found: Iterable[Document]) -> Iterator[tuple[Document, bool, np.ndarray, int]]:
        """Yields (document, whether it is its last, what a shard stores, bytes) for every piece, in order."""
        for batch in _batches(found):
            pieces = [piece for *_, piece in batch]
            if isinstance(self.tokenizer, ChatEncoder):
                try:
                    encoded = self.tokenizer.encode(pieces)
                except BadConversation as error:
                    document = batch[error.index][0]
                    where = place_of(self.sources[document.source], document.place)
                    raise ConfigError(f"{where}: {error}.") from None
            else:
                sizes = [len(piece) for piece in pieces]
                encoded = list(zip(self.tokenizer.encode_batch(pieces), sizes, strict=True))
            for at, (document, is_last, _) in enumerate(batch):
                for ids, size in encoded[self.of_each * at : self.of_each * (at + 1)]:
                    yield document, is_last, ids, size


def _batches(found: Iterable[Document]) -> Iterator[list[tuple[Document, bool, bytes]]]:
    batch: list[tuple[Document, bool, bytes]] = []
    size = 0
    for document in found:
        before: bytes | None = None
        for piece in document.pieces:
            if before is not None:
                batch.append((document, False, before))
            before = piece
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], len(piece)
        if before is not None:
            batch.append((document, True, before))
    if batch:
        yield batch


Report = Callable[[int, int], None]
"""Called with the bytes of files tokenized since the last call, and their tokens."""


def write(
    folder: Path,
    sources: Sequence[SourceFile],
    skipped: int,
    tokenizer: TextEncoder,
    field: str,
    *,
    workers: int = 0,
    report: Report = lambda size, tokens: None,
) -> CorpusFacts:
    """Fills `folder` with the tokens of all `sources`, continuing where an interrupted call ended.

    field: key of the text in objects, or its column in tables. workers: processes; 0: one per core, and none
    if the text is short. skipped: files that were left out, for corpus.json.

    Raises ConfigError if text cannot be read, is missing, or changes meanwhile; OSError if the folder cannot
    be written. Complete runs and shards stay for the next call.
    """
    plan, name = tuple(units(sources)), name_of(sources, tokenizer, field)
    work = Work(tuple(sources), plan, field, tokenizer, folder)
    _prepare(folder, _digest_of_plan(name, sources, plan))
    size = sum(source.size for source in sources)

    def ran(done: Done) -> None:
        report(sum(span.size for span in plan[done.task.number]), done.tokens)

    count = 0 if size <= SMALL_BYTES else workers or len(os.sched_getaffinity(0))
    try:
        with Workers(min(count, len(plan)), work) as pool:
            runs = [Task(number) for number in range(len(plan))]
            tokens = _finish(pool, runs, [work.run(task.number) for task in runs], ran)
            if not tokens:
                names = ", ".join(str(source.path) for source in sources[:3])
                lacks = "holds text"
                if work.is_chat:
                    lacks = "has a turn to learn, which is one of the assistant (gpt) and not of weight 0"
                raise ConfigError(f"data.paths: no line of {names} {lacks}.")
            number = -(-tokens // SHARD_TOKENS)
            shards = [Task(each, number) for each in range(number)]
            _finish(pool, shards, [work.shard(task.number) for task in shards])
    except ConfigError:
        check_unchanged(sources)
        raise
    except DamagedShard as error:
        raise ConfigError(f"{folder} was changed while tokens were written there; start again.") from error
    check_unchanged(sources)
    tokenizer.save(folder)
    facts = _facts(name, work, number, tokenizer, skipped)
    partial = folder / NEW_FACTS
    content = {key: value for key, value in dataclasses.asdict(facts).items() if value is not None}
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    disk.flush(partial)
    partial.replace(folder / FACTS_FILE)
    disk.flush(folder)
    shutil.rmtree(folder / RUNS_FOLDER)
    for path in _shards(folder):
        if path.name.endswith(PARTIAL):  # left by a killed call
            path.unlink()
    return facts


def _digest_of_plan(name: str, sources: Sequence[SourceFile], plan: Sequence[Unit]) -> str:
    """Hashes everything that decides the content of each run."""
    order = b"".join(source.digest for source in sources)
    return hashlib.blake2b(f"{name} {plan}".encode() + order, digest_size=16).hexdigest()


def _prepare(folder: Path, plan: str) -> None:
    """Removes all runs and shards of another plan from the folder. The plan's file is written first and
    removed last: it marks the other files as ours."""
    runs = folder / RUNS_FOLDER
    there = runs / PLAN_FILE
    if there.is_file():
        with contextlib.suppress(OSError):
            if there.read_text(encoding="utf-8") == plan:
                return
        for path in _shards(folder):
            path.unlink()
        for path in runs.iterdir():
            if OUR_RUN.fullmatch(path.name):
                path.unlink()
    runs.mkdir(parents=True, exist_ok=True)
    new = runs / (PLAN_FILE + PARTIAL)
    new.write_text(plan, encoding="utf-8")
    disk.flush(new)
    new.replace(there)


def _shards(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if OUR_SHARD.fullmatch(path.name)]


def is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing except what an interrupted call left."""
    runs = folder / RUNS_FOLDER
    names = {path.name for path in folder.iterdir()}
    in_runs = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
    if PLAN_FILE not in in_runs:  # the call ended before it wrote one
        return names <= {RUNS_FOLDER, LOCK} and in_runs <= {PLAN_FILE + PARTIAL}
    plan = (runs / PLAN_FILE).read_bytes()
    known = {RUNS_FOLDER, LOCK, FILE_NAME, CONFIG_NAME, NEW_FACTS}
    return (
        re.fullmatch(rb"[0-9a-f]{32}", plan) is not None
        and all(name in known or OUR_SHARD.fullmatch(name) for name in names)
        and all(name.startswith(PLAN_FILE) or OUR_RUN.fullmatch(name) for name in in_runs)
    )


def _finish(
    pool: Workers[Task, Done],
    tasks: Sequence[Task],
    paths: Sequence[Path],
    report: Callable[[Done], None] = lambda done: None,
) -> int:
    """Does the tasks without a complete file; `report` is called for all. Returns the tokens of all."""
    tokens, left = 0, []
    for task, path in zip(tasks, paths, strict=True):
        try:
            found = TokenShard.open(path)
            found.check()
        except DamagedShard:
            left.append(task)
            continue
        tokens += len(found.tokens)
        report(Done(task, len(found.tokens)))
    for done in pool.map(left):
        tokens += done.tokens
        report(done)
    return tokens


def _facts(name: str, work: Work, shards: int, tokenizer: TextEncoder, skipped: int) -> CorpusFacts:
    found = [TokenShard.open(work.shard(number)) for number in range(shards)]
    return CorpusFacts(
        name,
        tokenizer.fingerprint.hex(),
        tokenizer.vocab_size,
        sum(len(each.tokens) for each in found),
        sum(each.index.shape[1] for each in found) // work.of_each,
        sum(int(each.index[1, -1]) for each in found if each.index.size),
        len(work.sources),
        skipped,
        tuple(len(each.tokens) for each in found),
        targets=sum(int(each.index[2, -1]) for each in found if each.index.size) if work.is_chat else None,
        empty=sum(int((np.diff(each.index[0], prepend=0) == 0).sum()) for each in found) // work.of_each
        if work.is_chat
        else None,
        pairs=True if work.of_each == 2 else None,
    )


def read_facts(folder: Path) -> CorpusFacts:
    """Returns the facts of a folder of tokens. Raises ConfigError if they are damaged."""
    try:
        facts = CorpusFacts(**json.loads((folder / FACTS_FILE).read_text(encoding="utf-8")))
        numbers = [facts.vocab_size, facts.tokens, facts.documents, facts.bytes, facts.files, facts.skipped]
        whole = isinstance(facts.name, str) and isinstance(facts.fingerprint, str)
        whole = whole and all(type(each) is int and each >= 0 for each in [*numbers, *facts.shards])
        whole = whole and (facts.targets is None or (type(facts.targets) is int and facts.targets > 0))
        whole = whole and facts.tokens == sum(facts.shards) > 0 and type(facts.format) is int
        facts = dataclasses.replace(facts, shards=tuple(facts.shards))
    except (OSError, ValueError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ConfigError(f"{folder / FACTS_FILE} is damaged: it does not say what tokens there are.")
    if facts.format != FORMAT:
        raise ConfigError(
            f"{folder} holds tokens in format {facts.format}, and this program reads {FORMAT}; tokenize "
            "the text again."
        )
    return facts


def is_tokens(path: Path) -> bool:
    """Whether `path` is a folder of tokens."""
    return (path / FACTS_FILE).is_file()


def is_unfinished(path: Path) -> bool:
    """Whether `path` is a folder with unfinished tokens."""
    return (path / RUNS_FOLDER / PLAN_FILE).is_file() and not is_tokens(path)
