"""Makes batches of windows of tokens, and reads them ahead of the steps that use them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from pyruntime.train.data.corpus import Corpus, ValidationSet
from pyruntime.train.data.corpus_tokens import Tokens
from pyruntime.train.data.order import SampleOrder, SampleWindow, generator
from pyruntime.train.data.packed_conversations import IGNORED, Row
from pyruntime.train.data.packed_pairs import PackedPairs
from pyruntime.train.data.preferences import Preferences
from pyruntime.train.errors import ConfigError

PHASES = 2**33
"""First random stream for the phases of the sources' windows; `order` uses lower ones."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of one length."""

    ids: torch.Tensor
    """[B, S] int64."""
    labels: torch.Tensor
    """[B, S] int64: each token's successor, IGNORED where it is not learned."""
    documents: torch.Tensor | None
    """[B, S] int64: a token attends only to tokens of its document; None: to its whole sequence."""
    targets: int
    """The number of which its loss is the mean: labels of its whole sequences that are learned, or pairs of
    answers; at least 1 in each sequence."""
    of_step: tuple[int, int]
    """Sequences and targets of all ranks whose gradients are summed, in this step."""
    preferences: Preferences | None = None
    """Its pairs of answers, if it has such."""

    def split(self, size: int) -> list[Batch]:
        """Splits it, in order, into batches of `size` sequences."""
        parts = []
        for begin in range(0, len(self.ids), size):
            rows = slice(begin, begin + size)
            documents = None if self.documents is None else _needed(self.documents[rows])
            labels, preferences = self.labels[rows], self.preferences
            preferences = None if preferences is None else preferences.rows(rows)
            targets = _learned(labels) if preferences is None else preferences.pairs
            parts.append(Batch(self.ids[rows], labels, documents, targets, self.of_step, preferences))
        return parts

    @property
    def weight(self) -> float:
        """Its targets a sequence, divided by those of the step: times this, the mean of the mean losses of
        all micro-batches is the mean over all targets. Of text it is 1."""
        sequences, targets = self.of_step
        return self.targets * sequences / (len(self.ids) * targets)


def _learned(labels: torch.Tensor) -> int:
    return int((labels != IGNORED).sum())


def _needed(documents: torch.Tensor) -> torch.Tensor | None:
    """Returns None if every sequence is of one document."""
    return documents if bool((documents != documents[:, :1]).any()) else None


def windows(tokens: Tokens, seq_len: int) -> int:
    """The number of windows of seq_len tokens and a label after them; they overlap only in that label."""
    return (len(tokens) - 1) // seq_len


class Batches:
    """The batches of a run's steps, in the order of its seed.

    A thread reads the next batch while a step computes. Every rank makes one. own: the sequences of a step
    that this rank takes; None: all. together: those of the ranks whose gradients are summed with its; None:
    all of the step. masks: whether documents are told apart. prepare: called with each batch, by the thread
    that reads ahead.
    """

    def __init__(
        self,
        corpus: Corpus,
        seed: int,
        batch_size: int,
        seq_len: int,
        vocab_size: int,
        *,
        own: Sequence[int] | None = None,
        together: range | None = None,
        masks: bool = True,
        prepare: Callable[[Batch], None] | None = None,
    ):
        self._prepare = prepare
        self._sources = [source.train for source in corpus.sources]
        self._packed = [source.packed for source in corpus.sources]
        self._folders = [source.text.folder for source in corpus.sources]
        self._has_pairs = bool(corpus.pairs)
        self._order = SampleOrder(
            tuple(
                windows(tokens, seq_len) if packed is None else len(packed)
                for tokens, packed in zip(self._sources, self._packed, strict=True)
            ),
            seed,
            corpus.weights,
        )
        self._seed, self._seq_len, self._vocab_size, self._masks = seed, seq_len, vocab_size, masks
        self._size, everything = batch_size, range(batch_size)
        self._own, self._together = own or everything, together or everything
        self._ahead: dict[int, Future[Batch]] = {}

    def take(self, first: int) -> Batch:
        """Returns this rank's sequences of the batch that begins with sample `first` of the run, and starts
        reading the next batch. Raises ConfigError for tokens outside the model's vocabulary."""
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
        except Exception as error:  # `take` raises it in the step that needs the batch
            found.set_exception(error)

    def read(self, first: int) -> Batch:
        """Returns the same, but reads nothing ahead."""
        rows = [self._row(*self._order.samples(first + number, 1)) for number in self._own]
        batch = _batch(rows, self._masks, self._of_step(first), self._has_pairs)
        self._check(batch.ids, batch.labels)
        if self._prepare is not None:
            self._prepare(batch)
        return batch

    def _of_step(self, first: int) -> tuple[int, int]:
        """Returns the sequences and the targets of the ranks whose gradients are summed with this one's."""
        count = len(self._together)
        if not any(self._packed):
            return count, count * self._seq_len
        samples = self._order.samples(first + self._together.start, count)
        return count, sum(map(self._targets, samples))

    def _targets(self, sample: SampleWindow) -> int:
        packed = self._packed[sample.source]
        return self._seq_len if packed is None else int(packed.targets[sample.window])

    def _row(self, sample: SampleWindow) -> Row:
        """Returns a sample. Every epoch shifts all windows of text by a random phase, so that they are not
        cut in the same places."""
        packed = self._packed[sample.source]
        if packed is not None:
            return packed.row(sample.window)
        tokens, length = self._sources[sample.source], self._seq_len
        slack = len(tokens) - 1 - windows(tokens, length) * length
        phase = generator(self._seed, sample.epoch, PHASES + sample.source).integers(0, slack + 1)
        return _row_at(tokens, int(phase) + sample.window * length, length, self._masks)

    def _check(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        most = max(int(ids.max()), int(labels.max()))
        if most >= self._vocab_size:
            where = ", ".join(map(str, self._folders))
            raise ConfigError(
                f"data.paths: the tokens in {where} go up to {most}, but the model's vocabulary "
                f"has {self._vocab_size}; the files are damaged, or of another model."
            )


def _row_at(tokens: Tokens, at: int, seq_len: int, masks: bool) -> Row:
    """Returns the sample of text that begins there."""
    found = tokens.read(at, at + seq_len + 1).astype(np.int64)
    return Row(found[:-1], found[1:], tokens.documents(at, at + seq_len) if masks else None)


def _batch(
    rows: Sequence[Row], masks: bool, of_step: tuple[int, int] | None = None, has_pairs: bool = False
) -> Batch:
    """of_step: None: only these."""
    ids, labels = (torch.from_numpy(np.stack(each)) for each in list(zip(*rows, strict=True))[:2])
    documents = None
    if masks:
        found = np.stack([row.documents for row in rows if row.documents is not None])
        documents = _needed(torch.from_numpy(found - found[:, :1]))
    preferences = _preferences(rows) if has_pairs else None
    targets = _learned(labels) if preferences is None else preferences.pairs
    return Batch(ids, labels, documents, targets, of_step or (len(rows), targets), preferences)


def _preferences(rows: Sequence[Row]) -> Preferences:
    answers, found, count = [], [], 0
    for row in rows:
        assert row.documents is not None
        answers.append(row.documents + count)
        count += int(row.documents[-1]) + 1
        found.append(row.reference)
    known = [each for each in found if each is not None]
    reference = torch.from_numpy(np.concatenate(known)) if len(known) == len(rows) else None
    return Preferences(torch.from_numpy(np.stack(answers)), reference)


def validation_batches(
    each: ValidationSet, sequences: int, batch_size: int, seq_len: int, masks: bool = True
) -> list[Batch]:
    """Returns at most `sequences` samples, `batch_size` at a time: windows without overlap, spread evenly
    over the tokens, or samples of conversations, spread evenly over all.

    The result is the same every time; the last batch may be smaller.
    """
    tokens, packed = each.tokens, each.packed
    if packed is None:
        count = min(sequences, windows(tokens, seq_len))
        starts = [index * ((len(tokens) - 1) // count) for index in range(count)]
        rows = [_row_at(tokens, at, seq_len, masks) for at in starts]
    else:
        count = min(sequences, len(packed))
        rows = [packed.row(index * len(packed) // count) for index in range(count)]
    has_pairs = isinstance(packed, PackedPairs)
    return [_batch(rows[at : at + batch_size], masks, None, has_pairs) for at in range(0, count, batch_size)]


def batch_of_pairs(packed: PackedPairs, samples: range) -> Batch:
    """Returns those samples."""
    return _batch([packed.row(sample) for sample in samples], True, None, True)
