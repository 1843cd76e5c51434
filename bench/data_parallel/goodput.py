"""Measures the goodput of replicas that are killed again and again: processes of one host, joined by
`python -m pyruntime members`.

    python -m bench.data_parallel.goodput [--replicas 4] [--steps 6000] [--tau 20] [--every 60] [--seeds 3]
        [--config tiny] [--method diloco] [--json FILE]

First come --seeds undisturbed runs with different seeds. Then, in a run with the first seed, kill -9 ends a
random replica every --every seconds, or later while one is still restarting. The killed replica is restarted
at once, as its launcher would.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common.measuring import at_least_one, parser_of, report_each
from bench.common.tables import table

LIMIT_S = 3600.0
"""Time limit of one run."""
PR_SET_PDEATHSIG = 1

HOW = """\
Blocks: one replica's sequences of a round, counted if its displacement was averaged, from the beginning of
the first round to the end of the last. Goodput: blocks per second and replica of the disturbed run, divided
by those of the undisturbed one; a replica counts from joining the service until it is lost. Of all time: its
missing seconds count too. All replicas share this machine's cores: a missing one leaves its share to the
others, and takes more while it starts. Loss: validation loss after the last step."""


class Replicas:
    """The service and its replicas, in `folder`."""

    def __init__(self, args: argparse.Namespace, seed: int, folder: Path):
        self._args, self._seed, self._folder = args, seed, folder
        self.record = folder / "record"
        self._service = self._start(
            "members",
            "--replicas",
            args.replicas,
            "--port",
            0,
            "--record",
            self.record,
            stdout=subprocess.PIPE,
        )
        assert self._service.stdout is not None
        line = self._service.stdout.readline()
        found = re.search(r"on port (\d+)$", line.strip())
        if found is None:
            sys.exit(f"the service did not start: {line}")
        self._address = f"127.0.0.1:{found[1]}"
        self.running = [self._replica(number) for number in range(args.replicas)]

    def _start(self, *arguments: object, **options: Any) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "pyruntime", *map(str, arguments)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_us,
            **options,
        )

    def run_dir(self, number: int) -> Path:
        return self._folder / f"replica-{number}"

    def _replica(self, number: int) -> subprocess.Popen:
        args = self._args
        settings = {
            "config": args.config,
            "data_parallel.method": args.method,
            "data_parallel.tau": args.tau,
            "data_parallel.members": self._address,
            "train.steps": args.steps,
            "train.seed": self._seed,
            "train.val_every": 0,
            "train.val_sequences": 64,
            "output.run_dir": self.run_dir(number),
            "output.sample_tokens": 0,
            "output.progress": "off",
        }
        flags = [text for name, value in settings.items() for text in (f"--{name}", value)]
        with open(self._folder / f"log-{number}", "a") as log:
            return self._start("train", *flags, stdout=log, stderr=log)

    def events(self) -> list[dict[str, Any]]:
        text = self.record.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def kill(self, number: int) -> None:
        """Kills a replica and starts it again."""
        os.killpg(self.running[number].pid, signal.SIGKILL)
        self.running[number].wait()
        self.running[number] = self._replica(number)

    def check(self) -> bool:
        """Whether all replicas have ended. Exits if one failed before the run was over; one that starts
        after the end finds no service, which is no failure."""
        for number, process in enumerate(self.running):
            if process.poll() and not self.is_over():
                log = (self._folder / f"log-{number}").read_text()
                self.close()
                sys.exit(f"{log}\nreplica {number} ended with {process.returncode}; see above.")
        return all(process.poll() is not None for process in self.running)

    def are_all_there(self) -> bool:
        counts = collections.Counter(event["event"] for event in self.events())
        return counts["come"] - counts["lost"] == self._args.replicas

    def is_over(self) -> bool:
        """Whether the last round has been committed."""
        rounds = sum(event["event"] == "round" for event in self.events())
        return rounds == self._args.steps // self._args.tau

    def loss(self) -> float:
        """Returns the last validation loss of a replica that took the last step; all have the same model."""
        for number in range(self._args.replicas):
            path = self.run_dir(number) / "metrics.jsonl"
            for line in path.read_text().splitlines()[-1:] if path.exists() else []:
                if (loss := json.loads(line).get("val_loss")) is not None:
                    return loss
        sys.exit("no replica took the last step.")

    def close(self) -> None:
        for process in (*self.running, self._service):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_with_us() -> None:
    """Makes child processes end when this program is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(args: argparse.Namespace, seed: int, every_s: float | None) -> dict[str, Any]:
    """Runs one job from its first round to its last, with a kill every `every_s` seconds (None: no kills)."""
    folder = Path(tempfile.mkdtemp(prefix="goodput-"))
    replicas = Replicas(args, seed, folder)
    draw, kills, began = random.Random(seed), 0, time.monotonic()
    next_kill: float | None = None
    try:
        while not replicas.check():
            time.sleep(0.05)
            now = time.monotonic()
            if now - began > LIMIT_S:
                sys.exit(f"a run did not end within {LIMIT_S:.0f} s.")
            if every_s is None:
                continue
            if next_kill is None:
                if any(event["event"] == "start" for event in replicas.events()):
                    next_kill = now + every_s
            elif now >= next_kill and replicas.are_all_there() and not replicas.is_over():
                replicas.kill(draw.randrange(args.replicas))
                kills, next_kill = kills + 1, now + every_s
        return figures(replicas.events()) | {"kills": kills, "loss": replicas.loss()}
    finally:
        replicas.close()
        shutil.rmtree(folder, ignore_errors=True)


def figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the seconds, replica-seconds, rounds and counted blocks of a record."""
    begin = next(event["time"] for event in events if event["event"] == "start")
    rounds = [event for event in events if event["event"] == "round"]
    end = rounds[-1]["time"]
    blocks = [block for event in rounds for block in event["blocks"].values()]
    if len(set(blocks)) < len(blocks):
        sys.exit("a block counted twice.")
    return {
        "seconds": end - begin,
        "replica_seconds": sum(there(events, begin, end)),
        "rounds": len(rounds),
        "blocks": len(blocks),
    }


def there(events: list[dict[str, Any]], begin: float, end: float) -> Iterator[float]:
    """Yields the seconds between two events times the number of joined replicas."""
    count, before = 0, begin
    for event in events:
        now = min(max(event["time"], begin), end)
        yield count * (now - before)
        count, before = count + {"come": 1, "lost": -1}.get(event["event"], 0), now
    yield count * (end - before)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    calm = [run(args, seed, None) for seed in range(args.seeds)]
    killed = run(args, 0, args.every)
    rates = [each["blocks"] / each["replica_seconds"] for each in calm]
    rate = sum(rates) / len(rates)
    of_all = sum(each["blocks"] / each["seconds"] for each in calm) / len(calm)
    losses = [each["loss"] for each in calm]
    return {
        "undisturbed": calm,
        "disturbed": killed,
        "kills": killed["kills"],
        "rounds": killed["rounds"],
        "goodput": killed["blocks"] / killed["replica_seconds"] / rate,
        "goodput_all_time": killed["blocks"] / killed["seconds"] / of_all,
        "loss": killed["loss"],
        "losses": losses,
    }


def show(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{one['seconds']:.0f}",
            f"{one['replica_seconds']:.0f}",
            str(one["blocks"]),
            f"{one['loss']:.4f}",
        ]
        for name, one in (
            *((f"undisturbed, seed {seed}", each) for seed, each in enumerate(result["undisturbed"])),
            (f"killed {result['kills']} times, seed 0", result["disturbed"]),
        )
    ]
    return (
        f"{table(['', 'seconds', 'replica-seconds', 'blocks', 'loss'], rows)}\n"
        f"goodput {result['goodput']:.3f}, of all time {result['goodput_all_time']:.3f}"
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the figures to this file")
    add("--replicas", type=at_least_one, default=4, help="default %(default)s")
    add("--steps", type=at_least_one, default=6000, help="steps of a replica; default %(default)s")
    add("--tau", type=at_least_one, default=20, help="default %(default)s")
    add("--every", type=float, default=60.0, help="seconds between two kills; default %(default)s")
    add("--seeds", type=at_least_one, default=3, help="undisturbed runs; default %(default)s")
    add("--config", default="tiny", help="preset of the trainer; default %(default)s")
    add(
        "--method", choices=("diloco", "local_sgd", "slowmo", "co2", "overlapped_local_sgd"), default="diloco"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    report_each(args, HOW, (measure(args) for _ in range(1)), show)


if __name__ == "__main__":
    main()
