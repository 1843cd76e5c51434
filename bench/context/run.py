"""Times attention and training over a sequence that is cut over ranks, next to ranks that compute it alone.

    torchrun --nproc-per-node 2 -m bench.context.run [--json FILE] [--seq 8192 32768] [--dtypes bf16 fp32]
    python -m bench.netlab --hosts 2 --rate 1gbit -- python -m bench.context.run ...

Every line computes the same attention: the first call of each is compared with one rank's result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import pyruntime
from bench.common.limits import LIMITS_HEAD, Held, limits_cells
from bench.common.measuring import interleave, parser_of, report_each, started
from bench.common.plain_llama import LONGER, Shape
from bench.common.tables import table
from bench.training.workers import BETA1, BETA2, CLIP, DTYPES, EPS, LEARNING_RATE, WEIGHT_DECAY, our_model
from pyruntime import comm
from pyruntime.comm.ring import Ring
from pyruntime.context import Context, ring_attention, take_shard
from pyruntime.context.mask import mask_of
from pyruntime.ops.attention import causal_attention, statistics_dtype

HEADS, KEY_HEADS, DIM = 8, 4, 64
LINES = ("ring zigzag", "ring striped", "ring contiguous", "all_gather_kv zigzag", "ulysses zigzag")
MODEL = Shape(1024, 4, 16, 8, 2816, 8192, seq=2048, micro_batch=1, accumulate=1)
SMALL = Shape(256, 4, 8, 4, 768, 2048, seq=2048, micro_batch=1, accumulate=1)
TINY = Shape(64, 2, 4, 2, 128, 256, seq=64, micro_batch=1, accumulate=1)
MODELS = {
    "dim256": SMALL,
    "dim1024": MODEL,
    "dim1024-1k": replace(MODEL, seq=1024),
    "tiny": TINY,
    **{f"{name}-a-rank": replace(shape, seq=2 * shape.seq) for name, shape in LONGER.items()},
}
TOLERANCE = {"bf16": 0.02, "fp32": 1e-4}  # as a share of the norm

HOW = """\
Seconds of the slowest rank, medians over {rounds} rounds. Within a round every line takes one turn, in
shuffled order, started together on all ranks. Alone: every rank computes the whole sequence at the same time,
forward and backward; its seconds divided by the number of ranks are the ideal (T_g). T_c: the ring's messages
(attention), or as many bytes as a training step sends between hosts, without computation. E = T_g / line. R =
line / max(T_g, T_c). Loaded, between hosts: T_g while as many bytes as the line sends pass unrelated. Waits:
share of the time, of the rank that waited most, by the ledger, in separate turns."""

Turn = Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """One contender's figures: seconds, except for the ratios."""

    name: str
    seconds: float
    spread: float
    E: float


def inputs(seq: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k, v and the gradient of the result, the same on every rank."""
    draw = torch.Generator().manual_seed(seq)
    return [
        torch.randn(1, seq, n, DIM, generator=draw).to(dtype) for n in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]


def alone(whole: list[Tensor]) -> Turn:
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in whole[:3]]
    grad = whole[3].flatten(2)

    def run() -> list[Tensor]:
        out, _ = causal_attention(*leaves)
        grads = torch.autograd.grad(out, leaves, grad)
        return [out.detach().view(whole[0].shape), *(g.transpose(1, 2) for g in grads)]

    return run


def over_ranks(whole: list[Tensor], group, variant: str, layout: str) -> Turn:
    shards = [take_shard(x, layout, group.size(), group.rank()) for x in whole]
    leaves = [x.detach().requires_grad_() for x in shards[:3]]

    def run() -> list[Tensor]:
        out = ring_attention(*leaves, group, layout=layout, variant=variant)
        return [out.detach(), *torch.autograd.grad(out, leaves, shards[3])]

    return run


def exchange(whole: list[Tensor], group) -> Turn:
    """Returns a turn that only sends the messages of the zigzag ring's forward and backward pass."""
    k, size, rank = whole[1], group.size(), group.rank()
    ways = mask_of("zigzag", k.shape[1], size, rank, True, None).ways

    def run() -> None:
        rings = [Ring(group, "cp", step=way.step) for way in ways]
        for sums in (False, False, True):
            dtype = statistics_dtype(k) if sums else k.dtype
            for hop in range(1, size):
                shifts = []
                for ring, way in zip(rings, ways, strict=True):
                    tokens = way.sums if sums else way.keys
                    runs = [tokens(way.owner(rank, hop + end + sums - 1), hop) for end in (0, 1)]
                    lines = [2 * KEY_HEADS * (end - begin) for begin, end in runs]
                    shifts.append(ring.shift(*lines, DIM, dtype, k.device))
                    shifts[-1].send()
                for shift in shifts:
                    shift.receive()
                    shift.finish()

    return run


def compare(
    name: str, found: list[Tensor], whole: list[Tensor], group, layout: str, tolerance: float
) -> None:
    """Raises RuntimeError if a line's results differ from those of the whole sequence."""
    for index, (one, all_tokens) in enumerate(zip(found, whole, strict=True)):
        expected = take_shard(all_tokens, layout, group.size(), group.rank()).double()
        error = float((one.double() - expected).norm() / expected.norm())
        if not error <= tolerance:
            what = ("out", "dq", "dk", "dv")[index]
            raise RuntimeError(f"{name}: {what} of this rank is off by {error:.1e} of its norm.")


def measured(title: str, turns: dict[str, Turn], ranks: int, rounds: int) -> dict[str, Any]:
    """Times all turns; returns figures of all except "alone" (all ranks' work on each rank) and "T_c"."""
    names = [name for name in turns if name not in ("alone", "T_c")]
    exchange = [name for name in turns if name == "T_c"]
    held = {name: Held(turns, name, ["alone"], exchange, shares=ranks) for name in names}
    samples = interleave(turns, rounds)
    lines = []
    for name in names:
        sample = samples[name]
        ideal = samples["alone"].over(sample).median / ranks
        lines.append(Line(name, sample.median, sample.spread, ideal))
    return {
        "title": title,
        "T_g": samples["alone"].median / ranks,
        "lines": [asdict(line) for line in lines],
        "limits": {name: asdict(each.limits(samples)) for name, each in held.items()},
        "peers": {},
        "rounds": {name: list(sample.rounds) for name, sample in samples.items()},
    }


def measure_attention(seq: int, dtype: str, args: argparse.Namespace, group) -> dict[str, Any]:
    whole = inputs(seq, DTYPES[dtype])
    turns: dict[str, Turn] = {"alone": alone(whole)}
    expected = turns["alone"]()
    for name in args.lines:
        variant, layout = name.split()
        turns[name] = over_ranks(whole, group, variant, layout)
        compare(name, turns[name](), expected, group, layout, TOLERANCE[dtype])
    turns["T_c"] = exchange(whole, group)
    turns["T_c"]()
    title = f"attention of {seq} tokens, {HEADS} heads ({KEY_HEADS} of keys) of {DIM}, {dtype}, causal"
    return measured(title, turns, group.size(), args.rounds)


def training_step(shape: Shape, dtype: torch.dtype, tp, mesh, context: Context | None) -> Turn:
    model = our_model(shape, dtype, tp, context=context)
    handle = pyruntime.shard(model, mesh, stage=0 if context is None else 1)
    optimizer = handle.adamw(
        lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, max_norm=CLIP
    )
    draw = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(shape.vocab, (1, shape.seq), generator=draw) for _ in range(2))
    if context is not None:
        ids, labels = context.shard(ids), context.shard(labels)

    def run() -> float:
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def measure_training(model: str, dtype: str, args: argparse.Namespace, cp, tp, alone_mesh) -> dict[str, Any]:
    shape, group = MODELS[model], comm.process_group(cp)
    turns: dict[str, Turn] = {"alone": training_step(shape, DTYPES[dtype], tp, alone_mesh, None)}
    context = Context(cp)
    turns["cp"] = training_step(shape, DTYPES[dtype], tp, cp, context)
    for _ in range(2):  # the first pass is not overlapped
        losses = torch.tensor([turns["cp"](), turns["alone"]()], dtype=torch.float64)
    mean = context.sum(losses) / context.size
    if abs(mean[0] - mean[1]) > (2e-2 if dtype == "bf16" else 1e-4):
        raise RuntimeError(f"{model} {dtype}: the loss over ranks is {mean[0]}, and {mean[1]} on one rank.")
    title = f"training step, {model}, {shape.seq} tokens, {dtype}, zigzag ring, zero 1"
    return measured(title, turns, group.size(), args.rounds)


def show(found: dict[str, Any]) -> str:
    head = ["", "ms", "+-", "E", *LIMITS_HEAD]
    rows = [
        [
            line["name"],
            f"{line['seconds'] * 1e3:.1f}",
            f"{line['spread']:.1%}",
            f"{line['E']:.3f}",
            *limits_cells(found["limits"][line["name"]]),
        ]
        for line in found["lines"]
    ]
    return "\n".join([f"{found['title']}: T_g {found['T_g'] * 1e3:.1f} ms", table(head, rows)])


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument(
        "--seq", nargs="*", type=int, default=[8192, 32768], help="lengths of the whole sequence"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["dim256", "dim1024"], help="to train")
    return parser.parse_args()


def measure_all(args: argparse.Namespace, runtime: Any) -> Iterator[dict[str, Any]]:
    for dtype in args.dtypes:
        for seq in args.seq:
            yield measure_attention(seq, dtype, args, comm.process_group(runtime.cp.mesh))
        for model in args.models:
            yield measure_training(model, dtype, args, runtime.cp.mesh, runtime.tp.mesh, runtime.dp.mesh)


def main() -> None:
    args = arguments()
    with started({"cp": -1, "tp": 1}) as runtime:
        report_each(args, HOW.format(rounds=args.rounds), measure_all(args, runtime), show)


if __name__ == "__main__":
    main()
