"""Takes times, in tuning and in the benchmarks, by three rules.

Variants take turns within a round, in a new shuffled order each round, so a machine that slows down slows all
of them. The ranks start each timing together. A round's time is the slowest rank's, a variant's time the
median over rounds.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pyruntime.comm.exchange import named_failures

LEAD_S = 0.001  # between agreeing on a start and starting: longer than the message that agrees takes


@dataclass(frozen=True)
class Sample:
    """One value for each round, in order."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.rounds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def over(self, other: Sample) -> Sample:
        """Returns this divided by `other`, round by round: what slowed both in a round cancels."""
        return Sample(tuple(a / b for a, b in zip(self.rounds, other.rounds, strict=True)))


def start_together(group: dist.ProcessGroup | None = None) -> float:
    """Returns on all ranks of a group (None: of the job) at the same moment, with that moment in seconds of
    `time.perf_counter`.

    On one host that clock is the same for all processes: the ranks agree on a time and wait for it. Ranks of
    several hosts leave a barrier as its messages arrive.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return time.perf_counter()
    on_one_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == dist.get_world_size()
    agreed = torch.tensor(time.perf_counter(), dtype=torch.float64)
    with named_failures(group or dist.group.WORLD, "Starting to measure"):
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group) if on_one_host else dist.barrier(group)
    if not on_one_host:
        return time.perf_counter()
    start = agreed.item() + LEAD_S
    while (now := time.perf_counter()) < start:
        pass
    return now


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    seed: int = 0,
    finish: Callable[[], object] = lambda: None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Sample]:
    """Returns the seconds of every variant over `rounds` rounds. Every rank of `group` (None: of the job)
    makes the same call and gets the same times.

    finish: returns when the device has finished a variant's work. Nothing is warmed up here: call each
    variant before, as often as it needs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = sorted(variants)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for round_ in range(rounds):
            random.Random(f"{seed} {round_}").shuffle(names)
            gc.collect()
            for name in names:
                start = start_together(group)
                variants[name]()
                finish()
                seconds[name].append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    slowest = torch.tensor([seconds[name] for name in variants], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return {name: Sample(tuple(row)) for name, row in zip(variants, slowest.tolist(), strict=True)}
