"""The order in which the warps of a kernel for Hopper meet (csrc/cuda/sm90/product.cuh).

Loader, both warpgroups of multipliers, mover and TMA are what they do, step by step, in the order of the
sources. Of one block every order that its barriers allow is gone through. Of a cluster, whose blocks wait for
each other only in that a stage is free when all have read it, orders are drawn: what may be done once may be
done for good, so all orders end alike.

Nobody may wait for ever, come to a barrier twice before the other side has come once, or write where half of
a result is staged before it has been read. Each rule is broken once, to see that it is needed and would be
found.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

Step = tuple[str, str]
"""What is done, and to which thing of the block's: ("arrive", "free0")."""
STAGES = 2


@dataclass(frozen=True)
class Rules:
    """What the mover keeps to."""

    one_half_at_a_time: bool = True  # kFree of the second half comes when the first has been read
    awaits_reading: bool = True  # by TMA, before kFree
    awaits_sums: bool = True  # kStaged of own tiles, too


def sync(barrier: str) -> list[Step]:
    return [("arrive", barrier), ("wait", barrier)]


def loader(tiles: list[str], steps: int) -> Iterator[Step]:
    yield from [("fill", "stages")] * (len(tiles) * steps)


def warpgroup(tiles: list[str], steps: int, half: int) -> Iterator[Step]:
    for tile in tiles:
        yield from [("multiply", f"stages{half}")] * steps
        yield from sync(f"free{half}")
        yield ("stage", "result")
        if tile == "own":
            yield from sync(f"parts{half}")
            yield ("take", "result")  # summed
        yield ("arrive", f"staged{half}")


def mover(tiles: list[str], rules: Rules) -> Iterator[Step]:
    for tile in tiles:
        if not rules.one_half_at_a_time:
            yield ("arrive", "free1")
        for half in range(2):
            if half == 0 or rules.one_half_at_a_time:
                yield ("arrive", f"free{half}")
            if tile == "own":
                yield from sync(f"parts{half}")
            if tile == "other" or rules.awaits_sums:
                yield from sync(f"staged{half}")
            if tile == "other":
                yield ("store", "result")
                if rules.awaits_reading:
                    yield ("await", "reading")


def tma(tiles: list[str]) -> Iterator[Step]:
    yield from [("take", "result")] * (2 * tiles.count("other"))


class Broken(Exception):
    """A rule is, by some order."""


class Block:
    """What each actor does, and how often it has done which step when it is so far."""

    def __init__(self, tiles: list[str], steps: int, rules: Rules) -> None:
        self.programs = [
            list(loader(tiles, steps)),
            list(warpgroup(tiles, steps, 0)),
            list(warpgroup(tiles, steps, 1)),
            list(mover(tiles, rules)),
            list(tma(tiles)),
        ]
        self.counts: list[list[Counter[Step]]] = []
        for program in self.programs:
            self.counts.append([Counter()])
            for step in program:
                self.counts[-1].append(self.counts[-1][-1] + Counter([step]))

    def done(self, at: tuple[int, ...], step: Step) -> int:
        return sum(counts[i][step] for counts, i in zip(self.counts, at, strict=True))

    def read(self, at: tuple[int, ...]) -> int:
        """Stages that both warpgroups have."""
        return min(self.done(at, ("multiply", f"stages{half}")) for half in range(2))

    def may(self, at: tuple[int, ...], actor: int, released: int) -> bool:
        """Whether an actor's next step can be taken; raises Broken where it can and must not. `released`:
        stages that all have read, in all blocks."""
        step = kind, thing = self.programs[actor][at[actor]]
        mine = self.counts[actor][at[actor]]
        if kind == "arrive":
            # Two sides to each barrier.
            if 2 * mine[step] > self.done(at, step):
                raise Broken(f"somebody comes to {thing} twice")
        elif kind == "wait":
            return 2 * mine["arrive", thing] <= self.done(at, ("arrive", thing))
        elif kind == "fill":
            return mine[step] < released + STAGES
        elif kind == "multiply":
            return mine[step] < self.done(at, ("fill", "stages"))
        elif kind == "stage" and self.done(at, step) > self.done(at, ("take", thing)):
            raise Broken("a half is staged over one that has not been read")
        elif kind == "take" and actor == 4:
            return mine[step] < self.done(at, ("store", "result"))
        elif kind == "await":
            return self.counts[4][at[4]]["take", "result"] == mine["store", "result"]
        return True

    def is_over(self, at: tuple[int, ...]) -> bool:
        return all(i == len(program) for i, program in zip(at, self.programs, strict=True))

    def next(self, at: tuple[int, ...], released: int) -> Iterator[tuple[int, ...]]:
        for actor, program in enumerate(self.programs):
            if at[actor] < len(program) and self.may(at, actor, released):
                yield (*at[:actor], at[actor] + 1, *at[actor + 1 :])


def go_through(tiles: list[str], steps: int, rules: Rules) -> int:
    """Every order of one block; the number of states."""
    block = Block(tiles, steps, rules)
    seen = {(0,) * len(block.programs)}
    under_way = list(seen)
    while under_way:
        at = under_way.pop()
        after = list(block.next(at, block.read(at)))
        if not after and not block.is_over(at):
            raise Broken(f"nobody goes on from {at}")
        for one in after:
            if one not in seen:
                seen.add(one)
                under_way.append(one)
    return len(seen)


TILES = [list(tiles) for tiles in itertools.product(("other", "own"), repeat=3)]


@pytest.mark.parametrize("steps", [1, 3])
def test_no_order_of_a_block_ends_in_waiting_or_spoils_what_is_staged(steps):
    for tiles in TILES:
        assert go_through(tiles, steps, Rules()) > 100


@pytest.mark.parametrize(
    ("rules", "tiles", "words"),
    [
        (Rules(one_half_at_a_time=False), "other", "staged over one that has not been read"),
        (Rules(awaits_reading=False), "other", "staged over one that has not been read"),
        (Rules(awaits_sums=False), "own", "staged over one that has not been read|comes to staged. twice"),
    ],
)
def test_every_rule_is_needed(rules, tiles, words):
    with pytest.raises(Broken, match=words):
        go_through([tiles] * 2, 1, rules)


@pytest.mark.parametrize("tiles", TILES)
def test_the_blocks_of_a_cluster_do_not_wait_for_each_other_for_ever(tiles):
    draw = random.Random()
    blocks = [Block(tiles, 3, Rules()) for _ in range(2)]
    for _ in range(20):
        at = [(0,) * len(block.programs) for block in blocks]
        while True:
            read = min(block.read(where) for block, where in zip(blocks, at, strict=True))
            after = [(i, one) for i, block in enumerate(blocks) for one in block.next(at[i], read)]
            if not after:
                break
            i, at[i] = draw.choice(after)
        assert all(block.is_over(where) for block, where in zip(blocks, at, strict=True))
