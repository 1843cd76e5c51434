"""Divides a model's layers among pipeline stages, and work among ranks of unequal speed."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

_Cuts: TypeAlias = dict[int, tuple[float, int]]


def split_layers(
    costs: Sequence[float],
    stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    shares: Sequence[float] = (),
) -> list[range]:
    """Cuts the layers, in order, into `stages` ranges such that the costliest range costs least. Of several
    such cuts it returns the most even one (the least sum of squares), as a rank may have several stages; then
    the one whose earlier stages hold more layers.

    costs: the cost of each layer, in any unit. first, last: cost of the first and the last stage beside their
        layers (embedding; norm, head and loss).
    shares: share of the micro-batches that visits each stage, which multiplies its cost; empty: all.

    Raises ValueError if there are fewer layers than stages.
    """
    return list(_split(tuple(costs), stages, first, last, tuple(shares) or (1.0,) * stages))


@functools.lru_cache(maxsize=1024)  # a search of meshes asks for the same cuts thousands of times
def _split(
    costs: tuple[float, ...], stages: int, first: float, last: float, shares: tuple[float, ...]
) -> tuple[range, ...]:
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages; use 1 to {layers}.")
    total = list(accumulate(costs, initial=0.0))

    def of_stage(begin: int, end: int, stage: int) -> float:
        whole = total[end] - total[begin] + first * (stage == 0) + last * (stage == stages - 1)
        return shares[stage] * whole

    def best_cuts(value: Callable[[float], float], join: Callable[[float, float], float]) -> list[_Cuts]:
        """Returns for each stage and end the best cut of layers 0 .. end - 1 into stages 0 .. stage: what
        its stages are worth together, and minus the layer at which its last stage begins."""
        cuts: list[_Cuts] = [{end: (value(of_stage(0, end, 0)), 0) for end in range(1, layers + 1)}]
        for stage in range(1, stages):
            before = cuts[-1]
            cuts.append(
                {
                    end: min(
                        (join(before[begin][0], value(of_stage(begin, end, stage))), -begin)
                        for begin in range(stage, end)
                    )
                    for end in range(stage + 1, layers + 1)
                }
            )
        return cuts

    largest = best_cuts(lambda cost: cost, max)[-1][layers][0] * (1 + 1e-12)
    cuts = best_cuts(lambda cost: cost * cost if cost <= largest else math.inf, operator.add)
    runs, end = [], layers
    for stage in reversed(range(stages)):
        begin = -cuts[stage][end][1]
        runs.append(range(begin, end))
        end = begin
    return tuple(reversed(runs))


def least_largest(per_unit: Sequence[float], rest: Sequence[float], fewest: int, units: int) -> list[int]:
    """Returns the units n[r] of each rank or stage, layers or micro-batches, that minimize the largest
    rest[r] + n[r] * per_unit[r].

    Each unit goes to the rank that has the fewest seconds with it (`deal`). This is optimal. Suppose another
    assignment has a smaller maximum M. Here some rank r exceeds M, so n[r] is larger than there; then some
    rank s holds fewer units than there. With one more s would stay within M, so r's last unit would have
    gone to s.

    per_unit: seconds for a unit. rest: seconds beside them. fewest: units that each one has. Raises
    ValueError if there are not enough.
    """
    if fewest * len(per_unit) > units:
        raise ValueError(f"{units} layers do not give {fewest} to each of {len(per_unit)} stages.")
    first = [rest_s + fewest * unit_s for rest_s, unit_s in zip(rest, per_unit, strict=True)]
    given = Counter(deal(per_unit, units - fewest * len(per_unit), first))
    return [fewest + given[rank] for rank in range(len(per_unit))]


def deal(per_unit: Sequence[float], units: int, rest: Sequence[float] = ()) -> list[int]:
    """Returns the rank that each unit goes to, in turn: the one that has the fewest seconds with it, of
    several the first.

    per_unit: seconds for a unit. rest: seconds of each rank before; empty: none.
    """
    rest = rest or [0.0] * len(per_unit)
    counts, dealt = [0] * len(per_unit), []
    for _ in range(units):
        with_one_more = [
            rest_s + (count + 1) * unit_s
            for rest_s, count, unit_s in zip(rest, counts, per_unit, strict=True)
        ]
        dealt.append(with_one_more.index(min(with_one_more)))
        counts[dealt[-1]] += 1
    return dealt
