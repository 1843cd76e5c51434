"""`python -m pyruntime plan --measure FILE`: measures this machine and writes it as a cluster file.

One process times GEMMs, attention and memory; under torchrun (or bench/netlab) also the links between ranks.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import pyruntime
from pyruntime import comm
from pyruntime.cli.arguments import writing
from pyruntime.cli.environment import check_started, started_rank, started_ranks
from pyruntime.comm.core import _C
from pyruntime.comm.runtime import DEFAULT_DEADLINE_S
from pyruntime.llama.attention import causal_attention
from pyruntime.ops.primitives import linear
from pyruntime.plan.cluster import to_toml
from pyruntime.plan.measured import AlphaBeta, cluster_of, fit_alpha_beta
from pyruntime.plan.step import FLASH_BACKWARD
from pyruntime.train.errors import ConfigError
from pyruntime.train.watching.peak import ROUNDS, gemm_flops, median_seconds

SIZES = tuple(2**power for power in range(14, 25, 2))
"""Bytes of each timed all-gather, over all ranks."""
GEMMS_OVER_WAIT = 2.5
"""Seconds of the GEMMs that hide an all-gather, divided by the seconds of the all-gather alone."""
ATTEMPTS = 3
"""Attempts to separate the cost of a transfer, alone or beside GEMMs, from noise."""


def main(path: str) -> None:
    """Measures and writes the TOML file. Every rank calls it."""
    torch.set_num_threads(1)
    check_started()
    ranks = started_ranks()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=DEFAULT_DEADLINE_S))
    try:
        fitted, received, together = (None, 0.0, lambda: None) if ranks == 1 else _links(ranks)
        flops, attention, copied = _gemms(together), _attention(together), _copies(together)
        share = _core_share(flops)
    finally:
        if ranks > 1:
            dist.destroy_process_group()  # while Python lives: its threads may still free tensors
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
    if started_rank():
        return
    hosts = ranks // local
    cluster = cluster_of(
        Path(path).stem,
        f"measured: {hosts} host(s) of {local} rank(s), one thread each",
        flops=flops,
        attention_flops=attention,
        memory_bytes=float(memory),
        memory_bandwidth=copied,
        ranks_per_host=local,
        inside=fitted if hosts == 1 else None,
        between=fitted if hosts > 1 else None,
        core_bandwidth=received or copied / 2,  # each received byte is read and written
        core_share=share,
    )
    with writing(f"--measure {path}:"):
        Path(path).write_text(to_toml(cluster), encoding="utf-8")
    print(f"GEMMs      {flops / 1e9:,.1f} GFLOP/s in bf16\nattention  {attention / 1e9:,.1f} GFLOP/s")
    print(f"memory     {copied / 1e9:,.1f} GB/s of reading and writing")
    if fitted is None:
        print("links      not measured: start it with torchrun on as many ranks as you have")
    else:
        print(
            f"links      {fitted.alpha * 1e6:,.0f} us a step and {fitted.bandwidth / 1e9:,.2f} GB/s a rank, "
            f"fitted to {len(SIZES)} sizes with an error of {fitted.error:.0%}; GEMMs lose a second "
            f"for every {received / 1e9:,.2f} GB sent beside them"
        )
    print(f"{path} is a cluster for --cluster.")


def _gemms(together: Callable[[], object]) -> float:
    return gemm_flops(1024, torch.bfloat16, together)


def _core_share(flops: float) -> float:
    """Returns `flops`, measured on all ranks at once, divided by rank 0's while the others wait (waiting
    costs next to nothing). At most 1."""
    if not dist.is_initialized():
        return 1.0
    alone = torch.tensor(_gemms(lambda: None) if dist.get_rank() == 0 else 0.0)
    dist.broadcast(alone, 0)  # the others wait here
    return min(1.0, flops / float(alone))


def _attention(together: Callable[[], object]) -> float:
    """Returns operations/s of the model's causal attention, both passes, as the planner counts them."""

    heads, seq, width = 8, 512, 64
    q, k, v = (torch.randn(1, heads, seq, width).bfloat16().requires_grad_() for _ in range(3))
    flops = 2.0 * seq * heads * width * seq * (1 + FLASH_BACKWARD)
    return flops / median_seconds(lambda: causal_attention(q, k, v).sum().backward(), together)


def _copies(together: Callable[[], object]) -> float:

    source, target = torch.ones(2**24), torch.empty(2**24)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), together)


def _links(ranks: int) -> tuple[AlphaBeta, float, Callable[[], object]]:
    """Returns the fitted time of an all-gather over all ranks, the bytes received per second that it delays
    GEMMs beside it, and a barrier."""
    group = dist.group.WORLD
    shards = [torch.ones(size // ranks // 4, 1) for size in SIZES]

    def seconds(shard: torch.Tensor) -> float:
        mine = torch.tensor(median_seconds(lambda: pyruntime.all_gather(shard, group), dist.barrier))
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return float(mine)

    fitted, measured = link_of(lambda: [seconds(shard) for shard in shards], ranks)
    received = SIZES[-1] * (ranks - 1) / ranks
    return fitted, received / _own_seconds(group, shards[-1], measured[-1]), dist.barrier


def link_of(measure: Callable[[], list[float]], ranks: int) -> tuple[AlphaBeta, list[float]]:
    """Returns alpha and beta, and the medians they are fitted to. Measures again, at most ATTEMPTS times,
    until seconds rise with the size. Raises ConfigError if they never do."""
    rounds: list[list[float]] = []
    for _ in range(ATTEMPTS):
        rounds.append(measure())
        medians = [statistics.median(of_size) for of_size in zip(*rounds, strict=True)]
        with contextlib.suppress(ValueError):
            return fit_alpha_beta(SIZES, medians, ranks), medians
    raise ConfigError(
        f"--measure: all-gathers of {SIZES[-1] / 1e6:.0f} MB took hardly longer than those of "
        f"{SIZES[0] / 1e3:.0f} kB, {ATTEMPTS} times over: other work on this machine hides what transfers "
        "cost. Run it again when the machine is idle."
    )


def _own_seconds(group: dist.ProcessGroup, shard: torch.Tensor, wait: float) -> float:
    """Returns the seconds by which an all-gather of `shard` delays a rank's GEMMs that run beside it. The
    GEMMs take GEMMS_OVER_WAIT times `wait`, the seconds of the all-gather alone."""
    x, w = (torch.randn(512, 512).bfloat16() for _ in range(2))

    def multiply(times: int) -> None:
        for _ in range(times):
            linear(x, w)

    one = torch.tensor(median_seconds(lambda: multiply(8), dist.barrier) / 8)
    dist.all_reduce(one, dist.ReduceOp.MAX)
    times = 1 + int(GEMMS_OVER_WAIT * wait / float(one))
    whole = torch.empty(comm.group_size(group) * len(shard), 1)

    def beside() -> None:
        gather = _C.LineGather(comm.group_name(group), len(whole), 1, whole.dtype, "cpu")
        for index, (begin, count) in enumerate(gather.own_chunks()):
            first = begin % len(shard)
            gather.own(index).copy_(shard[first : first + count])
            gather.publish(index)
        multiply(times)
        for index, (begin, count) in enumerate(gather.chunks()):
            whole[begin : begin + count].copy_(gather.chunk(index))
        gather.finish()

    more: list[float] = []
    multiply(times)
    beside()
    for attempt in range(ATTEMPTS):
        for _ in range(ROUNDS * 2**attempt):
            took = []
            for run in (lambda: multiply(times), beside):
                dist.barrier()
                started = time.perf_counter()
                run()
                took.append(time.perf_counter() - started)
            more.append(took[1] - took[0])
        own = torch.tensor(statistics.median(more))
        dist.all_reduce(own, dist.ReduceOp.MAX)
        if own > 0:
            return float(own)
    raise ConfigError(
        f"--measure: GEMMs under which {whole.nbytes / 1e6:.0f} MB were gathered took no longer than "
        f"those without, in {len(more)} rounds: other work on this machine hides what transfers cost. Run it "
        "again when the machine is idle."
    )
