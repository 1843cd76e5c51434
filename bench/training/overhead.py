"""Measures what a step of the trainer costs beyond a bare loop of forward, backward and optimizer.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.training.overhead [--config dim1024]

Both train the same model, from the same weights, on the same tokens, over the same ranks.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common.measuring import Report, at_least_one, parser_of, started
from bench.common.tables import table
from bench.training.saving import trainer
from pyruntime.cli.train import read
from pyruntime.comm.exchange import barrier
from pyruntime.data_parallel import shard
from pyruntime.train.config import RunConfig, learning_rate
from pyruntime.train.data.batches import Batch
from pyruntime.train.metrics import MetricsFile
from pyruntime.train.model_of_run import make_model
from pyruntime.train.progress import Progress
from pyruntime.train.ranks import on_rank_0
from pyruntime.train.resolved import check
from pyruntime.train.watching.watch import Watch

HOW = """\
Milliseconds a step on rank 0: medians over {rounds} rounds of {every} steps each, in shuffled order, after a
barrier. bare: forward and backward of every micro-batch, clipping by the norm over all ranks, AdamW, on
tokens in memory. trainer: the same, and reading tokens, learning rate, exchange of figures, policies,
signals, the record of a step, metrics.jsonl and the line on the terminal. Pays: the median of the ratios
within a round. cpu: the same for the rank's processor time, which other work disturbs less.
bench.training.slow measures the check for slow ranks, in one of 20 steps."""


def bare(config: RunConfig, runtime: Any) -> Callable[[Batch, int], float]:
    """Returns a function that takes the step of a given number, and does nothing else."""
    run = check(config, runtime.world.size())
    model = make_model(run, runtime)
    handle, settings = shard(model, runtime.replicas, stage=config.parallel.zero), config.optimizer
    optimizer = handle.adamw(
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_norm=settings.clip_grad_norm,
    )
    share = 1.0 / run.micro_batches

    def step(batch: Batch, number: int) -> float:
        optimizer.lr = learning_rate(number, config.train.steps, settings)
        total, parts = 0.0, batch.split(config.train.micro_batch_size)
        for each in parts:
            loss = model(each.ids, each.labels, each.documents) * share
            if each is not parts[-1]:
                with handle.accumulate():
                    loss.backward()
            else:
                loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def measure(config: RunConfig, runtime: Any, folder: Path, every: int, rounds: int) -> dict[str, Any]:
    made, dice = trainer(config, runtime, folder), random.Random(0)
    alone, is_rank_0 = bare(config, runtime), runtime.rank == 0
    size = config.train.batch_size
    flops = made.model.config.flops_per_token(config.train.seq_len)
    watch = Watch(config.train.steps, runtime.world.size(), flops, None)
    progress = Progress(config.train.steps, "lines" if is_rank_0 else "off", every)
    losses: dict[str, list[float]] = {"trainer": [], "bare": []}
    steps, taken = made.fit(), 0

    def block_of(name: str, file: MetricsFile | None) -> tuple[float, float]:
        nonlocal taken
        mine = [made._batches.read((taken + number) * size) for number in range(every)]
        barrier(runtime.world, "Measuring")
        begin, cpu = time.perf_counter(), time.process_time()
        for number in range(every):
            if name == "bare":
                losses[name].append(alone(mine[number], taken + number + 1))
                continue
            record = watch.complete(next(steps), made.step)
            losses[name].append(record.loss)
            if file is not None:
                file.write(record)
                progress.show(record)
        return (time.perf_counter() - begin) / every, (time.process_time() - cpu) / every

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in losses}
    with tempfile.TemporaryDirectory() as kept, MetricsFile(Path(kept)) as written:
        file = written if is_rank_0 else None
        for number in range(1 + rounds):  # the first allocates memory
            for name in dice.sample(sorted(found), 2):
                found[name].append(block_of(name, file))
            taken = (1 + number) * every
    steps.close()
    made.close()
    ratios = [
        [one / other for one, other in zip(*pair, strict=True)]
        for pair in zip(found["trainer"][1:], found["bare"][1:], strict=True)
    ]
    pays, pays_cpu = (statistics.median(column) - 1.0 for column in zip(*ratios, strict=True))
    return {
        "every": every,
        "trainer_s": [seconds for seconds, _ in found["trainer"][1:]],
        "bare_s": [seconds for seconds, _ in found["bare"][1:]],
        "ratios": [ratio for ratio, _ in ratios],
        "largest_difference_of_losses": max(map(_distance, losses["trainer"], losses["bare"])),
        "pays": pays,
        "pays_cpu": pays_cpu,
    }


def _distance(one: float, other: float) -> float:
    return abs(one - other)


def show(found: dict[str, Any]) -> str:
    quarters = statistics.quantiles(found["ratios"], n=4) if len(found["ratios"]) > 1 else [0.0] * 3
    row = [
        f"{1e3 * statistics.median(found['bare_s']):.1f}",
        f"{1e3 * statistics.median(found['trainer_s']):.1f}",
        f"{100 * found['pays']:+.2f} % ({100 * (quarters[0] - 1):+.2f} to {100 * (quarters[2] - 1):+.2f})",
        f"{100 * found['pays_cpu']:+.2f} %",
        f"{found['largest_difference_of_losses']:.1e}",
    ]
    return table(["bare ms", "trainer ms", "pays (quartiles)", "cpu", "losses differ by"], [row])


if __name__ == "__main__":
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--config", default="dim1024", help="preset of the trainer; default %(default)s")
    parser.add_argument("--every", type=at_least_one, default=2, help="steps a turn; default %(default)s")
    args = parser.parse_args()
    with started({"tp": -1}) as runtime, tempfile.TemporaryDirectory() as temporary:
        folder = Path(on_rank_0(runtime.world, "Making a folder", lambda: temporary, str))
        config, _ = read(["--config", args.config, "--train.steps", "1000000", "--train.val_every", "0"])
        output = dataclasses.replace(config.output, log_every=args.every)
        report = Report(args, HOW.format(rounds=args.rounds, every=args.every))
        found = measure(dataclasses.replace(config, output=output), runtime, folder, args.every, args.rounds)
        report.add(found, show(found))
        report.write(args.json)
