"""Puts whole conversations into samples of one length.

A conversation of n tokens takes n - 1 positions: each token but the last has its successor as label, if that
is a target. Longer ones lose their end. What is too long and has no target before the cut is left out. So
every conversation in a sample, and every sample, has a target.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from pyruntime.train.data.corpus_tokens import Tokens

IGNORED = -100
"""The label of what is not learned, as everywhere in torch."""


class Row(NamedTuple):
    """One sample: ids, labels and documents, int64 [S] each; documents ascend."""

    ids: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None
    reference: np.ndarray | None = None
    """Logarithms of the reference's probabilities of a sample's pairs, fp64 [pairs, 2], if known."""


class PackedConversations:
    """The samples of some conversations; the same on every machine.

    The longest come first, each into the fullest sample that has room for it (best fit, decreasing; Johnson
    1973, "Near-optimal bin packing algorithms").
    """

    def __init__(self, tokens: Tokens, seq_len: int):
        self._tokens, self._seq_len = tokens, seq_len
        ends, targets = tokens.conversations()
        self._begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        sizes = ends - self._begins
        found = np.diff(targets, prepend=0)
        self.cut = self.left_out = 0
        """Conversations that were cut, and left out, because they are longer than a sample."""
        for number in np.flatnonzero(sizes > seq_len + 1):
            begin = int(self._begins[number])
            kept = int((tokens.read(begin, begin + seq_len + 1) & 1).sum())
            found[number], sizes[number] = kept, seq_len + 1
            self.cut += kept > 0
            self.left_out += kept == 0
        self._sizes = sizes
        taken = np.flatnonzero(found)
        self.conversations = len(taken)
        order = taken[np.argsort(-sizes[taken], kind="stable")]
        samples = best_fit((sizes[order] - 1).tolist(), seq_len)
        by_sample = np.argsort(samples, kind="stable")
        self._members = order[by_sample]
        self._first = np.searchsorted(samples[by_sample], np.arange(samples.max(initial=-1) + 2))
        totals = np.concatenate([[0], np.cumsum(found[self._members])])
        self.targets = np.diff(totals[self._first])
        """Labels of each sample that are learned, int64 [samples]."""

    def __len__(self) -> int:
        return len(self.targets)

    def row(self, sample: int) -> Row:
        """Returns a sample; its end is filled with token 0, of the last conversation's document."""
        ids = np.zeros(self._seq_len, dtype=np.int64)
        labels = np.full(self._seq_len, IGNORED, dtype=np.int64)
        documents = np.zeros(self._seq_len, dtype=np.int64)
        at = 0
        for number, member in enumerate(self._members[self._first[sample] : self._first[sample + 1]]):
            begin, size = int(self._begins[member]), int(self._sizes[member])
            stored = self._tokens.read(begin, begin + size).astype(np.int64)
            behind = at + size - 1
            ids[at:behind] = stored[:-1] >> 1
            labels[at:behind] = np.where(stored[1:] & 1, stored[1:] >> 1, IGNORED)
            documents[at:] = number
            at = behind
        return Row(ids, labels, documents)


def best_fit(sizes: list[int], room: int) -> np.ndarray:
    """Returns the number of the sample that each of these descending sizes goes into, int64."""
    left: list[int] = []  # distinct remaining rooms, ascending
    samples: dict[int, list[int]] = {}
    found, count = np.empty(len(sizes), dtype=np.int64), 0
    for number, size in enumerate(sizes):
        place = bisect.bisect_left(left, size)
        if place == len(left):
            sample, rest = count, room - size
            count += 1
        else:
            rest = left[place]
            sample = samples[rest].pop()
            if not samples[rest]:
                del samples[rest], left[place]
            rest -= size
        if rest not in samples:
            bisect.insort(left, rest)
            samples[rest] = []
        samples[rest].append(sample)
        found[number] = sample
    return found
