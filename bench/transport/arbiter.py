"""Measures how long an urgent chunk waits while a large bucket is sent, with and without the arbiter.

    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- \
        python -m bench.transport.arbiter [--json FILE]

A tensor-parallel group gathers a small operand again and again. Meanwhile a data-parallel group of the same
ranks reduce-scatters buckets, one after the other, from another thread. Three cases take turns: no bucket,
buckets with the arbiter's order, and buckets in the order of arrival.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

import pyruntime
from bench.common.measuring import facts, parser_of, write_json
from bench.common.tables import table
from pyruntime import comm

HOW = """\
wait      from the moment when a tp chunk is ready to leave until the arbiter sends it
chunk     time of a chunk of the bucket from sending to arrival (median)
gather    seconds of one tp gather for its caller
Percentiles over all chunks and gathers of all turns, on the rank where they are largest."""
CASES = ("alone", "arbiter", "fifo")


@dataclass(frozen=True)
class Result:
    case: str
    wait_p50_s: float
    wait_p99_s: float
    bucket_chunk_s: float
    wait_p99_chunks: float  # in chunk times of the bucket
    gather_p50_s: float
    gather_p99_s: float
    bucket_s: float  # of one bucket, median


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class Buckets:
    """A thread that reduce-scatters `count` buckets, one after the other."""

    def __init__(self, group: dist.ProcessGroup, megabytes: float, count: int):
        self.group, self.count = group, count
        self.bucket = torch.randn(int(megabytes * 1e6) // 4 // 1024, 1024)
        self.seconds: list[float] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for _ in range(self.count):
            start = time.perf_counter()
            pyruntime.reduce_scatter(self.bucket, self.group)
            self.seconds.append(time.perf_counter() - start)

    def __enter__(self) -> Buckets:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join()


def turn(case: str, tp, dp, args: argparse.Namespace, seen: dict[str, list[float]]) -> None:
    """Takes one turn of one case and appends the measurements. Gathers continue while rank 0 has open
    buckets: its messages say so, so that all ranks gather equally often."""
    comm.core._C.set_arbiter_fifo(case == "fifo")
    dist.barrier()
    comm.core._C.reset_traffic()
    rows = int(args.tp_kilobytes * 1e3) // 4 // 256
    own = torch.randn(rows, 256)
    with Buckets(dp, args.bucket_megabytes, 0 if case == "alone" else args.buckets) as buckets:
        for number in range(10**6):
            own[0, 0] = number < args.gathers if case == "alone" else buckets.thread.is_alive()
            start = time.perf_counter()
            gathered = pyruntime.all_gather(own, tp, rows=rows * dist.get_world_size())
            seen["gather"].append(time.perf_counter() - start)
            if not gathered[0, 0]:
                break
            time.sleep(args.pause_ms * 1e-3)
    figures = comm.traffic()
    seen["wait"] += figures["tp"].recent_queued_s
    if case != "alone":
        seen["chunk"] += figures["dp"].recent_transfer_s
        seen["bucket"] += buckets.seconds
    comm.core._C.set_arbiter_fifo(False)


def largest(value: float) -> float:
    agreed = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.item()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--bucket-megabytes", type=float, default=64, help="fp32; default %(default)s")
    parser.add_argument("--tp-kilobytes", type=float, default=64, help="a rank's rows; default %(default)s")
    parser.add_argument("--buckets", type=int, default=3, help="a turn; default %(default)s")
    parser.add_argument(
        "--gathers", type=int, default=100, help="of a turn without buckets; default %(default)s"
    )
    parser.add_argument("--pause-ms", type=float, default=2, help="between two gathers; default %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="turns of each case; default %(default)s")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with pyruntime.Runtime.start() as runtime:
        tp, dp = runtime.tp.group, dist.new_group(list(range(dist.get_world_size())))
        comm.configure(dp, traffic_class="dp")
        # On one host nothing would be sent; under netlab "auto" chooses this one.
        for group in (tp, dp):
            comm.configure(group, transport="process_group")
        seen = {case: {name: [] for name in ("wait", "chunk", "gather", "bucket")} for case in CASES}
        for number in range(args.turns + 1):
            for case in CASES:
                unused: dict[str, list[float]] = {name: [] for name in seen[case]}
                turn(case, tp, dp, args, seen[case] if number else unused)  # the first turn warms up
        results = []
        for case in CASES:
            figures = seen[case]
            chunk = statistics.median(figures["chunk"]) if figures["chunk"] else float("nan")
            bucket = statistics.median(figures["bucket"]) if figures["bucket"] else float("nan")
            wait = largest(percentile(figures["wait"], 0.99))
            results.append(
                Result(
                    case,
                    largest(percentile(figures["wait"], 0.5)),
                    wait,
                    chunk,
                    wait / chunk,
                    largest(percentile(figures["gather"], 0.5)),
                    largest(percentile(figures["gather"], 0.99)),
                    bucket,
                )
            )
        if runtime.rank == 0:
            where = facts()
            print(f"{where['machine']}\n{where['ranks']} ranks, {where['date']}")
            print(f"{comm.transport_of(dp)}\n\n{HOW}\n")
            head = [
                "case",
                "wait p50 ms",
                "p99",
                "chunk ms",
                "p99 in chunks",
                "gather p50 ms",
                "p99",
                "bucket ms",
            ]
            lines = [
                [result.case]
                + [
                    f"{1e3 * value:.2f}"
                    for value in (result.wait_p50_s, result.wait_p99_s, result.bucket_chunk_s)
                ]
                + [f"{result.wait_p99_chunks:.2f}"]
                + [
                    f"{1e3 * value:.2f}"
                    for value in (result.gather_p50_s, result.gather_p99_s, result.bucket_s)
                ]
                for result in results
            ]
            print(table(head, lines))
            if args.json:
                settings = {**vars(args), "transport": comm.transport_of(dp), "how": HOW}
                write_json(args.json, where, settings, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
