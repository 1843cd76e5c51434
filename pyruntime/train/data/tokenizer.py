"""Text to tokens and back: bytes, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from pyruntime.train.errors import ConfigError, refusing

FILE_NAME = "tokenizer.json"
FACTS_FILE = "corpus.json"
"""In a folder of tokens (`tokenizing`)."""
CONFIG_NAME = "tokenizer_config.json"  # what transformers' AutoTokenizer reads beside it
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """What training, validation and sampling need of a tokenizer."""

    vocab_size: int
    """Number of tokens; ids are below it."""
    separator: int | None
    """Token put behind every document; None where the tokenizer has none."""
    fingerprint: bytes
    """What it makes of a text, by its content: two with the same make the same."""

    def encode(self, document: bytes) -> np.ndarray:
        """Token ids [n] of a document, without its separator."""

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Those of each of several documents, on all cores."""

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
    fingerprint = b"bytes"

    def encode(self, document: bytes) -> np.ndarray:
        return np.frombuffer(document, dtype=np.uint8)

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [self.encode(document) for document in documents]

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
            content = path.read_bytes()
            self._engine = Engine.from_buffer(content)
            self._engine.no_truncation()  # those are of a model's input, not of a text to learn from
            self._engine.no_padding()
            self.vocabulary: dict[str, int] = self._engine.get_vocab()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
        except BaseException as error:  # the package raises bare Exception, and panics raise BaseException
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            first = (str(error).splitlines() or [""])[0]
            raise ConfigError(f"{path} is not a tokenizer.json that `tokenizers` reads: {first}.") from error
        if not self.vocabulary:
            raise ConfigError(f"{path} holds a tokenizer without any token.")
        self._path, self._content = path, content
        self.fingerprint = hashlib.sha256(content).digest()
        self.vocab_size = max(self.vocabulary.values()) + 1  # ids may have gaps
        found = [self._engine.token_to_id(name) for name in END_OF_DOCUMENT_NAMES]
        self.separator = next((token for token in found if token is not None), None)

    def encode(self, document: bytes) -> np.ndarray:
        return self.encode_batch([document])[0]

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8", errors="backslashreplace") for document in documents]
        try:
            encoded = self._engine.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # bare, as above
            raise ConfigError(f"{self._path} cannot tokenize the text: {error}.") from error
        return [np.asarray(each.ids, dtype=np.uint32) for each in encoded]

    def decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        (folder / FILE_NAME).write_bytes(self._content)
        beside = self._path.with_name(CONFIG_NAME)
        if beside.is_file():
            shutil.copyfile(beside, folder / CONFIG_NAME)
            return
        config: dict[str, str | None] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.separator is not None:
            name = self._engine.id_to_token(self.separator)
            config |= {"bos_token": name, "eos_token": name}
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def open_tokenizer(name: str, init_from: str = "", paths: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of `data.tokenizer`: "bytes", the path of a tokenizer.json, or where it is empty that of
    the checkpoint `init_from`, of the first folder of tokens among `paths`, or bytes.

    Raises ConfigError where a file is damaged, the named vocabulary is not the checkpoint's, or nothing says
    what the checkpoint reads.
    """
    beside = Path(init_from, FILE_NAME)
    own = JsonTokenizer(beside) if init_from and beside.is_file() else None
    if not name and own is None:
        folder = next((Path(path) for path in paths if Path(path, FACTS_FILE).is_file()), None)
        name = "" if folder is None else _name_beside(folder)
    if not name:
        return own or _of_bytes(init_from)
    named = ByteTokenizer() if name == "bytes" else JsonTokenizer(Path(name))
    if own is not None and getattr(named, "vocabulary", None) != own.vocabulary:
        raise ConfigError(
            f"data.tokenizer={name} has another vocabulary than {beside}, which model.init_from was trained "
            "with; leave data.tokenizer out."
        )
    return named


def _name_beside(folder: Path) -> str:
    """What made a folder of tokens."""
    path = folder / FILE_NAME
    return str(path) if path.is_file() else "bytes"


def _of_bytes(init_from: str) -> ByteTokenizer:
    """Bytes, unless a checkpoint without a tokenizer seems to read something else."""
    if init_from:
        from pyruntime.llama.hf import read_config

        with refusing("model.init_from: ", (ValueError, OSError)):
            vocabulary = read_config(init_from).get("vocab_size")
        if vocabulary != ByteTokenizer.vocab_size:
            raise ConfigError(
                f"model.init_from: {init_from} holds no {FILE_NAME}, and its vocabulary of {vocabulary} "
                f"tokens is not that of bytes; copy the model's {FILE_NAME} there, or name what it reads in "
                "data.tokenizer."
            )
    return ByteTokenizer()


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
