"""Which tokens' keys go which way round the ring, and how far: data, made by pure functions.

Half of every rank's tokens travel to the next rank, the other half to the one before, so that both
directions between neighbours carry as much. A rank passes on only what a rank further on its way sees: under
a causal mask in the zigzag layout the second half of a rank's tokens, which only the ranks before it see,
goes back to rank 0 and no further. The sums of the gradients of keys go the same way, from the first rank
that has a part to the owner.

A token is counted within its rank's share; `distance` counts hops from the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Tokens = tuple[int, int]
"""From one token to before another, of one rank; (0, 0) is none."""
NONE: Tokens = (0, 0)


@dataclass(frozen=True)
class Way:
    """One direction round the ring, and the tokens of every rank that take it."""

    step: int
    """1: every rank sends to the next one; -1: to the one before."""
    tokens: Tokens
    always: bool
    """Whether a token of every rank goes to its neighbour even where nobody sees one: there the ranks compare
    what they were called with."""
    hulls: tuple[tuple[Tokens, ...], ...]
    """[rank][owner]: the owner's tokens that any query of the rank sees, those between them included."""

    @property
    def ranks(self) -> int:
        return len(self.hulls)

    def owner(self, rank: int, distance: int) -> int:
        return (rank - self.step * distance) % self.ranks

    def rank(self, owner: int, distance: int) -> int:
        return (owner + self.step * distance) % self.ranks

    def seen(self, rank: int, owner: int) -> Tokens:
        """What of the owner's tokens on this way any query of the rank sees."""
        begin, end = self.hulls[rank][owner]
        begin, end = max(begin, self.tokens[0]), min(end, self.tokens[1])
        return (begin, end) if begin < end else NONE

    def keys(self, owner: int, distance: int) -> Tokens:
        """Whose keys and values go to the rank at that distance: what it and those behind it see."""
        if not 1 <= distance < self.ranks:
            return NONE
        wanted = hull(self.seen(self.rank(owner, d), owner) for d in range(distance, self.ranks))
        if wanted == NONE and self.always and distance == 1:
            return self.tokens[0], self.tokens[0] + 1
        return wanted

    def sums(self, owner: int, distance: int) -> Tokens:
        """The gradients of whose keys go on from the rank at that distance: what it and those before it, but
        the owner, see."""
        return hull(
            self.seen(self.rank(owner, d), owner) for d in range(1, min(distance, self.ranks - 1) + 1)
        )


def ways(hulls: Sequence[Sequence[Tokens]], share: int) -> tuple[Way, ...]:
    """The ways of a ring of ranks with `share` tokens each: two; one between two ranks, whose link is one.

    hulls: see `Way`.
    """
    known = tuple(tuple(row) for row in hulls)
    if len(known) < 3:
        return (Way(1, (0, share), share > 0, known),)
    half = (share + 1) // 2
    return Way(1, (0, half), share > 0, known), Way(-1, (half, share), False, known)


def hull(parts: Iterable[Tokens]) -> Tokens:
    """The least run that holds all of them."""
    some = [part for part in parts if part[0] < part[1]]
    return (min(begin for begin, _ in some), max(end for _, end in some)) if some else NONE
