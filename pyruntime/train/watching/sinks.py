"""Where the record of every step goes besides metrics.jsonl: TensorBoard, and Weights & Biases."""

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
"""In W&B's folder: the name by which a run that is resumed goes on there."""
FLUSH_S = 10
"""Seconds after which TensorBoard sees a step at the latest."""


class Sink(Protocol):
    """Takes the record of every step, on rank 0."""

    path: Path
    """Of what it writes."""

    def write(self, metrics: StepMetrics) -> None: ...


def open_sinks(config: RunConfig, run_dir: Path, step: int, held: contextlib.ExitStack) -> list[Sink]:
    """Those that the configuration asks for, of a run that goes on after `step`, until `held` is closed.
    Raises ConfigError where W&B refuses, and OSError."""
    sinks: list[Sink] = []
    if config.output.tensorboard:
        sinks.append(held.enter_context(TensorBoard(run_dir, step)))
    if config.output.wandb:
        sinks.append(held.enter_context(WeightsAndBiases(config, run_dir, step)))
    return sinks


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of the record by name: as in metrics.jsonl, what is by axis or set as NAME/AXIS. What is
    not known, or not finite, is left out."""
    return {name: value for name, value in _named("", dataclasses.asdict(metrics)) if math.isfinite(value)}


def _named(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _named(f"{prefix}{name}/", value)
        elif isinstance(value, int | float) and f"{prefix}{name}" != "step":
            yield f"{prefix}{name}", value


class TensorBoard:
    """RUN_DIR/tensorboard, one event a step. What an earlier process wrote past `step` is not shown."""

    def __init__(self, run_dir: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.path = run_dir / TENSORBOARD
        # Also of step 0: a job that its launcher starts anew may have ended before it saved anything.
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
    """A run of the project output.wandb, with the configuration; what it keeps here is in RUN_DIR/wandb.
    Online or offline as WANDB_MODE says. A run that is resumed goes on there. Raises ConfigError where W&B
    refuses to start."""

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
                settings=wandb.Settings(console="off"),  # the run's lines are the trainer's to write
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
