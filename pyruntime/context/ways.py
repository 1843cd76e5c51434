"""Plans which tokens' keys travel in which direction round the ring, and how far: data, by pure functions.

There are two plans. *Round the ring*: the keys of half of every rank's tokens travel to the next rank, those
of the other half to the previous one, so that both directions carry the same load. A rank passes on only keys
that a rank further along sees. Under a causal mask in the zigzag layout, for example, only lower ranks see
the second half of a rank's tokens: it travels back to rank 0 and no further. The sums of the keys' gradients
travel on in the same direction, from the first rank that has a part to the owner, so no rank keeps them.

*There and back*: all keys that a rank sees come to it by the shorter way, and the sums go back as the keys
came. That is less where ranks see only their neighbours' keys: in a window, or in documents that lie on few
ranks. But a rank keeps its parts of the sums until those of ranks further along have come.

Tokens are numbered within their rank's share; `distance` counts hops from the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Tokens = tuple[int, int]
"""A run of one rank's tokens, [begin, end); (0, 0) is empty."""
NONE: Tokens = (0, 0)
OF_SUMS = 2
"""Bytes of a token's gradients, in fp32, beside those of its keys in bf16."""
MOST_KEPT = 1
"""Shares of a rank's tokens whose sums it may keep, there and back."""


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
    comes_back: bool = False
    """Whether keys go only to ranks that are nearer this way round, and sums come back as the keys went.
    `tokens` then take this way only to the rank that is as far both ways."""

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
        twice = 2 * ((rank - owner) * self.step % self.ranks)
        if self.comes_back and twice > self.ranks:
            return NONE
        if not self.comes_back or twice == self.ranks:
            begin, end = max(begin, self.tokens[0]), min(end, self.tokens[1])
        return (begin, end) if begin < end else NONE

    def keys(self, owner: int, distance: int) -> Tokens:
        """Returns the tokens whose keys and values travel to the rank at that distance: those that it, or a
        rank further along, sees."""
        if not 1 <= distance < self.ranks:
            return NONE
        wanted = self.seen_from(owner, distance)
        if wanted == NONE and self.always and distance == 1:
            return self.tokens[0], self.tokens[0] + 1
        return wanted

    def seen_from(self, owner: int, distance: int) -> Tokens:
        """Returns the tokens that the rank at that distance, or one further along, sees. If sums come back,
        theirs leave from there."""
        return hull(self.seen(self.rank(owner, d), owner) for d in range(distance, self.ranks))

    @property
    def reach(self) -> int:
        """The largest distance at which a rank sees tokens that take this way."""
        return max(
            (
                distance
                for distance in range(1, self.ranks)
                for owner in range(self.ranks)
                if self.seen(self.rank(owner, distance), owner) != NONE
            ),
            default=0,
        )

    def sums(self, owner: int, distance: int) -> Tokens:
        """Returns the tokens whose gradient sums travel on from the rank at that distance, if they do not
        come back: those that the ranks from the owner's neighbour to it see.
        """
        return hull(
            self.seen(self.rank(owner, d), owner) for d in range(1, min(distance, self.ranks - 1) + 1)
        )


def ways(hulls: Sequence[Sequence[Tokens]], share: int) -> tuple[Way, ...]:
    """Returns the two ways of a ring of ranks with `share` tokens each; only one for up to two ranks, which
    have a single link. hulls: see `Way`. There and back, if that sends less and ranks keep few sums."""
    known = tuple(tuple(row) for row in hulls)
    if len(known) < 3:
        return (Way(1, (0, share), share > 0, known),)
    half = (share + 1) // 2
    up, down = Way(1, (0, half), share > 0, known), Way(-1, (half, share), False, known)
    back = replace(up, comes_back=True), replace(down, comes_back=True)
    few = all(_kept(back, rank) <= MOST_KEPT * share for rank in range(len(known)))
    return back if few and tokens_sent(back) < tokens_sent((up, down)) else (up, down)


def tokens_sent(plan: Sequence[Way]) -> int:
    """Returns the tokens that all ranks send on, those of sums by their weight."""
    return sum(
        _count(way.keys(owner, distance))
        + OF_SUMS * _count((way.seen_from if way.comes_back else way.sums)(owner, distance))
        for way in plan
        for owner in range(way.ranks)
        for distance in range(1, way.ranks)
    )


def _kept(plan: Sequence[Way], rank: int) -> int:
    """Returns the tokens whose sums a rank keeps if they come back."""
    return sum(
        _count(way.seen_from(way.owner(rank, distance), distance))
        for way in plan
        for distance in range(1, way.ranks)
    )


def _count(tokens: Tokens) -> int:
    return tokens[1] - tokens[0]


def hull(parts: Iterable[Tokens]) -> Tokens:
    """Returns the least run that contains all parts."""
    some = [part for part in parts if part[0] < part[1]]
    return (min(begin for begin, _ in some), max(end for _, end in some)) if some else NONE
