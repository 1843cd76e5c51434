"""The planner's step next to the trainer's, over every mesh it runs here.

    python bench/plan_time.py [--ranks 2 4] [--shape dim1024] [--most 12] [--json FILE]
    python bench/plan_time.py --ranks 2 --netlab "--hosts 2 --ranks-per-host 1 --rate 1gbit"

No torchrun: every mesh is a run of the trainer of its own. Before, the machine is measured: its links,
memory and attention by `python -m pyruntime plan --measure`, and the speed of products by as many runs of
one rank at the same time as there will be ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median

from common import Report, parser_of, table
from plan_runs import SHAPES, job_of, launcher, run, runnable, train

from pyruntime.plan.cluster import Cluster, find_cluster
from pyruntime.plan.measured import fit_flops
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.step import Predictor

HOW = """\
Measured: median of {steps} steps as the trainer writes them to metrics.jsonl, after two that warm up.
Predicted: the planner with links, memory and attention as `plan --measure` found them under the same
launcher, and with operations/s such that one rank alone, beside as many others as there are ranks, takes
what it took ({alone})."""


def measured_cluster(ranks: int, netlab: list[str] | None, folder: Path) -> Cluster:
    file = folder / "machine.toml"
    run([*launcher(ranks, netlab), "pyruntime", "plan", "--measure", str(file)])
    return find_cluster(str(file))


def alone(job: Job, copies: int, steps: int) -> float:
    """Seconds of a step of `job` on one rank, while `copies` of it run."""
    with ThreadPoolExecutor(copies) as pool:
        runs = pool.map(lambda _: train(job, Mesh(zero=0, micro_batch=1), steps).seconds, range(copies))
        return median(runs)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--shape", choices=SHAPES, default="dim1024")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step; default 8")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--most", type=int, default=1000, help="meshes of a number of ranks; default all")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run; default 5")
    parser.add_argument("--netlab", default="", help="options of bench/netlab.py, in place of torchrun")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    netlab = args.netlab.split() or None
    steps = args.steps + 2
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            cluster = measured_cluster(ranks, netlab, Path(folder))
        single = job_of(args.shape, cluster, 1, max(1, args.batch // ranks), args.seq)
        took = alone(single, ranks, steps)
        cluster = fit_flops(single, took, sums_whole=True)
        report = Report(
            args, HOW.format(steps=args.steps, alone=f"{took:.3f} s for {single.batch} sequences")
        )
        job = job_of(args.shape, cluster, ranks, args.batch, args.seq)
        predictor = Predictor(job, sums_whole=True)
        rows, found = [], []
        for mesh in runnable(job, 1, args.most):
            measured = train(job, mesh, steps, netlab).seconds
            seconds = predictor.step(mesh)
            error = seconds.total / measured - 1
            rows.append([mesh.text(), f"{measured:.3f}", f"{seconds.total:.3f}", f"{error:+.1%}"])
            found.append((seconds.total, measured))
            report.add(
                {
                    "mesh": asdict(mesh),
                    "ranks": ranks,
                    "measured_seconds": measured,
                    "predicted_seconds": seconds.total,
                    "parts": asdict(seconds),
                    "cluster": asdict(cluster),
                    "error": error,
                },
                "  ".join(rows[-1]),
            )
            report.write(args.json and args.json.replace(".json", f"_{ranks}.json"))
        print("\n" + table([f"{ranks} ranks", "measured s", "predicted s", "error"], rows))
        close = sum(abs(guess / measured - 1) <= 0.15 for guess, measured in found)
        chosen = min(found)[1] / min(measured for _, measured in found) - 1
        print(
            f"\n{close} of {len(found)} within 15 %; the predicted best is {chosen:.1%} slower than the best"
        )


if __name__ == "__main__":
    main()
