"""Measures what the check for slow ranks costs a step, and what moving work away from a slow rank gains.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.training.slow [--axis dp] [--config dim256]

It runs two stages of a pipeline, one on each rank, or with --axis dp two data-parallel ranks. Rank 1 is made
to take twice as long: after every forward pass of a layer it sleeps three times the pass's time, because a
backward pass takes twice as long as a forward pass.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.common.measuring import Report, at_least_one, parser_of, started
from bench.common.tables import table
from pyruntime.cli.train import read
from pyruntime.train import metrics, run_folder
from pyruntime.train import run as run_module
from pyruntime.train.config import Checkpoint, Output
from pyruntime.train.loop import Trainer
from pyruntime.train.ranks import on_every_rank, on_rank_0
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from pyruntime.train.slow.judge import WINDOWS
from pyruntime.train.slow.own_clock import Moment, OwnClock
from pyruntime.train.slow.windows import SlowReport

SLOW_RANK, CALLS, BATCHES = 1, 100, 100
HOW = """\
Milliseconds of a step on rank 0, which waits for the other in every step; medians over {rounds} rounds of two
runs. One has {steps} steps with equal ranks. In the other rank 1 takes twice as long, and {units} move at the
checkpoint after step {steps}; its first step, and the one after the move, are left out. The cost of looking
is timed in the first run: the fastest reading of the clock times the readings in a step, plus the check every
{every} steps, in which this rank waits for the other, divided by {every}. The least that can be reached:
both ranks work all the time, 4/3 of equal ranks' step."""


class Timed(Trainer):
    """A trainer that records when steps end, how often it reads the clock, and how long its checks take."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.ends: list[float] = []

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        for step in super().fit(*args, **kwargs):
            self.ends.append(time.perf_counter())
            yield step


class Slowed(Timed):
    """A trainer whose SLOW_RANK takes twice as long to compute."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self._runtime.rank == SLOW_RANK:
            for block in self.model.layers:
                _slow_down(block)


def _slow_down(block: Any) -> None:
    def begin(*_: Any) -> None:
        block.began = time.perf_counter()

    def end(*_: Any) -> None:
        time.sleep(3 * (time.perf_counter() - block.began))

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end)


def trained(config: Any, runtime: Any, kind: type[Timed]) -> list[Timed]:
    """Runs a training and returns its trainers, one after the other."""
    made: list[Timed] = []

    def make(*args: Any) -> Timed:
        made.append(kind(*args))
        return made[-1]

    # Looks like a new job, not like one that its launcher restarted.
    with patch.object(run_module, "Trainer", make), patch.object(run_folder, "life_before", lambda: None):
        run(config, "slow", runtime, StopRequest())
    return made


def milliseconds(lines: list[dict], first: int, last: int) -> float:
    return 1e3 * statistics.median(line["step_time_s"] for line in lines if first <= line["step"] <= last)


def cost_of_looking(config: Any, runtime: Any) -> tuple[float, float]:
    """Trains as `config` says. Returns the seconds of a step for reading clocks, and for checks."""
    reads, looks = [0], []
    plain, now = SlowReport.look, OwnClock.now

    def counted(clock: OwnClock) -> Moment:
        reads[0] += 1
        return now(clock)

    def timed(report: SlowReport) -> Any:
        begin = time.perf_counter()
        found = plain(report)
        looks.append(time.perf_counter() - begin)
        return found

    with patch.object(OwnClock, "now", counted), patch.object(SlowReport, "look", timed):
        trained(config, runtime, Timed)
    clock = OwnClock(runtime.device)
    of_clock = min(_of_clock(clock) for _ in range(BATCHES))
    # The first check opens its connections, and asks for the hosts' names.
    return of_clock * reads[0] / config.train.steps, statistics.median(looks[1:]) / config.train.slow_every


def _of_clock(clock: OwnClock) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        clock.now()
    return (time.perf_counter() - begin) / CALLS


def round_of(config: Any, runtime: Any, folder: Path) -> dict[str, Any]:
    def to(name: str, steps: int, rebalance: str) -> Any:
        return dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, steps=steps),
            parallel=dataclasses.replace(config.parallel, rebalance=rebalance),
            checkpoint=Checkpoint(every_steps=config.train.steps, keep=1),
            output=Output(run_dir=str(folder / name), progress="off", sample_tokens=0),
        )

    steps = config.train.steps
    clocks, looks = cost_of_looking(to("equal", steps, "off"), runtime)
    made = trained(to("slow", 2 * steps, "on"), runtime, Slowed)
    equal, slow = (
        on_every_rank(runtime.world, "Reading", lambda n=name: metrics.read(folder / n / metrics.FILE_NAME))
        for name in ("equal", "slow")
    )
    moves = [line["moved"] for line in slow if "moved" in line]
    if len(moves) != 1 or len(made) != 2:
        raise SystemExit(f"Work should move once and moved {len(moves)} times; use a quiet machine.")
    first_after = next(line for line in slow if line["step"] == steps + 1)
    return {
        "equal_ms": milliseconds(equal, 2, steps),
        "slow_ms": milliseconds(slow, 2, steps),
        "moved_ms": milliseconds(slow, steps + 2, 2 * steps),
        "before": moves[0]["before"],
        "after": moves[0]["after"],
        "expected_gain": moves[0]["gain"],
        "move_s": made[1].ends[0] - made[0].ends[-1] - first_after["step_time_s"],
        "clock_ms": 1e3 * clocks,
        "look_ms": 1e3 * looks,
    }


def show(found: list[dict[str, Any]], units: str) -> str:
    def median(name: str) -> float:
        return statistics.median(each[name] for each in found)

    gain = statistics.median(1 - each["moved_ms"] / each["slow_ms"] for each in found)
    best = statistics.median(each["moved_ms"] / (4 / 3 * each["equal_ms"]) for each in found)
    cost = statistics.median((each["clock_ms"] + each["look_ms"]) / each["equal_ms"] for each in found)
    rows = [
        ["equal ranks", f"{median('equal_ms'):.1f}", f"looking takes {cost:.3%} of it"],
        ["rank 1 twice as slow", f"{median('slow_ms'):.1f}", f"{list(found[0]['before'])} {units}"],
        [
            f"{units} moved",
            f"{median('moved_ms'):.1f}",
            f"{' or '.join(sorted({str(list(each['after'])) for each in found}))} {units}, {gain:.0%} less; "
            f"expected {median('expected_gain'):.0%}; {best:.2f} of the least; moving took "
            f"{median('move_s'):.1f} s",
        ],
    ]
    return table(["run", "ms a step", ""], rows)


if __name__ == "__main__":
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--config", default="dim256", help="preset of the trainer; default %(default)s")
    parser.add_argument("--layers", type=at_least_one, default=8, help="default %(default)s")
    parser.add_argument(
        "--every", type=at_least_one, default=10, help="steps of a check; default %(default)s"
    )
    parser.add_argument("--axis", choices=["pp", "dp"], default="pp", help="default %(default)s")
    args = parser.parse_args()
    units = "layers" if args.axis == "pp" else "micro-batches"
    with started({args.axis: 2, "tp": -1}) as runtime, tempfile.TemporaryDirectory() as temporary:
        folder = Path(on_rank_0(runtime.world, "Making a folder", lambda: temporary, str))
        steps = (WINDOWS + 1) * args.every
        options = {
            "model.num_hidden_layers": args.layers, "train.steps": steps, "train.slow_every": args.every,
            "train.micro_batch_size": 1, "train.batch_size": 4 if args.axis == "pp" else 12,
            "train.seq_len": 128, "train.val_every": 0, "train.val_sequences": 4, f"parallel.{args.axis}": 2,
        }  # fmt: skip
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        config, _ = read(["--config", args.config, *flags])
        report = Report(args, HOW.format(rounds=args.rounds, steps=steps, every=args.every, units=units))
        found = [round_of(config, runtime, folder / str(number)) for number in range(args.rounds)]
        report.add({"rounds": found}, show(found, units))
        report.write(args.json)
