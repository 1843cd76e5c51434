"""What all benchmarks share: how they take time (pyruntime.tuning.timing), how they sum it up, how they say
where it was taken."""

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
from typing import Any

import torch
import torch.distributed as dist

from bench.common.records import write_records
from pyruntime.tuning.timing import Sample, interleave, start_together

__all__ = [
    "Report",
    "Sample",
    "at_least_one",
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
    """A pyruntime.Runtime over the ranks that torchrun or netlab started, one thread each; one of the `axes`
    is -1, all ranks that the others leave. Ends with exit code 2 where nobody started ranks."""
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
    """What runs, as it is started: "-m bench.linear.run"."""
    spec = sys.modules["__main__"].__spec__
    return f"-m {spec.name}" if spec else sys.argv[0]


def parser_of(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's docstring. With `--rounds`, which has that default, and `--json`
    where rounds are given."""
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


def at_least_one(text: str) -> int:
    """For argparse. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} measures nothing; use a number from 1 on.")
    return int(text)


class Report:
    """Prints on rank 0 what was found as it is found, and keeps it for the JSON file."""

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
        """To a file, where one was asked for."""
        if path and self._is_first:
            write_json(path, self._facts, {**vars(self._args), "how": self._how}, self.results)


def report_each(
    args: argparse.Namespace,
    how: str,
    results: Iterable[dict[str, Any]],
    show: Callable[[dict[str, Any]], str],
) -> None:
    """A Report of what is measured one after the other."""
    report = Report(args, how)
    for result in results:
        report.add(result, show(result))
    report.write(args.json)


def rounds_for(seconds: float, least: int, one_round: Callable[[], object], most: int = 100) -> int:
    """How many rounds fill about `seconds`, within [least, most]; the same on every rank. Runs one round."""
    start = time.perf_counter()
    one_round()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(least, min(most, int(seconds / max(took.item(), 1e-6))))


def facts() -> dict[str, Any]:
    """Where and how this benchmark runs: machine in words, versions, command, date."""
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
    """One object: `facts`, `settings` of the benchmark, and `results`, one object a row."""
    write_records(path, {"facts": facts, "settings": settings, "results": results})
