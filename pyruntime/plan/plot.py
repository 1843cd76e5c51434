"""Time against memory, one dot a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyruntime.plan.memory import SAFE
from pyruntime.plan.report import GB
from pyruntime.plan.search import Candidate, Result, pareto

LABELLED = 6


def png(result: Result, shown: Sequence[Candidate], path: str | Path) -> None:
    """Draws all candidates, the Pareto front, and the numbers of those that are `shown`. Raises OSError."""
    from matplotlib.figure import Figure

    capacity = result.job.cluster.memory_bytes
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    groups = {
        "data, tensor, context": [each for each in result.candidates if _kind(each) == 0],
        "with a pipeline": [each for each in result.candidates if _kind(each) == 1],
        "CO2": [each for each in result.candidates if _kind(each) == 2],
        "AxoNN 4D": [each for each in result.candidates if _kind(each) == 3],
    }
    for (name, group), colour in zip(groups.items(), ("C0", "C1", "C2", "C4"), strict=True):
        if group:
            axes.plot(*_points(group), ".", ms=4, alpha=0.35, color=colour, label=name, zorder=1)
    front = pareto(result.candidates)
    axes.plot(*_points(front), "-", color="black", lw=1, label="no mesh is better in both", zorder=2)
    for number, each in enumerate(shown[:LABELLED], 1):
        x, y = each.memory.total / GB, each.total
        axes.plot([x], [y], "o", color="C3", ms=5, zorder=3)
        axes.annotate(
            f"{number}: {each.mesh.text()}",
            (x, y),
            xytext=(0.985, 0.50 - 0.045 * number),
            textcoords="axes fraction",
            ha="right",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": "C3", "lw": 0.5, "alpha": 0.6},
        )
    axes.axvline(SAFE * capacity / GB, color="grey", lw=0.8, ls="--")
    axes.text(SAFE * capacity / GB, axes.get_ylim()[1], " 80 %", va="top", fontsize=8, color="grey")
    axes.set_yscale("log")
    axes.set_xlabel("memory of the fullest rank (GB)")
    axes.set_ylabel("predicted step (s)")
    axes.set_title(f"{result.job.model.name} on {result.job.gpus} x {result.job.cluster.gpu}", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="upper right", fontsize=8)
    figure.savefig(path)


def _kind(candidate: Candidate) -> int:
    mesh = candidate.mesh
    return 3 if mesh.is_axonn else 2 if mesh.tau else 1 if mesh.pp > 1 else 0


def _points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [each.memory.total / GB for each in candidates], [each.total for each in candidates]
