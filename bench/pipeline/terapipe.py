"""Times one long sequence through a pipeline, whole and in slices, beside TeraPipe's prediction.

torchrun --nproc-per-node 2 -m bench.pipeline.terapipe [--json FILE] [--seq 2048] [--step 128]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.common.measuring import Report, Sample, interleave, parser_of, start_together, started
from bench.common.tables import table
from bench.training.workers import DTYPES
from pyruntime import comm
from pyruntime.comm.exchange import gather
from pyruntime.llama import Llama
from pyruntime.llama.model import ModelPart
from pyruntime.llama.presets import preset
from pyruntime.llama.stage_profile import Profile, profile_stage
from pyruntime.pipeline import make_schedule
from pyruntime.pipeline.carry import Carry
from pyruntime.pipeline.executor import Pipeline
from pyruntime.plan import terapipe
from pyruntime.plan.slice_cost import fit
from pyruntime.plan.slice_cost import table as costs_table

HOW = """\
Seconds of the slowest rank, forward and backward of one sequence through {stages} stages of {layers} layers
(no embedding, no head), medians over {rounds} interleaved rounds. Predicted from the fitted costs: the sum
over a stage's slices plus (stages - 1) times the longest (arXiv 2102.07988, equation 5)."""


class Layers(nn.Module):
    """Some layers as a stage that takes slices."""

    def __init__(self, model: Llama, seqs: Sequence[int]):
        super().__init__()
        self.model, self._seqs = model, seqs

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        layers = self.model.part.layers
        if carry is None:
            return self.model.run(x, layers, 1, self._seqs[0])
        return self.model.run(
            x, layers, 1, self._seqs[carry.part], carry.length, carry.of_layers(len(layers))
        )


def turn(args: argparse.Namespace, config, lengths: Sequence[int], group):
    """Returns one step with slices of these lengths."""
    dtype = DTYPES[args.dtype]
    numbers = tuple(range(1 + group.rank() * args.layers, 1 + (group.rank() + 1) * args.layers))
    stage = Layers(Llama(config, dtype=dtype, part=ModelPart(numbers, embed=False, head=False)), lengths)
    kind = "terapipe" if len(lengths) > 1 else "gpipe"
    schedule = make_schedule(kind, group.size(), 1, slices=len(lengths))
    shapes = [(length, config.hidden_size) for length in lengths]
    pipeline = Pipeline(schedule, {group.rank(): stage}, group, shapes=shapes, dtype=dtype)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(args.seq, config.hidden_size, generator=draw).to(dtype)
    inputs = [list(x.split(list(lengths)))]

    def run() -> float:
        stage.zero_grad()
        losses = pipeline.step(inputs, lambda y, *_: y.float().square().mean() * len(y) / args.seq)
        return sum(float(part) for parts in losses for part in parts)

    return run


def measure(args: argparse.Namespace, group) -> dict[str, Any]:
    stages = group.size()
    shape = preset(args.preset, max_position_embeddings=2 * args.seq)
    config = preset(
        args.preset, num_hidden_layers=stages * args.layers + 2, max_position_embeddings=2 * args.seq
    )
    lengths = list(range(args.step, args.seq + 1, args.step))
    start_together()
    found = profile_stage(
        shape, args.layers, DTYPES[args.dtype], lengths, lengths[:: max(1, len(lengths) // 8)]
    )
    found = gather(group, "Telling what stages cost", found, Profile)[0]
    fitted = fit(*zip(*found.contexts, strict=True), found.lengths, found.seconds)
    costs = costs_table(fitted.cost, args.seq, args.step)
    slicings = {
        "whole": terapipe.uniform_slicing(costs, stages, 1),
        "best equal slices": terapipe.best_uniform_slicing(costs, stages),
        "best slices": terapipe.best_slicing(costs, stages),
    }
    turns = {
        name: turn(args, config, [length * args.step for length in slicing.lengths], group)
        for name, slicing in slicings.items()
    }
    losses = {name: run() for name, run in turns.items()}
    wanted = losses["whole"]
    if any(abs(loss - wanted) > 0.02 * abs(wanted) for loss in losses.values()):
        raise RuntimeError(f"the losses differ: {losses}")
    samples: dict[str, Sample] = interleave(turns, args.rounds)
    return {
        "fit_error": fitted.error,
        "context_error": fitted.context_error,
        "lines": [
            {
                "name": name,
                "slices": [length * args.step for length in slicings[name].lengths],
                "predicted_s": slicings[name].total,
                "seconds": sample.median,
                "spread": sample.spread,
                "speed_up": samples["whole"].over(sample).median,
                "rounds": sample.rounds,
            }
            for name, sample in samples.items()
        ],
    }


def show(found: dict[str, Any]) -> str:
    head = ["", "ms", "+-", "speed-up", "predicted ms", "ms / predicted"]
    rows = [
        [
            line["name"],
            f"{line['seconds'] * 1e3:.0f}",
            f"{line['spread']:.1%}",
            f"{line['speed_up']:.2f}",
            f"{line['predicted_s'] * 1e3:.0f}",
            f"{line['seconds'] / line['predicted_s']:.3f}",
        ]
        for line in found["lines"]
    ]
    slices = "; ".join(f"{line['name']}: {' + '.join(map(str, line['slices']))}" for line in found["lines"])
    errors = f"fit: {found['fit_error']:.1%} of a slice, {found['context_error']:.1%} of what context adds"
    return "\n".join([errors, slices, table(head, rows)])


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--preset", default="dim1024")
    parser.add_argument("--layers", type=int, default=2, help="of a stage")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--step", type=int, default=128, help="tokens that slice lengths are multiples of")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    args = parser.parse_args()
    with started({"pp": -1, "tp": 1}) as runtime:
        group = comm.process_group(runtime.pp)
        report = Report(args, HOW.format(stages=group.size(), layers=args.layers, rounds=args.rounds))
        result = measure(args, group)
        report.add(result, show(result))
        report.write(args.json)


if __name__ == "__main__":
    main()
