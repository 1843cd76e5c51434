"""Measures the bytes that a rank receives in a step with each wire format.

    python -m bench.data_parallel.wire [--json FILE] [--steps 12]

It runs the trainer on a preset's model and the standard library's sources, two ranks of one host, one run a
line.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common.launch import ROOT, on_one_host
from bench.common.measuring import at_least_one, parser_of, report_each
from bench.common.tables import table
from pyruntime.train.metrics import FILE_NAME, read

HOW = """\
dim256 in bf16, {steps} steps of two ranks of one host. Bytes: those that the rank which read most received in
a step, as the transport counts them, median over the second half of the steps. Validation loss after the last
step: one run each, so it differs by as much as a seed changes it."""
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name} {wire}": (counted, settings | {key: wire})
    for name, counted, key, settings in (
        ("zero 3, weights", "dp_bytes", "data_parallel.weight_wire", {"parallel.dp": 2, "parallel.zero": 3}),
        ("tp 2, rows", "tp_bytes", "parallel.tp_wire", {"parallel.tp": 2}),
        ("2 stages, activations", "pp_bytes", "pipeline.wire", {"parallel.pp": 2}),
        ("ring of 2, keys", "cp_bytes", "context.wire", {"parallel.cp": 2}),
    )
    for wire in ("same", "fp8")
}
"""By name: the counted metric, the option of the format, and other settings."""


def measure(name: str, steps: int) -> dict[str, Any]:
    counted, settings = LINES[name]
    with tempfile.TemporaryDirectory() as folder:
        options = settings | {"train.dtype": "bf16", "train.steps": steps, "output.run_dir": folder}
        arguments = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        done = subprocess.run(
            on_one_host("pyruntime", ["train", "--config", "dim256", *arguments]),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            sys.exit(f"{done.stdout}{done.stderr}\n{name} ended with {done.returncode}; see above.")
        found = read(Path(folder, FILE_NAME))
    taken = [step.get(counted, 0) for step in found]
    return {
        "name": name,
        "bytes": statistics.median(taken[steps // 2 :]),
        "val_loss": found[-1]["val_loss"],
    }


def lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.lines:
        yield measure(name, args.steps)


def show(line: dict[str, Any]) -> str:
    cells = [line["name"], f"{line['bytes'] / 1e6:.3f}", f"{line['val_loss']:.4f}"]
    return table(["", "MB", "val loss"], [cells])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--steps", type=at_least_one, default=12)
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    args = parser.parse_args()
    report_each(args, HOW.format(steps=args.steps), lines(args), show)


if __name__ == "__main__":
    main()
