"""Compares pipelines whose micro-batches skip stages with the whole pipeline: the executor's messages between
ranks whose stages sleep for as long as they would compute, so that four ranks need no four cores.

    torchrun --nproc-per-node 4 -m bench.pipeline.skipping [--json FILE] [--layers 32] [--micro-batches 8]

The layers are cut so that all ranks are equally busy, for either pipeline. A layer's forward takes
--layer-ms, its backward twice that; the head takes as long as --head layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.common.measuring import at_least_one, interleave, parser_of, report_each, started
from bench.common.tables import table
from pyruntime import comm
from pyruntime.pipeline import Costs, make_schedule, simulate
from pyruntime.pipeline.executor import Pipeline
from pyruntime.pipeline.skipping import shares
from pyruntime.pipeline.split import split_layers

ROWS, WIDTH = 64, 256
HOW = """\
Milliseconds of the slowest rank for forward and backward of all micro-batches, medians over {rounds} rounds,
in which the lines take turns. Stages sleep; messages are [64, 256] in fp32. Simulated: the schedule's
makespan with the same seconds. "of whole" divides by the pipeline that skips none."""


class SleepingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x + weight

    @staticmethod
    def backward(ctx, gradient: Tensor):
        time.sleep(ctx.seconds)
        return gradient, gradient.sum(0), None


class SleepingStage(nn.Module):
    """Sleeps for `seconds` in a forward and twice that in a backward."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return SleepingBackward.apply(x, self.weight, 2 * self.seconds)


def line_of(skip: int, args: argparse.Namespace, group) -> tuple[Callable[[], Any], float, list[int]]:
    """Returns a turn of the pipeline that skips so many stages, its simulated seconds, and its stages'
    layers."""
    ranks, count = group.size(), args.micro_batches
    runs = split_layers([1.0] * args.layers, ranks, last=args.head, shares=shares(ranks, skip))
    layers = [len(run) for run in runs]
    seconds = [args.layer_ms / 1e3 * own for own in layers]
    seconds[-1] += args.layer_ms / 1e3 * args.head
    costs = Costs(*([[each] for each in seconds] for _ in range(3)))
    schedule = make_schedule("1f1b", ranks, count, skip=skip, costs=costs)
    stage = SleepingStage(seconds[group.rank()])
    pipeline = Pipeline(
        schedule, {group.rank(): stage}, group, shapes=[(ROWS, WIDTH)], dtype=torch.float32, scale_grads=True
    )
    inputs = [[torch.randn(ROWS, WIDTH)] for _ in range(count)]

    def turn() -> Any:
        return pipeline.step(inputs, lambda y, micro_batch, part: y.square().mean())

    return turn, simulate(schedule, costs).makespan, layers


def measure(args: argparse.Namespace, group) -> dict[str, Any]:
    made = {f"skip {skip}": line_of(skip, args, group) for skip in (0, *args.skip)}
    samples = interleave({name: turn for name, (turn, _, _) in made.items()}, args.rounds)
    whole = samples["skip 0"]
    lines = [
        {
            "name": name,
            "layers": layers,
            "seconds": samples[name].median,
            "of_whole": samples[name].over(whole).median,
            "simulated": simulated,
            "simulated_of_whole": simulated / made["skip 0"][1],
        }
        for name, (_, simulated, layers) in made.items()
    ]
    return {"ranks": group.size(), "micro_batches": args.micro_batches, "lines": lines}


def show(result: dict[str, Any]) -> str:
    head = ["", "layers", "ms", "simulated ms", "ms / simulated", "of whole", "simulated"]
    rows = [
        [
            line["name"],
            " ".join(map(str, line["layers"])),
            f"{line['seconds'] * 1e3:.0f}",
            f"{line['simulated'] * 1e3:.0f}",
            f"{line['seconds'] / line['simulated']:.3f}",
            f"{line['of_whole']:.3f}",
            f"{line['simulated_of_whole']:.3f}",
        ]
        for line in result["lines"]
    ]
    return table(head, rows)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--layers", type=at_least_one, default=32)
    parser.add_argument("--head", type=float, default=0.6)
    parser.add_argument("--layer-ms", type=float, default=10.0)
    parser.add_argument("--micro-batches", type=at_least_one, default=8)
    parser.add_argument("--skip", type=int, nargs="+", default=[1])
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with started({"pp": -1, "tp": 1}) as runtime:
        group = comm.process_group(runtime.pp)
        report_each(args, HOW.format(rounds=args.rounds), [measure(args, group)], show)


if __name__ == "__main__":
    main()
