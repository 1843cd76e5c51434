"""Times calls through torch's symm_mem operators against direct calls of the primitives.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.linear.symm_mem [--json FILE]

Operands are so small that a call is almost only overhead: shards of 8 rows of 16 features, fp32. The two take
turns. A figure is the slowest rank's median over rounds of 100 calls. "Over" is the median of the rounds'
differences.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

import pyruntime
import pyruntime.symm_mem
from bench.common.measuring import facts, interleave, parser_of, write_json
from bench.common.tables import table
from pyruntime.comm import group_name

CALLS = 100
Call = Callable[[], object]


def pairs(group: Any) -> dict[str, tuple[Call, Call]]:
    """Returns by name the primitive and torch's operator for the same."""
    name, size = group_name(group), pyruntime.comm.group_size(group)
    through = torch.ops.symm_mem
    shard, batch, weight = torch.randn(8, 16), torch.randn(8, 2, 16), torch.randn(16, 16)
    rows = torch.randn(8 * size, 16)
    b = weight.t()
    return {
        "all_gather_matmul": (
            lambda: pyruntime.all_gather_matmul(shard, weight, group, rows=8 * size),
            lambda: through.fused_all_gather_matmul(shard, [b], 0, name, return_A=False),
        ),
        "all_gather_matmul, three weights, gathered rows returned": (
            lambda: pyruntime.all_gather_matmul(
                shard, [weight] * 3, group, rows=8 * size, return_gathered=True
            ),
            lambda: through.fused_all_gather_matmul(shard, [b] * 3, 0, name),
        ),
        "all_gather_matmul, along dimension 1": (
            lambda: pyruntime.all_gather_matmul(batch, weight, group, rows=8 * size),
            lambda: through.fused_all_gather_matmul(batch.movedim(0, 1), [b], 1, name, return_A=False),
        ),
        "matmul_reduce_scatter": (
            lambda: pyruntime.matmul_reduce_scatter(rows, weight, group),
            lambda: through.fused_matmul_reduce_scatter(rows, b, "sum", 0, name),
        ),
    }


def repeated(call: Call) -> Call:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def measure(group: Any, rounds: int) -> list[dict[str, Any]]:
    lines = []
    with torch.no_grad():
        for name, (ours, through) in pairs(group).items():
            variants = {"ours": repeated(ours), "through": repeated(through)}
            for run in variants.values():
                run()
            samples = interleave(variants, rounds)
            ours_us, through_us = (
                [seconds / CALLS * 1e6 for seconds in samples[which].rounds] for which in ("ours", "through")
            )
            over = [b - a for a, b in zip(ours_us, through_us, strict=True)]
            lines.append(
                {
                    "name": name,
                    "ours_us": statistics.median(ours_us),
                    "through_us": statistics.median(through_us),
                    "over_us": statistics.median(over),
                }
            )
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} measures nothing; use at least 1.")
    torch.set_num_threads(1)
    with pyruntime.Runtime.start() as runtime:
        where = facts()
        lines = measure(runtime.tp.mesh, args.rounds)
        if runtime.rank > 0:
            return
        print(where["machine"])
        head = ["", "us a call", "us through symm_mem", "us over"]
        print(
            table(
                head,
                [
                    [line["name"], *(f"{line[key]:.1f}" for key in ("ours_us", "through_us", "over_us"))]
                    for line in lines
                ],
            )
        )
        if args.json:
            write_json(args.json, where, vars(args), lines)


if __name__ == "__main__":
    main()
