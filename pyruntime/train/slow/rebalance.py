"""Chooses how many layers each pipeline stage holds, from its ranks' measured seconds per layer.

Pure functions of numbers that all ranks have. The slowest rank sets the pace of a pipeline, so its seconds
are minimized. Malleus (Li et al. 2024, arXiv 2410.13333) distributes layers by how far ranks straggle, and
also regroups ranks; here all layers cost the same, and stages keep their ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

from pyruntime.train.slow.judge import Window

GAIN = 0.1
"""Least share of the slowest stage's seconds that a move must save."""


@dataclasses.dataclass(frozen=True)
class Move:
    """Layers of each stage, before and after, and the expected saving."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    gain: float
    """Saved share of the seconds of the rank that computes longest."""
    sentence: str


def least_largest(per_layer: Sequence[float], rest: Sequence[float], fewest: int, layers: int) -> list[int]:
    """Returns the layers n[r] of each rank that minimize the largest rest[r] + n[r] * per_layer[r].

    Each layer goes to the rank that has the fewest seconds with it. This is optimal. Suppose another
    assignment has a smaller maximum M. Here some rank r exceeds M, so n[r] is larger than there; then some
    rank s holds fewer layers than there. With one layer more s would stay within M, so r's last layer would
    have gone to s.

    fewest: layers that each rank keeps. Raises ValueError if there are not enough.
    """
    if fewest * len(per_layer) > layers:
        raise ValueError(f"{layers} layers do not give {fewest} to each of {len(per_layer)} ranks.")
    counts = [fewest] * len(per_layer)
    for _ in range(layers - sum(counts)):
        with_one_more = [
            rest_s + (count + 1) * layer_s
            for rest_s, count, layer_s in zip(rest, counts, per_layer, strict=True)
        ]
        counts[with_one_more.index(min(with_one_more))] += 1
    return counts


def best_move(
    windows: Sequence[Sequence[Window]],
    ranks_of: Sequence[Sequence[int]],
    placement: Sequence[int],
    layers: Sequence[int],
    slow: Sequence[int],
    names: Sequence[str],
) -> Move | None:
    """Returns the move that saves most; None if it saves less than GAIN.

    windows: measurements of all ranks. ranks_of: ranks at each place in the pipeline. placement: place of
    each stage. layers: of each stage now. slow: slow ranks; names: of all ranks, for the sentence.
    """

    def of_place(ranks: Sequence[int], name: str) -> float:
        """Returns the slowest rank's median: the ranks of a place wait for it."""
        return max(median(getattr(window[rank], name) for window in windows) for rank in ranks)

    per_layer = [of_place(ranks, "layer_s") for ranks in ranks_of]
    rest = [of_place(ranks, "rest_s") for ranks in ranks_of]
    now = [0] * len(ranks_of)
    for count, place in zip(layers, placement, strict=True):
        now[place] += count
    then = least_largest(per_layer, rest, len(placement) // len(ranks_of), sum(layers))
    gain = 1 - _largest(per_layer, rest, then) / _largest(per_layer, rest, now)
    if gain < GAIN:
        return None
    after = _by_stage(then, placement)
    told = ", ".join(f"{seconds:.3g}" for seconds in per_layer)
    why = "".join(f"{names[rank]} is slow, and " for rank in slow)
    before, ahead = (", ".join(map(str, each)) for each in (layers, after))
    sentence = (
        f"layers of the stages go from {before} to {ahead}: {why}the ranks of the pipeline take {told} s a "
        f"step for each layer they hold, so that the one that takes longest will take {gain:.0%} less."
    )
    return Move(tuple(layers), after, gain, sentence)


def _largest(per_layer: Sequence[float], rest: Sequence[float], counts: Sequence[int]) -> float:
    return max(
        rest_s + count * layer_s for rest_s, count, layer_s in zip(rest, counts, per_layer, strict=True)
    )


def _by_stage(counts: Sequence[int], placement: Sequence[int]) -> tuple[int, ...]:
    """Returns the layers of each stage, given those of each rank: shared equally by a rank's stages, the
    earlier ones taking the remainder."""
    result = [0] * len(placement)
    for place, count in enumerate(counts):
        stages = [stage for stage, holder in enumerate(placement) if holder == place]
        each, more = divmod(count, len(stages))
        for index, stage in enumerate(stages):
            result[stage] = each + (index < more)
    return tuple(result)
