"""Times finetuning steps on conversations beside TRL's SFTTrainer, with DDP and with FSDP2, on two ranks.

    torchrun --nproc-per-node 2 -m bench.training.finetune [--modes full lora] [--shapes dim256] [--json FILE]
    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- python -m bench.training.finetune ...

Needs `pip install trl`. The losses of the first step must agree: every contender learns the same rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common.measuring import Report, Sample, parser_of
from bench.common.plain_llama import Shape
from bench.common.tables import table
from bench.training.sft_workers import OURS, THEIRS, Task, Worker, write_task

SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 512, seq=64, micro_batch=2, accumulate=1),
    "dim256": Shape(256, 4, 8, 4, 768, 2048, seq=256, micro_batch=2, accumulate=2),
    "dim1024": Shape(1024, 4, 16, 8, 2816, 8192, seq=512, micro_batch=1, accumulate=2),
}
TOLERANCE = 0.02
"""Nats by which losses of the first step may differ, in bf16."""

HOW = """\
Targets per second of finetuning. Conversations are packed to rows once; in each step all contenders
learn the same rows, those of pyruntime's data, tokens of a conversation attending to it alone. pyruntime is
its trainer; TRL is SFTTrainer, with position ids for the documents and PyTorch's attention. In full
finetuning TRL has fp32 weights and bf16 autocast, pyruntime bf16 weights and fp32 masters; both have fp32
moments. With LoRA (rank 16, all linears of the layers) frozen weights are bf16 on both sides. Each contender
has processes of its own, one thread each. In a round every contender takes one turn of whole steps, about
{seconds:g} s, in shuffled order, while the others sleep; a turn is as long as its slowest rank's. Medians
over {rounds} rounds; +- is half the interquartile range. "cpu": processor time of a step and a
rank, which other programs on the machine disturb less. Memory is the peak of a rank's resident memory, less
what it had once its libraries were imported."""


def turn(worker: Worker, steps: int) -> Tensor:
    """Lets a contender train, with its processes on all ranks. Returns for each rank seconds, loss, bytes of
    peak memory, and processor seconds."""
    dist.barrier()
    told = torch.tensor(worker.turn(steps), dtype=torch.float64)
    every = [torch.empty_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(every, told)
    return torch.stack(every)


def measure(shape_name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape, rank = SHAPES[shape_name], dist.get_rank()
    task = Task(asdict(shape), str(folder), False, rank, dist.get_world_size())
    if rank == 0:
        write_task(task)
    dist.barrier()
    with ExitStack() as stack:
        workers = {}
        for mode, name in itertools.product(args.modes, args.contenders):
            of_mode = replace(task, lora=mode == "lora")
            workers[f"{name}, {mode}"] = stack.enter_context(Worker(name, of_mode, _free_port()))
        losses = {name: turn(worker, 1)[:, 1].mean().item() for name, worker in workers.items()}
        if max(losses.values()) - min(losses.values()) > TOLERANCE:
            raise RuntimeError(f"The losses of the first step are {losses}; they may differ by {TOLERANCE}.")
        warm = {name: turn(worker, 2)[:, 0].max().item() / 2 for name, worker in workers.items()}
        steps = {name: max(1, round(args.seconds / took)) for name, took in warm.items()}
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        cpu: dict[str, list[float]] = {name: [] for name in workers}
        memory: dict[str, float] = {}
        for round_ in range(args.rounds):
            order = list(workers)
            random.Random(round_).shuffle(order)
            for name in order:
                found = turn(workers[name], steps[name])
                seconds[name].append(found[:, 0].max().item() / steps[name])
                memory[name] = found[:, 2].max().item()
                cpu[name].append(found[:, 3].mean().item() / steps[name])
    targets = json.loads((folder / "rows.json").read_text())["targets_per_step"]
    samples = {name: Sample(tuple(each)) for name, each in seconds.items()}
    first = samples[next(iter(samples))]
    return {
        "shape_name": shape_name,
        "shape": asdict(shape),
        "targets_per_step": targets,
        "losses": losses,
        "lines": [
            {
                "name": name,
                "step_s": sample.median,
                "spread": sample.spread,
                "targets_per_second": targets / sample.median,
                "over_first": sample.over(first).median,
                "cpu_s": Sample(tuple(cpu[name])).median,
                "memory_bytes": memory[name],
                "rounds": list(sample.rounds),
            }
            for name, sample in samples.items()
        ],
    }


def _free_port() -> int:
    """Returns a port of rank 0's machine that is free, the same on every rank."""
    port = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        import socket

        with socket.socket() as found:
            found.bind(("", 0))
            port[0] = found.getsockname()[1]
    dist.broadcast(port, 0)
    return int(port)


def show(result: dict[str, Any]) -> str:
    rows = [
        [
            line["name"],
            f"{line['step_s'] * 1e3:.0f}",
            f"{line['spread']:.1%}",
            f"{line['targets_per_second']:,.0f}",
            f"{line['over_first']:.2f}",
            f"{line['cpu_s'] * 1e3:.0f}",
            f"{line['memory_bytes'] / 1e6:.0f}",
        ]
        for line in result["lines"]
    ]
    title = f"{result['shape_name']}: {result['targets_per_step']:.0f} targets a step"
    return f"{title}\n{table(['', 'ms', '+-', 'targets/s', 'time over the first', 'cpu ms', 'MB'], rows)}"


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["dim256", "dim1024"])
    parser.add_argument("--modes", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--contenders", nargs="+", default=[*OURS, *THEIRS], choices=[*OURS, *THEIRS])
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn; default %(default)s")
    args = parser.parse_args()
    if set(args.contenders) & set(THEIRS) and importlib.util.find_spec("trl") is None:
        parser.exit(
            2, f"{parser.prog}: {', '.join(THEIRS)} need trl; `pip install trl`, or leave them out.\n"
        )
    dist.init_process_group("gloo")
    report = Report(args, HOW.format(seconds=args.seconds, rounds=args.rounds))
    for name in args.shapes:
        folder = Path(tempfile.gettempdir()) / f"finetune-{os.environ['MASTER_PORT']}-{name}"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        dist.barrier()
        result = measure(name, args, folder)
        report.add(result, show(result))
        report.write(args.json)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
