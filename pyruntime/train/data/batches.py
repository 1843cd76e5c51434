"""Windows of tokens as batches, read ahead of the steps that use them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from pyruntime.train.data.corpus import Corpus, Tokens, ValidationSet
from pyruntime.train.data.order import SampleOrder, SampleWindow, generator
from pyruntime.train.errors import ConfigError

PHASES = 2**33
"""Streams of random numbers of the sources' windows; `order` has those below."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of one length."""

    ids: torch.Tensor
    """[B, S] int64."""
    labels: torch.Tensor
    """[B, S] int64: each token's successor."""
    documents: torch.Tensor | None
    """[B, S] int64: tokens of one document, and no others, see each other; None: all of a sequence do."""

    def split(self, size: int) -> list[Batch]:
        """In order, `size` sequences each."""
        parts = []
        for begin in range(0, len(self.ids), size):
            rows = slice(begin, begin + size)
            documents = None if self.documents is None else _needed(self.documents[rows])
            parts.append(Batch(self.ids[rows], self.labels[rows], documents))
        return parts


def _needed(documents: torch.Tensor) -> torch.Tensor | None:
    """None where every sequence is of one document."""
    return documents if bool((documents != documents[:, :1]).any()) else None


def windows(tokens: Tokens, seq_len: int) -> int:
    """Of seq_len tokens and a label behind them, which do not overlap but for that."""
    return (len(tokens) - 1) // seq_len


class Batches:
    """The batches of a run's steps, in the order that its seed says.

    A thread reads the next batch while a step computes. Every rank makes one; `share` and `shares`: which
    part of a batch's sequences are this rank's, of how many. masks: whether documents are told apart.
    """

    def __init__(
        self,
        corpus: Corpus,
        seed: int,
        batch_size: int,
        seq_len: int,
        vocab_size: int,
        *,
        share: int = 0,
        shares: int = 1,
        masks: bool = True,
    ):
        self._sources = [source.train for source in corpus.sources]
        self._folders = [source.text.folder for source in corpus.sources]
        self._order = SampleOrder(
            tuple(windows(each, seq_len) for each in self._sources), seed, corpus.weights
        )
        self._seed, self._seq_len, self._vocab_size, self._masks = seed, seq_len, vocab_size, masks
        self._size, self._share, self._mine = batch_size, share, batch_size // shares
        self._ahead: dict[int, Future[Batch]] = {}

    def take(self, first: int) -> Batch:
        """This rank's sequences of the batch that begins with sample `first` of the run. The one that follows
        is read from now on. Raises ConfigError for tokens that the model does not have."""
        found = self._ahead.pop(first, None)
        batch = self.read(first) if found is None else found.result()
        following = first + self._size
        self._ahead = {following: Future()}
        thread = threading.Thread(
            target=self._fulfil, args=(self._ahead[following], following), daemon=True, name="pyr-batch"
        )
        thread.start()
        return batch

    def _fulfil(self, found: Future[Batch], first: int) -> None:
        try:
            found.set_result(self.read(first))
        except Exception as error:  # raised by `take`, of the step that wants it
            found.set_exception(error)

    def read(self, first: int) -> Batch:
        """As `take`, at once."""
        samples = self._order.samples(first + self._share * self._mine, self._mine)
        return _batch([self._window(sample) for sample in samples], self._seq_len, self._masks, self._check)

    def _window(self, sample: SampleWindow) -> tuple[Tokens, int]:
        """Where its tokens begin. In every epoch all windows begin a little later, or not, so that they are
        not cut in the same places."""
        tokens, length = self._sources[sample.source], self._seq_len
        slack = len(tokens) - 1 - windows(tokens, length) * length
        phase = generator(self._seed, sample.epoch, PHASES + sample.source).integers(0, slack + 1)
        return tokens, int(phase) + sample.window * length

    def _check(self, ids: np.ndarray) -> None:
        if int(ids.max()) >= self._vocab_size:
            where = ", ".join(map(str, self._folders))
            raise ConfigError(
                f"data.paths: the tokens in {where} go up to {int(ids.max())}, and the model's vocabulary "
                f"holds {self._vocab_size}; the files are damaged, or of another model."
            )


def _batch(starts: Sequence[tuple[Tokens, int]], seq_len: int, masks: bool, check=lambda ids: None) -> Batch:
    rows = np.stack([tokens.read(at, at + seq_len + 1) for tokens, at in starts]).astype(np.int64)
    check(rows)
    documents = None
    if masks:
        found = np.stack([tokens.documents(at, at + seq_len) for tokens, at in starts])
        documents = _needed(torch.from_numpy(found - found[:, :1]))
    return Batch(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy()), documents)


def validation_batches(
    each: ValidationSet, sequences: int, batch_size: int, seq_len: int, masks: bool = True
) -> list[Batch]:
    """At most `sequences` windows that do not overlap, evenly spread over the tokens, `batch_size` at a time.

    The same every time; the last batch may be smaller.
    """
    tokens = each.tokens
    count = min(sequences, windows(tokens, seq_len))
    starts = [(tokens, index * ((len(tokens) - 1) // count)) for index in range(count)]
    return [_batch(starts[at : at + batch_size], seq_len, masks) for at in range(0, count, batch_size)]
