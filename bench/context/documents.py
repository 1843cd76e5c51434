"""Times attention to packed documents over the layouts of context parallelism.

    python -m bench.netlab --hosts 4 --ranks-per-host 1 --rate 200mbit -- \\
        python -m bench.context.documents [--layouts placed zigzag balanced striped] [--json FILE]

Every layout computes the same attention, forward and backward; the first call of each is compared with the
others' results.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.common.measuring import interleave, parser_of, report_each, started
from bench.common.tables import table
from bench.context.run import TOLERANCE, Turn, inputs
from bench.training.workers import DTYPES
from pyruntime import comm
from pyruntime.context import LAYOUTS, positions, ring_attention, take_shard
from pyruntime.context.layouts import document_bounds

MIXES = {
    "one of half, the rest short": (1, 2, 1024),
    "all short": (0, 1, 1024),
    "one document": (1, 1, 0),
    "Pareto": (0, 1, 0),
}
"""Long documents, each of 1/n of the sequence; then others of at most so many tokens, of any length if 0."""
HOW = """\
Milliseconds of a forward and backward pass of attention on the slowest rank, medians over {rounds} rounds.
Within a round every layout takes one turn, in shuffled order, started together on all ranks. Attention: that
of the rank with most, beside the mean. Sent: MB of the rank that sends most, a pass."""


def lengths_of(mix: str, seq: int) -> list[int]:
    """Returns the lengths of documents that fill the sequence, the same on every rank."""
    long, part, short = MIXES[mix]
    draw, found = random.Random(seq), [seq // part] * long
    while (left := seq - sum(found)) > 0:
        most = min(left, short or left)
        found.append(min(most, int(draw.paretovariate(0.8) * 128) if not short else draw.randint(16, short)))
    draw.shuffle(found)
    return found


def over_ranks(whole: list[Tensor], ids: Tensor, group: Any, layout: str) -> Turn:
    shards = [take_shard(x, layout, group.size(), group.rank(), ids) for x in whole]
    leaves = [x.detach().requires_grad_() for x in shards[:3]]

    def run() -> list[Tensor]:
        out = ring_attention(*leaves, group, layout=layout, document_ids=ids)
        return [out.detach(), *torch.autograd.grad(out, leaves, shards[3])]

    return run


def norms(found: list[Tensor], group: Any) -> Tensor:
    """Returns the norms of out, dq, dk and dv over all ranks."""
    squares = torch.stack([x.double().square().sum() for x in found])
    torch.distributed.all_reduce(squares, group=group)
    return squares.sqrt()


def measure(mix: str, seq: int, dtype: str, layouts: list[str], rounds: int, group: Any) -> dict[str, Any]:
    lengths, ranks = lengths_of(mix, seq), group.size()
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    whole = inputs(seq, DTYPES[dtype])
    turns = {layout: over_ranks(whole, ids, group, layout) for layout in layouts}
    work = torch.arange(seq) - document_bounds(ids)[0][0] + 1
    lines, first = {}, None
    for layout, turn in turns.items():
        found = norms(turn(), group)
        first = found if first is None else first
        if not (found - first).abs().max() <= TOLERANCE[dtype] * first.max():
            raise RuntimeError(f"{mix}, {layout}: the norms of the results are {found}, others' {first}.")
        before = comm.traffic()["cp"].bytes_sent
        turn()
        sent = torch.tensor([comm.traffic()["cp"].bytes_sent - before], dtype=torch.float64)
        torch.distributed.all_reduce(sent, torch.distributed.ReduceOp.MAX, group=group)
        of_ranks = work[positions(layout, seq, ranks, ids)].sum(1).double()
        lines[layout] = {"sent_mb": sent.item() / 1e6, "attention": (of_ranks.max() / of_ranks.mean()).item()}
    samples = interleave(turns, rounds)
    for layout, sample in samples.items():
        lines[layout] |= {"seconds": sample.median, "spread": sample.spread, "rounds": list(sample.rounds)}
    return {"mix": mix, "seq": seq, "dtype": dtype, "documents": len(lengths), "lines": lines}


def show(found: dict[str, Any]) -> str:
    fastest = found["lines"][next(iter(found["lines"]))]["seconds"]
    rows = [
        [
            layout,
            f"{line['seconds'] * 1e3:.0f}",
            f"{line['spread']:.0%}",
            f"{line['seconds'] / fastest:.2f}",
            f"{line['attention']:.2f}",
            f"{line['sent_mb']:.1f}",
        ]
        for layout, line in found["lines"].items()
    ]
    title = f"{found['mix']}: {found['documents']} documents, {found['seq']} tokens, {found['dtype']}"
    return "\n".join([title, table(["", "ms", "+-", "of the first", "attention", "sent"], rows)])


def measure_all(args: Any, group: Any) -> Iterator[dict[str, Any]]:
    for mix, dtype in itertools.product(args.mixes, args.dtypes):
        yield measure(mix, args.seq, dtype, args.layouts, args.rounds, group)


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--seq", type=int, default=16384, help="tokens of the sequence; default %(default)s")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=["placed", "zigzag", "balanced", "striped"]
    )
    args = parser.parse_args()
    with started({"cp": -1, "tp": 1}) as runtime:
        group = comm.process_group(runtime.cp.mesh)
        report_each(args, HOW.format(rounds=args.rounds), measure_all(args, group), show)


if __name__ == "__main__":
    main()
