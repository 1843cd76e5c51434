"""Times a tensor-parallel training step between hosts against its limits, in turns with PyTorch's DTensor.

    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 400mbit -- \\
        python -m bench.training.hosts [--json FILE] [--shapes dim1024] [--dtypes bf16] [--slices 2]

bench.training.run measures the same on one host, with separate processes for every contender.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bench.common.limits import LIMITS_HEAD, Figure, Held, Turn, limits_cells
from bench.common.measuring import interleave, parser_of, report_each, started
from bench.common.plain_llama import PlainLlama, PlainStep, Shape, shard_with_dtensor
from bench.common.tables import table
from bench.data_parallel.run import SETTINGS, SHAPES, TOLERANCE, ours_alone
from bench.training.workers import CLIP, DTYPES, SEED, OurStep

OURS, DTENSOR, ALONE = "pyruntime tp", "DTensor", "alone"

HOW = """\
Seconds of a training step (forward, backward, clipping to norm 1, AdamW) of one micro-batch on the slowest
rank, medians over {rounds} rounds. Within a round every line takes one turn, in shuffled order, started
together on all ranks, on the same random tokens and from the same weights; the losses of the first two steps
agree. T_g: every rank trains the whole model alone at the same time; its seconds are divided by the number of
ranks. T_c: the time to send as many bytes as our step, both ways, without computation. R = step / max(T_g,
T_c). Loaded: T_g while as many bytes pass unrelated and are awaited only at the end. Waits: share of a step,
by the ledger, in separate steps. pyruntime has fp32 master weights and states; DTensor's AdamW has states of
the dtype."""


def dtensor(shape: Shape, dtype: torch.dtype, mesh: DeviceMesh) -> PlainStep:
    model = PlainLlama(shape, dtype, SEED)
    context: Any = shard_with_dtensor(model, mesh) if mesh.size() > 1 else nullcontext
    return PlainStep(model, SETTINGS, clip=CLIP, loss_context=context)


def measure(
    shape_name: str, dtype: str, slices: int, rounds: int, tp: DeviceMesh, one: DeviceMesh
) -> dict[str, Any]:
    """Measures one shape. slices: causal slices of our sequences; tp: all ranks; one: this rank alone."""
    shape, torch_dtype = SHAPES[shape_name], DTYPES[dtype]
    whole_step = ours_alone(shape, torch_dtype, one, CLIP)
    steps = {
        ALONE: lambda ids, labels: whole_step(ids[0], labels[0]),
        OURS: OurStep(shape, torch_dtype, tp, slices=slices),
        DTENSOR: dtensor(shape, torch_dtype, tp),
    }
    draw = torch.Generator().manual_seed(SEED)
    size = (1, shape.micro_batch, shape.seq)
    ids, labels = (torch.randint(shape.vocab, size, generator=draw) for _ in range(2))
    for number in (1, 2):
        losses = {name: step(ids, labels) for name, step in steps.items()}
        if not max(losses.values()) - min(losses.values()) <= TOLERANCE[dtype]:
            raise RuntimeError(f"step {number}: the losses of this rank differ: {losses}.")

    def turn(step: Callable[..., float]) -> Turn:
        return lambda: step(ids, labels)

    turns = {name: turn(step) for name, step in steps.items()}
    held = Held(turns, OURS, [ALONE], shares=tp.size())
    samples = interleave(turns, rounds)
    return {
        "shape_name": shape_name,
        "shape": asdict(shape),
        "dtype": dtype,
        "slices": slices,
        "limits": {OURS: asdict(held.limits(samples))},
        "peers": {DTENSOR: asdict(Figure.of(samples[DTENSOR]))},
        "rounds": {name: list(sample.rounds) for name, sample in samples.items()},
    }


def show(result: dict[str, Any]) -> str:
    limits = result["limits"][OURS]
    lines = {OURS: limits["ours"], DTENSOR: result["peers"][DTENSOR], "T_g": limits["T_g"]}
    rows = [
        [
            name,
            f"{figure['median'] * 1e3:.1f}",
            f"{figure['spread']:.1%}",
            *limits_cells(result["limits"].get(name)),
        ]
        for name, figure in lines.items()
    ]
    title = (
        f"{result['shape_name']} {result['dtype']}: {result['shape']['layers']} layers, tensor parallel, "
        f"slices {result['slices']}"
    )
    return "\n".join([title, table(["", "step ms", "+-", *LIMITS_HEAD], rows)])


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["dim1024"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument(
        "--slices", type=int, default=1, help="causal slices of our sequences; default %(default)s"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with started({"tp": -1, "dp": 1}) as runtime:
        if dist.get_world_size() < 2:
            raise SystemExit("bench.training.hosts: one rank has nothing to exchange; start two or more.")
        each = (
            measure(shape, dtype, args.slices, args.rounds, runtime.tp.mesh, runtime.dp.mesh)
            for shape in args.shapes
            for dtype in args.dtypes
        )
        report_each(args, HOW.format(rounds=args.rounds), each, show)


if __name__ == "__main__":
    main()
