"""Compares pyruntime with PyTorch's own parallelism on two ranks, and makes the README's table.

    python -m bench.compare [--only linear pipeline] [--places host] [--json FILE] [--readme README.md]

Runs bench.linear.run, bench.data_parallel.run and bench.pipeline.run on one host and on two hosts of
bench.netlab at 1gbit. In each of them all contenders take turns within every round. Prints a Markdown table
of this call's figures and writes all rounds to one file, where earlier figures of other tasks stay;
`--readme` shows the whole file. Takes under 12 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.launch import between_hosts, on_one_host, run, warning
from bench.common.measuring import parser_of
from bench.common.records import write_records

RESULT = "bench/results/compare.json"
MARKS = ("<!-- bench.compare -->", "<!-- end of bench.compare -->")
"""The lines around the table in the README."""


class Figure(NamedTuple):
    seconds: float
    """Median over rounds of the slowest rank's seconds."""
    of_limit: float
    """Share of the speed of ranks that exchange nothing, with the same model and framework."""


@dataclass(frozen=True)
class Task:
    title: str
    module: str
    arguments: str
    tiny: str
    """Arguments of a run that only shows that everything works."""
    figures: Callable[[dict[str, Any]], Mapping[str, Figure]]
    rows: Mapping[str, str]
    """The contenders in the table's order: {name in the table: name in `figures`}."""


def of_linear(result: dict[str, Any]) -> dict[str, Figure]:
    seconds = {"ours": result["T_o"], "dtensor": result["T_dtensor"]}
    return {name: Figure(each, result["T_g"] / each) for name, each in seconds.items()}


def of_steps(result: dict[str, Any]) -> dict[str, Figure]:
    return {line["name"]: Figure(line["step_s"], line["of_alone"]) for line in result["lines"]}


def of_pipelines(result: dict[str, Any]) -> dict[str, Figure]:
    return {line["name"]: Figure(line["seconds"], line["of_limit"]) for line in result["lines"]}


TASKS = {
    "linear": Task(
        "MLP of a Llama block, forward and backward: 2048 rows, 2048 to 5632 features",
        "bench.linear.run",
        "--shapes mlp:2048x2048x5632 --dtype bf16 --rounds 5 --seconds 1",
        "--shapes mlp:64x32x64 --dtype bf16 --rounds 1 --seconds 0.1",
        of_linear,
        {"pyruntime": "ours", "DTensor (`parallelize_module`)": "dtensor"},
    ),
    "data-parallel": Task(
        "Training step of a Llama of 4 layers of 1024, 512 tokens a rank: data parallel",
        "bench.data_parallel.run",
        '--shapes dim1024 --dtypes bf16 --stages 1 3 --peers DDP "FSDP2 zero 3" --rounds 3 --steps 1',
        '--shapes tiny --dtypes bf16 --stages 1 3 --peers DDP "FSDP2 zero 3" --rounds 1 --steps 1',
        of_steps,
        {
            "pyruntime, ZeRO 1": "pyruntime zero 1",
            "DistributedDataParallel": "DDP",
            "pyruntime, ZeRO 3": "pyruntime zero 3",
            "FSDP2 (`fully_shard`)": "FSDP2 zero 3",
        },
    ),
    "pipeline": Task(
        "The same Llama in two stages, forward and backward of 4 micro-batches of 512 tokens",
        "bench.pipeline.run",
        '--kinds 1f1b zb-h1 --peers "torch 1F1B" "torch zero bubble" --micro-batches 4 --rounds 3',
        '--shapes tiny --kinds 1f1b zb-h1 --peers "torch 1F1B" "torch zero bubble" '
        "--micro-batches 2 --rounds 1",
        of_pipelines,
        {
            "pyruntime, 1F1B": "1f1b",
            "torch.distributed.pipelining, 1F1B": "torch 1F1B",
            "pyruntime, ZB-H1": "zb-h1",
            "torch.distributed.pipelining, interleaved zero bubble": "torch zero bubble",
        },
    ),
}
PLACES = {"host": "one host", "1gbit": "two hosts, 1gbit"}


def command_of(task: Task, place: str, *, tiny: bool) -> list[str]:
    """Returns the command that measures a task in a place."""
    arguments = shlex.split(task.tiny if tiny else task.arguments)
    if place == "host":
        return on_one_host(task.module, arguments)
    return between_hosts(task.module, arguments, place)


def figures_of(name: str, document: dict[str, Any]) -> Mapping[str, Figure]:
    """Returns the figures of the last result, which for linears is forward and backward."""
    return TASKS[name].figures(document["results"][-1])


def table(runs: Mapping[str, Mapping[str, dict[str, Any]]]) -> str:
    """Returns the Markdown table of `runs`, the results by task and place."""
    places = [place for place in PLACES if any(place in of_place for of_place in runs.values())]
    head = ["2 ranks, bf16", *(f"{PLACES[place]}: ms | of its limit" for place in places), "command"]
    lines = [" | ".join(head), " | ".join(["---"] * (2 * len(places) + 2))]
    for name in [name for name in TASKS if name in runs]:
        of_place = runs[name]
        empty = " | ".join(["", *[" | "] * len(places)])
        lines.append(f"**{TASKS[name].title}**{empty} | `python -m bench.compare --only {name}`")
        found = [figures_of(name, of_place[place]) if place in of_place else None for place in places]
        for label, contender in TASKS[name].rows.items():
            cells = [
                f"{_ms(each[contender].seconds)} | {each[contender].of_limit:.2f}" if each else " | "
                for each in found
            ]
            lines.append(" | ".join([label, *cells, ""]))
    text = "\n".join(f"| {line.strip()} |" for line in lines)
    return text + warning([run for of_place in runs.values() for run in of_place.values()])


def write_readme(path: Path, text: str) -> None:
    """Puts the table between the marks."""
    begin, end = map(re.escape, MARKS)
    before = path.read_text()
    after, count = re.subn(
        rf"({begin}\n).*?({end})", lambda m: f"{m[1]}\n{text}\n\n{m[2]}", before, flags=re.DOTALL
    )
    if count != 1:
        sys.exit(f"{path} must have {MARKS[0]} and {MARKS[1]} exactly once; the table was not written.")
    path.write_text(after)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES), help="default: both")
    parser.add_argument("--json", metavar="FILE", help=f"default: {RESULT}")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="put the table there, between its marks")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, one round: shows that all runs")
    return parser.parse_args()


def _ms(seconds: float) -> str:
    """Returns milliseconds with at least two digits, so that nothing takes 0 ms."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"


def main() -> None:
    args = arguments()
    path = Path(args.json or RESULT)
    runs: dict[str, dict[str, Any]] = {}
    fresh: dict[str, dict[str, Any]] = {}
    if path.exists() and not args.tiny:
        runs = json.loads(path.read_text())  # results that are not measured now stay
    for name in args.only:
        for place in args.places:
            found = run(command_of(TASKS[name], place, tiny=args.tiny))
            for of_task in (runs, fresh):
                of_task.setdefault(name, {})[place] = found
            if args.json or not args.tiny:
                write_records(path, runs)
    print(table(fresh))
    if args.readme:
        write_readme(args.readme, table(runs))


if __name__ == "__main__":
    main()
