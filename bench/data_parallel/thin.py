"""Times training steps over networks that are too slow for a gradient in every step: CO2 beside zero 1, DDP
and replicas that exchange nothing.

    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 100mbit -- python -m bench.data_parallel.thin
        [--tau 24] [--json FILE] [--shape dim1024] [--dtype bf16] [--others "zero 1" DDP]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pyruntime
from bench.common.measuring import Sample, at_least_one, interleave, parser_of, report_each, started
from bench.common.tables import table
from bench.common.traffic import Traffic, bytes_out
from bench.data_parallel.run import SETTINGS, SHAPES, Step, ours, ours_alone, plain
from bench.training.workers import CLIP, DTYPES, our_model
from pyruntime.replicas import co2
from pyruntime.replicas.sharded_outer import ShardedOuter

ALONE, LOADED, CO2 = "each rank alone", "each rank alone, loaded", "CO2"
OTHERS = ("zero 1", "DDP")

HOW = """\
Seconds of a training step (forward, backward, clipping, AdamW with fp32 states) on the slowest rank, medians
over {rounds} rounds. Within a round every line takes one turn, in shuffled order, started together on all
ranks. A turn of CO2 and of ranks alone is a whole round of tau steps, a turn of the others one step. Loaded:
alone while as many bytes as CO2 sends in a round pass unrelated. "Of alone" and "of loaded": their seconds
divided by the line's in the same round, which is throughput relative to hosts that exchange nothing. Waits
and moves: the share of CO2's turns in which the computing thread waited for peers, and in which it copied and
summed messages, on the rank with most."""


def with_co2(shape, dtype: torch.dtype, tp, mesh, tau: int | str) -> tuple[Step, ShardedOuter]:
    model = our_model(shape, dtype, tp)
    handle = pyruntime.shard(model, None)
    optimizer = handle.adamw(max_norm=CLIP, **SETTINGS)
    outer = ShardedOuter(handle, mesh, co2(tau), ())

    def step(ids: Tensor, labels: Tensor) -> float:
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        outer.step()
        return float(loss.detach())

    return step, outer


class Exposed:
    """A turn that records, round by round, which share of its seconds the transport waited and moved data."""

    def __init__(self, turn: Callable[[], None]):
        self._turn = turn
        self.rounds: list[tuple[float, float]] = []
        """(waits, moves) of each round."""

    def __call__(self) -> None:
        before, began = pyruntime.comm.traffic(), time.perf_counter()
        self._turn()
        seconds, after = time.perf_counter() - began, pyruntime.comm.traffic()
        waits = sum(each.waiting_s for each in after.values()) - sum(e.waiting_s for e in before.values())
        moves = sum(each.moving_s for each in after.values()) - sum(e.moving_s for e in before.values())
        self.rounds.append((waits / seconds, moves / seconds))

    def most(self, last: int) -> list[list[float]]:
        """Returns the shares of the `last` turns, on the rank with most. All ranks call it together."""
        shares = torch.tensor(self.rounds[-last:], dtype=torch.float64)
        dist.all_reduce(shares, dist.ReduceOp.MAX)
        return shares.tolist()


def measure(args: argparse.Namespace, mesh, tp) -> dict[str, Any]:
    shape, dtype = SHAPES[args.shape], DTYPES[args.dtype]
    draw = torch.Generator().manual_seed(1 + mesh.get_local_rank())
    size = (shape.micro_batch * shape.accumulate, shape.seq)
    ids, labels = (torch.randint(shape.vocab, size, generator=draw) for _ in range(2))
    co2_step, outer = with_co2(shape, dtype, tp, mesh, args.tau or "auto")
    while outer.tau is None:
        co2_step(ids, labels)
    described, tau = outer.describe(), outer.tau

    def turn(step: Step, steps: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(steps):
                step(ids, labels)

        return run

    exposed = Exposed(turn(co2_step, tau))
    turns: dict[str, Callable[[], None]] = {
        ALONE: turn(ours_alone(shape, dtype, tp, CLIP), tau),
        CO2: exposed,
    }
    steps = {ALONE: tau, CO2: tau, LOADED: tau}
    if "zero 1" in args.others:
        turns["zero 1"] = turn(ours(shape, dtype, tp, mesh, 1)[0], 1)
    if "DDP" in args.others:
        turns["DDP"] = turn(plain(shape, dtype, mesh, "DDP", CLIP), 1)
    for each in turns.values():
        each()  # warms up; CO2's first round waits for nothing
    dist.barrier()
    before = bytes_out()
    exposed()
    sent = torch.tensor(float(bytes_out() - before), dtype=torch.float64)
    dist.all_reduce(sent)
    traffic = Traffic(int(sent) // dist.get_world_size())
    turns[LOADED] = traffic.beside(turns[ALONE])
    samples = interleave(turns, args.rounds)
    shares = exposed.most(args.rounds)
    seconds = {name: Sample(tuple(s / steps.get(name, 1) for s in samples[name].rounds)) for name in turns}
    lines = []
    for name, sample in seconds.items():
        of_alone, of_loaded = seconds[ALONE].over(sample), seconds[LOADED].over(sample)
        lines.append(
            {
                "name": name,
                "step_s": sample.median,
                "spread": sample.spread,
                "of_alone": of_alone.median,
                "of_alone_spread": of_alone.spread,
                "of_loaded": of_loaded.median,
                "of_loaded_spread": of_loaded.spread,
            }
        )
    return {
        "shape": asdict(shape),
        "outer": described,
        "tau": tau,
        "sent_bytes_of_a_round": int(sent) // dist.get_world_size(),
        "lines": lines,
        "waits": Sample(tuple(waits for waits, _ in shares)).median,
        "moves": Sample(tuple(moves for _, moves in shares)).median,
        "rounds": {name: list(sample.rounds) for name, sample in samples.items()},
    }


def show(result: dict[str, Any]) -> str:
    head = ["", "step ms", "+-", "of alone", "of loaded", "+-"]
    rows = [
        [
            line["name"],
            f"{line['step_s'] * 1e3:.0f}",
            f"{line['spread']:.1%}",
            f"{line['of_alone']:.3f}",
            f"{line['of_loaded']:.3f}",
            f"{line['of_loaded_spread']:.1%}",
        ]
        for line in result["lines"]
    ]
    text = (
        f"{result['outer']}; {result['sent_bytes_of_a_round'] / 1e6:.0f} MB leave a host in a round\n"
        f"{table(head, rows)}\nCO2: waits {result['waits']:.2%}, moves {result['moves']:.2%} of a round"
    )
    return text


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--tau", type=at_least_one, help="default: measured")
    parser.add_argument("--shape", choices=SHAPES, default="dim1024")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=list(OTHERS))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with started({"dp": -1, "tp": 1}) as runtime:
        found = (measure(args, runtime.dp.mesh, runtime.tp.mesh) for _ in range(1))
        report_each(args, HOW.format(rounds=args.rounds), found, show)


if __name__ == "__main__":
    main()
