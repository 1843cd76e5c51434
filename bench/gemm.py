"""Times our bf16 GEMM and the library's for the three products of a linear layer on the CPU.

    python -m bench.gemm                                    one thread
    torchrun --nproc-per-node 2 -m bench.gemm               two ranks of one thread at once; the slower counts

x [rows, k], a weight [n, k]: forward x W^T, dX = dY W, dW = dY^T x, and dW added to a gradient. Ours packs
its operands in every product, as in a layer. The library's is torch.mm, or where it has no bf16 the same
in fp32, of operands converted in the call. Seconds are processor time (CLOCK_THREAD_CPUTIME_ID), without
the time that other programs take. The two GEMMs take turns, and the fastest round counts (of two rounds if a
product takes half a second). Operands are random numbers in memory that is already mapped.

--write enters ours in pyruntime/ops/gemm_tables.json where it reaches at least 0.95 of the library's speed,
in these figures and in the --json files of --beside. In chunks ours is then the faster one, because it packs
a weight once for all chunks.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pyruntime
from bench.common.measuring import facts, parser_of, write_json
from bench.common.tables import table
from pyruntime import _C
from pyruntime.ops import gemm_tables
from pyruntime.ops.gemm_tables import GemmTable
from pyruntime.tuning.gemms import LEAST_S, LIBRARY, OURS, contenders, seconds_of

LEAST_RATIO = 0.95
LONG_S = 0.5
"""A product that takes this many seconds is measured only twice."""


def measure(rows: int, k: int, n: int, rounds: int) -> list[dict[str, Any]]:
    """Measures on all ranks at once; returns a line for each product with the slowest rank's seconds."""
    lines = []
    _C.use_gemm(True)
    for product, runs in contenders(rows, k, n).items():
        first = {name: seconds_of(run) for name, run in runs.items()}
        longest = max(first.values())
        samples = [first] if longest > LONG_S else []
        for _ in range(1 if samples else rounds):
            if dist.is_initialized():
                dist.barrier()
            repeats = max(1, int(LEAST_S / longest))
            samples.append({name: seconds_of(run, repeats) for name, run in runs.items()})
        library, own = (largest(min(sample[name] for sample in samples)) for name in (LIBRARY, OURS))
        shape = {"product": product, "rows": rows, "k": k, "n": n}
        lines.append(shape | {"library": library, "ours": own, "ratio": library / own})
    return lines


def largest(seconds: float) -> float:
    """Returns the largest `seconds` of all ranks."""
    if not dist.is_initialized():
        return seconds
    box = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def shown(lines: list[dict[str, Any]]) -> str:
    """Returns a table of library time over ours: the worst point for each number of rows, and where it is."""
    rows = []
    for name in dict.fromkeys(line["product"] for line in lines):
        for m in sorted({line["rows"] for line in lines}):
            of = sorted(
                (line for line in lines if (line["product"], line["rows"]) == (name, m)),
                key=lambda line: line["ratio"],
            )
            worst, middle = of[0], of[len(of) // 2]
            rate = 2e-9 * worst["rows"] * worst["k"] * worst["n"] / worst["ours"]
            below = sum(line["ratio"] < 0.95 for line in of)
            where = f"{worst['k']} to {worst['n']}"
            rows.append(
                [
                    name,
                    str(m),
                    f"{worst['ratio']:.2f}",
                    where,
                    f"{rate:.0f}",
                    f"{middle['ratio']:.2f}",
                    f"{below} of {len(of)}",
                ]
            )
    return table(["product", "rows", "worst", "k to n", "GFLOP/s", "median", "below 0.95"], rows)


def made(lines: list[dict[str, Any]], grid: GemmTable) -> GemmTable:
    """Returns the table with ours where it reaches LEAST_RATIO of the library's speed in every measurement of
    a point. For dW the slower of its two forms decides."""
    slowest: dict[tuple[str, int, int, int], float] = {}
    for line in lines:
        key = (line["product"].removesuffix(" +="), line["rows"], line["k"], line["n"])
        slowest[key] = min(slowest.get(key, float("inf")), line["ratio"])
    missing = [point for point in grid.points() if ("dW", *point) not in slowest]
    if missing:
        sys.exit(
            f"--write needs all points of the grid; {len(missing)} were not measured, such as {missing[0]}."
        )
    ours = frozenset(key for key, ratio in slowest.items() if ratio >= LEAST_RATIO)
    return GemmTable(grid.rows, grid.features, ours, datetime.date.today().isoformat())


def main() -> None:
    grid = gemm_tables.read()
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--rows", type=int, nargs="+", default=grid.rows)
    parser.add_argument("--features", type=int, nargs="+", default=grid.features)
    parser.add_argument("--write", action="store_true", help="write the result into the table")
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="figures of other runs, with --write"
    )
    args = parser.parse_args()
    if not _C.has_own_gemm():
        sys.exit("Our GEMM needs a processor with AVX2 and without AMX; here the library is used.")
    torch.set_num_threads(1)
    pyruntime.keep_freed_memory()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    where, lines = facts(), []
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    for m in args.rows:
        for k in args.features:
            for n in args.features:
                lines += measure(m, k, n, args.rounds)
        if is_first:
            print(f"{m} rows", file=sys.stderr, flush=True)
    if is_first:
        print(where["machine"])
        print(shown(lines))
        if args.json:
            write_json(args.json, where, vars(args) | {"beside": []}, lines)
        if args.write:
            for path in args.beside:
                lines = lines + json.loads(path.read_text())["results"]
            gemm_tables.write(made(lines, grid), _C.processor_key())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
