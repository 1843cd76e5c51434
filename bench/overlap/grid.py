"""Measures meshes of 4D tensor parallelism on the same ranks: bytes over each axis beside the formulas, and
steps against their limits.

    python -m bench.netlab --hosts 4 --ranks-per-host 1 --rate 1gbit -- \\
        python -m bench.overlap.grid [--meshes 2x2x1 1x1x4] [--rounds 5] [--json FILE]

A mesh is x, y and z (docs/explanation/primitives.md). Bytes are those that a rank reads from its peers for
one layer in one step, by the transport's counters: half the difference between models of 3 layers and of 1,
and between runs of several steps and of one. A step is one micro-batch for each rank of z: forward, backward,
update.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from bench.common.limits import LIMITS_HEAD, Held, Turn, limits_cells
from bench.common.measuring import Report, interleave, parser_of
from bench.common.plain_llama import Shape
from bench.common.tables import table
from bench.data_parallel.run import SHAPES, ours, ours_alone
from bench.training.workers import CLIP
from pyruntime import comm
from pyruntime.comm import Runtime
from pyruntime.comm.exchange import gather
from pyruntime.llama import Llama, LlamaConfig
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.traffic import bytes_of_step
from pyruntime.train.planned import of_llama

MESHES = ("2x2x1", "1x2x2", "2x1x2", "4x1x1", "1x1x4")
LAYERS = (1, 3)
COUNTED = 2
"""Steps after the first whose bytes are counted."""
ALONE, OURS = "alone", "ours"
HOW = """\
MB of a layer and step: fp32, {hidden} features, a sequence of {seq} tokens for each rank of z; of the rank
that reads most, and by `bytes_of_step`, which leaves out the exchanges of norms.

Step: {shape} in bf16, a sequence of {tokens} tokens for each rank of z, clipped; of the slowest rank, medians
of {rounds} rounds in which all lines take turns. T_g: every rank trains the whole model alone at the same
time; its seconds are divided by x y. T_c: the time to send as many bytes as ours, both ways, without
computation. R = step / max(T_g, T_c). Loaded: T_g while as many bytes pass unrelated and are awaited only at
the end. Waits: share of a step, by the ledger."""
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
    """Returns the bytes read over x, y and z until now."""
    over_y = 0 if runtime.tp_y.mesh is None else comm.stats(runtime.tp_y).bytes
    return [comm.stats(runtime.tp).bytes, over_y, comm.bytes_read("dp")]


def step_of(runtime: Runtime, config: LlamaConfig, seq: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns a step of a model of that shape, and a function that ends it."""
    model = Llama(config, runtime.tp_grid, device=runtime.device)
    handle = pyruntime.shard(model, runtime.dp, stage=3, bucket_bytes=64 << 10)
    optimizer = handle.adamw(max_norm=1.0)
    torch.manual_seed(runtime.coordinate.dp)
    ids = torch.randint(config.vocab_size, (1, seq)).to(runtime.device)

    def step() -> None:
        model(ids, ids).backward()
        optimizer.step()

    return step, handle.close


def measured(runtime: Runtime, hidden: int, seq: int) -> list[float]:
    """Returns the bytes that this rank reads for a layer over each axis."""
    found: list[list[float]] = []
    for layers in LAYERS:
        few = run(runtime, config_of(layers, hidden), seq, 1)
        many = run(runtime, config_of(layers, hidden), seq, 1 + COUNTED)
        found.append([(more - less) / COUNTED for less, more in zip(few, many, strict=True)])
    fewer, more = found
    return [(two - one) / (LAYERS[1] - LAYERS[0]) for one, two in zip(fewer, more, strict=True)]


def run(runtime: Runtime, config: LlamaConfig, seq: int, steps: int) -> list[int]:
    """Returns the bytes of `steps` steps of a new model, from its creation to its end."""
    before = counters(runtime)
    step, close = step_of(runtime, config, seq)
    for _ in range(steps):
        step()
    close()  # waits for the transfers that steps have begun
    return [now - then for now, then in zip(counters(runtime), before, strict=True)]


def limits(runtime: Runtime, shape: Shape, one: DeviceMesh, inside: int, rounds: int) -> dict[str, Any]:
    """Measures a step of that shape and its limits. one: this rank alone; inside: x y."""
    torch.manual_seed(runtime.coordinate.dp)
    ids, labels = (torch.randint(shape.vocab, (shape.micro_batch, shape.seq)) for _ in range(2))
    alone = ours_alone(shape, torch.bfloat16, one, CLIP)
    step, handle = ours(shape, torch.bfloat16, runtime.tp_grid, runtime.dp.mesh, stage=3)
    turns: dict[str, Turn] = {ALONE: lambda: alone(ids, labels), OURS: lambda: step(ids, labels)}
    for turn in turns.values():
        turn()
    held = Held(turns, OURS, [ALONE], shares=inside)
    found = asdict(held.limits(interleave(turns, rounds)))
    handle.close()
    return found


def expected(sizes: tuple[int, ...], hidden: int, seq: int, per_host: int) -> list[float]:
    """Returns the bytes over each axis by the formulas."""
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
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--hidden-size", type=int, default=512, help="features for the bytes; default 512")
    parser.add_argument("--seq", type=int, default=256, help="likewise; default 256")
    parser.add_argument("--shape", choices=SHAPES, default="dim1024", help="shape of a step; default dim1024")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyruntime.keep_freed_memory()
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    shape = SHAPES[args.shape]
    report = None
    for name in args.meshes:
        sizes = tuple(map(int, name.split("x")))
        x, y, z = sizes
        with Runtime.start(tp=x, tp_y=y, dp=z) as runtime:
            if report is None:
                how = HOW.format(
                    hidden=args.hidden_size,
                    seq=args.seq,
                    shape=args.shape,
                    tokens=shape.seq,
                    rounds=args.rounds,
                )
                report = Report(args, how)
            own = measured(runtime, args.hidden_size, args.seq)
            told = gather(torch.distributed.group.WORLD, "Gathering what was read", own, list[float])
            ranks = torch.arange(world).view(world, 1)
            one = DeviceMesh("cpu", ranks, mesh_dim_names=("others", "one"))["one"]
            result = {
                "mesh": name,
                "read": [max(each[axis] for each in told) for axis in range(3)],
                "expected": expected(sizes, args.hidden_size, args.seq, local),
                "limits": limits(runtime, shape, one, x * y, args.rounds),
            }
        report.add(result, show(result))
        report.write(args.json)


def show(result: dict[str, Any]) -> str:
    pairs = zip(result["read"], result["expected"], strict=True)
    both = [f"{read / 1e6:.3f} ({wanted / 1e6:.3f})" for read, wanted in pairs]
    found = result["limits"]
    times = [f"{found[name]['median'] * 1e3:.0f}" for name in ("ours", "T_g")]
    head = ["x, y, z", *(f"{axis}: MB read (formula)" for axis in AXES), "step ms", "T_g ms", *LIMITS_HEAD]
    return table(head, [[result["mesh"], *both, *times, *limits_cells(found)]])


if __name__ == "__main__":
    main()
