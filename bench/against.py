"""Compares this tree with another one: training steps, the MLP, importing and the first step, in turns.

    python -m bench.against FOLDER [--cases tp-dim256 mlp-512 ...] [--rounds 9] [--json FILE]

FOLDER is a checkout of the project, built in place (`make build`), whose benches have the functions that
`serve` calls. For each case this process (not torchrun) starts two ranks of each tree. The trees then train
in turns; the other one sleeps.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THIS = Path(__file__).resolve().parents[1]
RANKS = 2
DIMS = ("dim256", "dim1024")
TRAINED: dict[str, list[str]] = {
    "tp": ["--parallel.tp", "2"],
    "zero1": ["--parallel.dp", "2", "--parallel.tp", "1", "--parallel.zero", "1"],
    "zero3": ["--parallel.dp", "2", "--parallel.tp", "1", "--parallel.zero", "3"],
    "cp": ["--parallel.cp", "2", "--parallel.tp", "1"],
    "zbv": ["--parallel.pp", "2", "--parallel.tp", "1", "--pipeline.kind", "zb-v"],
}
"""Axes of two ranks, as flags of the trainer."""
SHORT = {"dim256": 4, "dim1024": 1}
"""Steps of a turn, by preset."""
STARTED: dict[str, list[str]] = {
    "import": ["-c", "import pyruntime"],
    "import-torch": ["-c", "import torch"],
    "first-step": [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pyruntime", "train"),
        *("--config", "main", "--train.steps", "1", "--train.val_every", "0", "--output.run_dir", "{run}"),
    ],
}
"""Programs that are run whole; "import-torch" is torch's part of "import"."""
CASES = [
    *("mlp-512", "mlp-2048"),
    *(f"{name}-{dim}" for name in TRAINED for dim in DIMS),
    *STARTED,
]
HOW = """\
Seconds of a turn on the slowest rank: medians over {rounds} rounds, in each of which both trees have a turn,
in shuffled order. this/other: the median of the ratios within a round and their quartiles. cpu: the same for
processor time, summed over ranks, which other work disturbs less. Above 1 this tree is slower."""


def turn_of(case: str, folder: Path) -> tuple[Callable[[], object], Any]:
    """Returns a rank's work in a turn and its runtime, from the tree that is on the path."""
    from pyruntime import Runtime

    kind, size = case.split("-")
    if kind == "mlp":
        import torch

        from bench.linear.contenders import Ours
        from bench.linear.problem import Case, Operands

        runtime = Runtime.start(tp=RANKS)
        wanted = Case.parse(f"mlp:{size}x2048x5632", torch.bfloat16)
        ours = Ours(wanted, Operands.random(wanted, seed=0), runtime.mesh["tp"], "auto")
        return ours.forward_backward, runtime
    from bench.training.saving import trainer
    from pyruntime.cli.train import read

    config, _ = read(["--config", size, *TRAINED[kind], "--train.steps", "1000000"])
    sizes = {axis: getattr(config.parallel, axis) for axis in ("dp", "cp", "pp", "tp")}
    runtime = Runtime.start(**{axis: size for axis, size in sizes.items() if size > 1})
    steps = trainer(config, runtime, folder).fit()

    def turn() -> None:
        for _ in range(SHORT[size]):
            next(steps)

    return turn, runtime


def serve(case: str, folder: Path) -> None:
    """Runs a rank: takes a turn for each line that it reads, and writes a line with the seconds."""
    import torch

    import pyruntime

    torch.set_num_threads(1)
    pyruntime.keep_freed_memory()
    turn, runtime = turn_of(case, folder)
    from bench.common.measuring import start_together

    with runtime:
        for _ in sys.stdin:
            begin, cpu = start_together(), time.process_time()
            turn()
            print(f"took {time.perf_counter() - begin} {time.process_time() - cpu}", flush=True)


class Tree:
    """The ranks of one tree, which sleep between their turns."""

    def __init__(self, root: Path, case: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": f"{RANKS}", "LOCAL_WORLD_SIZE": f"{RANKS}"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--serve", case, str(folder)]
        self.root = root
        self._ranks = [
            subprocess.Popen(
                command,
                cwd=root,
                env=environment(root, RANK=f"{rank}", LOCAL_RANK=f"{rank}", **shared),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def turn(self) -> tuple[float, float]:
        """Returns the slowest rank's seconds and the processor seconds of all ranks."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("turn\n")
            rank.stdin.flush()
        found = [self._answer(rank) for rank in self._ranks]
        return max(seconds for seconds, _ in found), sum(cpu for _, cpu in found)

    def _answer(self, rank: subprocess.Popen[str]) -> tuple[float, float]:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("took "):
                _, seconds, cpu = line.split()
                return float(seconds), float(cpu)
        raise SystemExit(f"A rank of {self.root} ended with {rank.wait()}; see above.")

    def close(self) -> None:
        for rank in self._ranks:
            rank.terminate()
        for rank in self._ranks:
            rank.communicate()


def environment(root: Path, **names: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), **names}


class Started:
    """A program of one tree that each turn runs from start to end."""

    def __init__(self, root: Path, case: str, folder: Path) -> None:
        self._root, self._case, self._folder, self._turns = root, case, folder, 0

    def turn(self) -> tuple[float, float]:
        self._turns += 1
        run = self._folder / f"run-{self._turns}"
        command = [sys.executable, *(part.format(run=run) for part in STARTED[self._case])]
        begin, before = time.perf_counter(), os.times()
        done = subprocess.run(command, cwd=self._root, env=environment(self._root), capture_output=True)
        after = os.times()
        if done.returncode:
            raise SystemExit(f"{done.stderr.decode()}\nIn {self._root}; see above.")
        cpu = (after.children_user - before.children_user) + (after.children_system - before.children_system)
        return time.perf_counter() - begin, cpu

    def close(self) -> None:
        """Does nothing: nothing runs between turns."""


def measure(case: str, other: Path, rounds: int) -> dict[str, Any]:
    kind = Started if case in STARTED else Tree
    seconds: dict[str, list[float]] = {"this": [], "other": []}
    cpu: dict[str, list[float]] = {"this": [], "other": []}
    with tempfile.TemporaryDirectory() as folder:
        trees = {
            name: kind(root, case, Path(folder, name)) for name, root in (("this", THIS), ("other", other))
        }
        try:
            for round_ in range(-2, rounds):  # two to allocate memory and settle tiers
                for name in random.Random(f"{case} {round_}").sample(sorted(trees), 2):
                    took = trees[name].turn()
                    if round_ >= 0:
                        seconds[name].append(took[0])
                        cpu[name].append(took[1])
        finally:
            for tree in trees.values():
                tree.close()
    return {"case": case, **{f"{name}_s": seconds[name] for name in seconds}} | {
        f"{name}_cpu_s": cpu[name] for name in cpu
    }


def row(found: dict[str, Any]) -> list[str]:
    from bench.common.measuring import Sample

    this, other = Sample(tuple(found["this_s"])), Sample(tuple(found["other_s"]))
    ratio = this.over(other)
    of_cpu = Sample(tuple(found["this_cpu_s"])).over(Sample(tuple(found["other_cpu_s"])))
    return [
        found["case"],
        f"{1e3 * other.median:.1f}",
        f"{1e3 * this.median:.1f}",
        f"{ratio.median:.3f} +- {ratio.spread * ratio.median:.3f}",
        f"{of_cpu.median:.3f} +- {of_cpu.spread * of_cpu.median:.3f}",
    ]


def main() -> None:
    from bench.common.measuring import Report, parser_of
    from bench.common.tables import table

    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("other", metavar="FOLDER", type=Path, help="the other tree, built in place")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default: all")
    args = parser.parse_args()
    if not list(Path(args.other, "pyruntime").glob("_C.*.so")):
        parser.error(f"{args.other} is not a built checkout; run `make build` in it.")
    report = Report(args, HOW.format(rounds=args.rounds))
    rows = []
    for case in args.cases:
        found = measure(case, args.other.resolve(), args.rounds)
        rows.append(row(found))
        report.add(found, table(["case", "other ms", "this ms", "this/other", "cpu"], rows[-1:]))
    args.other = str(args.other)
    report.write(args.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
