"""`python -m pyruntime tokenize`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated, TextIO

import tyro

from pyruntime.cli.arguments import check_at_least, parse
from pyruntime.train.data import tokenizing
from pyruntime.train.data.documents import survey
from pyruntime.train.data.tokenizer import Tokenizer, check_named, open_tokenizer
from pyruntime.train.disk import in_use
from pyruntime.train.errors import ConfigError
from pyruntime.train.progress import bar, clock
from pyruntime.train.signals import Stopped

DESCRIPTION = """Makes text into a folder of tokens, once, for any number of runs: train --data.paths FOLDER.
All cores take part, and memory does not grow with the text. What was interrupted goes on where it ended, when
the same is asked for again."""
LINE_EVERY_S = 10.0
"""Seconds between two lines about how far it is, where there is no terminal."""


@dataclasses.dataclass(frozen=True)
class TokenizeOptions:
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the tokens, which is made."""
    paths: tuple[str, ...]
    """Files and folders of text, folders recursively. Of a .jsonl or .ndjson file every line is a document,
    of a .parquet or .arrow file every row, of others the whole file."""
    pattern: str = "*"
    """Only files of a folder whose name matches this shell pattern are read."""
    field: str = "text"
    """Key of a line's object, or column of a table, in which the text is."""
    tokenizer: str = "bytes"
    """"bytes" (one token a byte), or the path of a tokenizer.json, or of a folder with a tokenizer."""
    workers: int = 0
    """Processes; 0: one for each core."""


def main(argv: list[str]) -> None:
    options = parse(TokenizeOptions, argv, "tokenize", DESCRIPTION)
    check_at_least(options, 0, "workers")
    for path in options.paths:
        if not (os.path.isfile(path) or os.path.isdir(path)):
            raise ConfigError(f"--paths: {path} is no file and no folder.")
    check_named("--tokenizer", options.tokenizer)
    tokenizer = open_tokenizer(options.tokenizer)
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            in_use(out, held, "tokenize")
            facts, is_new = _write(options, tokenizer, out)
    except ConfigError as error:
        words = str(error).replace("data.paths", "--paths").replace("data.field", "--field")
        raise ConfigError(words) from error
    except Stopped as stopped:
        raise Stopped(
            stopped.signum,
            f"while tokens were made; what is whole stays in {out}, and the same command goes on.",
        ) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or out} cannot be written: {error.strerror}.") from error
    print(
        f"{out}: {facts.tokens:,} tokens of {facts.documents:,} documents ({facts.bytes / 1e6:,.1f} MB) in "
        f"{len(facts.shards)} shard(s){'' if is_new else ', which were there'}. Train on them with "
        f"--data.paths {out}"
    )


def _write(options: TokenizeOptions, tokenizer: Tokenizer, out: Path) -> tuple[tokenizing.CorpusFacts, bool]:
    sources, skipped = survey(options.paths, options.pattern)
    if tokenizing.is_tokens(out):
        facts = tokenizing.read_facts(out)
        if facts.name != tokenizing.name_of(sources, tokenizer, options.field):
            raise ConfigError(
                f"{out} holds the tokens of another text or tokenizer; name another folder, or remove it."
            )
        return facts, False
    if not tokenizing.is_ours(out):
        raise ConfigError(f"{out} holds other files than tokens; name a folder of its own.")
    progress = TokenizeProgress(sum(source.size for source in sources))
    facts = tokenizing.write(
        out,
        sources,
        skipped,
        tokenizer,
        options.field,
        workers=options.workers,
        report=progress.add,
    )
    progress.close()
    return facts, True


class TokenizeProgress:
    """How much text has become tokens: a bar that is rewritten on a terminal, elsewhere a line now and then.

    size: bytes of all files. Of tables, which are compressed, the bar runs ahead.
    """

    def __init__(self, size: int, stream: TextIO = sys.stderr):
        self._size, self._stream = size, stream
        self._started = self._shown = time.monotonic()
        self._done = self._tokens = 0
        self._is_bar = stream.isatty()

    def add(self, size: int, tokens: int) -> None:
        """So many more bytes became so many tokens."""
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
