"""Measures a step of two tensor-parallel ranks, one of which has half a core: cut equally, and by speed.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.training.slow_tp [--layers 4]

A cgroup with a quota of half a core slows rank 1, so this needs root and the cpu controller, of cgroups 1 or
2. Other programs on the machine hide the quota: use a quiet one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common.measuring import Report, at_least_one, parser_of, started
from bench.common.tables import table
from bench.training.slow import SLOW_RANK, Timed, trained
from pyruntime.cli.train import read
from pyruntime.comm.exchange import gather
from pyruntime.train.config import Checkpoint, Output
from pyruntime.train.ranks import on_rank_0

SPEEDS = (1.0, 0.5)
PERIOD_US = 10_000
HOW = """\
Milliseconds of a step on rank 0, without each run's first step; medians over {rounds} rounds of three runs of
{steps} steps. Slow: rank 1 has half a core, {period} ms in every {twice}. The ideal is what equal ranks take,
times the ranks over the sum of the speeds, 4/3. CPU: seconds of a core that the ranks spent in a step, which
other programs change least; waiting counts where it spins. By CPU s: the larger of rank 0's and twice rank
1's, as a share of the ideal that equal ranks' CPU seconds give."""


class Quota:
    """A cgroup of this process with half a core."""

    def __init__(self) -> None:
        self._name = f"pyruntime-slow-{os.getpid()}"
        legacy = Path("/sys/fs/cgroup/cpu")
        self._is_legacy = legacy.is_dir()
        self._root = legacy if self._is_legacy else Path("/sys/fs/cgroup")

    @contextlib.contextmanager
    def half_a_core(self) -> Iterator[None]:
        """Within this context the process has half a core."""
        line = next(
            line
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if ("cpu" in line.split(":")[1].split(",") if self._is_legacy else line.startswith("0::"))
        )
        home = self._root / line.split(":")[2].lstrip("/")
        folder = self._root / self._name
        try:
            folder.mkdir()
            if self._is_legacy:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(PERIOD_US // 2))
            else:
                (folder / "cpu.max").write_text(f"{PERIOD_US // 2} {PERIOD_US}")
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise SystemExit(
                f"{folder} gives no quota: {error}. Start it as root, with the cpu controller."
            ) from error
        try:
            yield
        finally:
            (home / "cgroup.procs").write_text(str(os.getpid()))
            folder.rmdir()


class Counted(Timed):
    """A trainer that also records its processor seconds at the end of each step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.spent: list[float] = []

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        for step in super().fit(*args, **kwargs):
            self.spent.append(time.process_time())
            yield step


def measured(
    config: Any, runtime: Any, folder: Path, speeds: tuple[float, ...], slow: bool
) -> dict[str, Any]:
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, tp_speeds=speeds),
        checkpoint=Checkpoint(),
        output=Output(run_dir=str(folder), progress="off", sample_tokens=0),
    )
    with Quota().half_a_core() if slow and runtime.rank == SLOW_RANK else contextlib.nullcontext():
        (made,) = trained(config, runtime, Counted)
    seconds = [after - before for before, after in zip(made.ends, made.ends[1:], strict=False)]
    cpu = [after - before for before, after in zip(made.spent, made.spent[1:], strict=False)]
    every = gather(
        runtime.world, "Comparing", [statistics.median(seconds), statistics.median(cpu)], list[float]
    )
    return {
        "step_ms": 1e3 * every[0][0],
        "cpu_s": [of_rank[1] for of_rank in every],
        "cut": str(made._run.cuts),
    }


def show(found: list[dict[str, Any]]) -> str:
    def row(name: str, words: str) -> list[str]:
        cpu = [statistics.median(each[name]["cpu_s"][rank] for each in found) for rank in (0, 1)]
        shown = [words, f"{of_name(name):.0f}", f"{cpu[0]:.2f}, {cpu[1]:.2f}"]
        if name == "equal":
            return [*shown, "", ""]
        least = statistics.median(
            _least(each[name]["cpu_s"]) / _ideal(each["equal"]["cpu_s"]) for each in found
        )
        return [*shown, f"{of_name(name) / _ideal([of_name('equal')] * 2):.2f}", f"{least:.2f}"]

    def of_name(name: str) -> float:
        return statistics.median(each[name]["step_ms"] for each in found)

    rows = [
        row("equal", "equal ranks"),
        row("slow", "rank 1 slow, equal parts"),
        row("by_speed", f"rank 1 slow, {found[0]['by_speed']['cut']}"),
    ]
    heads = ["run", "ms a step", "CPU s of ranks 0, 1", "of the ideal", "by CPU s"]
    return table(heads, rows)


def _ideal(equal: list[float]) -> float:
    """Returns the least that a step can take, from what equal ranks take."""
    return sum(equal) / sum(SPEEDS)


def _least(cpu: list[float]) -> float:
    """Returns the least that a step takes if the ranks need these seconds of a whole core."""
    return max(seconds / speed for seconds, speed in zip(cpu, SPEEDS, strict=True))


if __name__ == "__main__":
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--config", default="dim1024", help="preset of the trainer; default %(default)s")
    parser.add_argument("--layers", type=at_least_one, default=4, help="default %(default)s")
    parser.add_argument("--steps", type=at_least_one, default=6, help="of a run; default %(default)s")
    args = parser.parse_args()
    with started({"tp": 2}) as runtime, tempfile.TemporaryDirectory() as temporary:
        folder = Path(on_rank_0(runtime.world, "Making a folder", lambda: temporary, str))
        options = {
            "model.num_hidden_layers": args.layers, "train.steps": args.steps, "train.batch_size": 1,
            "train.micro_batch_size": 1, "train.dtype": "fp32", "train.slow_every": 0, "parallel.tp": 2,
            "train.val_sequences": 1,
        }  # fmt: skip
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        config, _ = read(["--config", args.config, *flags])
        report = Report(
            args,
            HOW.format(
                rounds=args.rounds, steps=args.steps, period=PERIOD_US // 2000, twice=PERIOD_US // 1000
            ),
        )
        cases = {"equal": ((), False), "slow": ((), True), "by_speed": (SPEEDS, True)}
        found = [
            {
                name: measured(config, runtime, folder / f"{number}-{name}", *case)
                for name, case in cases.items()
            }
            for number in range(args.rounds)
        ]
        report.add({"rounds": found}, show(found))
        report.write(args.json)
