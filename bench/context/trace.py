"""Draws when keys are sent and when they are used in one layer's ring attention, from torch.profiler.

torchrun --nproc-per-node 4 -m bench.context.trace --plot docs/pictures/context-parallel.png
python -m bench.netlab --hosts 2 --rate 1gbit -- python -m bench.context.trace --plot FILE
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from bench.common.measuring import parser_of, started
from bench.common.traces import Spans, of_all_ranks, spans_of, write
from bench.context.run import inputs, over_ranks
from pyruntime import comm

COLOURS = {
    "forward block": ("#2e4057", "block of the forward pass"),
    "backward block": ("#66a182", "block of the backward pass"),
    "send keys": ("#edae49", "K and V leave"),
    "take keys": ("#d1495b", "waits for K and V"),
    "send gradients": ("#f4d58d", "dK and dV leave"),
    "take gradients": ("#8d5a97", "waits for dK and dV, and adds them"),
}


def spans(seq: int, group) -> Spans:
    """Returns (name, start, seconds) of this rank's ranges in one forward and backward pass, in seconds after
    its start."""
    turn = over_ranks(inputs(seq, torch.bfloat16), group, "ring", "zigzag")
    for _ in range(3):
        turn()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        turn()
    return spans_of(profiled, ("cp ",))


def plot(path: str, ranks: list[Spans]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.9 + 0.7 * len(ranks)), dpi=130, layout="constrained")
    axes = figure.subplots()
    for rank, found in enumerate(ranks):
        for name, start, seconds in found:
            kind = next(kind for kind in COLOURS if name.startswith(f"cp {kind}"))
            is_block = kind.endswith("block")
            axes.barh(
                rank, seconds * 1e3, 0.55 if is_block else 0.85, start * 1e3, color=COLOURS[kind][0],
                edgecolor="white" if is_block else COLOURS[kind][0], lw=0.6,
            )  # fmt: skip
            if is_block:
                place = (start + seconds / 2) * 1e3
                axes.text(place, rank, f"K, V of {name[-1]}", ha="center", va="center", color="w", fontsize=7)
    axes.set_xlabel("ms")
    write(path, figure, axes, ranks, COLOURS)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--plot", required=True, metavar="FILE", help="PNG to write")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of the whole sequence")
    args = parser.parse_args()
    with started({"cp": -1, "tp": 1}) as runtime:
        ranks = of_all_ranks(spans(args.seq, comm.process_group(runtime.cp)))
        if runtime.rank == 0:
            plot(args.plot, ranks)


if __name__ == "__main__":
    main()
