"""Converts text to tokens and back: as bytes, or with a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pyruntime.text import short_repr
from pyruntime.train.errors import ConfigError, refusing

FILE_NAME = "tokenizer.json"
FACTS_FILE = "corpus.json"
"""File in a folder of tokens (`tokenizing`)."""
CONFIG_NAME = "tokenizer_config.json"  # what transformers' AutoTokenizer reads beside it
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names to try if CONFIG_NAME sets no eos_token."""
WHAT_IT_MAY_BE = (
    'give "bytes", the path of a tokenizer.json, or a folder, such as '
    "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) of transformers writes."
)


class Tokenizer(Protocol):
    """The interface that training, validation and sampling need."""

    vocab_size: int
    """Number of tokens; ids are below it."""
    separator: int | None
    """Token after every document; None if the tokenizer has none."""
    begin: tuple[int, ...]
    """Tokens before every document."""
    fingerprint: bytes
    """Hash of the tokenizer: two with the same fingerprint make the same tokens of a text."""

    def encode(self, document: bytes) -> np.ndarray:
        """Returns the token ids [n] of a document, without `begin` and `separator`."""

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the token ids of each document, computed on all cores."""

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the token ids [n] of each text, and the characters of the text that each token is of, begin
        and end, int64 [n, 2]."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids."""

    def save(self, folder: Path) -> None:
        """Writes the files that `load_beside` needs into a checkpoint's folder."""


class ByteTokenizer:
    """One token per byte. Byte 0, which no text holds, ends a document, so the vocabulary is 256.

    A model may have a larger vocabulary; its other tokens decode to nothing.
    """

    vocab_size = 256
    separator: int | None = 0
    begin: tuple[int, ...] = ()
    fingerprint = b"bytes"

    def encode(self, document: bytes) -> np.ndarray:
        return np.frombuffer(document, dtype=np.uint8)

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [self.encode(document) for document in documents]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for text in texts:
            begin = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
            found.append((self.encode(text.encode()), np.stack([begin, begin + 1], axis=1)))
        return found

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < self.vocab_size).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Writes nothing: a checkpoint without tokenizer.json is read as bytes."""


class JsonTokenizer:
    """A tokenizer.json, run by the `tokenizers` package. `path` is that file, a folder that holds it, or a
    folder from which `transformers` makes one. Bytes that are not UTF-8 become the text `\\xNN`.

    A document ends with the eos_token of the tokenizer_config.json beside it, else with a usual name of such
    a token. It begins with what the tokenizer itself puts before a text (`<|begin_of_text|>`, `<bos>`).
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Engine

        folder = path if path.is_dir() else path.parent
        try:
            content = path.read_bytes() if folder != path else _content(folder)
            self._engine = Engine.from_buffer(content)
            self._engine.no_truncation()  # both are for a model's input, not for a text to learn from
            self._engine.no_padding()
            self.vocabulary: dict[str, int] = self._engine.get_vocab()
            around = self._engine.encode("", add_special_tokens=True).ids
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
        except BaseException as error:  # the package raises bare Exception, and panics raise BaseException
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            first = (str(error).splitlines() or [""])[0].rstrip(".")
            raise ConfigError(f"{path} is not a tokenizer.json that `tokenizers` reads: {first}.") from error
        if not self.vocabulary:
            raise ConfigError(f"{path} holds a tokenizer without any token.")
        self._path, self._content, self._config = path, content, folder / CONFIG_NAME
        self.folder = folder
        added = self._engine.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)
        self.vocab_size = max(self.vocabulary.values()) + 1  # ids may have gaps
        found = [self._engine.token_to_id(name) for name in END_OF_DOCUMENT_NAMES]
        usual = next((token for token in found if token is not None), None)
        self.separator = self._stated_end(usual)
        behind = around.index(self.separator) if self.separator in around else len(around)
        self.begin = tuple(around[:behind])
        if max(self.begin, default=0) >= self.vocab_size:
            raise ConfigError(f"{path} begins a text with token {max(self.begin)}, which it does not have.")
        is_usual = self.separator == usual and not self.begin
        around_it = b"" if is_usual else f"{self.begin} {self.separator}".encode()
        self.fingerprint = hashlib.sha256(content + around_it).digest()

    def _stated_end(self, usual: int | None) -> int | None:
        """Returns the token that tokenizer_config.json calls eos_token; `usual` if it names none."""
        try:
            stated = json.loads(self._config.read_bytes()).get("eos_token")
        except FileNotFoundError:
            return usual
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{self._config} is damaged: it holds no JSON object.") from error
        name = stated.get("content") if isinstance(stated, dict) else stated
        if name is None:
            return usual
        if not isinstance(name, str) or name not in self.vocabulary:
            raise ConfigError(
                f"{self._config} ends a text with {short_repr(name)}, which is no token of {self._path}; "
                "correct its eos_token."
            )
        return self.vocabulary[name]

    def encode(self, document: bytes) -> np.ndarray:
        return self.encode_batch([document])[0]

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8", errors="backslashreplace") for document in documents]
        encoded = self._encoded(self._engine.encode_batch_fast, texts)
        return [np.asarray(each.ids, dtype=np.uint32) for each in encoded]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (np.asarray(each.ids, dtype=np.uint32), np.asarray(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in self._encoded(self._engine.encode_batch, texts)
        ]

    def _encoded(self, encode: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
        try:
            return encode(texts, add_special_tokens=False)
        except Exception as error:  # bare, as above
            raise ConfigError(f"{self._path} cannot tokenize the text: {error}.") from error

    def decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        (folder / FILE_NAME).write_bytes(self._content)
        if self._config.is_file():
            shutil.copyfile(self._config, folder / CONFIG_NAME)
            return
        config: dict[str, str | None] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.separator is not None:
            name = self._engine.id_to_token(self.separator)
            first = self._engine.id_to_token(self.begin[0]) if self.begin else name
            config |= {"bos_token": first, "eos_token": name}
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def _content(folder: Path) -> bytes:
    """Returns the tokenizer.json of a folder, or the one that transformers makes from another form
    (tokenizer.model, vocab.json and merges.txt, ..). Raises ConfigError if it makes none."""
    path = folder / FILE_NAME
    if path.is_file():
        return path.read_bytes()
    lacks = f"{folder} holds no {FILE_NAME}, and"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{lacks} transformers, which makes one, is not installed; install it.") from error
    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # each of the packages behind it raises its own kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[-1].rstrip(".") if lines else type(error).__name__
        raise ConfigError(f"{lacks} transformers cannot make one from its files: {why}.") from error
    engine = getattr(found, "backend_tokenizer", None)
    if engine is None:
        raise ConfigError(
            f"{lacks} {type(found).__name__} of transformers, which is pure Python, cannot become one; use "
            "another tokenizer."
        )
    return str(engine.to_str()).encode()


def prompt_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Returns the tokens of a text to continue, as a document begins; for an empty text the separator, if
    there is one."""
    ids = [*tokenizer.begin, *tokenizer.encode(text).tolist()]
    return ids or ([] if tokenizer.separator is None else [tokenizer.separator])


def check_named(key: str, name: str) -> None:
    """Raises ConfigError if `name`, the option `key`, is neither "bytes" nor an existing file or folder."""
    if name != "bytes" and not os.path.isfile(name) and not os.path.isdir(name):
        raise ConfigError(f"{key}: {name} is no file and no folder; {WHAT_IT_MAY_BE}")


def open_tokenizer(name: str, init_from: str = "", paths: Sequence[str] = ()) -> Tokenizer:
    """Returns the tokenizer of `data.tokenizer`: "bytes", or the path of a tokenizer.json or of a folder with
    a tokenizer. If it is empty: that of the checkpoint `init_from`, of the first folder of tokens among
    `paths`, or bytes.

    Raises ConfigError if a file is damaged, the named vocabulary is not the checkpoint's, or the checkpoint's
    tokenizer is unknown.
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
    """Names the tokenizer of a folder of tokens."""
    path = folder / FILE_NAME
    return str(path) if path.is_file() else "bytes"


def _of_bytes(init_from: str) -> ByteTokenizer:
    """Returns bytes, unless a checkpoint without tokenizer has another vocabulary."""
    if init_from:
        from pyruntime.llama.hf import read_config

        with refusing("model.init_from: ", (ValueError, OSError)):
            vocabulary = read_config(init_from).get("vocab_size")
        if vocabulary != ByteTokenizer.vocab_size:
            raise ConfigError(
                f"model.init_from: {init_from} holds no {FILE_NAME}, and its vocabulary of {vocabulary} "
                f"tokens is not that of bytes; copy the model's {FILE_NAME} there, or name its tokenizer in "
                "data.tokenizer."
            )
    return ByteTokenizer()


def load_beside(checkpoint: Path, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of a checkpoint: its tokenizer.json, or bytes if there is none and the vocabulary
    has at least 256 tokens."""
    path = checkpoint / FILE_NAME
    if path.is_file():
        return JsonTokenizer(path)
    if vocab_size >= ByteTokenizer.vocab_size:
        return ByteTokenizer()
    raise ConfigError(
        f"{checkpoint} holds no {FILE_NAME}, and its vocabulary of {vocab_size} tokens is smaller than that "
        f"of bytes ({ByteTokenizer.vocab_size}); copy the model's {FILE_NAME} there."
    )
