"""Measures tensor-parallel training throughput on two ranks, against the machine's limit and PyTorch.

    python -m bench.training.run [--json FILE] [--shapes dim256 dim1024] [--dtypes fp32 bf16] [--rounds 7]

It is started without torchrun: this process starts the ranks of every variant in separate processes and lets
the variants train in turns; the others sleep.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.common.measuring import Sample, facts, parser_of, write_json
from bench.common.plain_llama import LONGER, Shape
from bench.common.tables import table
from bench.data_parallel.run import TOLERANCE
from bench.training.workers import DTYPES, KEEP_FREED_MEMORY, LEAD_S, Team, Turn, Variant

SHAPES = {
    "dim256": Shape(256, 4, 8, 4, 768, 2048, seq=256, micro_batch=2, accumulate=4),
    "dim1024": Shape(1024, 4, 16, 8, 2816, 8192, seq=512, micro_batch=1, accumulate=4),
    "tiny": Shape(64, 2, 4, 2, 128, 256, seq=32, micro_batch=2, accumulate=2),
    **LONGER,
}
OF_LIMIT = {"dim256": 0.85, "dim1024": 0.93}  # share of the limit that tp=2 must reach
OF_PLAIN, AIM_OF_PLAIN = 1.0, 1.2  # relative to plain PyTorch with its memory kept, on one rank

TP, SOLO, OTHER = "pyruntime tp=2", "pyruntime, one rank", "pyruntime, another rank"
PLAIN, PLAIN_KEPT, DTENSOR = "PyTorch, one rank", "PyTorch, one rank, memory kept", "PyTorch DTensor tp=2"
LIMIT = "limit: two pyruntime ranks, each alone"
VARIANTS = (
    Variant(TP, ours=True, ranks=2),
    Variant(SOLO, ours=True, ranks=1),
    Variant(OTHER, ours=True, ranks=1),
    Variant(PLAIN, ours=False, ranks=1),
    Variant(PLAIN_KEPT, ours=False, ranks=1, environment=KEEP_FREED_MEMORY),
    Variant(DTENSOR, ours=False, ranks=2, environment=KEEP_FREED_MEMORY),
)
TURNS = {TP: [TP], LIMIT: [SOLO, OTHER], **{name: [name] for name in (SOLO, PLAIN, PLAIN_KEPT, DTENSOR)}}
"""The teams that train at the same time, for every line of the table."""

HOW = """\
Tokens per second of training: micro-batches forward and backward, clipping, AdamW; random tokens, one thread
a process, medians over {rounds} rounds. In a round every line has one turn of about {seconds:g} s in whole
steps, in shuffled order; the others sleep. All start from the same weights, and the losses of the first two
steps agree. In bf16 runs pyruntime has fp32 master weights and optimizer states, PyTorch's AdamW bf16 states.
"Memory kept" and DTensor run with MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ raised. "cpu" is tokens
per second of processor time, summed over ranks, which other work disturbs less. Ratios are medians of the
ratios within a round; +- is half the interquartile range."""


def tokens_per_second(shape: Shape, steps: int, teams: list[list[Turn]]) -> float:
    """Returns tokens per second, summed over teams that train together, each as fast as its slowest rank."""
    tokens = steps * shape.tokens_per_step
    return sum(tokens / max(turn.end - turn.start for turn in turns) for turns in teams)


def take_turn(teams: list[Team], steps: int, timeout_s: float) -> list[list[Turn]]:
    """Lets teams train `steps` steps at the same time, and returns their reports."""
    start = time.perf_counter() + LEAD_S
    for team in teams:
        team.order(steps, start)
    return [team.turns(timeout_s) for team in teams]


def warm_up(teams: dict[str, Team], tolerance: float, timeout_s: float) -> float:
    """Takes two steps of every team. Returns the seconds of a step of one-rank PyTorch.

    Raises RuntimeError if a loss differs from the plain model's by more than `tolerance` nats.
    """
    for step in (1, 2):
        turns = {name: take_turn([team], 1, timeout_s)[0] for name, team in teams.items()}
        wanted = turns[PLAIN][0].loss
        for name, ranks in turns.items():
            for rank, turn in enumerate(ranks):
                if not abs(turn.loss - wanted) <= tolerance:
                    raise RuntimeError(
                        f"{name}, rank {rank}: the loss of step {step} is {turn.loss}, but the plain "
                        f"model's is {wanted}; they start alike and may differ by {tolerance}."
                    )
    return turns[PLAIN][0].end - turns[PLAIN][0].start


def measure(shape_name: str, dtype: str, rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Measures all lines of one shape in one dtype."""
    shape = SHAPES[shape_name]
    teams: dict[str, Team] = {}
    try:
        for variant in VARIANTS:
            teams[variant.name] = Team(variant, shape, dtype, folder)
        step_s = warm_up(teams, TOLERANCE[dtype], timeout_s=600.0)
        steps = max(1, round(seconds / step_s))
        throughput: dict[str, list[float]] = {name: [] for name in TURNS}
        cpu: dict[str, list[float]] = {name: [] for name in TURNS}
        order = list(TURNS)
        for round_ in range(rounds):
            random.Random(round_).shuffle(order)
            for name in order:
                turns = take_turn(
                    [teams[team] for team in TURNS[name]], steps, timeout_s=60 + 60 * steps * step_s
                )
                throughput[name].append(tokens_per_second(shape, steps, turns))
                tokens = steps * shape.tokens_per_step * len(turns)
                cpu[name].append(tokens / sum(turn.cpu_s for ranks in turns for turn in ranks))
    finally:
        for team in teams.values():
            team.close()
    samples = {name: Sample(tuple(values)) for name, values in throughput.items()}
    return {
        "shape_name": shape_name,
        "shape": asdict(shape),
        "dtype": dtype,
        "steps_per_turn": steps,
        "gemm_flops_per_step": shape.gemm_flops_per_step,
        "lines": {
            name: {
                "tokens_per_second": sample.median,
                "spread": sample.spread,
                "tokens_per_cpu_second": Sample(tuple(cpu[name])).median,
                "gflops": sample.median * shape.gemm_flops_per_step / shape.tokens_per_step / 1e9,
                "of_limit": sample.over(samples[LIMIT]).median,
                "of_plain": sample.over(samples[PLAIN]).median,
                "of_plain_memory_kept": sample.over(samples[PLAIN_KEPT]).median,
                "rounds": list(sample.rounds),
            }
            for name, sample in samples.items()
        },
        "targets": targets(shape_name, samples),
    }


def targets(shape_name: str, samples: dict[str, Sample]) -> list[dict[str, Any]]:
    """Returns each target and the measured figure; empty for a shape without targets."""
    if shape_name not in OF_LIMIT:
        return []
    wanted = [
        ("tp=2 of the limit", samples[TP].over(samples[LIMIT]), OF_LIMIT[shape_name]),
        ("one rank of plain PyTorch, memory kept", samples[SOLO].over(samples[PLAIN_KEPT]), OF_PLAIN),
        (
            "aim: one rank of plain PyTorch, memory kept",
            samples[SOLO].over(samples[PLAIN_KEPT]),
            AIM_OF_PLAIN,
        ),
    ]
    return [
        {
            "what": what,
            "least": least,
            "reached": ratio.median,
            "spread": ratio.spread,
            "met": ratio.median >= least,
        }
        for what, ratio, least in wanted
    ]


def show(result: dict[str, Any]) -> str:
    head = ["", "tokens/s", "+-", "cpu", "GFLOP/s", "of limit", "of PyTorch", "of PyTorch, memory kept"]
    rows = [
        [
            name,
            f"{line['tokens_per_second']:,.0f}",
            f"{line['spread']:.1%}",
            f"{line['tokens_per_cpu_second']:,.0f}",
            f"{line['gflops']:.0f}",
            f"{line['of_limit']:.3f}",
            f"{line['of_plain']:.3f}",
            f"{line['of_plain_memory_kept']:.3f}",
        ]
        for name, line in result["lines"].items()
    ]
    shape = result["shape"]
    title = (
        f"{result['shape_name']} {result['dtype']}: {shape['layers']} layers, "
        f"{shape['heads']}/{shape['kv_heads']} heads, FFN {shape['ffn']}, vocabulary {shape['vocab']}, "
        f"{shape['micro_batch']} x {shape['seq']} tokens x {shape['accumulate']} micro-batches, "
        f"{result['steps_per_turn']} step(s) a turn"
    )
    aims = [
        f"  {target['what']}: {target['reached']:.3f} +- {target['spread']:.1%}, "
        f"wanted {target['least']:.2f}: {'met' if target['met'] else 'MISSED'}"
        for target in result["targets"]
    ]
    return "\n".join([title, table(head, rows), *aims])


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["dim256", "dim1024"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="least length of a turn, in whole steps; default 2"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    where = facts()
    how = HOW.format(rounds=args.rounds, seconds=args.seconds)
    print(where["machine"])
    load = where["load_average_at_start"]
    print(f"torch {where['versions']['torch']}, load {load:.1f}, {where['date']}\n\n{how}", flush=True)
    results = []
    for shape in args.shapes:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(shape, dtype, args.rounds, args.seconds, Path(folder)))
            print("\n" + show(results[-1]), flush=True)
    if args.json:
        write_json(args.json, where, {**vars(args), "how": how}, results)


if __name__ == "__main__":
    main()
