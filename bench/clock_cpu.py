"""Compares steps in virtual time with steps of two CPU ranks, by a table measured on them.

    python -m bench.clock_cpu [--hosts 2] [--rounds 3] [--meshes "tp 2" "ZeRO 3"] [--json FILE]

The table: GEMMs and attention of every shape that the program asks for, and a copy of its bytes, take what
they take on two processes at once. What is not in it are two numbers. A launch beside its work: such that a
step of one rank of the preset `tiny` takes as long as measured. How much longer work takes within a step,
where operands are not in a cache: such that a step of one rank of the same preset does. With them the steps
of two ranks are predicted; so it is their share of one rank's step that is compared.

A CPU rank has no streams and no copy engines: it reads its peers' memory in place, so a transfer takes
nothing by itself, and what the program puts on several streams counts one after the other. With two hosts
each has one rank, behind an emulated link of 1 Gbit/s (bench/netlab): a message takes its bytes at the rate
that TCP reaches there, and none of the cores' time. Attention around a ring is one kernel on CPUs, and on
devices many, which the table prices. Real runs and rounds of the table take turns, and the fastest step and
call count, because whatever else runs slows both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.common.launch import ROOT, between_hosts
from bench.common.measuring import facts
from bench.common.records import write_records
from bench.common.tables import table
from pyruntime.cli import train
from pyruntime.clock import device_build
from pyruntime.clock.simulated_step import Program, simulate
from pyruntime.clock.step_account import COMPUTING, WORK, Span
from pyruntime.ops.attention import causal_attention
from pyruntime.plan.cluster import Cluster

# The clock's experts get equal shares of the rows. A router that learns would send nearly all rows of these
# few steps to two experts, of one rank or of two.
EXPERTS = " --model.experts 8 --model.experts_per_token 2 --optimizer.lr 1e-12"
CONFIGS = {
    "dim256": "--config dim256",
    "dim1024": "--config dim1024",
    "experts256": "--config dim256 --model.expert_size 384" + EXPERTS,
    "experts1024": "--config dim1024 --model.expert_size 1408" + EXPERTS,
}
SETS_LAUNCH = "tiny"
"""The preset whose work is so small that its step tells what launches take."""
ONE_RANK = "one rank"
MESHES = {
    ONE_RANK: (1, "--parallel.tp 1"),
    "tp 2": (2, "--parallel.tp 2"),
    "ZeRO 1": (2, "--parallel.tp 1 --parallel.dp 2 --parallel.zero 1"),
    "ZeRO 3": (2, "--parallel.tp 1 --parallel.dp 2 --parallel.zero 3"),
    "cp 2": (2, "--parallel.tp 1 --parallel.cp 2 --parallel.zero 1"),
    "ZB-V": (2, "--parallel.tp 1 --parallel.pp 2 --pipeline.kind zb-v"),
    "ep 2": (2, "--parallel.tp 1 --parallel.dp 2 --parallel.ep 2 --parallel.zero 1"),
}
OF_EXPERTS = ("ZeRO 1", "ep 2")
TWO = [name for name in MESHES if name != ONE_RANK]
RATE = "1gbit"
TCP_BYTES_PER_S = 1e9 / 8 * 1448 / 1514
LATENCY_S = 1e-4
"""Seconds of a message through an idle link of bench/netlab."""
ALWAYS = "--train.dtype fp32 --train.val_every 0 --checkpoint.every_steps 0 --train.threads 1 "
ALWAYS += "--optimizer.on_bad_step skip"  # reads each step's norm, so that the host does not run ahead
REAL_STEPS, LEFT_OUT = 6, 2
"""Steps of a run, and those that first prepare it."""
LEAST_S, MOST_CALLS = 0.02, 200
"""The shortest time for which a work is repeated, and the most repetitions."""
Asked = tuple[str, tuple[int, ...]]
NO_TIME = {
    **dict.fromkeys(("call", "event", "put", "store", "signal"), 0.0),
    **dict.fromkeys(("message inside a host", "latency inside a host"), 0.0),
    "multiprocessors": 1.0,
    "multiprocessors of blocks": 0.0,
}
BETWEEN_HOSTS = ("message between hosts", "latency between hosts")


def two_ranks(hosts: int) -> Cluster:
    ranks = Cluster.of_ranks(2 // hosts)
    return dataclasses.replace(ranks, memory_bytes=64e9, peak_flops=1e12)


@dataclasses.dataclass
class CpuMachine:
    """Two cores, as the clock asks for them."""

    known: dict[Asked, float]
    """Seconds of works; others take a microsecond."""
    slower: float = 1.0
    """Seconds of a work within a step over those by itself."""
    launch: float = 0.0
    """Seconds of a launch beside its work."""
    hosts: int = 1
    name: str = "two CPU ranks"

    @property
    def cluster(self) -> Cluster:
        return two_ranks(self.hosts)

    def seconds(self, kind: str, sizes: Sequence[int]) -> float:
        if kind in NO_TIME:
            return NO_TIME[kind]
        if kind in BETWEEN_HOSTS:
            return sizes[0] / TCP_BYTES_PER_S if sizes else LATENCY_S
        launch = 0.0 if kind == "bytes" else self.launch  # others are in a launch that is asked for
        return self.known.get(work_of(kind, sizes), 1e-6) * self.slower + launch

    def exchanged(self, hosts: int) -> float:
        return 2 * (hosts - 1) * LATENCY_S


def work_of(kind: str, sizes: Sequence[int]) -> Asked:
    """Returns the work that is measured for a kind: what moves bytes takes what a copy of them takes."""
    moves = kind in ("bytes", "copy to host", "copy from host", "memory beside")
    return ("memory", tuple(sizes[:1])) if moves else (kind, tuple(sizes))


def options_of(config: str) -> list[str]:
    return [*CONFIGS.get(config, f"--config {config}").split(), *ALWAYS.split()]


def virtual_step(config: str, mesh: str, machine: CpuMachine) -> tuple[Program, ...]:
    """Simulates in a process of its own, and returns the step's programs."""
    gpus, flags = MESHES[mesh]
    if gpus == 1:  # on a host of its own
        machine = dataclasses.replace(machine, hosts=1)
    run, _ = train.read([*options_of(config), *flags.split()], gpus)
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)

    def inside() -> None:
        there.send(simulate(run, machine, gpus, keeps_spans=True).programs)  # type: ignore[arg-type]

    child = multiprocessing.get_context("fork").Process(target=inside)
    child.start()
    there.close()
    found = here.recv()
    child.join()
    return found


def on_one_thread(program: Program) -> float:
    """Returns the seconds of a step if one thread does the work of all streams: other streams' work counts
    too, except while the computing stream does nothing."""
    own = [each for each in program.spans if each[0] == COMPUTING]
    idle = [(begin, end) for _, begin, end, spent, *_ in own if spent != WORK]
    others = _works(program, of_computing=False)
    beside = sum(end - begin for _, begin, end, *_ in others)
    return program.account.step + beside - min(beside, sum(_common(each, idle) for each in others))


def _works(program: Program, of_computing: bool) -> list[Span]:
    return [each for each in program.spans if (each[0] == COMPUTING) == of_computing and each[3] == WORK]


def _common(span: Span, idle: Iterable[tuple[float, float]]) -> float:
    return sum(max(0.0, min(span[2], end) - max(span[1], begin)) for begin, end in idle)


def real_steps(config: str, mesh: str, hosts: int, folder: Path) -> float:
    """Returns the seconds of the fastest step of a run on ranks of this machine; a run of one rank is beside
    another, on one host."""
    ranks, flags = MESHES[mesh]

    def run(number: int) -> float:
        run_dir = folder / f"{mesh}-{number}-{time.monotonic_ns()}"
        options = f"--train.steps {REAL_STEPS} --train.device cpu --output.run_dir"
        trained = ["train", *options_of(config), *flags.split(), *options.split(), str(run_dir)]
        if ranks == hosts == 2:
            command = between_hosts("pyruntime", trained, RATE)
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            command += ["--standalone", "-m", "pyruntime", *trained]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{mesh}: the run has failed: {done.stderr[-2000:]}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return min(json.loads(line)["step_time_s"] for line in lines[LEFT_OUT:])

    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(run, range(2 // ranks)))


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds of the fastest call, of as many as fill LEAST_S."""
    call()
    taken: list[float] = []
    until = time.perf_counter() + LEAST_S
    while len(taken) < 3 or (time.perf_counter() < until and len(taken) < MOST_CALLS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def work_s(work: Asked) -> float:
    """Returns the seconds of a work on this rank. Raises ValueError for a kind that is not measured."""
    kind, sizes = work
    if kind == "memory":
        half = max(1, sizes[0] // 8)  # in elements, read and written
        x, y = torch.ones(half), torch.ones(half)
        return timed(lambda: y.copy_(x))
    if kind == "gemm":
        m, n, k, batch, size = (*sizes, *(1, 4)[len(sizes) - 3 :])[:5]
        dtype = torch.float32 if size == 4 else torch.bfloat16
        a, b = torch.randn(batch, m, k, dtype=dtype), torch.randn(batch, n, k, dtype=dtype).transpose(1, 2)
        return timed(lambda: torch.mm(a[0], b[0]) if batch == 1 else torch.bmm(a, b))
    if kind == "attention":
        batch, heads, key_heads, queries, keys, features, size, _, backward = sizes
        dtype = torch.float32 if size == 4 else torch.bfloat16
        q = torch.randn(batch, heads, queries, features, dtype=dtype, requires_grad=True)
        k, v = (torch.randn(batch, key_heads, keys, features, dtype=dtype, requires_grad=True) for _ in "kv")
        forward = timed(lambda: causal_attention(q.detach(), k.detach(), v.detach()))
        if not backward:
            return forward
        return timed(lambda: causal_attention(q, k, v)[0].sum().backward()) - forward
    raise ValueError(f"{kind} {sizes} is not measured here.")


def works_s(works: Sequence[Asked]) -> dict[Asked, float]:
    """Returns the seconds of works that two processes do at once, on the slower of them."""
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(2)

    def on_rank(end: Any) -> None:
        torch.set_num_threads(1)
        found = {}
        for work in works:
            together.wait()
            found[work] = work_s(work)
        end.send(found)

    ends, ranks = [], []
    for _ in range(2):
        here, there = fork.Pipe(duplex=False)
        ranks.append(fork.Process(target=on_rank, args=(there,)))
        ranks[-1].start()
        there.close()
        ends.append(here)
    first, second = (end.recv() for end in ends)
    for rank in ranks:
        rank.join()
    return {work: max(first[work], second[work]) for work in works}


def compared(config: str, meshes: Sequence[str]) -> list[str]:
    """Returns those of `meshes` on which a configuration is compared."""
    return [mesh for mesh in meshes if (mesh in OF_EXPERTS if EXPERTS in CONFIGS[config] else mesh != "ep 2")]


def compare(rounds: int, meshes: Sequence[str], configs: Sequence[str], hosts: int) -> list[dict[str, Any]]:
    """Returns the seconds of each configuration and mesh, measured and in virtual time, and their ratio."""
    runs = [(SETS_LAUNCH, ONE_RANK)]
    runs += [(config, mesh) for config in configs for mesh in (ONE_RANK, *compared(config, meshes))]
    empty = CpuMachine({}, hosts=hosts)
    asked = [program for run in runs for program in virtual_step(*run, empty)]
    unmeasured = {*NO_TIME, *BETWEEN_HOSTS}
    works = sorted(
        {work_of(*each) for program in asked for each in program.works if each[0] not in unmeasured}
    )
    known = dict.fromkeys(works, math.inf)
    measured = dict.fromkeys(runs, math.inf)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            known = {work: min(known[work], seconds) for work, seconds in works_s(works).items()}
            measured = {run: min(measured[run], real_steps(*run, hosts, Path(folder))) for run in runs}
    launch = _left(measured, SETS_LAUNCH, CpuMachine(known, slower=1.0), CpuMachine(known, 1.0, 1.0))
    results = []
    for config in configs:
        slower = _left(measured, config, CpuMachine(known, 0.0, launch), CpuMachine(known, 1.0, launch))
        machine = CpuMachine(known, slower, launch, hosts)
        for mesh in compared(config, meshes):
            seconds = measured[config, mesh]
            virtual = max(map(on_one_thread, virtual_step(config, mesh, machine)))
            about = {"config": config, "mesh": mesh, "hosts": hosts, "slower": slower, "launch_s": launch}
            about["one_rank_s"] = measured[config, ONE_RANK]
            results.append({**about, "measured_s": seconds, "virtual_s": virtual, "ratio": virtual / seconds})
    return results


def _left(
    measured: dict[tuple[str, str], float], config: str, without: CpuMachine, once: CpuMachine
) -> float:
    """Returns how often a step of one rank has what one machine has once and the other not, so that it takes
    as long as measured. Raises ValueError if it is negative."""
    (first,), (second,) = (virtual_step(config, ONE_RANK, each) for each in (without, once))
    begin, end = on_one_thread(first), on_one_thread(second)
    found = (measured[config, ONE_RANK] - begin) / (end - begin)
    if found < 0:
        raise ValueError(
            f"A step of one rank of {config} took {measured[config, ONE_RANK]:.4f} s, less than {begin:.4f} "
            "s by the table: other programs have slowed it. Run it again while nothing else runs."
        )
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="default %(default)s")
    parser.add_argument(
        "--configs", nargs="+", choices=list(CONFIGS), default=list(CONFIGS), help="default: all"
    )
    parser.add_argument("--meshes", nargs="+", choices=TWO, default=TWO, help="default: all")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    options = parser.parse_args(argv)
    device_build.build()
    found = compare(options.rounds, options.meshes, options.configs, options.hosts)
    rows = [
        [
            f"{each['config']}, {each['mesh']}",
            f"{1e3 * each['measured_s']:.0f}",
            f"{1e3 * each['virtual_s']:.0f}",
            f"{each['ratio']:.2f}",
        ]
        for each in found
    ]
    print(table(["ms a step", "measured", "virtual", "ratio"], rows))
    slower = {each["config"]: f"{each['slower']:.2f} in {each['config']}" for each in found}
    print(
        f"Set by {ONE_RANK}: a launch takes {1e6 * found[0]['launch_s']:.0f} us, and work takes longer "
        f"within a step than by itself by {', '.join(slower.values())}."
    )
    if options.json:
        write_records(options.json, {"facts": facts(), "results": found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
