"""Text to tokens and back: bytes, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Protocol

import numpy as np

from pyruntime.train.errors import ConfigError

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"  # what transformers' AutoTokenizer reads beside it
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """What training, validation and sampling need of a tokenizer."""

    vocab_size: int
    """Number of tokens; ids are below it."""
    separator: int | None
    """Token put behind every document; None where the tokenizer has none."""

    def encode(self, document: bytes) -> np.ndarray:
        """Token ids [n] of a document, without its separator."""

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""

    def save(self, folder: Path) -> None:
        """Writes into a checkpoint's folder what `load_beside` needs."""


class ByteTokenizer:
    """One token a byte. Byte 0, which no text holds, ends a document, so the vocabulary is 256.

    A model may have a larger vocabulary; its other tokens stand for nothing.
    """

    vocab_size = 256
    separator: int | None = 0

    def encode(self, document: bytes) -> np.ndarray:
        return np.frombuffer(document, dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < self.vocab_size).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Bytes need no file: a checkpoint without tokenizer.json is read as bytes."""


class JsonTokenizer:
    """A tokenizer.json, through the `tokenizers` package. Bytes that are not UTF-8 become the text
    `\\xNN`."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Engine

        try:
            self._engine = Engine.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise ConfigError(f"{path} is not a tokenizer.json that `tokenizers` reads: {error}.") from error
        self._path = path
        self.vocab_size = self._engine.get_vocab_size()
        found = [self._engine.token_to_id(name) for name in END_OF_DOCUMENT_NAMES]
        self.separator = next((token for token in found if token is not None), None)

    def encode(self, document: bytes) -> np.ndarray:
        text = document.decode("utf-8", errors="backslashreplace")
        return np.asarray(self._engine.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        shutil.copyfile(self._path, folder / FILE_NAME)
        beside = self._path.with_name(CONFIG_NAME)
        if beside.is_file():
            shutil.copyfile(beside, folder / CONFIG_NAME)
            return
        config: dict[str, str | None] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.separator is not None:
            name = self._engine.id_to_token(self.separator)
            config |= {"bos_token": name, "eos_token": name}
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer`: "bytes" or a path."""
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(Path(name))


def load_beside(checkpoint: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint: its tokenizer.json, or bytes where there is none and the vocabulary
    holds at least 256 tokens."""
    path = checkpoint / FILE_NAME
    if path.is_file():
        return JsonTokenizer(path)
    if vocab_size >= ByteTokenizer.vocab_size:
        return ByteTokenizer()
    raise ConfigError(
        f"{checkpoint} holds no {FILE_NAME}, and its vocabulary of {vocab_size} tokens is smaller than that "
        f"of bytes ({ByteTokenizer.vocab_size}); copy the model's {FILE_NAME} there."
    )
