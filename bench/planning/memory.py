"""Compares the planner's memory of a rank with the trainer's peak, over every mesh that it runs here.

    python -m bench.planning.memory [--ranks 1 2 4] [--shape dim1024] [--most 12] [--json FILE]

It is started without torchrun: every mesh is a separate run of the trainer.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

from bench.common.measuring import Report, parser_of
from bench.common.tables import table
from bench.planning.trainer_runs import SHAPES, job_of, runnable, train
from pyruntime.choices import Recomputation, values
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.memory import memory_of_rank
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.train.planned import TRAINER

HOW = """\
Measured: the largest resident memory (VmHWM, shared pages included) of a rank over {steps} steps, from the
trainer's metrics.jsonl. Predicted: the planner's formulas with the trainer's rules, plus {process:.0f} MB for
the process itself, measured once with a model of {tiny:.1f} M parameters on one rank."""


def predicted(job: Job, mesh: Mesh, process: float) -> float:
    """Returns the predicted bytes of the fullest rank."""
    return max(memory_of_rank(job, mesh, rank, TRAINER, process).total for rank in range(mesh.pp))


def process_bytes(steps: int) -> float:
    """Measures the resident bytes of a rank without its model."""
    job = job_of("tiny", find_cluster("dgx-h100"), 1, 1, 32)
    return train(job, Mesh(zero=0), steps).memory_bytes - predicted(job, Mesh(zero=0), 0.0)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--shape", choices=SHAPES, default="dim1024")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step; default 8")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--most", type=int, default=1000, help="most meshes a number of ranks; default all")
    parser.add_argument("--skip", type=int, default=0, help="number of these meshes to skip at the beginning")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--recompute", choices=values(Recomputation), default="none", help="activation checkpointing"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    process = process_bytes(args.steps)
    tiny = SHAPES["tiny"].parameters / 1e6
    report = Report(args, HOW.format(steps=args.steps, process=process / 1e6, tiny=tiny))
    rows = []
    for ranks in args.ranks:
        job = job_of(args.shape, find_cluster("dgx-h100"), ranks, args.batch, args.seq)
        for mesh in runnable(job, args.micro_batch, args.most, recompute=args.recompute)[args.skip :]:
            measured = train(job, mesh, args.steps).memory_bytes
            guess = predicted(job, mesh, process)
            parts = max(
                (memory_of_rank(job, mesh, rank, TRAINER, process) for rank in range(mesh.pp)),
                key=lambda each: each.total,
            )
            error = guess / measured - 1
            rows.append(
                [f"{ranks}: {mesh.text()}", f"{measured / 1e6:.0f}", f"{guess / 1e6:.0f}", f"{error:+.1%}"]
            )
            report.add(
                {
                    "mesh": asdict(replace(mesh)),
                    "ranks": ranks,
                    "measured_bytes": measured,
                    "predicted_bytes": guess,
                    "parts": asdict(parts),
                    "error": error,
                },
                "  ".join(rows[-1]),
            )
            report.write(args.json)  # so that a later failure loses nothing
    print("\n" + table(["mesh", "measured MB", "predicted MB", "error"], rows))
    off = [abs(float(row[-1].rstrip("%"))) for row in rows]
    print(f"\n{sum(each <= 10 for each in off)} of {len(off)} within 10 %, the worst {max(off):.1f} %")


if __name__ == "__main__":
    main()
