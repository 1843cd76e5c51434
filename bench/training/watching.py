"""Measures what watching a run costs its steps, sink by sink.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.training.watching [--config dim256]

It includes wandb, offline, if that is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.common.measuring import Report, parser_of, started
from bench.common.tables import table
from bench.training.saving import trainer
from pyruntime.cli.train import read
from pyruntime.train.metrics import MetricsFile
from pyruntime.train.ranks import on_rank_0
from pyruntime.train.watching.peak import peak_of
from pyruntime.train.watching.sinks import open_sinks
from pyruntime.train.watching.watch import Watch

HOW = """\
Time that rank 0's thread, for which the others wait, spends on the record of a step: medians over {rounds}
steps, beside the time of a step. cpu: processor time, which other work disturbs less. "by axis": reading the
exposed time, which every rank does in every step. The work of a sink's own threads counts in the steps."""
WARM = 5


def measure(config: Any, runtime: Any, folder: Path, rounds: int) -> dict[str, Any]:
    began = time.perf_counter()
    peak = peak_of(config, runtime)
    peak_s = time.perf_counter() - began
    made = trainer(config, runtime, folder)
    flops = made.model.config.flops_per_token(config.train.seq_len)
    watch = Watch(config.train.steps, runtime.world.size(), flops, peak)
    spent: dict[str, list[tuple[float, float]]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin, cpu = time.perf_counter(), time.thread_time()
        result = work()
        spent.setdefault(name, []).append((time.perf_counter() - begin, time.thread_time() - cpu))
        return result

    with contextlib.ExitStack() as held:
        sinks: list[Any] = []
        if runtime.rank == 0:
            sinks = [held.enter_context(MetricsFile(folder)), *open_sinks(config, folder, 0, held)]
        steps = made.fit()
        for _ in range(WARM + rounds):
            measured = timed("step", lambda: next(steps))
            timed("by axis", runtime.exposed_by_axis)
            record = timed("record", lambda measured=measured: watch.complete(measured, made.step))
            for sink in sinks:
                timed(type(sink).__name__, lambda sink=sink, record=record: sink.write(record))
        steps.close()
        made.close()
    return {"peak_s": peak_s, "spent_s": {name: seconds[WARM:] for name, seconds in spent.items()}}


def show(found: dict[str, Any]) -> str:
    medians = {
        name: [statistics.median(column) for column in zip(*seconds, strict=True)]
        for name, seconds in found["spent_s"].items()
    }
    step, step_cpu = medians.pop("step")
    medians["all"] = [sum(column) for column in zip(*medians.values(), strict=True)]
    rows = [
        [name, f"{1e6 * each:.0f}", f"{each / step:.2%}", f"{1e6 * cpu:.0f}", f"{cpu / step_cpu:.2%}"]
        for name, (each, cpu) in medians.items()
    ]
    head = ["", "us", f"of {1e3 * step:.0f} ms", "cpu us", f"of {1e3 * step_cpu:.0f} ms"]
    return f"{table(head, rows)}\n\nmeasuring the peak, once: {1e3 * found['peak_s']:.0f} ms"


if __name__ == "__main__":
    parser = parser_of(__doc__, rounds=60)
    parser.add_argument("--config", default="dim256", help="preset of the trainer; default %(default)s")
    args = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    with started({"tp": -1}) as runtime, tempfile.TemporaryDirectory() as temporary:
        folder = Path(on_rank_0(runtime.world, "Making a folder", lambda: temporary, str))
        config, _ = read(["--config", args.config, "--train.steps", "1000000", "--train.val_every", "0"])
        wandb = "bench" if find_spec("wandb") else ""
        output = dataclasses.replace(config.output, tensorboard=True, wandb=wandb)
        report = Report(args, HOW.format(rounds=args.rounds))
        found = measure(dataclasses.replace(config, output=output), runtime, folder, args.rounds)
        report.add(found, show(found))
        report.write(args.json)
