"""`python -m pyruntime tokenize`: turns text into a folder of tokens for runs to read."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import tyro

from pyruntime.choices import LearnedTurns
from pyruntime.cli.arguments import check_at_least, parse
from pyruntime.train.data import tokenizing
from pyruntime.train.data.chat_template import BadConversation
from pyruntime.train.data.conversations import ChatEncoder
from pyruntime.train.data.documents import documents, place_of, survey, units
from pyruntime.train.data.preferences import ANSWERS
from pyruntime.train.data.tokenizer import Tokenizer, check_named, open_tokenizer
from pyruntime.train.disk import in_use
from pyruntime.train.errors import ConfigError
from pyruntime.train.progress import bar, clock
from pyruntime.train.signals import Stopped

DESCRIPTION = """Turns text into a folder of tokens, once, for any number of runs: train --data.paths FOLDER.
It uses all cores, and its memory does not grow with the text. An interrupted command continues when it is
started again."""
LINE_EVERY_S = 10.0
"""Seconds between two progress lines if the output is not a terminal."""


@dataclasses.dataclass(frozen=True)
class TokenizeOptions:
    paths: tuple[str, ...]
    """Files and folders of text, folders recursively. A document is a line of a .jsonl or .ndjson file, a row
    of a .parquet or .arrow file, or the whole of any other file. Lines and rows may be conversations
    (docs/how-to/finetune.md)."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = ""
    """Folder to write the tokens to."""
    pattern: str = "*"
    """Shell pattern of the file names to read in folders."""
    field: str = "text"
    """Key of a line's object, or column of a table, that has the text."""
    tokenizer: str = "bytes"
    """"bytes" (one token a byte), or the path of a tokenizer.json or of a folder with a tokenizer."""
    targets: LearnedTurns = "all"
    """Turns of a conversation whose tokens are learned."""
    chat_template: str = ""
    """File of the chat template (Jinja) that renders conversations; empty: that in the tokenizer's folder."""
    show: int = 0
    """Print the tokens of so many documents, those to learn in colour or between « and », and write
    nothing."""
    workers: int = 0
    """Processes; 0: one for each core."""


def main(argv: list[str]) -> None:
    options = parse(TokenizeOptions, argv, "tokenize", DESCRIPTION)
    check_at_least(options, 0, "workers", "show")
    if not (options.out or options.show):
        raise ConfigError("tokenize needs a folder to write to; name one, or look at tokens with --show 3.")
    for path in options.paths:
        if not (os.path.isfile(path) or os.path.isdir(path)):
            raise ConfigError(f"--paths: {path} is neither a file nor a folder.")
    check_named("--tokenizer", options.tokenizer)
    tokenizer = open_tokenizer(options.tokenizer)
    if options.show:
        with _in_words_of_options():
            show(options, tokenizer)
        return
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held, _in_words_of_options():
            in_use(out, held, "tokenize")
            facts, is_new = _write(options, tokenizer, out)
    except Stopped as stopped:
        raise Stopped(
            stopped.signum,
            f"while tokens were made; {out} keeps the finished part, and the same command continues.",
        ) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or out} cannot be written: {error.strerror}.") from error
    what, learned = "documents", ""
    if facts.targets is not None:
        what, learned = "conversations", f", {facts.targets:,} of them to learn,"
        what = "pairs of answers" if facts.pairs else what
        if facts.empty:
            learned += f" {facts.empty:,} {what} without a turn to learn left out,"
    print(
        f"{out}: {facts.tokens:,} tokens of {facts.documents - (facts.empty or 0):,} {what} "
        f"({facts.bytes / 1e6:,.1f} MB){learned} in {len(facts.shards)} "
        f"shard(s){'' if is_new else ', made earlier'}. Train on them with --data.paths {out}"
    )


@contextlib.contextmanager
def _in_words_of_options() -> Iterator[None]:
    """Names the options of this command in the errors of the trainer's files."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            re.sub(r"\bdata\.(paths|field|targets|chat_template)\b", r"--\1", str(error))
        ) from error


def show(options: TokenizeOptions, tokenizer: Tokenizer) -> None:
    """Prints the tokens of the first documents, and which of them are learned."""
    sources, _ = survey(options.paths, options.pattern, options.field)
    encoder = tokenizing.encoder_of(sources, tokenizer, options.chat_template, options.targets)
    found = (each for unit in units(sources) for each in documents(sources, unit, options.field))
    for document in itertools.islice(found, options.show):
        where = place_of(sources[document.source], document.place)
        if isinstance(encoder, ChatEncoder):
            try:
                stored = [each for each, _ in encoder.encode(list(document.pieces))]
            except BadConversation as error:
                raise ConfigError(f"{where}: {error}.") from None
            parts = [((each >> 1).tolist(), (each & 1).astype(bool).tolist()) for each in stored]
        else:
            ids = [token for piece in document.pieces for token in tokenizer.encode(piece).tolist()]
            parts = [(ids, [True] * len(ids))]
        names = [f", {name}" for name in ANSWERS] if len(parts) == len(ANSWERS) else [""]
        for name, (ids, learned) in zip(names, parts, strict=True):
            print(f"{where.removeprefix('data.paths: ')}{name}: {len(ids)} tokens, {sum(learned)} to learn")
            if ids:
                print(_in_colour(tokenizer, ids, learned) + "\n")


def _in_colour(tokenizer: Tokenizer, ids: Sequence[int], learned: Sequence[bool]) -> str:
    """Returns the tokens, · between two; the learned ones green, or between « and »."""
    begin, end = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("«", "»")
    found = []
    for is_learned, run in itertools.groupby(zip(ids, learned, strict=True), key=lambda each: each[1]):
        text = "·".join(tokenizer.decode([token]).replace("\n", "⏎\n") for token, _ in run)
        found.append(begin + text + end if is_learned else text)
    return "·".join(found)


def _write(options: TokenizeOptions, tokenizer: Tokenizer, out: Path) -> tuple[tokenizing.CorpusFacts, bool]:
    sources, skipped = survey(options.paths, options.pattern, options.field)
    encoder = tokenizing.encoder_of(sources, tokenizer, options.chat_template, options.targets)
    if encoder is tokenizer and (options.targets != "all" or options.chat_template):
        raise ConfigError("--targets and --chat_template are for conversations, and --paths holds none.")
    if tokenizing.is_tokens(out):
        facts = tokenizing.read_facts(out)
        if facts.name != tokenizing.name_of(sources, encoder, options.field):
            raise ConfigError(
                f"{out} holds tokens of another text or tokenizer; name another folder, or remove {out}."
            )
        return facts, False
    if not tokenizing.is_ours(out):
        raise ConfigError(f"{out} holds files that are not tokens; name a new folder.")
    progress = TokenizeProgress(sum(source.size for source in sources))
    facts = tokenizing.write(
        out,
        sources,
        skipped,
        encoder,
        options.field,
        workers=options.workers,
        report=progress.add,
    )
    progress.close()
    return facts, True


class TokenizeProgress:
    """The progress of tokenizing: a bar that is rewritten on a terminal, else a line every LINE_EVERY_S.

    size: bytes of all files. For tables, which are compressed, the bar runs ahead.
    """

    def __init__(self, size: int, stream: TextIO = sys.stderr):
        self._size, self._stream = size, stream
        self._started = self._shown = time.monotonic()
        self._done = self._tokens = 0
        self._is_bar = stream.isatty()

    def add(self, size: int, tokens: int) -> None:
        """Adds `size` bytes that became `tokens` tokens."""
        self._done, self._tokens = self._done + size, self._tokens + tokens
        now = time.monotonic()
        if self._is_bar or now - self._shown >= LINE_EVERY_S:
            self._shown = now
            self._stream.write(f"\r\x1b[K{self}" if self._is_bar else f"{self}\n")
            self._stream.flush()

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        share = min(self._done / self._size, 1.0)
        left = seconds * (1 - share) / share if share else 0.0
        return (
            f"{bar(share)} {share:.0%} {self._done / 1e6:,.0f} MB "
            f"{self._tokens / 1e6:,.1f} M tokens {self._done / 1e6 / seconds:,.1f} MB/s ETA {clock(left)}"
        )

    def close(self) -> None:
        """Ends the line of a bar."""
        if self._is_bar:
            self._stream.write("\n")
            self._stream.flush()
