"""The tokens of a corpus: ranges of shards, one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from pyruntime.train.data.token_shards import TokenShard


class Tokens:
    """Tokens `begin` to `end` of some shards, taken one after the other."""

    def __init__(self, shards: Sequence[TokenShard], begin: int, end: int):
        self._shards = [shard for shard in shards if len(shard.tokens)]
        self._offsets = np.cumsum([0, *(len(shard.tokens) for shard in self._shards)])
        self._documents = np.cumsum([0, *(shard.index.shape[1] for shard in self._shards)])
        self._begin, self._end = begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def digest(self) -> str:
        """BLAKE2b of the content digests in the shards' headers, and of the range of these tokens."""
        found = hashlib.blake2b(f"{self._begin} {self._end}".encode(), digest_size=16)
        for shard in self._shards:
            found.update(shard.digest)
        return found.hexdigest()

    @property
    def is_chat(self) -> bool:
        """Whether they are of conversations; then `read` returns what the shards store."""
        return any(shard.is_chat for shard in self._shards)

    def conversations(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the end of each conversation, and the targets up to it, int64, ascending."""
        ends, targets, before = [], [], 0
        for shard, offset in zip(self._shards, self._offsets, strict=False):
            ends.append(shard.index[0] + offset)
            targets.append(shard.index[2] + before)
            before = int(targets[-1][-1])
        end, target = np.concatenate(ends), np.concatenate(targets)
        is_mine = (end > self._begin) & (end <= self._end)
        return end[is_mine] - self._begin, target[is_mine] - target[end <= self._begin].max(initial=0)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns tokens [end - begin], copied."""
        parts = [shard.tokens[low:high] for shard, _, low, high in self._parts(begin, end)]
        return np.concatenate(parts)

    def documents(self, begin: int, end: int) -> np.ndarray:
        """Returns the number of each token's document, int64 [end - begin], ascending."""
        found = []
        for shard, before, low, high in self._parts(begin, end):
            ends = shard.index[0]
            first = int(np.searchsorted(ends, np.int64(low), side="right"))
            last = int(np.searchsorted(ends, np.int64(high - 1), side="right"))
            within = np.searchsorted(ends[first:last], np.arange(low, high), side="right")
            found.append(before + first + within)
        return np.concatenate(found)

    def _parts(self, begin: int, end: int) -> list[tuple[TokenShard, int, int, int]]:
        """The shards that hold these tokens, each with the documents before it and the range in it."""
        begin, end = begin + self._begin, end + self._begin
        first = int(np.searchsorted(self._offsets, begin, side="right")) - 1
        found = []
        while first < len(self._shards) and self._offsets[first] < end:
            offset, shard = int(self._offsets[first]), self._shards[first]
            low, high = max(begin - offset, 0), min(end - offset, len(shard.tokens))
            found.append((shard, int(self._documents[first]), low, high))
            first += 1
        return found

    @property
    def bytes(self) -> int:
        """Bytes of the text of these tokens; for a document that is cut, its share."""
        return self._bytes_before(self._end) - self._bytes_before(self._begin)

    def _bytes_before(self, token: int) -> int:
        total = 0
        for shard, offset in zip(self._shards, self._offsets, strict=False):
            total += bytes_before(shard.index, min(max(token - int(offset), 0), len(shard.tokens)))
        return total


def bytes_before(index: np.ndarray, token: int) -> int:
    """Returns the bytes of text of the first `token` tokens of a shard."""
    ends, sizes = index[:2]
    document = int(np.searchsorted(ends, np.int64(token), side="right"))
    first, before = (int(ends[document - 1]), int(sizes[document - 1])) if document else (0, 0)
    if document == len(ends) or token == first:
        return before
    last, behind = int(ends[document]), int(sizes[document])
    return before + round((behind - before) * (token - first) / (last - first))
