"""Compares the planner's step with the trainer's, over every mesh that it runs here.

    python -m bench.planning.time [--ranks 2 4] [--shape dim1024] [--most 12] [--json FILE]
    python -m bench.planning.time --ranks 2 --netlab "--hosts 2 --ranks-per-host 1 --rate 1gbit"

It is started without torchrun: every mesh is a separate run of the trainer. First it measures the machine:
links, memory and attention by `python -m pyruntime plan --measure`, and the speed of GEMMs by runs of one
rank, as many at the same time as there will be ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.measuring import Report, parser_of
from bench.common.tables import table
from bench.planning.trainer_runs import SHAPES, fit_flops, job_of, launcher, run, runnable, train
from pyruntime.plan.cluster import Cluster, find_cluster
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.step import Predictor

HOW = """\
Measured: median of {steps} steps in the trainer's metrics.jsonl, after two that warm up. Predicted: the
planner with links, memory and attention from `plan --measure` under the same launcher. Its operations/s are
those with which one rank's step, beside as many others as there are ranks, takes its measured time: the
median of runs before, between and after those of the meshes."""
BETWEEN = 4
"""Meshes between two runs of one rank alone."""


def measured_cluster(ranks: int, netlab: list[str] | None, folder: Path) -> Cluster:
    file = folder / "machine.toml"
    run([*launcher(ranks, netlab), "pyruntime", "plan", "--measure", str(file)])
    return find_cluster(str(file))


def alone(job: Job, copies: int, steps: int) -> list[float]:
    """Returns the seconds of the steps of `job` on one rank, while `copies` of it run."""
    with ThreadPoolExecutor(copies) as pool:
        runs = pool.map(lambda _: train(job, Mesh(zero=0, micro_batch=1), steps).step_seconds, range(copies))
        return [seconds for run in runs for seconds in run]


def predicted(job: Job, single: Job, took: float, measured: list[tuple[Mesh, float]]) -> list[dict[str, Any]]:
    """Returns measured steps beside the planner's, if a step of `single` takes `took` seconds."""
    cluster = fit_flops(single, took, sums_whole=True)
    predictor = Predictor(replace(job, cluster=cluster), sums_whole=True)
    found = []
    for mesh, seconds in measured:
        guess = predictor.step(mesh)
        found.append(
            {
                "mesh": asdict(mesh),
                "ranks": job.gpus,
                "measured_seconds": seconds,
                "predicted_seconds": guess.total,
                "parts": asdict(guess),
                "cluster": asdict(cluster),
                "alone_seconds": took,
                "error": guess.total / seconds - 1,
            }
        )
    return found


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--shape", choices=SHAPES, default="dim1024")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step; default 8")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--most", type=int, default=1000, help="most meshes a number of ranks; default all")
    parser.add_argument("--only", nargs="+", metavar="MESH", help='such as "dp2 zero1 mb1"')
    parser.add_argument("--grids", action="store_true", help="only meshes of x, y and z")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run; default 5")
    parser.add_argument("--netlab", default="", help="options of bench/netlab, which replaces torchrun")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    netlab = args.netlab.split() or None
    steps = args.steps + 2
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            cluster = measured_cluster(ranks, netlab, Path(folder))
        job = job_of(args.shape, cluster, ranks, args.batch, args.seq)
        single = job_of(args.shape, cluster, 1, max(1, args.batch // ranks), args.seq)
        report = Report(args, HOW.format(steps=args.steps))
        took, measured = [], []
        all_meshes = runnable(job, 1, args.most, grids=args.grids)
        meshes = [mesh for mesh in all_meshes if not args.only or mesh.text() in args.only]
        if not meshes:
            known = ", ".join(mesh.text() for mesh in all_meshes)
            print(f"--only {args.only}: none of them is a mesh of {ranks} ranks here; choose from {known}.")
            continue
        for index, mesh in enumerate(meshes):
            if index % BETWEEN == 0:
                took += alone(single, ranks, steps)
            measured.append((mesh, train(job, mesh, steps, netlab).seconds))
            if index == len(meshes) - 1:
                took += alone(single, ranks, steps)
            found = predicted(job, single, median(took), measured)
            report.results = found
            report.write(args.json and args.json.replace(".json", f"_{ranks}.json"))
            last = found[-1]
            print(f"{mesh.text()}  {last['measured_seconds']:.3f}  {last['error']:+.1%} so far", flush=True)
        rows = [
            [
                mesh.text(),
                f"{one['measured_seconds']:.3f}",
                f"{one['predicted_seconds']:.3f}",
                f"{one['error']:+.1%}",
            ]
            for mesh, one in zip(meshes, found, strict=True)
        ]
        print("\n" + table([f"{ranks} ranks", "measured s", "predicted s", "error"], rows))
        close = sum(abs(one["error"]) <= 0.15 for one in found)
        best = min(found, key=lambda one: one["predicted_seconds"])["measured_seconds"]
        chosen = best / min(one["measured_seconds"] for one in found) - 1
        print(
            f"\n{close} of {len(found)} within 15 %; the predicted best is {chosen:.1%} slower than the best;"
            f" one rank alone took {median(took):.3f} s for {single.batch} sequences"
        )


if __name__ == "__main__":
    main()
