"""Forward and backward pass of a Llama with each kind of activation checkpointing, and with torch.compile
between its linears, on one rank of one thread.

    python -m bench.training.activations [--rounds 9] [--json FILE]

4 layers of 1024, 512 tokens, bf16: processor time of the thread, medians over the rounds; within a round each
line takes one turn, in shuffled order. Ratios are of one round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

from bench.common.measuring import facts, parser_of, write_json
from bench.common.tables import table
from bench.data_parallel.run import SHAPES
from bench.training.workers import llama_config
from pyruntime.llama import Llama

LINES = {
    "none": {"recompute": "none"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "none, compiled": {"recompute": "none", "compile": True},
}


def turn_of(options: dict) -> Callable[[], float]:
    shape = SHAPES["dim1024"]
    model = Llama(llama_config(shape), dtype=torch.bfloat16, **options)
    ids, labels = (torch.randint(shape.vocab, (1, shape.seq)) for _ in range(2))

    def run() -> float:
        model.zero_grad()
        began = time.thread_time()
        model(ids, labels).backward()
        return time.thread_time() - began

    return run


def main() -> None:
    args = parser_of(__doc__, rounds=9).parse_args()
    torch.set_num_threads(1)
    where = facts()
    turns = {name: turn_of(options) for name, options in LINES.items()}
    for run in turns.values():
        run()  # warms up, and compiles
    rounds: list[dict[str, float]] = []
    for _ in range(args.rounds):
        order = random.sample(list(turns), len(turns))
        rounds.append({name: turns[name]() for name in order})
    rows = []
    for name in turns:
        seconds = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each[name] / each["none"] for each in rounds)
        rows.append([name, f"{seconds * 1e3:.0f}", f"{ratio:.3f}"])
    print(table(["", "ms", "of none"], rows))
    if args.json:
        write_json(args.json, where, vars(args), rounds)


if __name__ == "__main__":
    main()
