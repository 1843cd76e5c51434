"""Which layers of a model each stage holds."""

from __future__ import annotations

from collections.abc import Sequence


def split_layers(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Layers in their order, cut into `stages` runs whose costliest one costs least; of several such cuts the
    one whose earlier stages hold more.

    costs: of each layer, in any unit. first, last: what the first and the last stage do beside their layers
        (embedding; norm, head and loss).

    Raises ValueError where there are fewer layers than stages.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages; use 1 to {layers}.")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def of_stage(begin: int, end: int, stage: int) -> float:
        return total[end] - total[begin] + first * (stage == 0) + last * (stage == stages - 1)

    # best[end]: the least largest cost of stages 0 .. stage over layers 0 .. end - 1, and where the last of
    # them begins.
    best = {end: (of_stage(0, end, 0), 0) for end in range(1, layers + 1)}
    cuts = [best]
    for stage in range(1, stages):
        best = {
            end: min(
                (max(cuts[-1][begin][0], of_stage(begin, end, stage)), -begin) for begin in range(stage, end)
            )
            for end in range(stage + 1, layers + 1)
        }
        best = {end: (value, -begin) for end, (value, begin) in best.items()}
        cuts.append(best)
    runs, end = [], layers
    for stage in reversed(range(stages)):
        begin = cuts[stage][end][1]
        runs.append(range(begin, end))
        end = begin
    return runs[::-1]
