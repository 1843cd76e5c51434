"""Answers of a model to a person, by its chat template (`python -m pyruntime generate --chat`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pyruntime.train.data.chat_template import BadConversation, ChatTemplate, find_template
from pyruntime.train.data.tokenizer import JsonTokenizer, Tokenizer
from pyruntime.train.errors import ConfigError


class Chat:
    """A conversation with a model. Raises ConfigError if the model's folder has no template."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        specials = tokenizer.special_tokens if isinstance(tokenizer, JsonTokenizer) else ()
        found = find_template(folder, "", specials)
        if found is None:
            raise ConfigError(
                f"--chat: {folder} holds no chat template; copy the model's chat_template.jinja there, or "
                "leave out --chat."
            )
        self._template: ChatTemplate = found
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        try:
            self._ending = found.ending()
        except BadConversation as error:
            raise ConfigError(f"--chat: {error}.") from error

    def ask(self, question: str) -> list[int]:
        """Adds a person's turn. Returns the tokens of the conversation up to where the answer begins."""
        self._messages.append({"role": "user", "content": question})
        try:
            text = self._template.prompt(self._messages)
        except BadConversation as error:
            raise ConfigError(f"--chat: {error}.") from error
        ((ids, _),) = self._tokenizer.encode_with_places([text])
        return [int(token) for token in ids]

    def answer(self, pieces: Iterator[str]) -> Iterator[str]:
        """Yields the text that a model draws, until it ends its turn, and adds that turn."""
        said = []
        for piece in before(self._ending, pieces):
            said.append(piece)
            yield piece
        self._messages.append({"role": "assistant", "content": "".join(said).strip()})


def before(ending: str, pieces: Iterator[str]) -> Iterator[str]:
    """Yields text until `ending` comes, which may begin in one piece and end in a later one; all of it if
    `ending` is empty or does not come."""
    held = ""
    for piece in pieces:
        held += piece
        if ending and ending in held:
            yield held[: held.index(ending)]
            return
        # The longest end of the text that may be the beginning of `ending` waits for the next piece.
        waits = next((n for n in range(len(ending) - 1, 0, -1) if held.endswith(ending[:n])), 0)
        yield held[: len(held) - waits]
        held = held[len(held) - waits :]
    yield held


def questions() -> Iterator[str]:
    """Yields the lines of the standard input that are not empty, until it ends (Ctrl-D). Raises ConfigError
    if it is closed."""
    if sys.stdin is None:
        raise ConfigError(
            "--chat without --prompt reads questions from the standard input, which is closed; give --prompt."
        )
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
