"""Reads ranges of torch.profiler and draws the frame of a picture, for benchmarks that draw traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.profiler import profile

from pyruntime.comm.exchange import gather

Spans = list[tuple[str, float, float]]
"""(name, start, seconds) of each range; starts are seconds after the first one's."""


def spans_of(profiled: profile, prefixes: tuple[str, ...]) -> Spans:
    """Returns the ranges whose names begin with one of the prefixes."""
    events = [event for event in profiled.events() if event.name.startswith(prefixes)]
    start = min(event.time_range.start for event in events)
    return [
        (event.name, (event.time_range.start - start) * 1e-6, event.time_range.elapsed_us() * 1e-6)
        for event in events
    ]


def of_all_ranks(found: Spans) -> list[Spans]:
    """Returns the ranges of all ranks, in rank order, on every rank."""
    return gather(dist.group.WORLD, "Gathering what ranks did", found, Spans)


def write(path: str, figure, axes, ranks: Sequence[Spans], colours: Mapping[str, tuple[str, str]]) -> None:
    """Names the rows by rank, explains the colours (colour, label), and writes the PNG."""
    from matplotlib.patches import Patch

    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.legend(
        handles=[Patch(color=colour, label=label) for colour, label in colours.values()],
        ncols=len(colours),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)
