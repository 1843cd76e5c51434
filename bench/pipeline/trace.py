"""Draws a schedule as it ran, and as simulated with the stages' measured costs.

torchrun --nproc-per-node 2 -m bench.pipeline.trace --kind zb-h1 --plot docs/pictures
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.common.measuring import parser_of, start_together, started
from bench.pipeline.run import KINDS, SHAPES, batches, costs_of, loss_of, stages_of
from pyruntime import comm
from pyruntime.comm.exchange import gather
from pyruntime.pipeline import Action, Schedule, Span, Timeline, make_schedule, png, simulate
from pyruntime.pipeline.actions import Kind
from pyruntime.pipeline.executor import Pipeline


class Traced(Pipeline):
    """A pipeline that records its actions' times, on a clock that all ranks of a host share."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen: list[tuple[Action, float, float]] = []

    def _execute(self, action, *rest):
        begin = time.perf_counter()
        super()._execute(action, *rest)
        self.seen.append((action, begin, time.perf_counter()))


def measured(schedule: Schedule, shape, dtype: torch.dtype, group) -> tuple[Timeline, Timeline]:
    """Returns the timelines as it ran and as simulated, the same on every rank."""
    stages = stages_of(shape, schedule, group.rank(), dtype)
    costs = costs_of(shape, stages, schedule, group)
    lines = shape.micro_batch * shape.seq
    pipeline = Traced(schedule, stages, group, shapes=[(lines, shape.dim)], dtype=dtype)
    ids, labels = batches(shape, schedule.micro_batches)
    loss = loss_of(stages, labels)
    for _ in range(3):
        pipeline.seen.clear()
        dist.barrier()
        start_together()
        pipeline.step([[one] for one in ids], loss)
    own = [
        (action.kind.value, action.stage, action.micro_batch, action.slice, begin, end)
        for action, begin, end in pipeline.seen
        if action.kind.is_compute
    ]
    told = gather(group, "Gathering what ranks did", own, list[tuple[str, int, int, int, float, float]])
    start = min(begin for spans in told for *_, begin, _ in spans)
    spans = [
        Span(rank, Action(Kind(kind), *numbers), begin - start, end - start)
        for rank, own in enumerate(told)
        for kind, *numbers, begin, end in own
    ]
    ran = Timeline(schedule, tuple(spans), max(span.end for span in spans))
    return ran, simulate(schedule, costs)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--plot", required=True, metavar="FOLDER", help="folder for KIND-measured.png and KIND-simulated.png"
    )
    parser.add_argument("--kind", choices=KINDS, default="zb-h1")
    parser.add_argument("--shape", choices=SHAPES, default="dim1024")
    parser.add_argument("--micro-batches", type=int, default=8)
    args = parser.parse_args()
    with started({"pp": -1, "tp": 1}) as runtime:
        group = comm.process_group(runtime.pp)
        schedule = make_schedule(args.kind, group.size(), args.micro_batches, virtual=KINDS[args.kind])
        timelines = measured(schedule, SHAPES[args.shape], torch.bfloat16, group)
        if runtime.rank == 0:
            for name, timeline in zip(("measured", "simulated"), timelines, strict=True):
                png(timeline, Path(args.plot) / f"{args.kind}-{name}.png")
                print(f"{args.kind} {name}: {timeline.makespan * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
