"""Times training steps of a tensor-parallel Llama with whole sequences and with causal slices, in turns.

    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- \\
        python -m bench.overlap.slices [--shape dim1024] [--slices 1 2 4] [--rounds 8] [--json FILE]

Choose a rate at which transfers take about as long as computing; waits are the exposed time.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

import pyruntime
from bench.common.measuring import Report, Sample, interleave, parser_of, start_together, started
from bench.common.tables import table
from bench.data_parallel.run import SHAPES
from bench.training.workers import DTYPES
from pyruntime.llama import Llama, LlamaConfig
from pyruntime.overlap import Account

HOW = """\
Seconds of forward and backward of one micro-batch ({dtype}, no optimizer) on the slowest rank, medians over
{rounds} rounds in which the lines take turns. The next columns are from the ledger of one earlier round, for
the computing thread: waits for peers, computing, copying and summing, the rest; of the rank that waited
least, as waiting for a slower rank is no wait for a link. "Processor": processor seconds of one process for a
step, all threads; on shared cores it says more than the clock."""


def main() -> None:
    parser = parser_of(__doc__, rounds=8)
    parser.add_argument("--shape", choices=SHAPES, default="dim1024")
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, help="default: those of the shape")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    args = parser.parse_args()
    with started({"tp": -1}) as runtime:
        shape = SHAPES[args.shape]
        config = LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn,
            num_hidden_layers=args.layers or shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.seq,
        )
        torch.manual_seed(0)
        ids, labels = (torch.randint(shape.vocab, (shape.micro_batch, shape.seq)) for _ in range(2))
        times: dict[str, list[list[float]]] = {}
        cpu: dict[str, list[float]] = {}
        spent: dict[str, list[float]] = {}
        turns = {}
        for count in args.slices:
            model = Llama(config, runtime.tp, dtype=DTYPES[args.dtype], slices=count)
            times[name := f"slices {count}"] = [[], []]
            cpu[name] = []

            def turn(model=model, name=name) -> None:
                start, cpu_start = start_together(), time.process_time()
                loss = model(ids, labels)
                middle = time.perf_counter()
                loss.backward()
                end = time.perf_counter()
                times[name][0].append(middle - start)
                times[name][1].append(end - middle)
                cpu[name].append(time.process_time() - cpu_start)
                model.zero_grad()

            turns[name] = turn
        report = Report(args, HOW.format(rounds=args.rounds, dtype=args.dtype))
        for turn in turns.values():
            turn()
            turn()
        for name, turn in turns.items():
            with pyruntime.ledger() as ledger:
                turn()
            spent[name] = parts(ledger.account())
        for name in times:
            times[name] = [[], []]
            cpu[name] = []
        interleave(turns, args.rounds)
        for name, seconds in cpu.items():
            spent[name].append(statistics.median(seconds))
        slowest = torch.tensor(list(times.values()), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        least = torch.tensor(list(spent.values()), dtype=torch.float64)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        rows, first = [], None
        for name, (forward, backward), waited in zip(times, slowest, least.tolist(), strict=True):
            found = [Sample(tuple(part.tolist())) for part in (forward, backward, forward + backward)]
            first = first or found
            ratios = [sample.over(other) for sample, other in zip(found, first, strict=True)]
            report.results.append(
                {"name": name, "seconds": [each.median for each in found], "parts_s": waited}
            )
            rows.append(
                [name]
                + [
                    f"{sample.median * 1e3:.0f} ({ratio.median:.2f} +- {ratio.spread:.2f})"
                    for sample, ratio in zip(found, ratios, strict=True)
                ]
                + [f"{each * 1e3:.0f}" for each in waited]
            )
        heads = [
            "",
            "forward ms (of the first)",
            "backward",
            "both",
            "waits ms",
            "computing",
            "moving",
            "rest",
            "processor",
        ]
        report.add({}, table(heads, rows))
        report.write(args.json)


def parts(account: Account) -> list[float]:
    """Returns seconds of waits, computing, copying and summing, and the rest."""
    moving = account.copying_s + account.summing_s
    return [account.exposed_s, account.computing_s, moving, account.rest_s]


if __name__ == "__main__":
    main()
