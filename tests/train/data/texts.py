"""Small texts, and what is made of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pyruntime.train.config import Data
from pyruntime.train.data import corpus
from pyruntime.train.data.corpus import Corpus, Tokens
from pyruntime.train.data.token_shards import ShardWriter, TokenShard
from pyruntime.train.data.tokenizer import ByteTokenizer


def byte_level_bpe(text: str, vocab_size: int) -> Tokenizer:
    """Trained on that text, with the separator "</s>"."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    engine.train_from_iterator([text], trainer)
    return engine


def lines_file(folder: Path, texts, name="text.jsonl") -> Path:
    path = folder / name
    path.write_text("\n\n".join(json.dumps({"id": n, "text": text}) for n, text in enumerate(texts)))
    return path


def words(count: int, most: int = 60) -> list[str]:
    """So many documents of 1 to `most` random words."""
    rng = np.random.default_rng(random.getrandbits(64))
    return [
        " ".join(map(str, rng.integers(10**6, size=int(n)))) for n in rng.integers(1, most + 1, size=count)
    ]


def open_text(data: Data, tokenizer=None, seq_len: int = 4) -> Corpus:
    tokenizer = tokenizer or ByteTokenizer()
    return corpus.open_corpus(data, corpus.build(data, tokenizer), tokenizer, seq_len)


def build(paths, folder, tokenizer=None, seq_len: int = 4, **rest) -> Corpus:
    """The text in some paths, with a cache in `folder`."""
    return open_text(
        Data(paths=tuple(map(str, paths)), cache=str(folder / "cache"), **rest), tokenizer, seq_len
    )


def array(tokens: Tokens) -> np.ndarray:
    return tokens.read(0, len(tokens))


def halves(text: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """What is learned from, and what is held out, of text that is one source."""
    ((source,), (held_out,)) = text.sources, text.sets
    return array(source.train), array(held_out.tokens)


def everything(text: Corpus) -> bytes:
    return b"".join(half.tobytes() for half in halves(text))


def write_shard(path: Path, documents: list[np.ndarray], dtype=np.uint16) -> TokenShard:
    """Of documents whose text is three bytes a token."""
    with ShardWriter(path, np.dtype(dtype), b"any") as out:
        for ids in documents:
            out.write(ids)
        ends = np.cumsum([len(ids) for ids in documents])
        out.publish([ends, 3 * ends])
    return TokenShard.open(path)
