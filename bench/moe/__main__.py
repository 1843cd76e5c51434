"""Times an expert layer over ranks, beside three exchanges over gloo and the work of experts alone.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.moe [--json FILE] [--shapes TxDxF:EkK ...]
    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- python -m bench.moe

A shape is TxDxF:EkK[:IMBALANCE]: T rows a rank, D features, E experts of width F, K experts a row; bf16.
IMBALANCE: the rows of the busiest rank over the mean. Every result is checked before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.common.limits import Held, Limits
from bench.common.measuring import Sample, cases_of, interleave, parser_of, report_each, rounds_for, started
from bench.common.tables import table
from bench.moe.contenders import (
    AllGather,
    AllToAll,
    Ours,
    Transformers,
    alone,
    collectives,
    grouped_and_dense,
)
from bench.moe.problem import Case, check, everyones

SHAPES = [f"1024x1024x{rest}{skew}" for rest in ("768:32k4", "2816:8k2") for skew in ("", ":2")]
SHAPES += ["64x1024x256:8k1", "64x1024x2816:8k2", "256x1024x768:128k8", "256x1024x768:32k1"]
SHAPES += ["1024x1024x256:128k8", "1024x1024x768:128k1", "4096x1024x256:32k2", "4096x1024x768:8k2"]
QUICK = ["32x64x48:8k2", "32x64x48:4k2:2"]
WARM_UP = 2
PEERS = {"all_to_all": AllToAll, "all_gather": AllGather, "transformers": Transformers}

HOW = """\
Seconds of the slowest rank, medians over rounds. Within a round all variants run once, in shuffled order,
each started on all ranks at the same moment, on random bf16 data.
  T_g         a rank's experts alone, on all ranks at once: torch.mm of each expert into preallocated memory
              and SwiGLU, on rows that lie in the experts' order already; so the busiest rank's counts
  T_c         a gather and a reduce-scatter of all rows for each direction, alone, by pyruntime
  T_o         pyruntime.ops.experts; +- is half its interquartile range
  all_to_all  all_to_all_single over gloo, rows sorted by expert, a loop over experts, added at the source
  all_gather  all_gather over gloo, the rows of own experts, the same loop, reduce_scatter
  transformers  its AllToAllEP with Mixtral's experts by grouped_mm
  R = T_o / max(T_g, T_c)
  grouped     the gate_up products of a rank's experts, by pyruntime's rule, as a share of the speed of one
              torch.mm of the same work"""


@dataclass(frozen=True)
class Result:
    """One case in one direction: seconds, except R and grouped."""

    shape: str
    direction: str
    rows_per_expert: float
    T_g: float
    T_c: float
    T_o: float
    R: float
    spread_T_o: float
    peers: dict[str, float]
    grouped: float
    limits: dict[str, Limits]
    worst_relative_error: float
    rounds: dict[str, list[float]]


HEAD = ["shape", "rows/expert", "T_g ms", "T_c", "T_o", "+-", *PEERS, "R", "of best peer", "wait", "grouped"]


def row(result: dict[str, Any]) -> list[str]:
    """Returns a line of the table."""
    direction = "fwd+bwd" if result["direction"] == "forward_backward" else "fwd"
    best = min(result["peers"].values())
    return [
        f"{result['shape']} {direction}",
        f"{result['rows_per_expert']:.0f}",
        *(f"{result[name] * 1e3:.2f}" for name in ("T_g", "T_c", "T_o")),
        f"{result['spread_T_o']:.1%}",
        *(f"{result['peers'][name] * 1e3:.2f}" for name in PEERS),
        f"{result['R']:.3f}",
        f"{best / result['T_o']:.2f}",
        f"{result['limits']['ours']['waits']['median']:.1%}",
        f"{result['grouped']:.2f}",
    ]


def measure(case: Case, group: dist.ProcessGroup, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures forward, and forward with backward, of one case."""
    rank, ranks = group.rank(), group.size()
    all_ranks = everyones(case, ranks)
    own, held = all_ranks[rank], case.experts // ranks
    kinds = {"ours": Ours, **PEERS}
    contenders = {name: kind(case, own, group) for name, kind in kinds.items()}
    errors = {
        name: check(case, all_ranks, contender.forward_backward(), rank, name)
        for name, contender in contenders.items()
    }
    counts = sum(torch.bincount(each.ids.flatten(), minlength=case.experts) for each in all_ranks)
    routed = counts[rank * held : (rank + 1) * held].tolist()
    results = []
    for backward in (False, True):
        direction = "forward_backward" if backward else "forward"
        turns: dict[str, Callable[[], object]] = {
            name: getattr(contender, direction) for name, contender in contenders.items()
        }
        turns |= {
            "alone": alone(own, routed, backward=backward),
            "collectives": collectives(own, group, backward=backward),
            **grouped_and_dense(own, routed),
        }
        results.append(asdict(_time(case, direction, turns, ranks, errors["ours"], rounds, seconds)))
    return results


def _time(
    case: Case,
    direction: str,
    turns: dict[str, Callable[[], object]],
    ranks: int,
    error: float,
    rounds: int,
    seconds: float,
) -> Result:
    def one_round() -> None:
        for turn in turns.values():
            turn()

    for _ in range(WARM_UP):
        one_round()
    held = Held(turns, "ours", ["alone"], ["collectives"])
    samples: dict[str, Sample] = interleave(turns, rounds_for(seconds, rounds, one_round), seed=case.rows)
    ours, alone_, together = (samples[name].median for name in ("ours", "alone", "collectives"))
    return Result(
        shape=str(case),
        direction=direction,
        rows_per_expert=case.rows_per_expert(ranks),
        T_g=alone_,
        T_c=together,
        T_o=ours,
        R=ours / max(alone_, together),
        spread_T_o=samples["ours"].spread,
        peers={name: samples[name].median for name in PEERS},
        grouped=samples["dense"].median / samples["grouped"].median,
        limits={"ours": held.limits(samples)},
        worst_relative_error=error,
        rounds={name: list(sample.rounds) for name, sample in samples.items()},
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help=f"default: {' '.join(SHAPES)}")
    parser.add_argument("--quick", action="store_true", help=f"the shapes {' '.join(QUICK)}, for a look")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="more rounds if they fit into this time; default 3"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    cases = cases_of("bench/moe", Case.parse, args.shapes or (QUICK if args.quick else SHAPES))
    with started({"tp": -1}) as runtime:
        group = runtime.tp.mesh.get_group()
        results = (result for case in cases for result in measure(case, group, args.rounds, args.seconds))
        report_each(args, HOW, results, lambda result: table(HEAD, [row(result)]))


if __name__ == "__main__":
    main()
