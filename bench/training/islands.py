"""Times a training step on two islands of hosts in every numbering of the ranks, and in the measured one.

    python -m bench.netlab --hosts 4 --ranks-per-host 1 --rate 10gbit --islands 0,2/1,3 --between 500mbit \\
        -- python -m bench.training.islands [--config dim256] [--json FILE]

The mesh is pp 2 times dp 2. Rank 0 keeps its number; the other three have six orders, and to exchange the two
ranks of a stage, or the stages, changes no link, so these stand for all 24 numberings.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import pyruntime
from bench.common.measuring import Report, at_least_one, parser_of, program
from bench.common.tables import table
from pyruntime import comm
from pyruntime.cli.train import read
from pyruntime.train import metrics
from pyruntime.train.ranks import on_every_rank, on_rank_0
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest

PP, DP = 2, 2
LEFT_OUT = 2
"""First steps, which open groups and make buffers."""
HOW = """\
Milliseconds of a step (rank 0's, which the other ranks share), medians over {rounds} rounds of {steps} steps.
Within a round every numbering takes one turn, in shuffled order, in a run of its own."""


def numberings(ranks: int) -> list[tuple[int, ...]]:
    """Returns the numbers of the started ranks, in their order."""
    return [(0, *others) for others in itertools.permutations(range(1, ranks))]


def step_ms(options: dict[str, object], runtime: comm.Runtime, name: str) -> float:
    """Trains in `runtime`; returns the median of the steps after the first ones."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = on_rank_0(runtime.world, "Making a folder", lambda: temporary, str)
        flags = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        config, _ = read([*flags, "--output.run_dir", str(Path(folder) / name)])
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            run(config, name, runtime, StopRequest())
        path = Path(config.output.run_dir) / metrics.FILE_NAME
        lines = on_every_rank(runtime.world, "Reading", lambda: metrics.read(path))
    return 1e3 * statistics.median(line["step_time_s"] for line in lines[LEFT_OUT:])


def turns(rounds: int, options: dict[str, object], started: int, ranks: int) -> Iterator[dict[str, float]]:
    """Yields for each round the milliseconds of every numbering, and of the measured one."""
    every: list[tuple[int, ...] | None] = [*numberings(ranks), None]
    for number in range(rounds):
        found = {}
        for numbers in random.Random(number).sample(every, len(every)):
            # As if the launcher had started this process with that number.
            os.environ["RANK"] = str(started if numbers is None else numbers[started])
            name = "measured" if numbers is None else " ".join(map(str, numbers))
            hosts = "measured" if numbers is None else "started"
            with pyruntime.Runtime.start(pp=PP, dp=DP, tp=1, hosts=hosts) as runtime:
                found[name] = step_ms(options, runtime, f"{number} {name}".replace(" ", "-"))
        yield found


def show(found: list[dict[str, float]]) -> str:
    middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
    measured, best = middle.pop("measured"), min(middle.values())
    rows = [
        [name, f"{ms:.0f}", f"{ms / best:.2f}"] for name, ms in sorted(middle.items(), key=lambda x: x[1])
    ]
    rows.append(["measured", f"{measured:.0f}", f"{measured / best:.2f}"])
    return table(["numbers of the hosts' ranks", "ms a step", "of the best"], rows)


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--config", default="dim256", help="preset of the trainer; default %(default)s")
    parser.add_argument("--steps", type=at_least_one, default=10, help="default %(default)s")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != PP * DP:
        parser.error(f"it needs {PP * DP} ranks, found {ranks}; start it as the help of {program()} says.")
    torch.set_num_threads(1)
    options = {
        "config": args.config, "model.num_hidden_layers": 4, "train.steps": LEFT_OUT + args.steps,
        "train.micro_batch_size": 1, "train.batch_size": 4, "train.seq_len": 128, "train.val_every": 0,
        "train.val_sequences": 2, "parallel.pp": PP, "parallel.dp": DP, "output.sample_tokens": 0,
        "output.progress": "off",
    }  # fmt: skip
    found: list[dict[str, float]] = []
    for each in turns(args.rounds, options, int(os.environ["RANK"]), ranks):
        found.append(each)
    assert not dist.is_initialized()
    if os.environ["RANK"] == "0":
        report = Report(args, HOW.format(rounds=args.rounds, steps=args.steps))
        result: dict[str, Any] = {"ranks": ranks, "rounds": found}
        report.add(result, show(found))
        report.write(args.json)


if __name__ == "__main__":
    main()
