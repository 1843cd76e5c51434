"""Measures what saving a checkpoint costs the steps that run while it is written.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.training.saving [--config dim256] [--every 10]

Blocks of `--every` steps of one run take turns. Every other block begins with a checkpoint, as in the trainer
with --checkpoint.every_steps, and ends when it is on the disk.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common.measuring import Report, at_least_one, parser_of, started
from bench.common.tables import table
from pyruntime.cli.train import read
from pyruntime.comm.exchange import barrier
from pyruntime.train.config import Checkpoint
from pyruntime.train.data import corpus
from pyruntime.train.data.tokenizer import ByteTokenizer
from pyruntime.train.loop import Trainer
from pyruntime.train.model_of_run import make_model
from pyruntime.train.ranks import on_rank_0
from pyruntime.train.resolved import check
from pyruntime.train.signals import StopRequest

HOW = """\
Milliseconds of blocks of {every} steps on rank 0, which waits for the others in every step: medians over
{rounds} rounds of one block with a checkpoint and one without, in shuffled order. The block with a checkpoint
includes its copy, and a wait for the disk if {every} steps are too short. Pays: the median of the ratios
within a round. cpu: the same for the rank's processor time, which other work disturbs less. All cores are
busy with the steps, so hashing and writing slow them down."""


def trainer(config: Any, runtime: Any, folder: Path) -> Trainer:
    run = check(config, runtime.world.size())
    text = corpus.open_everywhere(config, ByteTokenizer(), runtime.world, lambda line: None)
    return Trainer(run, make_model(run, runtime), text, runtime, folder, StopRequest())


def measure(config: Any, runtime: Any, folder: Path, every: int, rounds: int) -> dict[str, Any]:
    made, dice = trainer(config, runtime, folder), random.Random(0)
    steps = made.fit()

    def block(saves: bool) -> tuple[float, float]:
        barrier(runtime.world, "Measuring")
        begin, cpu = time.perf_counter(), time.process_time()
        if saves:
            made._save(and_wait=False)
            copied.append(time.perf_counter() - begin)
        for _ in range(every):
            next(steps)
        if saves:
            at_end = time.perf_counter()
            made._saver.finish()
            waited.append(time.perf_counter() - at_end)
        return time.perf_counter() - begin, time.process_time() - cpu

    copied: list[float] = []
    waited: list[float] = []
    block(True)  # decides which rank writes what, and allocates memory
    block(False)
    copied.clear()
    waited.clear()
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(rounds):
        for saves in dice.sample((True, False), 2):
            found[saves].append(block(saves))
    files = list(folder.glob("checkpoints/*/*.safetensors"))
    steps.close()
    made.close()
    saved = sum(path.stat().st_size for path in files) / len({path.parent for path in files})
    ratios = [
        [on / off for on, off in zip(one, other, strict=True)]
        for one, other in zip(found[True], found[False], strict=True)
    ]
    pays, pays_cpu = (statistics.median(column) - 1.0 for column in zip(*ratios, strict=True))
    return {
        "parameters": sum(parameter.numel() for parameter in made.model.parameters()),
        "every": every,
        "checkpoint_bytes": saved,
        "with_s": [seconds for seconds, _ in found[True]],
        "without_s": [seconds for seconds, _ in found[False]],
        "with_cpu_s": [seconds for _, seconds in found[True]],
        "without_cpu_s": [seconds for _, seconds in found[False]],
        "copied_s": copied,
        "waited_s": waited,
        "pays": pays,
        "pays_cpu": pays_cpu,
    }


def show(found: dict[str, Any]) -> str:
    def median(name: str) -> str:
        return f"{1e3 * statistics.median(found[name]):.0f}"

    row = [
        f"{found['checkpoint_bytes'] / 1e6:.0f} MB, every {found['every']} steps",
        median("without_s"),
        median("with_s"),
        median("copied_s"),
        median("waited_s"),
        f"{100 * found['pays']:+.1f} %",
        f"{100 * found['pays_cpu']:+.1f} %",
    ]
    return table(["checkpoint", "without ms", "with ms", "copy ms", "wait ms", "pays", "cpu"], [row])


if __name__ == "__main__":
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--config", default="dim256", help="preset of the trainer; default %(default)s")
    parser.add_argument("--every", type=at_least_one, default=10, help="steps; default %(default)s")
    parser.add_argument("--folder", help="folder to save in; default: a temporary one")
    args = parser.parse_args()
    with started({"tp": -1}) as runtime, tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(on_rank_0(runtime.world, "Making a folder", lambda: temporary, str))
        config, _ = read(["--config", args.config, "--train.steps", "1000000", "--train.val_every", "0"])
        config = dataclasses.replace(config, checkpoint=Checkpoint(keep=1))
        report = Report(args, HOW.format(every=args.every, rounds=args.rounds))
        found = measure(config, runtime, folder, args.every, args.rounds)
        report.add(found, show(found))
        report.write(args.json)
