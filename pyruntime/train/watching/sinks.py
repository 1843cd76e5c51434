"""Writes the metrics of every step to TensorBoard and to Weights & Biases, besides metrics.jsonl."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pyruntime.train.config import RunConfig
from pyruntime.train.errors import ConfigError
from pyruntime.train.metrics import StepMetrics

TENSORBOARD, WANDB = "tensorboard", "wandb"
"""Folders in the run folder."""
RUN_ID = "run-id.txt"
"""File in W&B's folder with the id under which a resumed run continues there."""
FLUSH_S = 10
"""Seconds after which TensorBoard shows a step at the latest."""


class Sink(Protocol):
    """Takes the metrics of every step, on rank 0."""

    path: Path
    """File or folder that it writes."""

    def write(self, metrics: StepMetrics) -> None: ...


def open_sinks(config: RunConfig, run_dir: Path, step: int, held: contextlib.ExitStack) -> list[Sink]:
    """Opens the sinks that the configuration asks for, of a run that continues after `step`, until `held` is
    closed. Raises ConfigError if W&B refuses, and OSError."""
    sinks: list[Sink] = []
    if config.output.tensorboard:
        sinks.append(held.enter_context(TensorBoard(run_dir, step)))
    if config.output.wandb:
        sinks.append(held.enter_context(WeightsAndBiases(config, run_dir, step)))
    return sinks


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """Returns the numbers of the metrics by name: as in metrics.jsonl, those by axis or set as NAME/AXIS.
    Unknown and non-finite ones are left out."""
    return {name: value for name, value in _named("", dataclasses.asdict(metrics)) if math.isfinite(value)}


def _named(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _named(f"{prefix}{name}/", value)
        elif isinstance(value, int | float) and f"{prefix}{name}" != "step":
            yield f"{prefix}{name}", value


class TensorBoard:
    """Writes RUN_DIR/tensorboard, one event a step. Hides what an earlier process wrote after `step`."""

    def __init__(self, run_dir: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.path = run_dir / TENSORBOARD
        # Even if step is 0: a restarted job may have ended before it saved anything.
        self._writer = SummaryWriter(str(self.path), purge_step=step + 1, flush_secs=FLUSH_S)

    def write(self, metrics: StepMetrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all of them: SummaryWriter.add_scalar makes one each, which takes a millisecond.
        found = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(metrics).items()]
        self._writer.file_writer.add_summary(Summary(value=found), metrics.step)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project output.wandb, with the configuration; its local files are in RUN_DIR/wandb.
    WANDB_MODE chooses online or offline. A resumed run continues there. Raises ConfigError if W&B refuses to
    start."""

    def __init__(self, config: RunConfig, run_dir: Path, step: int):
        import wandb

        project = config.output.wandb
        self.path = run_dir / WANDB
        known = self.path / RUN_ID
        same = known.read_text(encoding="utf-8") if step and known.exists() else None
        self.path.mkdir(exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.resolve().name,
                dir=str(run_dir),
                config=dataclasses.asdict(config),
                id=same,
                resume="allow",
                settings=wandb.Settings(console="off"),  # the trainer prints the run's lines itself
            )
        except wandb.errors.Error as error:
            first = (str(error).splitlines() or ["no reason"])[0].rstrip(".")
            raise ConfigError(
                f"output.wandb={project}: W&B refuses to start: {first}; log in (`wandb login`), or set "
                "WANDB_MODE=offline."
            ) from error
        known.write_text(self._run.id, encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        self._run.log(scalars(metrics), step=metrics.step)

    def __enter__(self) -> WeightsAndBiases:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)
