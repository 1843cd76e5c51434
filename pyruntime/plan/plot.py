"""Plots time against memory, one dot for each mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyruntime.plan.findings import GB
from pyruntime.plan.memory import SAFE
from pyruntime.plan.mesh import Mesh
from pyruntime.plan.search import Candidate, Result, pareto

KINDS = {"data, tensor, context": "C0", "with a pipeline": "C1", "CO2": "C2", "AxoNN 4D": "C4"}
"""Colours of the kinds of meshes."""
LABELLED = 8
SLOWEST = 4
"""Meshes slower than this times the best are not drawn."""


def png(result: Result, shown: Sequence[Candidate], path: str | Path) -> None:
    """Draws all candidates, the Pareto front, and the numbers of the `shown` ones. Raises OSError."""
    from matplotlib.figure import Figure

    capacity = result.job.cluster.memory_bytes
    figure = Figure(figsize=(11, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, colour in KINDS.items():
        if group := [each for each in result.candidates if _kind(each.mesh) == name]:
            axes.plot(*_points(group), ".", ms=4, alpha=0.35, color=colour, label=name, zorder=1)
    front = pareto(result.candidates)
    axes.plot(*_points(front), "-", color="black", lw=1, label="no mesh is better in both", zorder=2)
    for number, each in enumerate(shown[:LABELLED], 1):
        place = (each.memory.total / GB, each.total)
        label = f"{number}: {each.mesh.text()}"
        axes.plot(*place, "o", color="C3", ms=5, zorder=3, label=label)
        # Below the dot, at three heights: dots may lie together.
        axes.annotate(
            str(number),
            place,
            xytext=(0, -8 - 9 * (number % 3)),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=7,
            color="C3",
        )
    best = front[0].total
    axes.set_yscale("log")
    axes.set_ylim(best * 0.75, best * SLOWEST)
    slower = sum(each.total > best * SLOWEST for each in result.candidates)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.axvline(SAFE * capacity / GB, color="grey", lw=0.8, ls="--", label="80 % of the memory")
    axes.set_xlabel("memory of the fullest rank (GB)")
    axes.set_ylabel("predicted step (s)")
    unseen = f"; {slower:,} are slower than shown" if slower else ""
    axes.set_title(
        f"{result.job.model.name} on {result.job.gpus} x {result.job.cluster.gpu}{unseen}", fontsize=10
    )
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path)


def _kind(mesh: Mesh) -> str:
    if mesh.is_axonn:
        return "AxoNN 4D"
    if mesh.tau:
        return "CO2"
    return "with a pipeline" if mesh.pp > 1 else "data, tensor, context"


def _points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [each.memory.total / GB for each in candidates], [each.total for each in candidates]
