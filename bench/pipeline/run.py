"""Times pipeline schedules: forward and backward of m micro-batches over the stages of a Llama, next to ranks
that run the whole model alone, to the simulation, and to torch.distributed.pipelining.

    torchrun --nproc-per-node 2 -m bench.pipeline.run [--json FILE] [--micro-batches 8] [--dtypes bf16 fp32]
    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- python -m bench.pipeline.run ...

The losses of all schedules must equal the whole model's.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.common.measuring import at_least_one, interleave, parser_of, report_each, start_together, started
from bench.common.plain_llama import LONGER, PlainLlama, Shape
from bench.common.tables import table
from bench.training.workers import DTYPES, llama_config
from pyruntime import comm
from pyruntime.comm.exchange import gather
from pyruntime.llama import Llama
from pyruntime.llama.stage import LlamaStage, layers_of_stages, part_of_layers
from pyruntime.pipeline import Costs, Schedule, closed_form_bubble, make_schedule, simulate
from pyruntime.pipeline.executor import Loss, Pipeline
from pyruntime.pipeline.split import split_layers
from pyruntime.pipeline.weight_gradients import WeightGradients

SHAPES = {
    "dim1024": Shape(1024, 4, 16, 8, 2816, 8192, seq=512, micro_batch=1, accumulate=1),
    "tiny": Shape(64, 4, 4, 2, 128, 256, seq=64, micro_batch=1, accumulate=1),
    **LONGER,
}
KINDS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 1}
PEERS = ("torch 1F1B", "torch interleaved", "torch zero bubble")

HOW = """\
Seconds of the slowest rank, forward and backward of all micro-batches, medians over {rounds} rounds. Within a
round every line takes one turn, in shuffled order, started together on all ranks. Limit: all ranks run the
whole model at the same time, with as many micro-batches; the seconds are divided by the number of ranks
(PyTorch's model for its own lines). "of limit" is limit / line. Bound: the limit plus the schedule's bubble
by its closed form, with the stages' measured costs. Simulated: the schedule's makespan with those costs,
stage by stage."""

Turn = Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """One contender's figures: seconds, except for the ratios."""

    name: str
    seconds: float
    spread: float
    of_limit: float
    bound: float
    simulated: float
    rounds: tuple[float, ...]


def batches(shape: Shape, count: int) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    size = (shape.micro_batch, shape.seq)
    ids = [torch.randint(shape.vocab, size, generator=draw) for _ in range(count)]
    return ids, [torch.randint(shape.vocab, size, generator=draw) for _ in range(count)]


def alone(shape: Shape, dtype: torch.dtype, count: int) -> Turn:
    model = Llama(llama_config(shape), dtype=dtype)
    ids, labels = batches(shape, count)

    def run() -> float:
        model.zero_grad()
        total = 0.0
        for one, wanted in zip(ids, labels, strict=True):
            loss = model(one, wanted)
            loss.backward()
            total += float(loss.detach())
        return total

    return run


def plain_alone(shape: Shape, dtype: torch.dtype, count: int) -> Turn:
    model = PlainLlama(shape, dtype)
    ids, labels = batches(shape, count)

    def run() -> float:
        model.zero_grad()
        total = 0.0
        for one, wanted in zip(ids, labels, strict=True):
            loss = plain_loss(model(one), wanted)
            loss.backward()
            total += float(loss.detach())
        return total

    return run


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def stages_of(shape: Shape, schedule: Schedule, rank: int, dtype: torch.dtype) -> dict[int, LlamaStage]:
    config = llama_config(shape)
    runs = layers_of_stages(config, schedule.stages)
    own = schedule.stages_of(rank)
    model = Llama(config, dtype=dtype, part=part_of_layers(config, [runs[stage] for stage in own]))
    return {stage: LlamaStage(model, runs[stage], shape.micro_batch, [shape.seq]) for stage in own}


def loss_of(stages: dict[int, LlamaStage], labels: Sequence[Tensor]) -> Loss:
    def loss(x: Tensor, micro_batch: int, _: int) -> Tensor:
        (last,) = (stage for stage in stages.values() if stage.is_last)
        return last.loss(x, labels[micro_batch])

    return loss


def pipelined(
    shape: Shape, dtype: torch.dtype, schedule: Schedule, stages: dict[int, LlamaStage], group
) -> Turn:
    lines = shape.micro_batch * shape.seq
    pipeline = Pipeline(schedule, stages, group, shapes=[(lines, shape.dim)], dtype=dtype)
    ids, labels = batches(shape, schedule.micro_batches)
    loss = loss_of(stages, labels)

    def run() -> float:
        for stage in stages.values():
            stage.zero_grad()
        return sum(float(part) for parts in pipeline.step([[one] for one in ids], loss) for part in parts)

    return run


def costs_of(shape: Shape, stages: dict[int, LlamaStage], schedule: Schedule, group) -> Costs:
    """Measures the seconds of every stage's forward, input and weight gradients, while all ranks compute."""
    ids, labels = batches(shape, 1)
    own: dict[int, list[float]] = {}
    weights = WeightGradients(stages.values())
    start_together()
    for number, stage in stages.items():
        seconds: list[list[float]] = [[], [], []]
        for _ in range(5):
            x = ids[0] if stage.is_first else torch.randn(
                shape.micro_batch * shape.seq, shape.dim, dtype=next(stage.parameters()).dtype
            ).requires_grad_()  # fmt: skip
            begin = time.perf_counter()
            y = stage(x)
            if stage.is_last:
                y = stage.loss(y, labels[0])
            seconds[0].append(time.perf_counter() - begin)
            grad = torch.ones_like(y)
            begin = time.perf_counter()
            with weights.deferred() as deferred:
                y.backward(grad)
            seconds[1].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            weights.take(deferred)
            seconds[2].append(time.perf_counter() - begin)
        own[number] = [median(each[1:]) for each in seconds]
    weights.close()
    told = gather(group, "Gathering the costs of stages", own, dict[int, list[float]])
    of_stage = {number: each for part in told for number, each in part.items()}
    tables = [[[of_stage[stage][kind]] for stage in range(schedule.stages)] for kind in range(3)]
    return Costs(*tables)


class PlainStage(nn.Module):
    """Some blocks of the plain model."""

    def __init__(self, model: PlainLlama, blocks: Sequence[int], last: int):
        super().__init__()
        self.embedding = model.embedding if 0 in blocks else None
        self.blocks = nn.ModuleList(model.blocks[index] for index in blocks)
        self.norm, self.head = (model.norm, model.head) if last in blocks else (None, None)
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def torch_pipelined(shape: Shape, dtype: torch.dtype, kind: str, count: int, group) -> Turn:
    from torch.distributed import pipelining

    rank, ranks = group.rank(), group.size()
    virtual = 1 if kind == "torch 1F1B" else 2
    runs = split_layers([1.0] * shape.layers, virtual * ranks, last=0.7)
    model = PlainLlama(shape, dtype)
    own = [rank + ranks * index for index in range(virtual)]
    modules = [PlainStage(model, runs[stage], shape.layers - 1) for stage in own]
    stages = [
        pipelining.PipelineStage(module, stage, virtual * ranks, torch.device("cpu"), group=group)
        for module, stage in zip(modules, own, strict=True)
    ]
    options = {"n_microbatches": count, "loss_fn": plain_loss, "scale_grads": False}
    schedule: Any
    if kind == "torch 1F1B":
        schedule = pipelining.Schedule1F1B(stages[0], **options)
    elif kind == "torch interleaved":
        schedule = pipelining.ScheduleInterleaved1F1B(stages, **options)
    else:
        schedule = pipelining.ScheduleInterleavedZeroBubble(stages, **options)
    ids, labels = (torch.cat(each) for each in batches(shape, count))

    def run() -> float:
        for module in modules:
            module.zero_grad()
        losses: list[Tensor] = []
        arguments = (ids,) if rank == 0 else ()
        if rank == ranks - 1:
            schedule.step(*arguments, target=labels, losses=losses)
        else:
            schedule.step(*arguments)
        return sum(float(loss.detach()) for loss in losses)

    return run


def measure(shape_name: str, dtype: str, args: argparse.Namespace, group) -> dict[str, Any]:
    shape, count, ranks = SHAPES[shape_name], args.micro_batches, group.size()
    turns: dict[str, Turn] = {"alone": alone(shape, DTYPES[dtype], count)}
    bounds: dict[str, tuple[float, float]] = {}
    wanted = turns["alone"]()
    for kind in args.kinds:
        schedule = make_schedule(kind, ranks, count, virtual=KINDS[kind])
        stages = stages_of(shape, schedule, group.rank(), DTYPES[dtype])
        costs = costs_of(shape, stages, schedule, group)
        turns[kind] = pipelined(shape, DTYPES[dtype], schedule, stages, group)
        agree(kind, turns[kind](), wanted, dtype, group)
        bounds[kind] = bubble_of(schedule, costs), simulate(schedule, costs).makespan
    if args.peers:
        turns["PyTorch alone"] = plain_alone(shape, DTYPES[dtype], count)
        wanted = turns["PyTorch alone"]()
        for kind in args.peers:
            turns[kind] = torch_pipelined(shape, DTYPES[dtype], kind, count, group)
            agree(kind, turns[kind](), wanted, dtype, group)
    samples = interleave(turns, args.rounds)
    lines = []
    for name, sample in samples.items():
        if "alone" in name:
            continue
        limit = samples["PyTorch alone" if name.startswith("torch") else "alone"]
        bubble, simulated = bounds.get(name, (math.nan, math.nan))
        ideal = limit.median / ranks
        lines.append(
            Line(
                name,
                sample.median,
                sample.spread,
                limit.over(sample).median / ranks,
                ideal + bubble,
                simulated,
                sample.rounds,
            )
        )
    return {
        "shape_name": shape_name,
        "shape": asdict(shape),
        "dtype": dtype,
        "micro_batches": count,
        "limit": samples["alone"].median / ranks,
        "lines": [asdict(line) for line in lines],
    }


def bubble_of(schedule: Schedule, costs: Costs) -> float:
    """Returns the bubble's seconds by the closed form, with the stages' mean costs; NaN without a form."""
    tables = (costs.forward, costs.backward_input, costs.backward_weight)
    means = (fmean(table[stage][0] for stage in range(schedule.stages)) for table in tables)
    found = closed_form_bubble(schedule, Costs(*means))
    return math.nan if found is None else found


def agree(name: str, found: float, wanted: float, dtype: str, group) -> None:
    """Raises RuntimeError if the last stage's losses differ from the whole model's."""
    told = gather(group, "Gathering losses", found, float)
    if abs(sum(told) - wanted) > abs(wanted) * (2e-3 if dtype == "bf16" else 1e-5):
        raise RuntimeError(
            f"{name}: the losses add up to {sum(told)}, and those of the whole model to {wanted}."
        )


def show(result: dict[str, Any]) -> str:
    head = ["", "ms", "+-", "of limit", "bound ms", "bound / ms", "simulated ms", "ms / simulated"]
    rows = [
        [
            line["name"],
            f"{line['seconds'] * 1e3:.0f}",
            f"{line['spread']:.1%}",
            f"{line['of_limit']:.3f}",
            f"{line['bound'] * 1e3:.0f}",
            f"{line['bound'] / line['seconds']:.3f}",
            f"{line['simulated'] * 1e3:.0f}",
            f"{line['seconds'] / line['simulated']:.3f}",
        ]
        for line in result["lines"]
    ]
    title = f"{result['shape_name']} {result['dtype']}, {result['micro_batches']} micro-batches"
    return "\n".join([f"{title}: limit {result['limit'] * 1e3:.0f} ms", table(head, rows)])


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["dim1024"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--micro-batches", type=at_least_one, default=8)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with started({"pp": -1, "tp": 1}) as runtime:
        group = comm.process_group(runtime.pp)
        each = (measure(shape, dtype, args, group) for shape in args.shapes for dtype in args.dtypes)
        report_each(args, HOW.format(rounds=args.rounds), each, show)


if __name__ == "__main__":
    main()
