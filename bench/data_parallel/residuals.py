"""Measures the residual of error feedback: its mean square divided by the gradients', after steps with
gradients of one size, by bits, rounding, and how heavy the gradients' tails are.

    python -m bench.data_parallel.residuals [--json FILE] [--steps 400]
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bench.common.measuring import at_least_one, facts, parser_of, write_json
from bench.common.tables import table
from pyruntime.ops import compression

COUNT = 64 * compression.BLOCK


def kept(bits: int, at_random: bool, heavy: bool, steps: int) -> float | None:
    """Returns the ratio, None if it overflowed. heavy: normal numbers times the squares of others."""
    torch.manual_seed(0)
    residual, packed = torch.zeros(COUNT), torch.empty(compression.quantized_bytes(COUNT, bits)).byte()
    for step in range(steps):
        gradient = torch.randn(COUNT) * (torch.randn(COUNT).square() if heavy else 1)
        compression.quantize(gradient, bits, packed, residual, (step, 0) if at_random else None)
    square = float(residual.square().mean()) / (3 if heavy else 1)  # the fourth moment
    return square if math.isfinite(square) else None


def _cell(figure: float | None) -> str:
    return "grows" if figure is None else f"{figure:.4g}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--steps", type=at_least_one, default=400)
    args = parser.parse_args()
    ways = [(at_random, heavy) for heavy in (False, True) for at_random in (False, True)]
    lines: list[dict[str, Any]] = [
        {
            "bits": bits,
            "at_random": at_random,
            "heavy": heavy,
            "kept": kept(bits, at_random, heavy, args.steps),
        }
        for bits in range(1, 9)
        for at_random, heavy in ways
    ]
    rows = [
        [str(bits), *(_cell(line["kept"]) for line in lines if line["bits"] == bits)] for bits in range(1, 9)
    ]
    print(table(["bits", "nearest", "random", "heavy tails, nearest", "heavy tails, random"], rows))
    if args.json:
        write_json(args.json, facts(), vars(args), lines)


if __name__ == "__main__":
    main()
