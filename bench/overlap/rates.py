"""Measures exposed communication by link rate: a table of rate x axis x limit / loaded limit / ours / peers.

    python -m bench.overlap.rates [--axes mlp tp tp-slices ...] [--ratios 0.3 0.7 1 3] [--json FILE]
    python -m bench.overlap.rates --axes ring --hosts 4

mlp is the MLP of a Llama block, forward and backward. tp, cp, zero1 and zero3 are training steps of a Llama
of 4 layers of 1024, all of them clipped. tp-slices cuts sequences into two causal slices; zero1-free and
zero3-free clip no step; ring is attention over 8192 tokens. For each axis a first run measures how long a
rank computes (T_g) and how many bytes it sends. From these follows the link rate for each ratio T_c / T_g,
and the axis's benchmark runs on bench.netlab at that rate. Prints a table in Markdown.

Every round is written to the JSON file at once. Rows that the file has are not measured again: after an
interruption the same command continues; name another file to measure again.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.launch import between_hosts, run, shown, warning
from bench.common.measuring import parser_of
from bench.common.records import write_records
from bench.netlab.plan import FASTEST, SLOWEST

RESULT = "bench/results/overlap/rates.json"
FIRST_RATE = "1gbit"  # of the run that measures T_g and the bytes
LEAST_ROUNDS = 3
WIRE_BYTES = 1514 / 1448  # per byte that the interface counts: it sees packets, the link sends frames
PEERS = ("DDP", "FSDP2 zero 2", "FSDP2 zero 3", "DTensor")
HEAD = ["axis", "rate", "T_c / T_g", "alone", "loaded", "ours", "ours / loaded", "R", "waits", *PEERS]
DATA_PARALLEL = '--peers DDP "FSDP2 zero 2" "FSDP2 zero 3"'


@dataclass(frozen=True)
class Axis:
    module: str
    arguments: str
    tiny: str
    """Arguments of a run that only shows that everything works."""
    ours: str
    """The module's name of our contender."""
    peers: str = ""
    """Arguments that choose peers; without them it measures none, or always the same ones."""


AXES = {
    "mlp": Axis(
        "bench.linear.run",
        "--shapes mlp:1024x2048x5632 --dtype bf16 --seconds 0",
        "--shapes mlp:512x128x256 --dtype bf16 --seconds 0",
        "ours",
    ),
    **{
        f"tp{name}": Axis(
            "bench.training.hosts",
            f"--shapes dim1024{arguments}",
            f"--shapes tiny{arguments}",
            "pyruntime tp",
        )
        for name, arguments in {"": "", "-slices": " --slices 2"}.items()
    },
    "cp": Axis(
        "bench.context.run",
        "--seq --models dim1024-1k --dtypes bf16",
        "--seq --models tiny --dtypes bf16",
        "cp",
    ),
    **{
        f"zero{stage}{name}": Axis(
            "bench.data_parallel.run",
            f"--shapes dim1024 --dtypes bf16 --stages {stage} --steps 1{arguments}",
            f"--shapes tiny --dtypes bf16 --stages {stage} --steps 1{arguments}",
            f"pyruntime zero {stage}",
            DATA_PARALLEL,
        )
        for name, arguments in {"": "", "-free": " --clip 1e9"}.items()
        for stage in (1, 3)
    },
    "ring": Axis(
        "bench.context.run",
        '--seq 8192 --models --dtypes bf16 --lines "ring zigzag"',
        '--seq 512 --models --dtypes bf16 --lines "ring zigzag"',
        "ring zigzag",
    ),
}

Run = dict[str, Any]
"""The JSON that a benchmark wrote, with "command"."""


def limits_of(axis: str, found: Run) -> dict[str, Any]:
    """Returns the limits of our contender in the last result, which for linears is forward and backward."""
    return found["results"][-1]["limits"][AXES[axis].ours]


def rate_of(ratio: float, computing_s: float, nbytes: float) -> str:
    """Returns the rate at which `nbytes` of the interface take `ratio` times as long as computing.

    Raises ValueError if netlab has no such rate."""
    rate = 8 * nbytes * WIRE_BYTES / (ratio * computing_s)
    if not SLOWEST <= rate <= FASTEST:
        raise ValueError(
            f"T_c / T_g = {ratio:g} takes links of {rate / 1e6:.3g}mbit ({nbytes / 1e6:.3g} MB in "
            f"{computing_s * 1e3:.3g} ms); netlab has {SLOWEST / 1e6:g}mbit to {FASTEST / 1e9:g}gbit, so ask "
            "for another ratio."
        )
    return f"{rate / 1e6:.1f}mbit"


def rounds_of(ratio: float, rounds: int) -> int:
    """Returns the number of rounds, fewer if a turn takes longer."""
    return max(min(rounds, LEAST_ROUNDS), round(rounds / max(1.0, ratio)))


@dataclass
class Kept:
    """The JSON file: {"first": runs, "rows": runs}, every run with its axis, its hosts and its ratio."""

    path: Path
    runs: dict[str, list[Run]]

    @classmethod
    def read(cls, path: Path) -> Kept:
        runs = json.loads(path.read_text()) if path.exists() else {}
        return cls(path, {"first": [], "rows": [], **runs})

    def take(self, kind: str, of: Mapping[str, Any], command: Sequence[str]) -> Run:
        """Returns the stored JSON of the run `of`; measures it if there is none of this `command`."""
        kept = self.runs[kind]
        same = [each for each in kept if of.items() <= each.items()]
        for each in same:
            if each["command"] == shown(command):
                return each
        found = {**of, **run(command)}
        self.runs[kind] = [each for each in kept if each not in same] + [found]
        write_records(self.path, self.runs)
        return found


def measure(axis: str, ratios: Sequence[float], hosts: int, rounds: int, kept: Kept, *, tiny: bool) -> None:
    """Measures the rows of one axis that the file lacks. Raises ValueError for a ratio that no link gives."""
    what = AXES[axis]
    arguments = shlex.split(what.tiny if tiny else what.arguments)
    peers = shlex.split(what.peers)
    of: dict[str, Any] = {"axis": axis, "hosts": hosts}
    alone = [*arguments, *peers[:1], "--rounds", str(LEAST_ROUNDS)]
    first = limits_of(axis, kept.take("first", of, between_hosts(what.module, alone, FIRST_RATE, hosts)))
    for ratio in ratios:
        rate = rate_of(ratio, first["T_g"]["median"], first["T_c_bytes"])
        timed = [*arguments, *peers, "--rounds", str(rounds_of(ratio, rounds))]
        kept.take("rows", {**of, "ratio": ratio}, between_hosts(what.module, timed, rate, hosts))


def cells(row: Run) -> list[str]:
    """Returns a line of the table."""
    result = row["results"][-1]
    limits = limits_of(row["axis"], row)

    def ms(figure: Mapping[str, float] | None) -> str:
        return f"{figure['median'] * 1e3:.0f} ± {figure['spread']:.0%}" if figure else ""

    def ratio(figure: Mapping[str, float] | None) -> str:
        return f"{figure['median']:.2f} ± {figure['spread']:.0%}" if figure else ""

    comm = limits["T_c"]["median"] / limits["T_g"]["median"] if limits["T_c"] else 0.0
    rate = shlex.split(row["command"])
    return [
        row["axis"] if row["hosts"] == 2 else f"{row['axis']}, {row['hosts']} hosts",
        rate[rate.index("--rate") + 1],
        f"{comm:.2f}",
        *(ms(limits[name]) for name in ("T_g", "loaded", "ours")),
        ratio(limits["over_loaded"]),
        ratio(limits["R"]),
        f"{limits['waits']['median']:.1%}",
        *(ms(result["peers"].get(peer)) for peer in PEERS),
    ]


def table(rows: Sequence[Run]) -> str:
    """Returns a Markdown table in milliseconds, each figure with half its interquartile range."""
    order = list(AXES)
    ordered = sorted(rows, key=lambda row: (row["hosts"], order.index(row["axis"]), row["ratio"]))
    lines = [HEAD, ["---"] * len(HEAD), *map(cells, ordered)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + warning(ordered)


def arguments() -> argparse.Namespace:
    def positive(text: str) -> float:
        if not 0 < (ratio := float(text)) < float("inf"):
            raise ValueError(text)
        return ratio

    parser = parser_of(__doc__, rounds=4)
    steps = [axis for axis in AXES if axis != "ring"]
    parser.add_argument("--axes", nargs="+", choices=AXES, default=steps, help="default: all but ring")
    parser.add_argument(
        "--ratios", nargs="+", type=positive, default=[0.3, 0.7, 1.0, 3.0], help="default: 0.3 0.7 1 3"
    )
    parser.add_argument("--hosts", type=int, default=2, help="default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: shows that everything runs")
    parser.set_defaults(json=RESULT)
    args = parser.parse_args()
    if args.hosts < 2:
        parser.error(f"--hosts {args.hosts} have no link between them; use at least 2.")
    return args


def main() -> None:
    args = arguments()
    kept = Kept.read(Path(args.json))
    for axis in args.axes:
        try:
            measure(axis, args.ratios, args.hosts, args.rounds, kept, tiny=args.tiny)
        except ValueError as error:
            raise SystemExit(f"bench.overlap.rates: {axis}: {error}") from None
    print(table(kept.runs["rows"]))


if __name__ == "__main__":
    main()
