"""Bytes that a rank takes from others in a step, by what travels: as it is, rounded, or packed.

    python -m bench.data_parallel.wire [--json FILE] [--steps 12]

The trainer on a preset's model and the standard library's sources, two ranks of one host, one run a line.
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
dim256 in bf16, {steps} steps of two ranks of one host. Bytes: what the rank that read most took in a step, as
the transport counts it, the median over the steps of the second half; of replicas that meet every 4 steps
(co2), in the whole run. Validation loss after the last step: one run each, so it differs by as much as a seed
changes it."""
WIRES = ("same", "bf16", "fp8")
CO2 = {"parallel.dp": 2, "data_parallel.method": "co2", "data_parallel.tau": 4}
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"zero 3, weights {wire}": (
            "dp_bytes",
            {"parallel.dp": 2, "parallel.zero": 3, "data_parallel.weight_wire": wire},
        )
        for wire in WIRES
    },
    **{
        f"2 stages, activations {wire}": ("pp_bytes", {"parallel.pp": 2, "pipeline.wire": wire})
        for wire in WIRES
    },
    **{f"ring of 2, keys {wire}": ("cp_bytes", {"parallel.cp": 2, "context.wire": wire}) for wire in WIRES},
    "co2, displacements same": ("outer_bytes", CO2),
    "co2, displacements 8 bits": (
        "outer_bytes",
        CO2 | {"data_parallel.compression": "quantize", "data_parallel.compression_bits": 8},
    ),
    "co2, displacements 4 bits": ("outer_bytes", CO2 | {"data_parallel.compression": "quantize"}),
    "co2, displacements top 1 %": ("outer_bytes", CO2 | {"data_parallel.compression": "top_k"}),
}
"""By name what is counted, and the settings."""


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
    nbytes = sum(taken) if counted == "outer_bytes" else statistics.median(taken[steps // 2 :])
    return {"name": name, "bytes": nbytes, "val_loss": found[-1]["val_loss"]}


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
