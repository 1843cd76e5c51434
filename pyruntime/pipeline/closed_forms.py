"""Bubbles by formula. The simulation must find the same if all stages cost the same and messages nothing."""

from __future__ import annotations

from pyruntime.pipeline.actions import Schedule
from pyruntime.pipeline.simulated import Costs


def bubble_1f1b(ranks: int, forward: float, backward: float) -> float:
    """Seconds that every rank idles under GPipe and 1F1B: (p - 1)(t_f + t_b) (arXiv 2104.04473,
    section 2.2.1).

    forward, backward: seconds of a rank's stage for one micro-batch. For TeraPipe and Seq1F1B with slices of
    equal cost, give the seconds of one slice (derived: a slice is a micro-batch there).
    """
    return (ranks - 1) * (forward + backward)


def bubble_interleaved(ranks: int, virtual: int, forward: float, backward: float) -> float:
    """Seconds that every rank idles under interleaved 1F1B: (p - 1)(t_f + t_b) / v (arXiv 2104.04473,
    section 2.2.2).

    forward, backward: seconds of all `virtual` stages of a rank together, for one micro-batch.
    """
    return (ranks - 1) * (forward + backward) / virtual


def bubble_zb_h1(ranks: int, forward: float, backward_input: float, backward_weight: float) -> float:
    """Seconds that every rank idles under ZB-H1: (p - 1)(T_F + T_B - T_W) (arXiv 2401.10241, table 2).

    Holds if micro_batches >= ranks and backward_weight is at most forward and at most backward_input
    (derived: simulated).
    """
    return (ranks - 1) * (forward + backward_input - backward_weight)


def closed_form_bubble(schedule: Schedule, costs: Costs) -> float | None:
    """Seconds that every rank of `schedule` idles, by the formula of its kind. None if the kind has none, if
    costs are tables, if messages take time, or if micro-batches skip stages."""
    seconds = (costs.forward, costs.backward_input, costs.backward_weight)
    numbers = [float(part) for part in seconds if isinstance(part, (int, float))]
    if costs.transfer or len(numbers) < len(seconds) or schedule.paths:
        return None
    forward, of_input, of_weight = numbers
    ranks, virtual = schedule.ranks, schedule.stages // schedule.ranks
    match schedule.kind:
        case "gpipe" | "1f1b" | "terapipe" | "seq1f1b":
            return bubble_1f1b(ranks, forward, of_input + of_weight)
        case "interleaved":
            return bubble_interleaved(ranks, virtual, virtual * forward, virtual * (of_input + of_weight))
        case "zb-h1" if schedule.micro_batches >= ranks and of_weight <= min(forward, of_input):
            return bubble_zb_h1(ranks, forward, of_input, of_weight)
    return None
