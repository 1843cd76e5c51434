"""Draws timelines of schedules, on the terminal and as a PNG."""

from __future__ import annotations

import os

from pyruntime.pipeline.actions import Action, Kind
from pyruntime.pipeline.simulated import Timeline

SHOWN = {
    Kind.FORWARD: ("forward", "#4c78a8"),
    Kind.BACKWARD: ("backward", "#54a24b"),
    Kind.BACKWARD_INPUT: ("input gradient", "#72b7b2"),
    Kind.BACKWARD_WEIGHT: ("weight gradient", "#b5cf6b"),
}
"""Name and colour of each kind."""
LIGHTEST = 0.55
"""Opacity of a sequence's last slice; the first has 1."""
MOST_INCHES = 40.0


def text(timeline: Timeline, width: int = 110) -> str:
    """Returns `timeline` as one line a rank, of at most `width` columns, and a legend.

    A compute is shown as its code (F, B, I, W) and its micro-batch, followed by dashes up to its length; in
    small letters for every second stage of a rank. If the number does not fit, only its last digit or only
    the code is shown. Computes shorter than a column are left out.
    """
    schedule = timeline.schedule
    names = [f"rank {rank:<{len(str(schedule.ranks - 1))}}  " for rank in range(schedule.ranks)]
    columns = max(1, width - len(names[0]))
    scale = _columns_a_second(timeline, columns)
    lines = []
    for rank, name in enumerate(names):
        row = [" "] * round(timeline.makespan * scale)
        stages = schedule.stages_of(rank)
        for span in timeline.spans_of(rank):
            begin, end = round(span.start * scale), round(span.end * scale)
            row[begin:end] = _label(span.action, stages.index(span.action.stage) % 2 == 1, end - begin)
        lines.append((name + "".join(row)).rstrip())
    step = f"{1 / scale:.3g} s" if scale else "no time"
    kinds = ", ".join(f"{kind.value} {SHOWN[kind][0]}" for kind in _kinds(timeline))
    return "\n".join([*lines, f"a column is {step}; {kinds}; the number is the micro-batch"])


def _kinds(timeline: Timeline) -> list[Kind]:
    """Returns the kinds that occur, in the order of the legend."""
    found = {span.action.kind for span in timeline.spans}
    return [kind for kind in SHOWN if kind in found]


def _columns_a_second(timeline: Timeline, columns: int) -> float:
    """Returns the scale that has room for every label, if the width allows it. Otherwise the shortest compute
    gets a whole number of columns, or less than one if not even one fits."""
    lengths = [span.end - span.start for span in timeline.spans if span.end > span.start]
    if not lengths:
        return 0.0
    shortest = min(lengths)
    label = 1 + len(str(timeline.schedule.micro_batches - 1))
    steps = timeline.makespan / shortest
    per_step = min(label, columns / steps)
    return (int(per_step + 1e-9) if per_step >= 1 else per_step) / shortest


def _label(action: Action, small: bool, length: int) -> str:
    code = action.kind.value.lower() if small else action.kind.value
    label = f"{code}{action.micro_batch}"
    if len(label) > length:
        label = f"{code}{action.micro_batch % 10}"
    return label[:length].ljust(length, "-")


def png(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes `timeline` to the PNG file `path`: a row for each rank, a box with its micro-batch for each
    compute. The colour is the kind; later slices are lighter, every second stage of a rank is hatched.

    Raises OSError if the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    longest = max((len(timeline.spans_of(rank)) for rank in range(schedule.ranks)), default=1)
    size = (min(MOST_INCHES, max(6.0, 0.28 * longest)), 1.6 + 0.45 * schedule.ranks)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axes = figure.subplots()
    inches_a_second = size[0] / timeline.makespan if timeline.makespan else 0.0
    for span in timeline.spans:
        action, length = span.action, span.end - span.start
        second = schedule.stages_of(span.rank).index(action.stage) % 2 == 1
        axes.barh(
            span.rank,
            length,
            left=span.start,
            height=0.86,
            color=SHOWN[action.kind][1],
            alpha=1 - (1 - LIGHTEST) * action.slice / max(1, schedule.slices - 1),
            edgecolor="white",
            linewidth=0.6,
            hatch="///" if second else None,
        )
        if length * inches_a_second > 0.12:
            axes.text(
                span.start + length / 2,
                span.rank,
                str(action.micro_batch),
                ha="center",
                va="center",
                fontsize=7,
            )
    patches = [Patch(color=SHOWN[kind][1], label=SHOWN[kind][0]) for kind in _kinds(timeline)]
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.makespan or 1)
    axes.set_xlabel("seconds")
    axes.set_title(f"{schedule.kind}, {schedule.micro_batches} micro-batches", fontsize=10)
    figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), fontsize=8, frameon=False)
    figure.savefig(path, format="png")
