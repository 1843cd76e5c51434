"""Places documents on ranks by their length: long ones on several neighbours, short ones whole on one.

The rows of a batch share one layout, with equally many tokens on every rank. FlexSP (Wang et al. 2024, arXiv
2412.01523) gives each document a group of ranks of its own size. Here all ranks stay one ring, along which
keys travel only as far as a rank sees them (`ways.py`), so a document that lies on d neighbours costs what it
would in a group of d. Integers only: the same documents give the same places, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

MORE_WORK = 0.1
"""Share by which the rank with most attention may have more than in the best even layout, to send less."""
Run = tuple[int, int]
"""Places of the sequence, [begin, end)."""


@dataclass
class _Ranks:
    """The state of a placement: the room that is left on each rank, its attention, and its runs."""

    room: list[int]
    work: list[int]
    runs: list[list[Run]] = field(default_factory=list)

    def put(self, rank: int, document: Run, begin: int, end: int) -> None:
        """Places tokens begin .. end - 1, counted in the document."""
        if begin < end:
            self.room[rank] -= end - begin
            self.work[rank] += work_of(begin, end)
            self.runs[rank].append((document[0] + begin, document[0] + end))


def work_of(begin: int, end: int) -> int:
    """Returns the pairs of queries begin .. end - 1 of a document with the keys that they see."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


@lru_cache(maxsize=64)
def places(documents: tuple[Run, ...], ranks: int, longest: int) -> tuple[tuple[Run, ...], ...]:
    """Returns the runs of each rank, for documents that fill a sequence which `ranks` divides.

    longest: a document of more tokens lies on 2, 4, 8 .. neighbours, so that none of them has more of it;
    each has an early and a late part (zigzag). Others lie whole on one rank. What does not fit so is cut into
    runs over neighbours. The longest documents are placed first, each where least attention is.
    """
    share = documents[-1][1] // ranks
    found = _Ranks([share] * ranks, [0] * ranks, [[] for _ in range(ranks)])
    for document in sorted(documents, key=lambda each: (each[0] - each[1], each[0])):
        length = document[1] - document[0]
        degree = 1
        while degree < ranks and -(-length // degree) > longest:
            degree = min(2 * degree, ranks)
        while not _put_on(found, document, degree):
            if degree == ranks:
                _put_anywhere(found, document)
                break
            degree = min(2 * degree, ranks)
    return tuple(tuple(sorted(runs)) for runs in found.runs)


def _put_on(found: _Ranks, document: Run, degree: int) -> bool:
    """Places the document on `degree` neighbours with enough room and least attention, and says whether there
    are such."""
    ranks, length = len(found.room), document[1] - document[0]
    ends = [length * part // (2 * degree) for part in range(2 * degree + 1)]
    parts = [
        ((ends[at], ends[at + 1]), (ends[2 * degree - 1 - at], ends[2 * degree - at])) for at in range(degree)
    ]
    best: tuple[int, int] | None = None
    for first in range(ranks if degree < ranks else 1):
        here = [(first + at) % ranks for at in range(degree)]
        sizes = [sum(end - begin for begin, end in part) for part in parts]
        if all(found.room[rank] >= size for rank, size in zip(here, sizes, strict=True)):
            most = max(
                found.work[rank] + sum(work_of(*run) for run in part)
                for rank, part in zip(here, parts, strict=True)
            )
            best = min(best or (most, first), (most, first))
    if best is None:
        return False
    for at, part in enumerate(parts):
        for begin, end in part:
            found.put((best[1] + at) % ranks, document, begin, end)
    return True


def _put_anywhere(found: _Ranks, document: Run) -> None:
    """Cuts the document into runs over neighbours, from the rank with most room on."""
    ranks, length, at = len(found.room), document[1] - document[0], 0
    first = min(range(ranks), key=lambda rank: (-found.room[rank], rank))
    for rank in (*range(first, ranks), *range(first)):
        end = min(length, at + found.room[rank])
        found.put(rank, document, at, end)
        at = end


def candidates(rows: Sequence[tuple[Run, ...]], ranks: int) -> list[tuple[tuple[Run, ...], ...]]:
    """Returns placements made for each row, of documents of at most a share, 3/4 of it, a half, 3/8 .. on one
    rank."""
    share = rows[0][-1][1] // ranks
    halves = [share >> number for number in range(ranks.bit_length())]
    sizes = sorted({max(1, size) for half in halves for size in (half, half * 3 // 4)}, reverse=True)
    return list(dict.fromkeys(places(row, ranks, longest) for row in rows for longest in sizes))
