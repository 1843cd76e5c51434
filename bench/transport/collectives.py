"""Times standalone all-gather and reduce-scatter: pyruntime's chunks next to the backend's own collectives.

    torchrun --nproc-per-node 2 -m bench.transport.collectives [--megabytes 1 16 64] [--json FILE]
    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- python -m bench.transport.collectives

Sizes are those of the whole operand, over all ranks. Every result is compared with the backend's before the
timing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from bench.common.measuring import Sample, facts, interleave, parser_of, rounds_for, write_json
from bench.common.tables import table
from bench.linear.problem import DTYPES

WIDTH = 1024
HOW = """\
Seconds of the slowest rank, medians over interleaved rounds, random data. backend: torch.distributed's
all_gather_into_tensor and reduce_scatter_tensor over the same process group. Each rank's link must carry at
least (P - 1) / P of the operand in each direction."""


@dataclass(frozen=True)
class Result:
    collective: str
    megabytes: float
    ours_s: float
    backend_s: float
    spread: float
    ratio: float  # ours over backend, median over rounds
    rounds: dict[str, list[float]]


def measure(
    mesh: DeviceMesh, megabytes: float, dtype: torch.dtype, rounds: int, seconds: float
) -> list[Result]:
    """Measures both collectives at one size."""
    size = mesh.size()
    rows = int(megabytes * 1e6) // (WIDTH * dtype.itemsize) // size * size
    whole = torch.randn(rows, WIDTH).to(dtype)
    shard = whole[: rows // size].clone()
    gathered, scattered = torch.empty_like(whole), torch.empty_like(shard)
    group = mesh.get_group()
    # torch 2.13 renamed these functions.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    variants = {
        "all_gather": {
            "ours": lambda: pyruntime.all_gather(shard, mesh, rows=rows),
            "backend": lambda: all_gather(gathered, shard, group=group),
        },
        "reduce_scatter": {
            "ours": lambda: pyruntime.reduce_scatter(whole, mesh),
            "backend": lambda: reduce_scatter(scattered, whole, group=group),
        },
    }
    check(pyruntime.all_gather(shard, mesh, rows=rows), gathered, variants["all_gather"]["backend"])
    check(pyruntime.reduce_scatter(whole, mesh), scattered, variants["reduce_scatter"]["backend"])
    results = []
    for name, pair in variants.items():

        def one_round(pair=pair) -> None:
            for run in pair.values():
                run()

        one_round()
        samples: dict[str, Sample] = interleave(pair, rounds_for(seconds, rounds, one_round), seed=rows)
        results.append(
            Result(
                name,
                megabytes,
                samples["ours"].median,
                samples["backend"].median,
                samples["ours"].spread,
                samples["ours"].over(samples["backend"]).median,
                {variant: list(sample.rounds) for variant, sample in samples.items()},
            )
        )
    return results


def check(found: torch.Tensor, reference: torch.Tensor, run_reference: Any) -> None:
    """Raises AssertionError if the two differ by more than a rounding."""
    run_reference()
    torch.testing.assert_close(found.float(), reference.float(), rtol=2e-2, atol=2e-2)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 16, 64])
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="fewest rounds; default %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="more rounds if they fit; default %(default)s"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures, every round of them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with pyruntime.Runtime.start() as runtime:
        where = facts()
        results: list[Result] = []
        for megabytes in args.megabytes:
            results += measure(runtime.tp.mesh, megabytes, DTYPES[args.dtype], args.rounds, args.seconds)
        if runtime.rank == 0:
            print(f"{where['machine']}\n{where['ranks']} ranks, {args.dtype}, {where['date']}")
            print(f"{pyruntime.comm.transport_of(runtime.tp.mesh)}\n\n{HOW}\n")
            head = ["collective", "MB", "ours ms", "+-", "backend ms", "ours / backend"]
            lines = [
                [
                    result.collective,
                    f"{result.megabytes:g}",
                    f"{result.ours_s * 1e3:.2f}",
                    f"{result.spread:.1%}",
                    f"{result.backend_s * 1e3:.2f}",
                    f"{result.ratio:.3f}",
                ]
                for result in results
            ]
            print(table(head, lines))
            if args.json:
                settings = {
                    **vars(args),
                    "transport": pyruntime.comm.transport_of(runtime.tp.mesh),
                    "how": HOW,
                }
                write_json(args.json, where, settings, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
