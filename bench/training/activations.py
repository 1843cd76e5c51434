"""Times forward and backward of a Llama with each kind of activation checkpointing, and with torch.compile
between its linears: 4 layers of 1024, 512 tokens, bf16, one rank of one thread.

    python -m bench.training.activations [--rounds 9] [--json FILE]

Milliseconds, medians over the rounds; within a round each line takes one turn, in shuffled order. "Of none":
the median of the ratios within a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from bench.common.measuring import facts, interleave, parser_of, write_json
from bench.common.tables import table
from bench.data_parallel.run import SHAPES
from bench.training.workers import llama_config
from pyruntime.llama import Llama

LINES: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "none, compiled": {"recompute": "none", "compile": True},
}


def turn_of(options: dict[str, Any]) -> Callable[[], None]:
    shape = SHAPES["dim1024"]
    model = Llama(llama_config(shape), dtype=torch.bfloat16, **options)
    ids, labels = (torch.randint(shape.vocab, (1, shape.seq)) for _ in range(2))

    def run() -> None:
        model.zero_grad()
        model(ids, labels).backward()

    return run


def main() -> None:
    args = parser_of(__doc__, rounds=9).parse_args()
    torch.set_num_threads(1)
    where = facts()
    turns = {name: turn_of(options) for name, options in LINES.items()}
    for run in turns.values():
        run()  # warms up, and compiles
    samples = interleave(turns, args.rounds)
    ratios = {name: sample.over(samples["none"]) for name, sample in samples.items()}
    rows = [
        [name, f"{sample.median * 1e3:.0f}", f"{ratios[name].median:.3f}", f"{ratios[name].spread:.1%}"]
        for name, sample in samples.items()
    ]
    print(table(["", "ms", "of none", "+-"], rows))
    if args.json:
        write_json(args.json, where, vars(args), [{"name": n, **asdict(s)} for n, s in samples.items()])


if __name__ == "__main__":
    main()
