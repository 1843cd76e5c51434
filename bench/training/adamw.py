"""AdamW on one core: bytes a second, next to a plain copy and to PyTorch's fused AdamW.

    python -m bench.training.adamw [--json FILE] [--elements 30000000]

Bytes counted: each array that a step reads or writes, once a direction (fp32: weight, both moments read and
written, gradient read, 28 bytes an element; bf16 weight and gradient with fp32 master: 30). A copy reads and
writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pyruntime
from bench.common.measuring import facts, interleave, parser_of, write_json
from bench.common.tables import table
from pyruntime.ops.layers import adamw_

SETTINGS = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.1}


def ours(elements: int, dtype: torch.dtype) -> tuple[Callable[[], None], int]:
    weight, gradient = (torch.randn(elements).to(dtype) for _ in range(2))
    first, second = torch.zeros(elements), torch.zeros(elements)
    masters = [] if dtype == torch.float32 else [weight.float()]
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        adamw_([weight], [gradient], [first], [second], masters, beta1=0.9, beta2=0.95, step=step, **SETTINGS)

    width = weight.element_size()
    # A low-precision weight is written only: its master is what is read.
    return run, elements * (16 + width + (8 + width if masters else 8))


def theirs(elements: int) -> Callable[[], None]:
    weight = torch.nn.Parameter(torch.randn(elements))
    weight.grad = torch.randn(elements)
    return torch.optim.AdamW([weight], betas=(0.9, 0.95), fused=True, **SETTINGS).step


def measure(elements: int, rounds: int) -> list[dict[str, Any]]:
    source, target = torch.randn(elements), torch.randn(elements)
    contenders: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: target.copy_(source), 8 * elements),
        "pyruntime fp32": ours(elements, torch.float32),
        "pyruntime bf16, fp32 master": ours(elements, torch.bfloat16),
        "PyTorch fused fp32": (theirs(elements), 28 * elements),
    }
    for run, _ in contenders.values():
        run()
    samples = interleave({name: run for name, (run, _) in contenders.items()}, rounds)
    copy_rate = 8 * elements / samples["copy"].median
    return [
        {
            "name": name,
            "seconds": sample.median,
            "spread": sample.spread,
            "gb_per_second": contenders[name][1] / sample.median / 1e9,
            "of_copy": contenders[name][1] / sample.median / copy_rate,
        }
        for name, sample in samples.items()
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--elements", type=int, default=30_000_000, help="parameters; default 30 million")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.elements < 1 or args.rounds < 1:
        parser.error(f"--elements {args.elements} --rounds {args.rounds} measure nothing; use at least 1.")
    torch.set_num_threads(1)
    pyruntime.keep_freed_memory()
    where = facts()
    lines = measure(args.elements, args.rounds)
    rows = [
        [
            line["name"],
            f"{line['seconds'] * 1e3:.1f}",
            f"{line['spread']:.1%}",
            f"{line['gb_per_second']:.1f}",
            f"{line['of_copy']:.2f}",
        ]
        for line in lines
    ]
    print(where["machine"])
    print(table(["", "ms", "+-", "GB/s", "of copy"], rows))
    if args.json:
        write_json(args.json, where, vars(args), lines)


if __name__ == "__main__":
    main()
