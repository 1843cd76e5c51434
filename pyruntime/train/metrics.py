"""The metrics of every step, and the file they are written to."""

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
    """Mean over the step's targets, in nats per token; with DPO over its pairs, in nats."""
    grad_norm: float
    """Norm over the whole model, before clipping."""
    lr: float
    tokens_per_second: float
    """Over all ranks."""
    step_time_s: float
    """Wall clock of the step on rank 0, which synchronizes with all others in it; without validation and
    checkpoint."""
    exposed_comm_s: float | None
    """Exposed seconds of the step, in which the computing thread waited for peers or moved bytes instead of
    multiplying: step_time_s times the largest share of any rank. None for several ranks on GPUs, where the
    host cannot see it."""
    memory_bytes: int
    """Peak memory of a rank so far: resident, with workspaces shared between ranks; on a GPU, in torch's
    tensors."""
    exposed_by_axis_s: dict[str, float] | None = None
    """The parts of exposed_comm_s by axis ("tp", "cp", "pp", "dp", "ep"); "all" is the exchange of figures
    that ends a step. None for a single rank."""
    outer_exposed_s: float | None = None
    """The part of exposed_comm_s spent on replicas that synchronize rarely; None if there are none, and on
    GPUs."""
    outer_bytes: int | None = None
    """Most bytes that a rank read from other replicas in this step; None unless replicas synchronize
    rarely."""
    dp_bytes: int | None = None
    """Bytes of gradients and weights, as sent, that a data-parallel rank read from others in the step; None
    if there is one such rank."""
    tokens_per_second_per_device: float | None = None
    """tokens_per_second divided by the ranks."""
    tp_bytes: int | None = None
    """Bytes of rows and sums that a tensor-parallel rank read from others; None if there is one such rank."""
    pp_bytes: int | None = None
    """Bytes of activations and their gradients that a stage read from others; None without a pipeline."""
    cp_bytes: int | None = None
    """Bytes of keys, values and their gradients that a context-parallel rank read; None if there is one."""
    mfu: float | None = None
    """Model FLOP/s as a share of the ranks' peak, if that is known."""
    predicted_step_s: float | None = None
    """The planner's prediction of step_time_s, if it was given a cluster."""
    expert_imbalance: dict[str, float] | None = None
    """Rows of the busiest expert over the mean, by number of the layer. None of a model without experts or
    without losses of routers, for which the rows are counted, and if replicas synchronize rarely."""
    rank_imbalance: dict[str, float] | None = None
    """Rows of the busiest tensor-parallel rank's experts over the mean, by number of the layer."""
    router_entropy: dict[str, float] | None = None
    """Mean entropy of a token's probabilities of the experts, in nats, by number of the layer."""
    balance_loss: float | None = None
    """Mean over layers, not times its weight; 1 where experts get alike."""
    router_z_loss: float | None = None
    """Mean over layers, not times its weight."""
    rewards_chosen: float | None = None
    """With DPO: mean over the step's pairs of beta times what the model gives the chosen answer more than the
    reference does, in nats. TRL's rewards/chosen, and so below."""
    rewards_rejected: float | None = None
    """The same of the rejected answer."""
    rewards_margins: float | None = None
    """Mean of the chosen answer's reward less the rejected one's."""
    rewards_accuracies: float | None = None
    """Share of the pairs whose chosen answer has the greater reward."""
    eta_s: float | None = None
    """Seconds left after this step, at the pace of this process so far."""
    val_loss: float | None = None
    """Validation loss in nats per token, if it was measured after this step."""
    val_loss_per_byte: float | None = None
    """Validation loss in nats per byte of text."""
    val_rewards: dict[str, float] | None = None
    """With DPO: the rewards of the held-out pairs by name, chosen, rejected, margins and accuracies."""
    val_losses: dict[str, float] | None = None
    """val_loss of each validation set, if there are several; val_loss is the mean over all tokens."""
    skipped: int | None = None
    """Steps of the run so far that updated nothing; set only if this is one."""
    slow: list[dict] | None = None
    """New findings about slow ranks and links after this step, as `slow.judge.Finding`."""
    moved: dict | None = None
    """Work that moves after this step, as `slow.rebalance.Move`."""

    def to_json(self) -> str:
        """One line of JSON. Figures that are not finite become null, as a skipped step's loss."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return json.dumps(finite(values), allow_nan=False)


FIGURES = tuple(
    field.name
    for field in dataclasses.fields(StepMetrics)
    if str(field.type).partition(" ")[0] in ("int", "float")
)
"""The fields that hold one number."""


class MetricsFile:
    """Writes RUN_DIR/metrics.jsonl, one object a line, each flushed at once. `resume_at` drops lines after
    that step."""

    def __init__(self, run_dir: Path, resume_at: int = 0):
        self.path = path = run_dir / FILE_NAME
        kept = (
            [line for line in read(path) if line["step"] <= resume_at] if resume_at and path.exists() else []
        )
        # Written aside and renamed: a kill here must not lose the earlier steps.
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
    """Returns the lines of a metrics file, without a torn last one. Raises ConfigError if another line does
    not hold a step's figures."""
    try:
        content = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    lines = [_parse(text) for text in content]
    if None in lines[:-1]:  # only the last line may be torn
        raise ConfigError(
            f"{path}, line {lines.index(None) + 1} is damaged: it does not hold the figures of a step; "
            "remove that line."
        )
    return [line for line in lines if line is not None]


def _parse(text: bytes) -> dict | None:
    """Returns the figures of a step; None if `text` does not hold them."""
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
    """Returns the largest resident set of this process so far, in bytes, shared memory included.

    Linux counts it per address space (VmHWM). getrusage, the fallback, starts from the launching process's
    peak.
    """
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
