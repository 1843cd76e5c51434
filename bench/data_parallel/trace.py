"""Draws how one weight's gradient travels in a training step of two ranks, from torch.profiler.

torchrun --nproc-per-node 2 -m bench.data_parallel.trace --plot docs/pictures/data-parallel.png
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from bench.common.measuring import parser_of, started
from bench.common.traces import Spans, of_all_ranks, spans_of, write
from bench.data_parallel.run import SHAPES, ours

COLOURS = {
    "write chunk of": ("#d1495b", "GEMM of a chunk, into the memory it leaves from"),
    "sum": ("#edae49", "sum over the ranks"),
    "update": ("#66a182", "AdamW on the shard"),
    "send weights": ("#2e4057", "new rows leave"),
    "take weights": ("#8d96a3", "others' new rows taken"),
}


def spans(args: argparse.Namespace, mesh) -> Spans:
    """Returns (name, start, seconds) of this rank's work on gradients in two steps, in seconds after the
    first step's start."""
    torch.manual_seed(dist.get_rank())
    shape = SHAPES[args.shape]
    step, _ = ours(shape, torch.bfloat16, mesh["tp"], mesh["dp"], 2)
    ids, labels = (torch.randint(shape.vocab, (shape.micro_batch, shape.seq)) for _ in range(2))
    for _ in range(4):
        step(ids, labels)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for number in range(2):
            with torch.profiler.record_function(f"step {number}"):
                step(ids, labels)
    return spans_of(profiled, ("dp ", "step "))


def plot(path: str, ranks: list[Spans], weight: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    for rank, found in enumerate(ranks):
        for name, start, seconds in found:
            kind = next((kind for kind in COLOURS if name.startswith(f"dp {kind}")), None)
            if name.startswith("step"):
                axes.barh(rank, seconds * 1e3, 0.8, start * 1e3, color="#f2f2f2", edgecolor="#888888", lw=0.6)
            elif kind is not None:
                own = name.endswith(weight) or kind == "update"
                axes.barh(
                    rank, seconds * 1e3, 0.72 if own else 0.3, start * 1e3, color=COLOURS[kind][0],
                    alpha=1.0 if own else 0.35,
                )  # fmt: skip
    axes.set_xlabel("ms; two steps, the rest of the box is forward and backward")
    axes.set_title(f"The gradient of {weight} (tall) among the others (short)", fontsize=10)
    write(path, figure, axes, ranks, COLOURS)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--plot", required=True, metavar="FILE", help="PNG to write")
    parser.add_argument("--shape", choices=SHAPES, default="dim1024")
    parser.add_argument("--weight", default="layers.2.gate_up.weight", help="weight whose gradient is shown")
    args = parser.parse_args()
    with started({"dp": -1, "tp": 1}) as runtime:
        ranks = of_all_ranks(spans(args, runtime.mesh))
        if runtime.rank == 0:
            plot(args.plot, ranks, args.weight)


if __name__ == "__main__":
    main()
