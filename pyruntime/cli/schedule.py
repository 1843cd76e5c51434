"""`python -m pyruntime schedule`: draws and checks a pipeline schedule, and simulates how long ranks idle."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from pyruntime import pipeline
from pyruntime.choices import PipelineKind
from pyruntime.cli.arguments import parse
from pyruntime.pipeline import Costs, Schedule, Timeline
from pyruntime.pipeline.routing import by_stage, costs_of_replicas
from pyruntime.train.errors import ConfigError, refusing

DESCRIPTION = """Makes or reads a pipeline schedule, checks it and simulates it with the given costs. Prints
which rank computes what and when, the total time, how long ranks idle, and how much they store. Nothing is
trained and no ranks are started."""


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    kind: PipelineKind = "1f1b"
    """Schedule to make."""
    stages: int = 4
    """Ranks of the pipeline."""
    micro_batches: int = 8
    """Micro-batches of a step."""
    virtual: int = 1
    """Stages of each rank, for interleaved only; zb-v always has 2, the others 1."""
    slices: int = 1
    """Parts that each sequence is cut into, for terapipe and seq1f1b."""
    skip: int = 0
    """Stages between the first and the last that every micro-batch leaves out, for 1f1b."""
    speeds: tuple[float, ...] = ()
    """Relative speeds of the replicas of every stage, those of the first stage first, for 1f1b; micro-batches
    are then those of all replicas. With --from_csv, speeds for its stages. Empty: one rank a stage, or equal
    speeds."""
    forward: float = 1.0
    """Seconds of one stage's forward, for one slice of a micro-batch."""
    backward_input: float = 1.0
    """Seconds of one stage's input gradient."""
    backward_weight: float = 1.0
    """Seconds of one stage's weight gradients."""
    transfer: float = 0.0
    """Seconds from sending a message to its arrival."""
    plot: str = ""
    """PNG file to draw the schedule into; empty: none."""
    csv: str = ""
    """CSV file to write the schedule into; empty: none."""
    from_csv: str = ""
    """CSV file to read the schedule from, instead of making one."""


def main(argv: list[str]) -> None:
    options = parse(ScheduleOptions, argv, "schedule", DESCRIPTION)
    with refusing():
        costs = Costs(options.forward, options.backward_input, options.backward_weight, options.transfer)
        schedule = _read(options) if options.from_csv else _make(options, costs)
        pipeline.check(schedule)
        if options.speeds:
            if len(options.speeds) != schedule.stages:
                raise ValueError(
                    f"--speeds has {len(options.speeds)} numbers, but the schedule has {schedule.stages} "
                    "replicas of stages; give one for each."
                )
            speeds = by_stage(options.speeds, schedule.stages // schedule.replicas)
            costs = costs_of_replicas(costs, speeds)
        timeline = pipeline.simulate(schedule, costs)
    _write(options, schedule, timeline)
    print(pipeline.text(timeline, shutil.get_terminal_size((110, 24)).columns))
    print(_summary(timeline, pipeline.closed_form_bubble(schedule, costs)))


def _make(options: ScheduleOptions, costs: Costs) -> Schedule:
    if options.stages < 1:
        raise ConfigError(f"--stages must be at least 1, found {options.stages}.")
    return pipeline.make_schedule(
        options.kind,
        options.stages,
        options.micro_batches,
        virtual=options.virtual,
        slices=options.slices,
        skip=options.skip,
        speeds=options.speeds,
        costs=costs,
    )


def _read(options: ScheduleOptions) -> Schedule:
    for name in (
        "kind",
        "stages",
        "micro_batches",
        "virtual",
        "slices",
        "skip",
    ):  # these say which schedule to make
        if getattr(options, name) != getattr(ScheduleOptions, name):
            raise ConfigError(
                f"--{name} and --from_csv, whose file sets it, exclude each other; leave one out."
            )
    path = options.from_csv
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from_csv {path} cannot be read: {error}.") from error
    with refusing(f"--from_csv {path}: "):
        return pipeline.from_csv(text)


def _write(options: ScheduleOptions, schedule: Schedule, timeline: Timeline) -> None:
    try:
        if options.csv:
            Path(options.csv).write_text(pipeline.to_csv(schedule), encoding="utf-8")
        if options.plot:
            pipeline.png(timeline, options.plot)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}.") from error
    except ValueError as error:  # the path is no possible file name
        raise ConfigError(f"{options.csv or options.plot}: cannot be written: {error}.") from error


def _summary(timeline: Timeline, formula: float | None) -> str:
    schedule = timeline.schedule
    lines = [
        "",
        f"{schedule.kind}: {schedule.ranks} rank(s), {schedule.stages} stage(s), {schedule.micro_batches} "
        f"micro-batch(es), {schedule.slices} slice(s)",
        f"makespan     {timeline.makespan:g} s",
    ]
    if formula is not None:
        lines.append(f"closed form  {formula:g} s of bubble on every rank")
    if schedule.paths:
        paths = " ".join("-".join(map(str, path)) for path in schedule.paths)
        lines.append(f"stages of the micro-batches  {paths}")
    lines += ["", "rank  bubble (s)   share  waits inside (s)  peak in flight (stage forwards)"]
    for rank in range(schedule.ranks):
        bubble = timeline.bubble(rank)
        share = bubble / timeline.makespan if timeline.makespan else 0.0
        lines.append(
            f"{rank:>4}  {bubble:>10.4g}  {share:>5.1%}  {timeline.waits(rank):>16.4g}  "
            f"{timeline.peak_in_flight(rank):>31}"
        )
    return "\n".join(lines)
