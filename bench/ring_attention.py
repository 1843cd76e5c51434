"""Attention and training over a sequence that is cut over ranks, next to ranks that compute it alone.

    torchrun --nproc-per-node 2 bench/ring_attention.py [--json FILE] [--seq 8192 32768] [--dtypes bf16 fp32]
    python bench/netlab.py --hosts 2 --rate 1gbit -- python bench/ring_attention.py ...

Every line computes the same attention: the first call of each is compared with that of one rank alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Report, interleave, parser_of, started
from plain_llama import Shape
from tables import table
from torch import Tensor
from train_workers import BETA1, BETA2, CLIP, DTYPES, EPS, LEARNING_RATE, WEIGHT_DECAY, our_model

import pyruntime
from pyruntime import comm
from pyruntime.comm.ring import Ring
from pyruntime.context import Context, ring_attention, take_shard
from pyruntime.ops.attention import causal_attention, statistics_dtype

HEADS, KEY_HEADS, DIM = 8, 4, 64
LINES = ("ring zigzag", "ring striped", "ring contiguous", "all_gather_kv zigzag", "ulysses zigzag")
MODEL = Shape(1024, 4, 16, 8, 2816, 8192, seq=2048, micro_batch=1, accumulate=1)
SMALL = Shape(256, 4, 8, 4, 768, 2048, seq=2048, micro_batch=1, accumulate=1)
MODELS = {"dim256": SMALL, "dim1024": MODEL}
TOLERANCE = {"bf16": 0.02, "fp32": 1e-4}  # of the norm

HOW = """\
Seconds of the slowest rank, medians over {rounds} rounds; within a round every line takes one turn, in
shuffled order, started together. Alone: every rank computes the whole sequence at the same time, forward
and backward, and its seconds divided by the ranks are the ideal (T_g). T_c: what the ring sends, with
nothing else to do. E = T_g / line. R = line / max(T_g, T_c). Exposed: share of the time in which the rank
waited for chunks or summed them, most of any rank."""

Turn = Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """One contender. Seconds but the ratios."""

    name: str
    seconds: float
    spread: float
    E: float
    R: float
    exposed: float
    rounds: tuple[float, ...]


def inputs(seq: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the result, the same on every rank."""
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
    """What the ring sends in a forward and a backward pass."""
    k = whole[1]
    lines, sums = 2 * KEY_HEADS * k.shape[1] // group.size(), statistics_dtype(k)

    def run() -> None:
        ring = Ring(group, "cp")
        for dtype in (k.dtype, k.dtype, sums):
            for _ in range(ring.size - 1):
                shift = ring.shift(lines, DIM, dtype, k.device)
                shift.send()
                shift.receive()
                shift.finish()

    return run


def compare(
    name: str, found: list[Tensor], whole: list[Tensor], group, layout: str, tolerance: float
) -> None:
    """Raises RuntimeError where a line's results are not those of the whole sequence."""
    for index, (one, all_tokens) in enumerate(zip(found, whole, strict=True)):
        expected = take_shard(all_tokens, layout, group.size(), group.rank()).double()
        error = float((one.double() - expected).norm() / expected.norm())
        if not error <= tolerance:
            what = ("out", "dq", "dk", "dv")[index]
            raise RuntimeError(f"{name}: {what} of this rank is off by {error:.1e} of its norm.")


class Exposed:
    """Adds up what a rank waited and summed for in the turns of a line."""

    def __init__(self, turn: Turn):
        self._turn, self.seconds, self.turns = turn, 0.0, 0

    def __call__(self) -> None:
        before = comm.exposed_s()
        self._turn()
        self.seconds += comm.exposed_s() - before
        self.turns += 1


def lines_of(turns: dict[str, Turn], ranks: int, rounds: int) -> tuple[list[Line], float, float]:
    """The lines of all turns but "alone" and "T_c"; T_g and T_c."""
    counted = {name: Exposed(turn) for name, turn in turns.items()}
    samples = interleave(counted, rounds)
    ideal = samples["alone"].median / ranks
    comm_s = samples["T_c"].median
    exposed = torch.tensor([counted[name].seconds / counted[name].turns for name in samples])
    dist.all_reduce(exposed, dist.ReduceOp.MAX)
    of_line = dict(zip(samples, exposed.tolist(), strict=True))
    lines = [
        Line(
            name,
            sample.median,
            sample.spread,
            samples["alone"].over(sample).median / ranks,
            sample.median / max(ideal, comm_s),
            of_line[name] / sample.median,
            sample.rounds,
        )
        for name, sample in samples.items()
        if name not in ("alone", "T_c")
    ]
    return lines, ideal, comm_s


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
    lines, ideal, comm_s = lines_of(turns, group.size(), args.rounds)
    title = f"attention of {seq} tokens, {HEADS} heads ({KEY_HEADS} of keys) of {DIM}, {dtype}, causal"
    return result(title, lines, ideal, comm_s)


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
        raise RuntimeError(f"{model} {dtype}: the loss over ranks is {mean[0]} and alone {mean[1]}.")
    dummy = torch.zeros(1, 2 * group.size(), KEY_HEADS, DIM)
    turns["T_c"] = exchange([dummy] * 4, group)
    lines, ideal, comm_s = lines_of(turns, group.size(), args.rounds)
    return result(
        f"training step, {model}, {shape.seq} tokens, {dtype}, zigzag ring, zero 1", lines, ideal, comm_s
    )


def result(title: str, lines: list[Line], ideal: float, comm_s: float) -> dict[str, Any]:
    return {"title": title, "T_g": ideal, "T_c": comm_s, "lines": [asdict(line) for line in lines]}


def show(found: dict[str, Any]) -> str:
    head = ["", "ms", "+-", "E", "R", "exposed"]
    rows = [
        [
            line["name"],
            f"{line['seconds'] * 1e3:.1f}",
            f"{line['spread']:.1%}",
            f"{line['E']:.3f}",
            f"{line['R']:.3f}",
            f"{line['exposed']:.1%}",
        ]
        for line in found["lines"]
    ]
    title = f"{found['title']}: T_g {found['T_g'] * 1e3:.1f} ms, T_c {found['T_c'] * 1e3:.1f} ms"
    return "\n".join([title, table(head, rows)])


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures, every round of them, to this file")
    parser.add_argument(
        "--seq", nargs="*", type=int, default=[8192, 32768], help="lengths of the whole sequence"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="to train")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} measures nothing; use at least 1.")
    return args


def main() -> None:
    args = arguments()
    with started("ring_attention.py", {"dp": 1, "cp": -1, "tp": 1}) as runtime:
        report = Report(args, HOW.format(rounds=args.rounds))
        for dtype in args.dtypes:
            for seq in args.seq:
                result = measure_attention(seq, dtype, args, comm.process_group(runtime.cp))
                report.add(result, show(result))
            for model in args.models:
                result = measure_training(model, dtype, args, runtime.cp, runtime.tp, runtime.dp)
                report.add(result, show(result))
        report.write(args.json)


if __name__ == "__main__":
    main()
