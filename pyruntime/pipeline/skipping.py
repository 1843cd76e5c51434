"""Schedules whose micro-batches skip stages (SkipPipe, Blagoev et al., arXiv 2502.19913).

Every micro-batch visits the first stage, the last, and all but `skip` of those between. The choice changes
the model that is trained: layers of skipped stages do not see the micro-batch, forward or backward. The
executor holds the head on the last stage, so that stage is never skipped; in the paper it is on the first,
which is the same if the head is a stage of its own there.

Paths are chosen before anything runs, from costs alone: each stage between gets the same number of
micro-batches, give or take one, and the order is the one whose list schedule ends first. Exchanges of two
stages on a path, which the paper allows, are not searched; the executor runs any path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from pyruntime.pipeline.list_schedule import Path, Paths, list_schedule
from pyruntime.pipeline.simulated import Costs

MOST_ORDERS = 3000
"""Sets of paths, balanced or not, up to which all balanced ones are tried; of more, those near a good one."""
MOST_COMPUTES = 60_000
"""Computes of all list schedules that a search may make, which takes about a second."""


def shares(stages: int, skip: int) -> list[float]:
    """Returns the share of the micro-batches that visits each stage."""
    between = stages - 2
    if skip == 0:
        return [1.0] * stages
    return [1.0, *[(between - skip) / between] * between, 1.0]


def check_skip(stages: int, micro_batches: int, skip: int) -> None:
    """Raises ValueError if that many stages cannot be skipped."""
    between = stages - 2
    if not 0 <= skip < max(1, between):
        raise ValueError(
            f"skip={skip} of {stages} stages: the first and the last are always visited, and one of those "
            f"between must be left; use 0 to {max(0, between - 1)}."
        )
    if skip and micro_batches * (between - skip) < between:
        raise ValueError(
            f"{micro_batches} micro-batch(es) that skip {skip} of the {between} stages between the first and "
            f"the last leave some of these without work; use {-(-between // (between - skip))} or more."
        )


def best_paths(
    placement: Sequence[int], micro_batches: int, skip: int, costs: Costs, most_stored: Sequence[int]
) -> Paths:
    """Returns the paths, in the order of the micro-batches, whose `list_schedule` ends first; the same for
    the same arguments. most_stored: see there."""
    stages = len(placement)
    kept = stages - 2 - skip

    def seconds(paths: Paths) -> float:
        found = list_schedule(placement, paths, costs, most_stored)
        assert found is not None, "stages in ascending order do not wait for each other in a circle"
        return found[1]

    if math.comb(stages - 2, kept) ** micro_batches <= MOST_ORDERS:
        return min(_balanced(stages, micro_batches, kept), key=seconds)  # the first of the best
    turns = MOST_COMPUTES // (2 * micro_batches * (kept + 2))
    best = _in_turn(stages, micro_batches, kept)
    least, tried = seconds(best), 1
    improves = True
    while improves:
        improves = False
        for other in _neighbours(best):
            if tried >= turns:
                return best
            tried += 1
            found = seconds(other)
            if found < least:
                best, least, improves = other, found, True
                break
    return best


def _in_turn(stages: int, micro_batches: int, kept: int) -> Paths:
    """Deals the stages between the first and the last to micro-batches in turn."""
    between = itertools.cycle(range(1, stages - 1))
    return tuple((0, *sorted(itertools.islice(between, kept)), stages - 1) for _ in range(micro_batches))


def _balanced(stages: int, micro_batches: int, kept: int) -> Iterator[Paths]:
    """Yields all sets of paths, in ascending order, in which stages between the first and the last get the
    same number of micro-batches, give or take one."""
    each = list(itertools.combinations(range(1, stages - 1), kept))
    least, more = divmod(micro_batches * kept, stages - 2)
    chosen: list[Path] = []
    counts = [0] * stages

    def complete() -> Iterator[Paths]:
        left = micro_batches - len(chosen)
        between = counts[1:-1]
        above = sum(count > least for count in between)
        if above > more or any(count > least + 1 or count + left < least for count in between):
            return
        if not left:
            yield tuple((0, *path, stages - 1) for path in chosen)
            return
        for path in each:
            for stage in path:
                counts[stage] += 1
            chosen.append(path)
            yield from complete()
            chosen.pop()
            for stage in path:
                counts[stage] -= 1

    return complete()


def _neighbours(paths: Paths) -> Iterator[Paths]:
    """Yields the sets of paths in which two micro-batches exchange a stage that only one of them visits for
    one that only the other visits: the number of visits of every stage stays."""
    for one, other in itertools.combinations(range(len(paths)), 2):
        for given in sorted(set(paths[one]) - set(paths[other])):
            for taken in sorted(set(paths[other]) - set(paths[one])):
                changed = list(paths)
                changed[one] = tuple(sorted({*paths[one], taken} - {given}))
                changed[other] = tuple(sorted({*paths[other], given} - {taken}))
                yield tuple(changed)
