"""Trains with compressed gradients and reports bytes, losses, and the savings of plans (L-GreCo).

    torchrun --nproc-per-node 2 -m bench.data_parallel.compression [--json FILE] [--steps 200]

It runs the trainer on a preset's model and the standard library's sources, once for each compression.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.common.measuring import at_least_one, parser_of, report_each, started
from bench.common.tables import table
from pyruntime.comm import Runtime
from pyruntime.data_parallel.compression.compressor import Compressor
from pyruntime.data_parallel.compression.units import Unit
from pyruntime.train import config_file
from pyruntime.train.config import DataParallel, RunConfig
from pyruntime.train.data import corpus
from pyruntime.train.data.tokenizer import open_tokenizer
from pyruntime.train.loop import Trainer
from pyruntime.train.model_of_run import make_model
from pyruntime.train.ranks import on_rank_0
from pyruntime.train.resolved import check
from pyruntime.train.signals import StopRequest

HOW = """\
{preset}, {steps} steps over {ranks} ranks at zero 0, where only gradients travel in the class dp.
Bytes: those that a rank received in a step, median of the second half. Of uniform: a plan's bytes divided by
those of one setting for all matrices, and the same for the measured errors (sums of squares of the lost
values), medians over plans; only matrices that are large enough count. Planning: measuring errors and the
dynamic program, as a share of the time of all steps. One run each: losses differ by as much as a seed changes
them."""

METHODS: dict[str, DataParallel] = {
    "none": DataParallel(),
    "quantize 8 bits": DataParallel(compression="quantize", compression_bits=8),
    "quantize 4 bits": DataParallel(compression="quantize"),
    "quantize 2 bits": DataParallel(compression="quantize", compression_bits=2),
    "quantize 1 bit": DataParallel(compression="quantize", compression_bits=1),
    "quantize 4 bits at random": DataParallel(compression="quantize", error_feedback=False),
    "top_k 1 %": DataParallel(compression="top_k"),
    "power_sgd rank 4": DataParallel(compression="power_sgd"),
}
PLANNED = ("quantize 4 bits", "top_k 1 %", "power_sgd rank 4")


class Plans:
    """Records the plans of a compressor and how long they take."""

    def __init__(self, compressor: Compressor):
        self._compressor = compressor
        self.seconds = 0.0
        self.of_uniform: list[tuple[float, float]] = []
        """(bytes, errors) of each plan, divided by those of one setting for all."""
        self._allocated = compressor._allocated
        compressor._errors = self._timed(compressor._errors)  # type: ignore[method-assign]
        compressor._plan_anew = self._timed(compressor._plan_anew)  # type: ignore[method-assign]
        compressor._allocated = self._watched  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        return run

    def _watched(self, units: Sequence[Unit], errors: Tensor) -> list[int]:
        made, numbers = self._compressor, self._allocated(units, errors)
        places = [made._candidates.index(number) for number in numbers]
        uniform = [made._candidates.index(made._uniform)] * len(units)
        sizes = [[made._nbytes(unit, number) for number in made._candidates] for unit in units]
        found = []
        for of in (sizes, errors.tolist()):
            planned, all_alike = (
                sum(row[c] for row, c in zip(of, chosen, strict=True)) for chosen in (places, uniform)
            )
            found.append(planned / all_alike)
        self.of_uniform.append((found[0], found[1]))
        return numbers


def lines(args: argparse.Namespace) -> Iterator[tuple[str, DataParallel]]:
    for name in args.methods:
        yield name, METHODS[name]
        if name in PLANNED:
            planned = dataclasses.replace(METHODS[name], compression_plan_every=args.plan_every)
            yield f"{name}, planned", planned


def measure(name: str, chosen: DataParallel, args: argparse.Namespace, runtime: Runtime) -> dict[str, Any]:
    """Runs one line and returns its figures."""
    config = config_file.load(config_file.find(args.preset))
    train = dataclasses.replace(config.train, steps=args.steps, dtype="bf16", micro_batch_size=2, val_every=0)
    parallel = dataclasses.replace(config.parallel, dp=runtime.sizes.dp, zero=0)
    config = dataclasses.replace(config, train=train, parallel=parallel, data_parallel=chosen)
    folder = on_rank_0(runtime.world, "Making a folder", lambda: Path(tempfile.mkdtemp()))
    try:
        return {"name": name, **run(config, runtime, folder)}
    finally:
        on_rank_0(runtime.world, "Removing the folder", lambda: shutil.rmtree(folder))


def run(config: RunConfig, runtime: Runtime, folder: Path) -> dict[str, Any]:
    tokenizer = open_tokenizer("bytes")
    resolved = check(config, runtime.world.size())
    text = corpus.open_everywhere(config, tokenizer, runtime.world, lambda _: None)
    model = make_model(resolved, runtime)
    trainer = Trainer(resolved, model, text, runtime, folder, StopRequest())
    compressor = trainer.sharded.compressor
    plans = None if compressor is None else Plans(compressor)
    steps = list(trainer.fit())
    trainer.close()
    half = steps[len(steps) // 2 :]
    found: dict[str, Any] = {
        "val_loss": steps[-1].val_loss,
        "train_loss": statistics.fmean(step.loss for step in half),
        "bytes": statistics.median(step.dp_bytes or 0 for step in half),
        "step_s": statistics.median(step.step_time_s for step in half),
        "losses": [step.loss for step in steps],
    }
    if plans is not None and plans.of_uniform:
        found["bytes_of_uniform"], found["error_of_uniform"] = (
            statistics.median(each) for each in zip(*plans.of_uniform, strict=True)
        )
        found["planning"] = plans.seconds / sum(step.step_time_s for step in steps)
        found["plan"] = compressor.plan if compressor is not None else {}
    return found


def show(line: dict[str, Any]) -> str:
    cells = [
        line["name"],
        f"{line['val_loss']:.4f}",
        f"{line['bytes'] / 1e6:.3f}",
        f"{line['step_s'] * 1e3:.0f}",
        f"{line['bytes_of_uniform']:.2f}" if "plan" in line else "",
        f"{line['error_of_uniform']:.3f}" if "plan" in line else "",
        f"{line['planning']:.2%}" if "plan" in line else "",
    ]
    head = ["", "val loss", "MB a step", "ms", "bytes of uniform", "error of uniform", "planning"]
    return table(head, [cells])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--preset", default="dim256", choices=config_file.preset_names())
    parser.add_argument("--steps", type=at_least_one, default=200)
    parser.add_argument("--plan-every", type=at_least_one, default=50, help="steps between two plans")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    with started({"dp": -1, "tp": 1}) as runtime:
        how = HOW.format(preset=args.preset, steps=args.steps, ranks=runtime.sizes.dp)
        each = (measure(name, chosen, args, runtime) for name, chosen in lines(args))
        report_each(args, how, each, show)


if __name__ == "__main__":
    main()
