"""Meshes of 4D tensor parallelism on as many ranks: bytes over each axis beside the formulas, and seconds.

    python -m bench.netlab --hosts 4 --ranks-per-host 1 --rate 1gbit -- \\
        python -m bench.overlap.grid [--meshes 2x2x1 1x1x4] [--rounds 2] [--json FILE]

A mesh is x, y and z (docs/4d.md). Bytes are what a rank has read from its peers, by the transport's counters,
for one layer in one step: half the difference of models of 3 layers and of 1, and of runs of several steps
and of one. Of a step of one micro-batch for each rank of z: forward, backward, update.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import pyruntime
from bench.common.measuring import Report, parser_of
from bench.common.tables import table
from pyruntime import comm
from pyruntime.train.planned import of_llama
from pyruntime.comm import Runtime
from pyruntime.llama import Llama, LlamaConfig
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.traffic import bytes_of_step

MESHES = ("2x2x1", "1x2x2", "2x1x2", "4x1x1", "1x1x4")
LAYERS = (1, 3)
HOW = """\
fp32, {hidden} features, a sequence of {seq} tokens for each rank of z. MB of a layer and step: by the rank
that reads most, and by `bytes_of_step`, which leaves out what norms exchange. Step: the slowest rank's median
of {rounds}, of {layers} layers."""
AXES = ("x", "y", "z")


def config_of(layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
    )


def counters(runtime: Runtime) -> list[int]:
    """Bytes read over x, y and z until now."""
    over_y = 0 if runtime.tp_y is None else comm.stats(runtime.tp_y).bytes
    return [comm.stats(runtime.tp).bytes, over_y, comm.bytes_read("dp")]


def step_of(runtime: Runtime, config: LlamaConfig, seq: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of a model of that shape, and what ends it."""
    model = Llama(config, runtime.tp_grid)
    handle = pyruntime.shard(model, runtime.dp, stage=3, bucket_bytes=64 << 10)
    optimizer = handle.adamw(max_norm=1.0)
    torch.manual_seed(runtime.coordinate.dp)
    ids = torch.randint(config.vocab_size, (1, seq))

    def step() -> None:
        model(ids, ids).backward()
        optimizer.step()

    return step, handle.close


def measured(runtime: Runtime, hidden: int, seq: int, rounds: int) -> tuple[list[float], float]:
    """Of this rank: bytes of a layer over each axis, and seconds of a step of the larger model."""
    found: list[list[float]] = []
    seconds: list[float] = []
    for layers in LAYERS:
        few, _ = run(runtime, config_of(layers, hidden), seq, 1)
        many, seconds = run(runtime, config_of(layers, hidden), seq, 1 + rounds)
        found.append([(more - less) / rounds for less, more in zip(few, many, strict=True)])
    fewer, more = found
    per_layer = [(two - one) / (LAYERS[1] - LAYERS[0]) for one, two in zip(fewer, more, strict=True)]
    return per_layer, statistics.median(seconds[1:])


def run(runtime: Runtime, config: LlamaConfig, seq: int, steps: int) -> tuple[list[int], list[float]]:
    """Bytes of so many steps of a new model, from its beginning to its end, and seconds of each."""
    before, seconds = counters(runtime), []
    step, close = step_of(runtime, config, seq)
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    close()  # what steps have begun has come
    return [now - then for now, then in zip(counters(runtime), before, strict=True)], seconds


def expected(sizes: tuple[int, ...], hidden: int, seq: int, per_host: int) -> list[float]:
    """By the formulas."""
    x, y, z = sizes
    cluster = Cluster.of_ranks(per_host)
    of_layers = []
    for layers in LAYERS:
        job = Job(of_llama("", config_of(layers, hidden)), cluster, x * y * z, z, seq)
        found = bytes_of_step(job, Mesh(x=x, y=y, z=z, zero=0), element=4)
        of_layers.append([found["tp"], found["y"], found["gradients"] + found["weights"]])
    fewer, more = of_layers
    return [(two - one) / (LAYERS[1] - LAYERS[0]) for one, two in zip(fewer, more, strict=True)]


def main() -> None:
    parser = parser_of(__doc__, rounds=2)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--seq", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    how = HOW.format(hidden=args.hidden_size, seq=args.seq, rounds=args.rounds, layers=LAYERS[1])
    report = Report(args, how) if os.environ["RANK"] == "0" else None
    rows = []
    for name in args.meshes:
        sizes = tuple(map(int, name.split("x")))
        x, y, z = sizes
        with Runtime.start(tp=x, tp_y=y, dp=z) as runtime:
            told: list[Any] = [None] * world
            own = measured(runtime, args.hidden_size, args.seq, args.rounds)
            torch.distributed.all_gather_object(told, own)
        wanted = expected(sizes, args.hidden_size, args.seq, local)
        rows.append(
            {
                "mesh": name,
                "read": [max(each[0][axis] for each in told) for axis in range(3)],
                "expected": wanted,
                "seconds": max(each[1] for each in told),
            }
        )
    if report is not None:
        report.add({"rows": rows}, show(rows))
        report.write(args.json)


def show(rows: list[dict[str, Any]]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        pairs = zip(row["read"], row["expected"], strict=True)
        both = [f"{read / 1e6:.3f} ({wanted / 1e6:.3f})" for read, wanted in pairs]
        return [row["mesh"], *both, f"{row['seconds'] * 1e3:.0f}"]

    head = ["x, y, z", *(f"{axis}: MB read (formula)" for axis in AXES), "step ms"]
    return table(head, [cells(row) for row in rows])


if __name__ == "__main__":
    main()
