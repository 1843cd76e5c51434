"""When keys travel and when they are computed with: one layer's attention, from torch.profiler, as a picture.

torchrun --nproc-per-node 4 bench/ring_attention_trace.py --plot docs/context-parallel.png
python bench/netlab.py --hosts 2 --rate 1gbit -- python bench/ring_attention_trace.py --plot FILE
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from ring_attention import inputs, over_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import pyruntime
from pyruntime import comm

COLOURS = {
    "forward block": ("#2e4057", "block of the forward pass"),
    "backward block": ("#66a182", "block of the backward pass"),
    "send keys": ("#edae49", "K and V leave"),
    "take keys": ("#d1495b", "waits for K and V"),
    "send gradients": ("#f4d58d", "dK and dV leave"),
    "take gradients": ("#8d5a97", "waits for dK and dV, and adds them"),
}


def spans(seq: int, group) -> list[tuple[str, float, float]]:
    """(name, start, seconds) of what this rank did, in one forward and backward pass; seconds since its
    start."""
    turn = over_ranks(inputs(seq, torch.bfloat16), group, "ring", "zigzag")
    for _ in range(3):
        turn()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        turn()
    events = [event for event in profiled.events() if event.name.startswith("cp ")]
    start = min(event.time_range.start for event in events)
    return [
        (event.name, (event.time_range.start - start) * 1e-6, event.time_range.elapsed_us() * 1e-6)
        for event in events
    ]


def plot(path: str, ranks: list[list[tuple[str, float, float]]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(
        handles=[Patch(color=colour, label=label) for colour, label in COLOURS.values()],
        ncols=len(COLOURS),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.22),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--plot", required=True, metavar="FILE", help="PNG to write")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of the whole sequence")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        print("bench/ring_attention_trace.py: start it with torchrun, as --help says.", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("cp", "tp"))
    with pyruntime.Runtime(mesh):
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, spans(args.seq, comm.process_group(mesh["cp"])))
        if dist.get_rank() == 0:
            plot(args.plot, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
