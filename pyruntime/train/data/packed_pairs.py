"""Puts pairs of answers into samples of one length, both answers of a pair into one sample.

Each answer is a document with the prompt before it, so that it attends to nothing else. An answer of n tokens
takes n - 1 positions, as a conversation does (`packed_conversations`). A pair that is longer than a sample
loses the end of the longer answer, or of both: neither is cut to less than half a sample. A pair of which an
answer has no target before the cut is left out.
"""

from __future__ import annotations

import numpy as np

from pyruntime.train.data.corpus_tokens import Tokens
from pyruntime.train.data.packed_conversations import IGNORED, Row, best_fit


class PackedPairs:
    """The samples of some pairs; the same on every machine."""

    def __init__(self, tokens: Tokens, seq_len: int):
        self._tokens, self._seq_len = tokens, seq_len
        ends, _ = tokens.conversations()
        self._begins = np.concatenate([[0], ends[:-1]]).astype(np.int64).reshape(-1, 2)
        self._sizes = ends.reshape(-1, 2) - self._begins - 1
        """Positions of each answer, int64 [pairs, 2]."""
        is_taken = self._sizes.min(axis=1) > 0
        self.cut = self.left_out = 0
        """Pairs that were cut, and left out, because they are longer than a sample."""
        for number in np.flatnonzero(is_taken & (self._sizes.sum(axis=1) > seq_len)).tolist():
            sizes = self._sizes[number]
            self._sizes[number] = np.minimum(sizes, np.maximum(seq_len // 2, seq_len - sizes[::-1]))
            is_taken[number] = all((self._stored(number, answer)[1:] & 1).any() for answer in (0, 1))
            self.cut += bool(is_taken[number])
            self.left_out += not is_taken[number]
        taken = np.flatnonzero(is_taken)
        self.conversations = len(taken)
        """Pairs in the samples."""
        totals = self._sizes.sum(axis=1)
        order = taken[np.argsort(-totals[taken], kind="stable")]
        samples = best_fit(totals[order].tolist(), seq_len)
        by_sample = np.argsort(samples, kind="stable")
        self._members = order[by_sample]
        self._first = np.searchsorted(samples[by_sample], np.arange(samples.max(initial=-1) + 2))
        self.targets = np.diff(self._first)
        """Pairs of each sample, int64 [samples]."""
        self.reference: np.ndarray | None = None
        """Logarithms of the reference's probabilities, in nats, fp64 [all pairs, 2], 0 where a pair is left
        out; None until they are known."""

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def pairs(self) -> int:
        """All pairs, those left out too."""
        return len(self._sizes)

    def members(self, sample: int) -> np.ndarray:
        """Returns the numbers of the pairs in a sample, in order."""
        return self._members[self._first[sample] : self._first[sample + 1]]

    def row(self, sample: int) -> Row:
        """Returns a sample, whose documents are answers: 2 k is the better one of its pair k, 2 k + 1 the
        worse one. Its end is filled with token 0, of the last answer's document."""
        ids = np.zeros(self._seq_len, dtype=np.int64)
        labels = np.full(self._seq_len, IGNORED, dtype=np.int64)
        documents = np.zeros(self._seq_len, dtype=np.int64)
        at, members = 0, self.members(sample)
        for number, (member, answer) in enumerate((member, each) for member in members for each in (0, 1)):
            stored = self._stored(member, answer)
            behind = at + len(stored) - 1
            ids[at:behind] = stored[:-1] >> 1
            labels[at:behind] = np.where(stored[1:] & 1, stored[1:] >> 1, IGNORED)
            documents[at:] = number
            at = behind
        return Row(ids, labels, documents, None if self.reference is None else self.reference[members])

    def _stored(self, pair: int, answer: int) -> np.ndarray:
        """Returns what the shard stores of an answer, up to its cut, int64."""
        begin = int(self._begins[pair, answer])
        return self._tokens.read(begin, begin + int(self._sizes[pair, answer]) + 1).astype(np.int64)
