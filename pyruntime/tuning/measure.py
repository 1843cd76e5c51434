"""Times the tiers of one linear on all ranks, and the GEMM and the collective alone. Also times the chunked
tier with other numbers of chunks and the fused tier with other tiles, if there are any.

T_g, T_c, R and E are those of docs/figures/results.md: T_g the best unsplit GEMM, T_c the best standalone
collective of the same bytes, R = T_o / max(T_g, T_c) and E = (T_g + T_c - T_o) / min(T_g, T_c). All come from
one interleaved run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyruntime import comm, ops
from pyruntime.comm import Group
from pyruntime.comm.core import _C
from pyruntime.comm.exchange import gather
from pyruntime.nn.tiers import TIERS
from pyruntime.tuning.apply import core_key
from pyruntime.tuning.cache import Key
from pyruntime.tuning.linears import RankLinear
from pyruntime.tuning.timing import interleave

Run = Callable[[], object]
LEAST_ROUNDS = 3
WARM_UP = 2
MUST_WIN_BY = 0.97
"""An overlapping tier is kept unless unfused is clearly faster. The same holds for the transport's number of
chunks and the kernel's tiles."""


@dataclass(frozen=True)
class Measured:
    """The times of one pass of one linear: seconds, medians over rounds of the slowest rank."""

    linear: RankLinear
    when: str
    """ "forward" or "backward"."""
    keys: tuple[Key, ...]
    """Keys of all ranks; they differ if a weight is cut unevenly."""
    tiers: dict[str, float]
    """Seconds by the name that ops take as `tier`: "unfused", "chunked", "chunked:4", "fused:large"."""
    refused: dict[str, str]
    """Reasons why the op does not accept the other tiers."""
    gemm: float
    collective: float
    rounds: int

    @property
    def best(self) -> str:
        return choose(self.tiers)

    @property
    def bound_ratio(self) -> float:
        """R."""
        return self.tiers[self.best] / max(self.gemm, self.collective)

    @property
    def efficiency(self) -> float:
        """E."""
        alone = self.gemm + self.collective
        return (alone - self.tiers[self.best]) / min(self.gemm, self.collective)


def choose(seconds: dict[str, float]) -> str:
    """Returns the tier to take: the fastest that overlaps, or unfused if that is clearly faster. Another
    number of chunks or other tiles than the default are taken only if they are clearly faster."""
    plain = [name for name in seconds if name != "unfused" and ":" not in name]
    if not plain:
        return "unfused"
    best = min(plain, key=lambda name: seconds[name])
    for others in ([name for name in seconds if ":" in name], ["unfused"]):
        quickest = min(
            (name for name in others if name in seconds), key=lambda name: seconds[name], default=best
        )
        if seconds[quickest] < MUST_WIN_BY * seconds[best]:
            best = quickest
    return best


class Problem:
    """Random operands of a linear on this rank, and the runs to time on them. Every rank makes it alike.

    group: the ranks that share the linear. job: the ranks that measure together, perhaps several such groups;
    None: all ranks.
    """

    def __init__(
        self,
        linear: RankLinear,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
        job: dist.ProcessGroup | None = None,
    ) -> None:
        self.linear, self.group, self.dtype, self.device, self.job = linear, group, dtype, device, job
        size, rank = comm.group_size(group), comm.group_rank(group)
        self.even = linear.rows % size == 0
        own = linear.rows // size + (rank < linear.rows % size)
        self.weight = self._random(linear.n, linear.k, scale=linear.k**-0.5)
        self.x_whole, self.y_whole = self._random(linear.rows, linear.k), self._random(linear.rows, linear.n)
        self.x = self.x_whole[:own] if linear.gathers else self.x_whole
        self.dy = self.y_whole if linear.gathers else self.y_whole[:own]

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def apply(self, x: Tensor, weight: Tensor, tier: str) -> Tensor:
        if self.linear.gathers:
            return ops.all_gather_matmul(x, weight, self.group, rows=self.linear.rows, tier=tier)
        return ops.matmul_reduce_scatter(x, weight, self.group, tier=tier)

    def tier(self, name: str, when: str) -> Run:
        """Returns one pass in a tier. A backward repeats on one forward, which is kept and not timed."""
        if when == "forward":
            return lambda: self.apply(self.x, self.weight, name)
        x, weight = (operand.detach().requires_grad_() for operand in (self.x, self.weight))
        with torch.enable_grad():
            y = self.apply(x, weight, name)
        return lambda: torch.autograd.grad(y, (x, weight), self.dy, retain_graph=True)

    def gemm(self, when: str) -> Run:
        """Returns the rank's GEMMs by the vendor library, unsplit, into preallocated memory."""
        if when == "forward":
            pairs = [(self.x_whole, self.weight.t())]
        else:
            pairs = [(self.y_whole, self.weight), (self.y_whole.t(), self.x_whole)]
        results = [a.new_empty(a.shape[0], b.shape[1]) for a, b in pairs]

        def run() -> None:
            for (a, b), result in zip(pairs, results, strict=True):
                torch.mm(a, b, out=result)

        return run

    def collectives(self, when: str) -> dict[str, Run]:
        """Returns the collective that the pass needs, by implementation. If x was not kept, a column linear's
        weight gradient gathers it again; that gather is not counted."""
        gathers = self.linear.gathers == (when == "forward")
        whole = self.x_whole if self.linear.gathers else self.y_whole
        own = self.x if self.linear.gathers else self.dy
        gather = functools.partial(ops.all_gather, own, self.group, rows=self.linear.rows)
        scatter = functools.partial(ops.reduce_scatter, whole, self.group)
        runs: dict[str, Run] = {"pyruntime": gather if gathers else scatter}
        if self.even:
            runs["process group"] = self._theirs(gathers, own, whole)
        return runs

    def _theirs(self, gathers: bool, own: Tensor, whole: Tensor) -> Run:
        # torch 2.13 renamed them.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        group, out = comm.process_group(self.group), torch.empty_like(whole if gathers else own)
        if gathers:
            return lambda: all_gather(out, own, group=group)
        return lambda: reduce_scatter(out, whole, group=group)

    def key(self, when: str) -> Key:
        linear = self.linear
        op = linear.op if when == "forward" else f"{linear.op}_backward"
        dtype = str(self.dtype).removeprefix("torch.")
        return Key(op, linear.rows, linear.n, linear.k, dtype, self.device.type)

    def finish(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure(problem: Problem, when: str, rounds: int, seconds: float) -> Measured:
    """Times one pass: `rounds` rounds, or as many as fit into `seconds`, at least three. Collective over the
    problem's job."""
    tiers, refused = accepted_tiers(problem, when)
    tiers |= {name: problem.tier(name, when) for name in other_choices(problem, when)}
    variants: dict[str, Run] = {f"tier {name}": run for name, run in tiers.items()}
    variants["gemm"] = problem.gemm(when)
    collectives = problem.collectives(when)
    variants |= {f"collective {owner}": run for owner, run in collectives.items()}
    with torch.no_grad():
        for _ in range(WARM_UP):
            started = time.perf_counter()
            for run in variants.values():
                run()
            problem.finish()
        fitting = int(seconds / largest(time.perf_counter() - started, problem.job))
        rounds = max(LEAST_ROUNDS, min(rounds, fitting))
        samples = interleave(variants, rounds, problem.linear.rows, problem.finish, problem.job)
    return Measured(
        linear=problem.linear,
        when=when,
        keys=tuple(sorted(set(gathered(problem.key(when), Key, problem.job)))),
        tiers={name: samples[f"tier {name}"].median for name in tiers},
        refused=refused,
        gemm=samples["gemm"].median,
        collective=min(samples[f"collective {owner}"].median for owner in collectives),
        rounds=rounds,
    )


def accepted_tiers(problem: Problem, when: str) -> tuple[dict[str, Run], dict[str, str]]:
    """Returns the tiers in which the op runs here, and the reasons against the others. A tier that one rank
    refuses is refused for all."""
    accepted: dict[str, Run] = {}
    refused: dict[str, str] = {}
    for name in TIERS:
        if name == "auto":
            continue
        why = ""
        try:
            run = problem.tier(name, when)
            run()
            problem.finish()
        except ValueError as error:
            why = str(error)
        found = [sentence for sentence in gathered(why, str, problem.job) if sentence]
        if found:
            refused[name] = found[0]
        else:
            accepted[name] = run
    return accepted, refused


def other_choices(problem: Problem, when: str) -> list[str]:
    """Returns other numbers of chunks and tiles worth measuring, such as "chunked:4" or "fused:large". Only
    names that all ranks of the job give: tiles may differ if a weight is cut unevenly. Call it after the
    group's first op."""
    mine = _C.other_choices(core_key(problem.key(when)), comm.group_name(problem.group))
    first, *others = gathered(mine, list[str], problem.job)
    return [name for name in first if all(name in other for other in others)]


T = TypeVar("T")


def gathered(value: T, kind: type[T], job: dist.ProcessGroup | None = None) -> list[T]:
    """Returns on all ranks of the job a list of each rank's value, of type `kind` (`comm.messages`)."""
    return gather(job or dist.group.WORLD, "Tuning", value, kind)


def largest(value: float, job: dist.ProcessGroup | None = None) -> float:
    """Returns on all ranks of the job the largest value of any of them."""
    box = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX, job)
    return float(box)
