"""What is measured in every step, and the file it is written to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import resource
from pathlib import Path
from typing import Any

from pyruntime.text import finite
from pyruntime.train.errors import ConfigError

FILE_NAME = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Memory and bytes are the maximum over ranks."""

    step: int
    """From 1."""
    loss: float
    """Mean over the step's tokens, in nats per token."""
    grad_norm: float
    """Of the whole model, before clipping."""
    lr: float
    tokens_per_second: float
    """Of all ranks."""
    step_time_s: float
    """Wall clock of the step on rank 0, which meets all others in it; without validation and checkpoint."""
    exposed_comm_s: float | None
    """Seconds of the step in which the thread that computes waited for peers or moved bytes instead of
    multiplying: the share of its time in the rank where it is largest. None for several ranks on devices,
    where the host does not see it."""
    memory_bytes: int
    """Peak memory of a rank so far: resident, workspaces shared with other ranks included, or on a device
    in torch's tensors."""
    exposed_by_axis_s: dict[str, float] | None = None
    """exposed_comm_s of the rank that it is of, by axis ("tp", "cp", "pp", "dp"); "all" is the exchange of
    figures that ends a step. None for a rank alone."""
    outer_exposed_s: float | None = None
    """Of exposed_comm_s, what was for replicas that do not meet in every step; None where they do."""
    outer_bytes: int | None = None
    """Most that a rank read of other replicas in this step; None where they meet in every step."""
    dp_bytes: int | None = None
    """Gradients and weights that a data-parallel rank took from others in the step, in bytes as they
    travelled; None where there is one such rank."""
    tokens_per_second_per_device: float | None = None
    """Of one rank."""
    tp_bytes: int | None = None
    """Rows and sums that a tensor-parallel rank took from others in the step, alike; None where there is one
    such rank."""
    pp_bytes: int | None = None
    """Activations, and gradients of them, that a stage took from others in the step, alike; None without a
    pipeline."""
    cp_bytes: int | None = None
    """Keys, values and their gradients that a context-parallel rank took from others, alike; None where there
    is one such rank."""
    mfu: float | None = None
    """Model FLOP/s as a share of the ranks' peak, where that is known."""
    predicted_step_s: float | None = None
    """step_time_s as the planner predicts it, where it is told of a cluster."""
    eta_s: float | None = None
    """Seconds to go after this step, at the pace of this process so far."""
    val_loss: float | None = None
    """Validation loss in nats per token, where it was measured after this step."""
    val_loss_per_byte: float | None = None
    """The same in nats per byte of text."""
    val_losses: dict[str, float] | None = None
    """val_loss of each set to validate on, where there are several; val_loss is the mean over all tokens."""
    skipped: int | None = None
    """Steps of the run that updated nothing so far, where this is one."""
    slow: list[dict] | None = None
    """What is new after this step of ranks and links that are slow, as `slow.judge.Finding`."""
    moved: dict | None = None
    """Which layers move between stages after this step, as `slow.rebalance.Move`."""

    def to_json(self) -> str:
        """Figures that are not finite, as null: the loss of a step that was skipped, or a validation's."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return json.dumps(finite(values), allow_nan=False)


FIGURES = tuple(
    field.name
    for field in dataclasses.fields(StepMetrics)
    if str(field.type).partition(" ")[0] in ("int", "float")
)
"""The fields that hold one number."""


class MetricsFile:
    """RUN_DIR/metrics.jsonl, one object a line, each written out at once. `resume_at` drops lines past that
    step."""

    def __init__(self, run_dir: Path, resume_at: int = 0):
        self.path = path = run_dir / FILE_NAME
        kept = (
            [line for line in read(path) if line["step"] <= resume_at] if resume_at and path.exists() else []
        )
        # Renamed: who is killed here must not lose what earlier steps measured.
        shorter = path.with_name(path.name + ".new")
        shorter.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        shorter.replace(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(metrics.to_json() + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read(path: Path) -> list[dict]:
    """The lines of a metrics file, a torn last one left out. Raises ConfigError where another one does not
    hold a step's figures."""
    try:
        content = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    lines = [_parse(text) for text in content]
    if None in lines[:-1]:  # every line that was written out ends
        raise ConfigError(
            f"{path}, line {lines.index(None) + 1} is damaged: it does not hold the figures of a step; "
            "remove that line."
        )
    return [line for line in lines if line is not None]


def _parse(text: bytes) -> dict | None:
    """The figures of a step, or None."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or not 1 <= line["step"] < 2**31:
        return None
    losses = [line.get("loss")] if line.get("loss") is not None or "skipped" not in line else []
    losses += [line["val_loss"]] if line.get("val_loss") is not None else []
    is_read = all(isinstance(loss, float) for loss in losses) and all(
        _is_figure(line[name]) for name in FIGURES if line.get(name) is not None
    )
    return line if is_read else None


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and not 1e30 < abs(value) < math.inf


def peak_memory_bytes() -> int:
    """Largest resident set of this process so far, in bytes, shared memory included.

    Linux keeps it per address space (VmHWM); getrusage, used elsewhere, starts from that of the launching
    process.
    """
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
