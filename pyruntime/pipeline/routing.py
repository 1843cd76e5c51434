"""Micro-batches that are routed among replicas of pipeline stages, by the replicas' speeds.

SWARM (Ryabinin et al., arXiv 2301.11913) has several ranks in every stage, and a micro-batch goes through
any one of each. There, senders choose while they run, from measured times. Here everything is chosen before
a step, from stated speeds: the same on all ranks, and the same bits in every run. The released code adds a
micro-batch's seconds to a replica's after it has chosen, and so takes the replica that is free first; here
it takes the one that ends first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyruntime.pipeline.actions import Action, Kind
from pyruntime.pipeline.list_schedule import Paths
from pyruntime.pipeline.simulated import Costs
from pyruntime.pipeline.split import deal

Speeds = tuple[tuple[float, ...], ...]
"""Relative speeds by stage and replica. Paths depend on those of each stage, the order of work on all."""


def by_stage(speeds: Sequence[float], stages: int) -> Speeds:
    """Arranges speeds that are listed stage by stage. Raises ValueError unless there are as many for each
    stage, and all are positive numbers."""
    replicas, more = divmod(len(speeds), stages)
    if more or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(
            f"speeds={list(speeds)} of {stages} stages must be positive numbers, as many for each stage: "
            "first those of the first stage's replicas, then those of the second's."
        )
    return tuple(tuple(speeds[stage * replicas : (stage + 1) * replicas]) for stage in range(stages))


def routes(speeds: Speeds, micro_batches: int) -> Paths:
    """Returns the path of each micro-batch, where stage s * replicas + r is replica r of stage s.

    At every stage micro-batches go, in order, to the replica that would end them first if it did nothing
    else, of several to the first. Raises ValueError if a replica gets none.
    """
    replicas = len(speeds[0])
    dealt = [deal([1 / speed for speed in each], micro_batches) for each in speeds]
    for stage, (each, own) in enumerate(zip(speeds, dealt, strict=True)):
        idle = sorted(set(range(replicas)) - set(own))
        if idle:
            raise ValueError(
                f"speeds {list(each)} of the replicas of stage {stage} leave replica {idle[0]} without any "
                f"of the {micro_batches} micro-batches of a step; use more of them, or start without it."
            )
    return tuple(
        tuple(stage * replicas + replica for stage, replica in enumerate(path))
        for path in zip(*dealt, strict=True)
    )


def costs_of_replicas(costs: Costs, speeds: Speeds) -> Costs:
    """Returns the seconds of every replica, given those of each stage at speed 1."""

    def table(kind: Kind) -> list[list[float]]:
        seconds = [costs.seconds(Action(kind, stage, 0)) for stage in range(len(speeds))]
        return [[own / speed] for own, each in zip(seconds, speeds, strict=True) for speed in each]

    return Costs(table(Kind.FORWARD), table(Kind.BACKWARD_INPUT), table(Kind.BACKWARD_WEIGHT), costs.transfer)
