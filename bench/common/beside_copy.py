"""Times passes over memory on one core, in bytes a second, next to a plain copy of fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import pyruntime
from bench.common.measuring import at_least_one, facts, interleave, parser_of, write_json
from bench.common.tables import table

Contender = tuple[Callable[[], Any], int]
"""A function to time, and the bytes that it reads and writes."""


def measure(contenders: Mapping[str, Contender], elements: int, rounds: int) -> list[dict[str, Any]]:
    source, target = torch.randn(elements), torch.randn(elements)
    lines = {"copy": (lambda: target.copy_(source), source.nbytes + target.nbytes), **contenders}
    for run, _ in lines.values():
        run()
    samples = interleave({name: run for name, (run, _) in lines.items()}, rounds)
    copy_rate = lines["copy"][1] / samples["copy"].median
    return [
        {
            "name": name,
            "seconds": sample.median,
            "spread": sample.spread,
            "gb_per_second": lines[name][1] / sample.median / 1e9,
            "of_copy": lines[name][1] / sample.median / copy_rate,
        }
        for name, sample in samples.items()
    ]


def main(description: str | None, contenders: Callable[[int], Mapping[str, Contender]]) -> None:
    """Runs the command line of a benchmark. `contenders` makes them for a number of elements."""
    parser = parser_of(description, rounds=9)
    parser.add_argument("--elements", type=at_least_one, default=30_000_000, help="default 30 million")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyruntime.keep_freed_memory()
    where = facts()
    lines = measure(contenders(args.elements), args.elements, args.rounds)
    rows = [
        [
            line["name"],
            f"{line['seconds'] * 1e3:.1f}",
            f"{line['spread']:.1%}",
            f"{line['gb_per_second']:.1f}",
            f"{line['of_copy']:.2f}",
        ]
        for line in lines
    ]
    print(where["machine"])
    print(table(["", "ms", "+-", "GB/s", "of copy"], rows))
    if args.json:
        write_json(args.json, where, vars(args), lines)
