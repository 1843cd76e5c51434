"""Measures what a ledger costs a training step, and compares its bytes with the network interface's.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.overlap.ledger [--axis tp] [--json FILE]
    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- \\
        python -m bench.overlap.ledger --axis dp

Steps with and without a ledger take turns, each after one that is not counted. Reading the ledger's entries
counts in the step's time, as in a run. Between hosts (netlab gives each rank its own host and interface) the
bytes that left through the interface are compared with the ledger's sent bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import pyruntime
from bench.common.measuring import Report, Sample, interleave, parser_of, start_together, started
from bench.common.traffic import bytes_out
from bench.data_parallel.run import SHAPES, ours
from pyruntime.overlap import Stretch, table, total

PERCENTILES = (5, 10, 25, 50)
HOW = """\
Seconds of a training step (forward, backward, clipping, AdamW, zero 1, bf16) on the slowest rank, medians
over {rounds} rounds in which steps with and without a ledger take turns. "Cost": the median of the ratios
within a round, minus 1, +- half the interquartile range. Beside it the processor time of rank 0's thread, at
percentiles of all rounds; low percentiles are the least disturbed."""


def main() -> None:
    parser = parser_of(__doc__, rounds=40)
    parser.add_argument("--shape", choices=SHAPES, default="dim256")
    parser.add_argument("--axis", choices=("tp", "dp"), default="tp")
    args = parser.parse_args()
    with started({"tp": -1} if args.axis == "tp" else {"dp": -1, "tp": 1}) as runtime:
        torch.manual_seed(0 if args.axis == "tp" else runtime.rank)
        shape = SHAPES[args.shape]
        step, _ = ours(shape, torch.bfloat16, runtime.tp.mesh, runtime.dp.mesh, 1)
        ids, labels = (torch.randint(shape.vocab, (shape.micro_batch, shape.seq)) for _ in range(2))
        left: list[int] = []
        seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "entered": []}

        def plain() -> None:
            step(ids, labels)
            seconds["plain"].append(timed())

        def entered() -> None:
            with pyruntime.ledger() as ledger:
                step(ids, labels)
                ledger.take()
                before = bytes_out()
                seconds["entered"].append(timed(ledger.take))
                left.append(bytes_out() - before)

        def timed(take: Callable[[], Stretch] | None = None) -> tuple[float, float]:
            start, ran = start_together(), time.thread_time()
            step(ids, labels)
            if take is not None:
                taken.append(take())
            return time.perf_counter() - start, time.thread_time() - ran

        taken: list[Stretch] = []
        report = Report(args, HOW.format(rounds=args.rounds))
        for _ in range(3):
            step(ids, labels)
        interleave({"plain": plain, "entered": entered}, args.rounds)
        measured = torch.tensor([seconds["plain"], seconds["entered"]], dtype=torch.float64)
        at = torch.tensor(PERCENTILES, dtype=torch.float64) / 100
        ran = measured[..., 1].quantile(at, dim=1).tolist()
        slowest = measured[..., 0].contiguous()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        plain_s, entered_s = (Sample(tuple(row)) for row in slowest.tolist())
        cost = entered_s.over(plain_s)
        accounts = [stretch.account() for stretch in taken]
        whole = total(accounts)
        sent = sum(axis.bytes_sent for axis in whole.axes.values())
        figures = {
            "plain_s": plain_s.median,
            "entered_s": entered_s.median,
            "cost": cost.median - 1,
            "spread": cost.spread,
            "percentiles": PERCENTILES,
            "plain_ran_s": [row[0] for row in ran],
            "entered_ran_s": [row[1] for row in ran],
            "entries": sum(len(stretch.rows) for stretch in taken) / len(taken),
            "entries_lost": whole.lost,
            "sent_bytes": sent / len(accounts),
            "interface_bytes": sum(left) / len(left),
        }
        text = (
            f"{args.shape}, {args.axis}: {figures['plain_s'] * 1e3:.1f} ms without, "
            f"{figures['entered_s'] * 1e3:.1f} ms with a ledger; cost {figures['cost']:+.2%} +- "
            f"{figures['spread']:.2%}\n"
            + "".join(
                f"ran, percentile {percent}: {plain * 1e3:.2f} ms, {entered * 1e3:.2f} ms, "
                f"{entered / plain - 1:+.2%}\n"
                for percent, (plain, entered) in zip(PERCENTILES, ran, strict=True)
            )
            + f"{figures['entries']:.0f} entries a step\n"
            f"sent by the ledger {figures['sent_bytes'] / 1e6:.3f} MB a step, out of the interface "
            f"{figures['interface_bytes'] / 1e6:.3f} MB\n\n{table(whole)}"
        )
        report.add(figures, text)
        report.write(args.json)


if __name__ == "__main__":
    main()
