"""Plots the loss of a run, and writes a scorecard of how well communication was hidden."""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from pyruntime.text import footnotes

PLOT_FILE, SCORECARD_FILE = "loss.png", "scorecard"
WARM_STEPS = 0.1
"""First share of the steps, left out of the medians: buffers are made in them."""


@dataclasses.dataclass(frozen=True)
class Scorecard:
    """Overlap of a whole run. Times are medians over the steps after the first tenth."""

    ranks: int
    steps: int
    """Number of steps in the medians."""
    step_time_s: float
    exposed_comm_s: float | None
    """Seconds of a step in which a rank waited for peers or moved bytes, as in `StepMetrics`; None for
    several ranks on GPUs, where it is not measured."""
    exposed_share: float | None
    """exposed_comm_s / step_time_s."""
    exposed_by_axis_s: dict[str, float]
    """Its parts by axis, each a median of its own, so they need not add up; empty if there are none."""
    predicted_step_s: float | None
    """The planner's prediction of step_time_s; None if it was not asked."""
    hidden_bound: float | None
    """step_time_s / (step_time_s - exposed_comm_s): 1.0 if nothing is exposed."""
    bytes_per_step: float
    """Bytes that rank 0 read from its peers or sent to them in one step."""
    tokens_per_second: float
    flops_per_second: float
    """Model FLOP/s of all ranks together (forward and backward GEMMs, no recomputation)."""
    mfu: float | None
    """flops_per_second as a share of the devices' peak, if that is known."""
    memory_bytes: int
    val_loss_per_byte: float | None
    tiers: list[dict]
    """The rows of `pyruntime.explain`: per layer and primitive, which tier ran, and why not a faster one."""


def scorecard(
    lines: list[dict[str, Any]], ranks: int, bytes_moved: int, flops_per_token: float, tiers: list[dict]
) -> Scorecard:
    """Returns the scorecard of the steps in `lines` (from metrics.jsonl), in which `bytes_moved` bytes were
    read or sent."""
    warm = lines[int(len(lines) * WARM_STEPS) :]
    step_time = statistics.median(line["step_time_s"] for line in warm)
    measured = _known(warm, "exposed_comm_s")
    exposed = statistics.median(measured) if measured else None
    mfus = _known(warm, "mfu")
    tokens_per_second = statistics.median(line["tokens_per_second"] for line in warm)
    return Scorecard(
        ranks=ranks,
        steps=len(warm),
        step_time_s=step_time,
        exposed_comm_s=exposed,
        exposed_share=None if exposed is None else exposed / step_time,
        exposed_by_axis_s=_by_axis(warm),
        predicted_step_s=warm[-1].get("predicted_step_s"),
        hidden_bound=None if exposed is None else step_time / (step_time - exposed),
        bytes_per_step=bytes_moved / len(lines),
        tokens_per_second=tokens_per_second,
        flops_per_second=tokens_per_second * flops_per_token,
        mfu=statistics.median(mfus) if mfus else None,
        memory_bytes=max(line["memory_bytes"] for line in lines),
        val_loss_per_byte=lines[-1].get("val_loss_per_byte"),
        tiers=tiers,
    )


def _known(lines: list[dict[str, Any]], name: str) -> list[float]:
    """The values of that figure in the steps that have it."""
    return [line[name] for line in lines if line.get(name) is not None]


def _by_axis(lines: list[dict[str, Any]]) -> dict[str, float]:
    found = [line.get("exposed_by_axis_s") or {} for line in lines]
    axes = dict.fromkeys(axis for each in found for axis in each)
    return {axis: statistics.median(each.get(axis, 0.0) for each in found) for axis in axes}


def format_scorecard(card: Scorecard) -> str:
    exposed = [("exposed communication", "not measured between devices")]
    if card.exposed_comm_s is not None and card.hidden_bound is not None:
        share = f"{card.exposed_comm_s * 1e3:,.1f} ms a step, {card.exposed_share:.1%} of it"
        if len(card.exposed_by_axis_s) > 1:
            parts = [f"{axis} {seconds * 1e3:,.1f}" for axis, seconds in card.exposed_by_axis_s.items()]
            share += f" ({', '.join(parts)})"
        bound = ("step / step with nothing exposed", f"{card.hidden_bound:.3f}")
        exposed = [("exposed communication", share), bound]
    planned = card.predicted_step_s
    predicted = "" if planned is None else f", {planned * 1e3:,.1f} ms predicted"
    rows = [
        ("ranks", f"{card.ranks}"),
        ("step", f"{card.step_time_s * 1e3:,.1f} ms (median of {card.steps}){predicted}"),
        *exposed,
        ("bytes moved by a rank", f"{card.bytes_per_step / 1e6:,.1f} MB a step"),
        (
            "throughput",
            f"{card.tokens_per_second:,.0f} tok/s, {card.flops_per_second / 1e9:,.1f} GFLOP/s of the model"
            + ("" if card.mfu is None else f", MFU {card.mfu:.1%}"),
        ),
        ("peak memory of a rank", f"{card.memory_bytes / 1e6:,.0f} MB"),
    ]
    if card.val_loss_per_byte is not None:
        rows.append(("validation loss", f"{card.val_loss_per_byte:.4f} nats/byte"))
    width = max(len(name) for name, _ in rows)
    lines = ["Overlap scorecard", *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return "\n".join([*lines, "  tiers", *(f"    {line}" for line in tier_lines(card.tiers))])


def tier_lines(tiers: list[dict]) -> list[str]:
    """Formats one line for all layers that run the same operation of the same size on the same tier for the
    same reason; below them the reasons shared by several lines."""
    counts = collections.Counter(
        (
            f"{use['when']:<8} {use['op']}",
            (f"[{use['rows']}, {use['k']}] @ [{use['n']}, {use['k']}]^T " if "matmul" in use["op"] else "")
            + use["dtype"],
            use["tier"],
            use["reason"],
        )
        for use in tiers
    )
    widths = [max(len(key[column]) for key in counts) for column in (0, 1)] if counts else []
    reasons, notes = footnotes([key[3] for key in counts])
    lines = [
        f"{count:>3} x {what:<{widths[0]}}  {size:<{widths[1]}}  {tier} {_bracketed(reason)}".rstrip()
        for ((what, size, tier, _), count), reason in zip(counts.items(), reasons, strict=True)
    ]
    return lines + notes


def _bracketed(reason: str) -> str:
    return f"({reason})" if reason and not reason.startswith("[") else reason


def write_scorecard(card: Scorecard, run_dir: Path) -> None:
    """Writes RUN_DIR/scorecard.json and RUN_DIR/scorecard.txt."""
    (run_dir / f"{SCORECARD_FILE}.json").write_text(json.dumps(dataclasses.asdict(card), indent=2) + "\n")
    (run_dir / f"{SCORECARD_FILE}.txt").write_text(format_scorecard(card) + "\n")


def plot_loss(lines: list[dict], path: Path) -> None:
    """Writes a PNG of training and validation loss over steps, from the lines of metrics.jsonl."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    known = [m for m in lines if m["loss"] is not None]
    axes.plot([m["step"] for m in known], [m["loss"] for m in known], lw=0.8, label="training")
    measured = [m for m in lines if m.get("val_loss") is not None]
    axes.plot(
        [m["step"] for m in measured], [m["val_loss"] for m in measured], "o-", ms=4, label="validation"
    )
    axes.set_xlabel("step")
    of_pairs = any("rewards_margins" in line for line in lines)
    axes.set_ylabel(f"loss (nats per {'pair of answers' if of_pairs else 'token'})")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
