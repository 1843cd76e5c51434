"""Times, sums up and reports all benchmarks (pyruntime.tuning.timing), with facts about the machine."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from bench.common.records import write_records
from pyruntime.tuning.timing import Sample, interleave, start_together

__all__ = [
    "Report",
    "Sample",
    "at_least_one",
    "cases_of",
    "facts",
    "interleave",
    "parser_of",
    "report_each",
    "rounds_for",
    "start_together",
    "started",
    "write_json",
]


@contextlib.contextmanager
def started(axes: Mapping[str, int]) -> Iterator[Any]:
    """Opens a pyruntime.Runtime over the ranks that torchrun or netlab started, with one thread each. One of
    the `axes` is -1 and gets all remaining ranks. Exits with code 2 if no ranks were started."""
    import pyruntime

    if "RANK" not in os.environ:
        print(f"{program()}: start it with torchrun, as --help says.", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    pyruntime.keep_freed_memory()
    rest = int(os.environ["WORLD_SIZE"]) // math.prod(size for size in axes.values() if size > 0)
    sizes = {axis: rest if size < 0 else size for axis, size in axes.items()}
    with pyruntime.Runtime.start(**sizes) as runtime:
        yield runtime


def program() -> str:
    """Returns the running program as it is started: "-m bench.linear.run"."""
    spec = sys.modules["__main__"].__spec__
    return f"-m {spec.name.removesuffix('.__main__')}" if spec else sys.argv[0]


def parser_of(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the benchmark's docstring. If `rounds` is given it has `--rounds`, with
    that default, and `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"python {program()}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if rounds is not None:
        add = parser.add_argument
        add("--json", metavar="FILE", help="write the figures, every round of them, to this file")
        add("--rounds", type=at_least_one, default=rounds, help="default %(default)s")
    return parser


class Checked(Protocol):
    """A case of a benchmark."""

    def check(self, ranks: int) -> None:
        """Raises ValueError unless so many ranks can measure it."""


T = TypeVar("T", bound=Checked)


def cases_of(bench: str, parse: Callable[[str], T], texts: Iterable[str]) -> list[T]:
    """Returns the cases that texts name. If one is wrong or does not fit the ranks, prints one sentence on
    rank 0 and ends the process with exit code 2."""
    try:
        cases = [parse(text) for text in texts]
        for case in cases:
            case.check(int(os.environ.get("WORLD_SIZE", "1")))
        return cases
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{bench}: {error}", file=sys.stderr)
        sys.exit(2)


def at_least_one(text: str) -> int:
    """Parses a whole number from 1 on for argparse. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} measures nothing; use at least 1.")
    return int(text)


class Report:
    """Prints each result on rank 0 at once, and keeps it for the JSON file."""

    def __init__(self, args: argparse.Namespace, how: str):
        self._args, self._how, self._facts = args, how, facts()
        self.results: list[dict[str, Any]] = []
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        if self._is_first:
            where = self._facts
            print(where["machine"])
            print(f"{where['ranks']} ranks, torch {where['versions']['torch']}, {where['date']}\n\n{how}")

    def add(self, result: dict[str, Any], text: str) -> None:
        self.results.append(result)
        if self._is_first:
            print(f"\n{text}", flush=True)

    def write(self, path: str | None) -> None:
        """Writes the results to a file if `path` is given."""
        if path and self._is_first:
            write_json(path, self._facts, {**vars(self._args), "how": self._how}, self.results)


def report_each(
    args: argparse.Namespace,
    how: str,
    results: Iterable[dict[str, Any]],
    show: Callable[[dict[str, Any]], str],
) -> None:
    """Reports results that are measured one after the other."""
    report = Report(args, how)
    for result in results:
        report.add(result, show(result))
    report.write(args.json)


def rounds_for(seconds: float, least: int, one_round: Callable[[], object], most: int = 100) -> int:
    """Runs a round; returns how many fill about `seconds`, within [least, most], the same on every rank."""
    start = time.perf_counter()
    one_round()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(least, min(most, int(seconds / max(took.item(), 1e-6))))


def facts() -> dict[str, Any]:
    """Returns where and how this benchmark runs: machine in words, versions, command, date."""
    import pyruntime
    from pyruntime import machine

    described = "; ".join(
        f"{name}: {value}"
        for name, value in machine.processor() + machine.memory()
        if not name.startswith("/")
    )
    return {
        "machine": described,
        "system": f"{platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pyruntime": getattr(pyruntime, "__version__", "unknown"),
        },
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "threads_per_rank": torch.get_num_threads(),
        "load_average_at_start": os.getloadavg()[0],
        "command": f"python {program()} {shlex.join(sys.argv[1:])}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_json(
    path: str | Path, facts: dict[str, Any], settings: dict[str, Any], results: list[dict[str, Any]]
) -> None:
    """Writes one JSON object: `facts`, `settings` of the benchmark, and `results`, one object a row."""
    write_records(path, {"facts": facts, "settings": settings, "results": results})
