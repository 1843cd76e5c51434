"""Chooses how many layers each pipeline stage holds, or without a pipeline how many micro-batches each
data-parallel rank takes, or with neither how much of each layer each tensor-parallel rank holds, from the
seconds that ranks need for one.

Functions of numbers that all ranks have. The slowest rank sets the pace, so its seconds are minimized.
Malleus (Li et al. 2024, arXiv 2410.13333) distributes layers by how far ranks straggle, and also regroups
ranks; here all layers cost the same, and stages keep their ranks. Micro-batches that follow speed are
strategy S2 of FALCON (Wu et al. 2024, arXiv 2410.12588).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

import torch

from pyruntime.comm import Runtime
from pyruntime.pipeline.split import least_largest
from pyruntime.train.errors import ConfigError
from pyruntime.train.resolved import Movable, ResolvedRun
from pyruntime.train.slow.judge import WINDOWS, Window
from pyruntime.train.slow.windows import SlowReport

GAIN = 0.1
"""Least share of the slowest stage's seconds that a move must save."""


_AXES: dict[Movable, int] = {"layers": 0, "micro-batches": 1, "parts": 3}
"""The axis of `Runtime.by_axes` over which work moves."""
_WORDS: dict[Movable, tuple[str, str]] = {
    "layers": (
        "layers of the stages",
        "the ranks of the pipeline take {} s a step for each layer they hold",
    ),
    "micro-batches": ("micro-batches of the data-parallel ranks", "they take {} s for each of them"),
    "parts": (
        "parts of the tensor-parallel ranks, in thousandths of an equal one,",
        "they take {} s a step for each thousandth",
    ),
}


@dataclasses.dataclass(frozen=True)
class Move:
    """`ResolvedRun.work` before and after, and the expected saving."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    gain: float
    """Saved share of the seconds of the rank that computes longest."""
    sentence: str


def move_of(run: ResolvedRun, runtime: Runtime, slow: SlowReport, is_moved: bool) -> Move | None:
    """Returns which work moves now, the same on all ranks; None: none. It moves only if a rank is slow, or if
    it has moved before (is_moved) and may move back."""
    if len(slow.windows) < WINDOWS or not (slow.slow_ranks or is_moved):
        return None
    grid = runtime.by_axes(torch.arange(runtime.world.size()))
    ranks = grid.movedim(_AXES[run.movable], 0).flatten(1).tolist()
    placement = run.placement if run.movable == "layers" else range(len(run.work))
    move = best_move(slow.windows, ranks, placement, run.work, slow.slow_ranks, slow.names, run.movable)
    if move is not None and run.movable == "parts" and not _changes_cuts(run, move.after):
        return None
    return move


def _changes_cuts(run: ResolvedRun, parts: Sequence[int]) -> bool:
    """Whether the model can be cut by these parts, which have larger units, and is then cut otherwise."""
    try:
        return run.with_work(parts).cuts != run.cuts
    except ConfigError:  # a rank would have no MLP features
        return False


def best_move(
    windows: Sequence[Sequence[Window]],
    ranks_of: Sequence[Sequence[int]],
    placement: Sequence[int],
    work: Sequence[int],
    slow: Sequence[int],
    names: Sequence[str],
    movable: Movable = "layers",
) -> Move | None:
    """Returns the move that saves most; None if it saves less than GAIN.

    windows: measurements of all ranks. ranks_of: ranks at each place in the pipeline, else of each
    data-parallel or tensor-parallel rank. placement: place of each stage. work: as in `ResolvedRun`, now.
    slow: slow ranks; names: of all ranks, for the sentence. movable: what moves.
    """

    def of_place(ranks: Sequence[int], name: str) -> float:
        """Returns the slowest rank's median: the ranks of a place wait for it."""
        return max(median(getattr(window[rank], name) for window in windows) for rank in ranks)

    per_unit = [of_place(ranks, "layer_s") for ranks in ranks_of]
    rest = [of_place(ranks, "rest_s") for ranks in ranks_of]
    now = [0] * len(ranks_of)
    for count, place in zip(work, placement, strict=True):
        now[place] += count
    then = least_largest(per_unit, rest, len(placement) // len(ranks_of), sum(work))
    gain = 1 - _largest(per_unit, rest, then) / _largest(per_unit, rest, now)
    if gain < GAIN:
        return None
    after = _by_stage(then, placement)
    told = ", ".join(f"{seconds:.3g}" for seconds in per_unit)
    why = "".join(f"{names[rank]} is slow, and " for rank in slow)
    before, ahead = (", ".join(map(str, each)) for each in (work, after))
    what, which = _WORDS[movable]
    sentence = (
        f"{what} go from {before} to {ahead}: {why}{which.format(told)}, so that the one that takes longest "
        f"will take {gain:.0%} less."
    )
    return Move(tuple(work), after, gain, sentence)


def _largest(per_unit: Sequence[float], rest: Sequence[float], counts: Sequence[int]) -> float:
    return max(rest_s + count * unit_s for rest_s, count, unit_s in zip(rest, counts, per_unit, strict=True))


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
