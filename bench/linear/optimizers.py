"""Times torch's optimizers over cut weights: plain tensors, torch's DTensors and ours.

    torchrun --nproc-per-node 2 -m bench.linear.optimizers [--weights 100] [--size 256] [--rounds 25]

Each kind has --weights weights of size x size with gradients; a rank has half of the rows. It times a step of
torch.optim.AdamW (its loop, foreach, fused) and `clip_grad_norm_` over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_

from bench.common.measuring import Report, Sample, at_least_one, interleave, parser_of, started
from bench.common.tables import table
from pyruntime.nn import ColumnParallelLinear

STEPS: dict[str, dict[str, Any]] = {
    "AdamW, loop": {"foreach": False},
    "AdamW, foreach": {"foreach": True},
    "AdamW, fused": {"fused": True},
}
CLIP = "clip_grad_norm_"
HOW = """\
Milliseconds of the slowest rank: medians over {rounds} rounds, in which each kind has a turn in shuffled
order; +- is half the interquartile range. "plain": this rank's halves as plain tensors. It is the lower limit
and no contender, because the norm of one rank's halves is not the weights' norm."""


def plain(size: int, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(torch.randn(size // mesh.size(), size))


def of_torch(size: int, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.randn(size, size), mesh, [Shard(0)]))


def ours(size: int, mesh: DeviceMesh) -> nn.Parameter:
    return ColumnParallelLinear(size, size, bias=False, group=mesh).weight


KINDS = {"plain": plain, "DTensor": of_torch, "pyruntime": ours}


def work(kind: str, count: int, size: int, mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    """Returns the calls to time, over weights of that kind."""
    weights = [KINDS[kind](size, mesh) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    made: dict[str, Callable[[], object]] = {
        name: torch.optim.AdamW(weights, lr=1e-4, **options).step for name, options in STEPS.items()
    }
    return made | {CLIP: lambda: clip_grad_norm_(weights, 1e9)}


def show(name: str, samples: dict[str, Sample]) -> list[str]:
    ratio = samples["pyruntime"].over(samples["DTensor"])
    cells = [f"{1e3 * samples[kind].median:.2f} +- {100 * samples[kind].spread:.0f} %" for kind in KINDS]
    return [name, *cells, f"{ratio.median:.2f}"]


def measure(count: int, size: int, rounds: int, mesh: DeviceMesh) -> dict[str, dict[str, Sample]]:
    kinds = {kind: work(kind, count, size, mesh) for kind in KINDS}
    found = {}
    for name in (*STEPS, CLIP):
        variants = {kind: each[name] for kind, each in kinds.items()}
        for run in variants.values():
            run()
        found[name] = interleave(variants, rounds)
    return found


if __name__ == "__main__":
    parser = parser_of(__doc__, rounds=25)
    parser.add_argument("--weights", type=at_least_one, default=100, help="default %(default)s")
    parser.add_argument("--size", type=at_least_one, default=256, help="default %(default)s")
    args = parser.parse_args()
    with started({"tp": -1}) as runtime:
        report = Report(args, HOW.format(rounds=args.rounds))
        found = measure(args.weights, args.size, args.rounds, runtime.mesh["tp"])
        rows = [show(name, samples) for name, samples in found.items()]
        report.add(
            {name: {kind: sample.rounds for kind, sample in each.items()} for name, each in found.items()},
            table(["", *KINDS, "pyruntime / DTensor"], rows),
        )
        report.write(args.json)
