"""Plans which tokens' keys travel in which direction round the ring, and how far: data, by pure functions.

The keys of half of every rank's tokens travel to the next rank, those of the other half to the previous one,
so that both directions carry the same load. A rank passes on only keys that a rank further along sees. Under
a causal mask in the zigzag layout, for example, only lower ranks see the second half of a rank's tokens: it
travels back to rank 0 and no further. The sums of the keys' gradients travel in the same direction, from the
first rank that has a part to the owner.

Tokens are numbered within their rank's share; `distance` counts hops from the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Tokens = tuple[int, int]
"""A run of one rank's tokens, [begin, end); (0, 0) is empty."""
NONE: Tokens = (0, 0)


@dataclass(frozen=True)
class Way:
    """One direction round the ring, and the tokens of every rank whose keys take it."""

    step: int
    """1: every rank sends to the next one; -1: to the previous one."""
    tokens: Tokens
    always: bool
    """Whether every rank sends its neighbour at least one token, even if no rank sees it: the messages let
    ranks compare their arguments."""
    hulls: tuple[tuple[Tokens, ...], ...]
    """[rank][owner]: the least run of the owner's tokens with all that any query of the rank sees."""

    @property
    def ranks(self) -> int:
        return len(self.hulls)

    def owner(self, rank: int, distance: int) -> int:
        return (rank - self.step * distance) % self.ranks

    def rank(self, owner: int, distance: int) -> int:
        return (owner + self.step * distance) % self.ranks

    def seen(self, rank: int, owner: int) -> Tokens:
        """Returns the owner's tokens on this way that any query of the rank sees."""
        begin, end = self.hulls[rank][owner]
        begin, end = max(begin, self.tokens[0]), min(end, self.tokens[1])
        return (begin, end) if begin < end else NONE

    def keys(self, owner: int, distance: int) -> Tokens:
        """Returns the tokens whose keys and values travel to the rank at that distance: those that it, or a
        rank further along, sees."""
        if not 1 <= distance < self.ranks:
            return NONE
        wanted = hull(self.seen(self.rank(owner, d), owner) for d in range(distance, self.ranks))
        if wanted == NONE and self.always and distance == 1:
            return self.tokens[0], self.tokens[0] + 1
        return wanted

    def sums(self, owner: int, distance: int) -> Tokens:
        """Returns the tokens whose gradient sums travel on from the rank at that distance: those that the
        ranks from the owner's neighbour to it see."""
        return hull(
            self.seen(self.rank(owner, d), owner) for d in range(1, min(distance, self.ranks - 1) + 1)
        )


def ways(hulls: Sequence[Sequence[Tokens]], share: int) -> tuple[Way, ...]:
    """Returns the two ways of a ring of ranks with `share` tokens each; only one for up to two ranks, which
    have a single link. hulls: see `Way`."""
    known = tuple(tuple(row) for row in hulls)
    if len(known) < 3:
        return (Way(1, (0, share), share > 0, known),)
    half = (share + 1) // 2
    return Way(1, (0, half), share > 0, known), Way(-1, (half, share), False, known)


def hull(parts: Iterable[Tokens]) -> Tokens:
    """Returns the least run that contains all parts."""
    some = [part for part in parts if part[0] < part[1]]
    return (min(begin for begin, _ in some), max(end for _, end in some)) if some else NONE
