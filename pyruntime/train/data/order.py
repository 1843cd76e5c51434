"""The order in which a run sees its samples: a function of seed and sample number only.

A sample is a window of tokens of one source; each source has a number of windows. Without weights an epoch is
every window of every source once, in an order of its own. With weights every BLOCK samples contain a fixed
number from each source (`quotas`), at places drawn for that block. A source's own samples keep their order:
each of its epochs is all its windows once.

No state is kept: every sample is computed from its number. So ranks exchange nothing, meshes of every shape
see the same samples, and a run resumes from the number of samples it has seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

BLOCK = 1024
"""Samples whose shares are exact if sources have weights."""
ROUNDS = 6
MASK = 2**64 - 1


@dataclasses.dataclass(frozen=True)
class SampleWindow:
    """One window of one source."""

    source: int
    epoch: int
    """Times that all windows were seen before: those of the source with weights, else those of all
    sources."""
    window: int


@dataclasses.dataclass(frozen=True)
class SampleOrder:
    """windows: of each source, at least 1. weights: shares of the sources in the samples, any positive
    numbers; empty: in proportion to their windows."""

    windows: tuple[int, ...]
    seed: int
    weights: tuple[float, ...] = ()

    def samples(self, first: int, count: int) -> list[SampleWindow]:
        """Returns samples first .. first + count - 1 of the run."""
        find = self._weighted if self.weights else self._unweighted
        return [find(number) for number in range(first, first + count)]

    def _unweighted(self, number: int) -> SampleWindow:
        epoch, index = divmod(number, sum(self.windows))
        window = shuffled(index, sum(self.windows), self.seed, epoch)
        source = 0
        while window >= self.windows[source]:
            window -= self.windows[source]
            source += 1
        return SampleWindow(source, epoch, window)

    def _weighted(self, number: int) -> SampleWindow:
        block, place = divmod(number, BLOCK)
        shares = quotas(self.weights)
        sources, ranks = _of_block(shares, self.seed, block)
        source = int(sources[place])
        epoch, index = divmod(block * shares[source] + int(ranks[place]), self.windows[source])
        window = shuffled(index, self.windows[source], self.seed, epoch, stream=1 + source)
        return SampleWindow(source, epoch, window)


@lru_cache(maxsize=16)
def quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Returns each source's number of samples among BLOCK: the nearest whole numbers with that sum (largest
    remainders)."""
    if BLOCK * sum(weights) == float("inf"):
        weights = tuple(weight / max(weights) for weight in weights)
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: (found[source] - exact[source], source))
    for source in by_remainder[: BLOCK - sum(found)]:
        found[source] += 1
    return tuple(found)


@lru_cache(maxsize=16)
def _of_block(shares: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each sample of a block, and how many samples of that source precede it."""
    sources = generator(seed, block, 2**32).permutation(np.repeat(np.arange(len(shares)), shares))
    ranks = np.empty(BLOCK, dtype=np.int64)
    for source, share in enumerate(shares):
        ranks[sources == source] = np.arange(share)
    return sources, ranks


def generator(seed: int, number: int, stream: int) -> np.random.Generator:
    """Returns a counter-based generator: the same for the same arguments, on every machine."""
    return np.random.Generator(np.random.Philox(key=[seed, number], counter=[0, 0, 0, stream]))


def shuffled(index: int, count: int, seed: int, epoch: int, stream: int = 0) -> int:
    """Returns the image of `index` of 0 .. count - 1 in that epoch's permutation, without storing it: a
    Feistel network over the next power of four, iterated until the result is below count (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains")."""
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in _keys(seed, epoch, stream):
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        index = left << half | right
        if index < count:
            return index


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int, stream: int) -> Sequence[int]:
    return generator(seed, epoch, stream).integers(0, 2**63, size=ROUNDS).tolist()


def _mixed(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
