"""Which layers each stage of a pipeline is to hold, by what its ranks were measured to take for a layer.

Pure functions of what all ranks have alike. The rank that takes longest sets the pace of a pipeline, so its
seconds are what is made least. Malleus (Li et al. 2024, arXiv 2410.13333) deals out layers by how far ranks
straggle, and regroups ranks besides; here layers are alike, and stages keep their ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

from pyruntime.train.slow.judge import Window

GAIN = 0.1
"""Share of the slowest stage's seconds that moving layers is to save, at least."""


@dataclasses.dataclass(frozen=True)
class Move:
    """Layers of each stage, before and after, and what that is expected to save."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    gain: float
    """Of the seconds of the rank that computes longest, the share."""
    sentence: str


def least_largest(per_layer: Sequence[float], rest: Sequence[float], fewest: int, layers: int) -> list[int]:
    """How many layers each rank is to hold, so that the largest of rest[r] + n[r] * per_layer[r] is least.

    One layer after the other goes to the rank that has the least seconds with it. No assignment has a
    smaller maximum: take one that has, M; the greedy one has a rank r whose last layer took it above M, so
    with n[r] greater than there. Then another rank s holds fewer than there, and would with one more be at
    most at M, so that the layer had gone to s.

    fewest: layers that each keeps. Raises ValueError where there are not as many.
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
    """The move that saves at least GAIN, of what was measured in `windows`, of all ranks each; None: none.

    ranks_of: of each place in the pipeline. placement: the place of each stage. layers: of each stage now.
    slow, names: ranks that are slow, and what all ranks are called, for the sentence.
    """

    def of_place(ranks: Sequence[int], name: str) -> float:
        """The ranks of a place wait for the slowest among them."""
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
    """Layers of each stage, where ranks hold so many: a rank's stages as equally as may be, the earlier ones
    more."""
    result = [0] * len(placement)
    for place, count in enumerate(counts):
        stages = [stage for stage, holder in enumerate(placement) if holder == place]
        each, more = divmod(count, len(stages))
        for index, stage in enumerate(stages):
            result[stage] = each + (index < more)
    return tuple(result)
