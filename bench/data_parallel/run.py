"""Times data-parallel training steps at every ZeRO stage, next to ranks that train alone and to PyTorch's
DDP, ZeRO and FSDP2.

    torchrun --nproc-per-node 2 -m bench.data_parallel.run [--json FILE] [--shapes dim256] [--dtypes bf16]
    python -m bench.netlab --hosts 2 --rate 1gbit -- python -m bench.data_parallel.run ...

Every rank trains on its own sequences. The losses of the first two steps must agree between all lines that
exchange gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyruntime
from bench.common.limits import LIMITS_HEAD, Figure, Held, limits_cells
from bench.common.measuring import Sample, at_least_one, interleave, parser_of, report_each, started
from bench.common.plain_llama import LONGER, PlainLlama, Shape
from bench.common.tables import table
from bench.training.workers import BETA1, BETA2, CLIP, DTYPES, EPS, LEARNING_RATE, WEIGHT_DECAY, our_model

SHAPES = {
    "dim256": Shape(256, 4, 8, 4, 768, 2048, seq=256, micro_batch=2, accumulate=1),
    "dim1024": Shape(1024, 4, 16, 8, 2816, 8192, seq=512, micro_batch=1, accumulate=1),
    "tiny": Shape(64, 2, 4, 2, 128, 256, seq=32, micro_batch=2, accumulate=1),
    **LONGER,
}
ALONE, PLAIN_ALONE = "pyruntime, each rank alone", "PyTorch, each rank alone"
IN_STEP = "pyruntime, alone, in step"
PEERS = ("DDP", "ZeroRedundancyOptimizer", "FSDP2 zero 2", "FSDP2 zero 3")
STAGES = (0, 1, 2, 3)
TOLERANCE = {"bf16": 2**-3, "fp32": 2e-3}  # nats; the PyTorch loss of bf16 near 9 has steps of 2**-4

HOW = """\
Seconds of a training step (forward, backward, clipping to norm {clip:g}, AdamW with fp32 states) on the
slowest rank, medians over {rounds} rounds. Within a round every line takes one turn of {steps} step(s), in
shuffled order, started together on all ranks. "Alone": every rank trains its own copy at the same time and
nothing is exchanged. "In step": the same, but ranks wait for each other before the optimizer, as the norm of
the whole gradient requires, so every step takes as long as its slowest rank. "Of alone": the seconds alone
(same framework) divided by the line's, median over rounds, +- half the interquartile range.
R = step / max(alone, T_c). T_c, between hosts: the time to send as many bytes as the step, both ways, without
computation. Loaded, between hosts: alone while as many bytes pass unrelated and are awaited only at the end.
Waits: share of a step, by the ledger, in separate steps."""

Step = Callable[[Tensor, Tensor], float]
SETTINGS: dict[str, Any] = {
    "lr": LEARNING_RATE,
    "betas": (BETA1, BETA2),
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
}


@dataclass(frozen=True)
class Line:
    """One contender's figures: seconds of a step, except for the ratios; `rounds` are seconds of turns."""

    name: str
    step_s: float
    spread: float
    of_alone: float
    of_alone_spread: float


def ours_alone(shape: Shape, dtype: torch.dtype, group, clip: float, in_step_with=None) -> Step:
    """Returns a step without exchange. in_step_with: group whose ranks wait for each other in each step."""
    model = our_model(shape, dtype, group)
    optimizer = pyruntime.shard(model, None).adamw(max_norm=clip, **SETTINGS)

    def step(ids: Tensor, labels: Tensor) -> float:
        loss = model(ids, labels)
        loss.backward()
        square = optimizer.squared_norm()
        if in_step_with is not None:
            pyruntime.ops.all_gather_stats(torch.zeros(1), in_step_with)
        optimizer.step(float(square.sqrt()))
        return float(loss)

    return step


def ours(
    shape: Shape,
    dtype: torch.dtype,
    group,
    mesh,
    stage: int,
    bucket_bytes: int | None = None,
    clip: float = CLIP,
) -> tuple[Step, pyruntime.data_parallel.Sharded]:
    model = our_model(shape, dtype, group)
    handle = pyruntime.shard(model, mesh, stage=stage, bucket_bytes=bucket_bytes)
    optimizer = handle.adamw(max_norm=clip, **SETTINGS)

    def step(ids: Tensor, labels: Tensor) -> float:
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step, handle


def plain(shape: Shape, dtype: torch.dtype, mesh, kind: str, clip: float) -> Step:
    """Returns a step of PyTorch's model, alone or with one of PyTorch's forms of data parallelism."""
    model: nn.Module = PlainLlama(shape, dtype, 0)
    if kind == "DDP" or kind == "ZeroRedundancyOptimizer":
        model = nn.parallel.DistributedDataParallel(
            model, process_group=mesh.get_group(), gradient_as_bucket_view=True
        )
    elif kind.startswith("FSDP2"):
        from torch.distributed.fsdp import fully_shard

        again = kind.endswith("3")
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=again)
        fully_shard(model, mesh=mesh, reshard_after_forward=again)
    settings: dict[str, Any] = {
        "lr": LEARNING_RATE,
        "betas": (BETA1, BETA2),
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
        "fused": True,
    }
    optimizer: Any
    if kind == "ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=mesh.get_group(), **settings
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)

    def step(ids: Tensor, labels: Tensor) -> float:
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def measure(shape_name: str, dtype: str, args: argparse.Namespace, mesh, tp) -> dict[str, Any]:
    shape, torch_dtype = SHAPES[shape_name], DTYPES[dtype]
    steps: dict[str, Step] = {
        ALONE: ours_alone(shape, torch_dtype, tp, args.clip),
        IN_STEP: ours_alone(shape, torch_dtype, tp, args.clip, mesh),
    }
    for stage in args.stages:
        steps[f"pyruntime zero {stage}"], _ = ours(
            shape, torch_dtype, tp, mesh, stage, args.bucket_bytes, args.clip
        )
    if args.peers:
        steps[PLAIN_ALONE] = plain(shape, torch_dtype, mesh, "alone", args.clip)
        for kind in args.peers:
            steps[kind] = plain(shape, torch_dtype, mesh, kind, args.clip)
    draw = torch.Generator().manual_seed(1 + mesh.get_local_rank())
    size = (shape.micro_batch * shape.accumulate, shape.seq)
    ids, labels = (torch.randint(shape.vocab, size, generator=draw) for _ in range(2))
    compare_losses(steps, ids, labels, TOLERANCE[dtype])

    def turn(step: Step) -> Callable[[], None]:
        def run() -> None:
            for _ in range(args.steps):
                step(ids, labels)

        return run

    turns = {name: turn(step) for name, step in steps.items()}
    names = [f"pyruntime zero {stage}" for stage in args.stages]
    held = {name: Held(turns, name, [ALONE], steps=args.steps) for name in names}
    samples = interleave(turns, args.rounds)
    lines = []
    for name in steps:
        sample = samples[name]
        alone = samples[ALONE if name.startswith("pyruntime") else PLAIN_ALONE]
        share = alone.over(sample)
        seconds = Sample(tuple(value / args.steps for value in sample.rounds))
        lines.append(Line(name, seconds.median, seconds.spread, share.median, share.spread))
    return {
        "shape_name": shape_name,
        "shape": asdict(shape),
        "dtype": dtype,
        "lines": [asdict(x) for x in lines],
        "limits": {name: asdict(each.limits(samples)) for name, each in held.items()},
        "peers": {name: asdict(Figure.of(samples[name], 1 / args.steps)) for name in args.peers},
        "rounds": {name: list(sample.rounds) for name, sample in samples.items()},
    }


def compare_losses(steps: dict[str, Step], ids: Tensor, labels: Tensor, tolerance: float) -> None:
    """Takes two steps of every line, which also warm up. Raises RuntimeError if a loss differs from the
    others."""
    for number in (1, 2):
        losses = {name: step(ids, labels) for name, step in steps.items() if "alone" not in name}
        for name, step in steps.items():
            if "alone" in name:
                step(ids, labels)
        wanted = next(iter(losses.values()), 0.0)
        for name, loss in losses.items():
            if not abs(loss - wanted) <= tolerance:
                raise RuntimeError(f"step {number}: the losses of this rank differ: {losses}; see {name}.")


def show(result: dict[str, Any]) -> str:
    head = ["", "step ms", "+-", "of alone", "+-", *LIMITS_HEAD]
    rows = [
        [
            line["name"],
            f"{line['step_s'] * 1e3:.1f}",
            f"{line['spread']:.1%}",
            f"{line['of_alone']:.3f}",
            f"{line['of_alone_spread']:.1%}",
            *limits_cells(result["limits"].get(line["name"])),
        ]
        for line in result["lines"]
    ]
    shape = result["shape"]
    title = (
        f"{result['shape_name']} {result['dtype']}: {shape['layers']} layers, "
        f"{shape['micro_batch']} x {shape['seq']} tokens a step"
    )
    return "\n".join([title, table(head, rows)])


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["dim256", "dim1024"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--stages", nargs="*", type=int, choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--bucket-bytes",
        type=int,
        help="smaller gradients travel together, up to this many bytes; default: as shard() chooses",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--clip",
        type=float,
        default=CLIP,
        help=f"largest gradient norm; default {CLIP:g}, which clips every step, so that each waits for its "
        "norm; 1e9 clips none",
    )
    parser.add_argument("--steps", type=at_least_one, default=2, help="of a turn; default 2")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with started({"dp": -1, "tp": 1}) as runtime:
        how = HOW.format(clip=args.clip, rounds=args.rounds, steps=args.steps)
        mesh, tp = runtime.dp.mesh, runtime.tp.mesh
        each = (measure(shape, dtype, args, mesh, tp) for shape in args.shapes for dtype in args.dtypes)
        report_each(args, how, each, show)


if __name__ == "__main__":
    main()
