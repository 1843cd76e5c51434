"""Measures a contender's limits: computing only, sending only, and both at once.

T_g     a rank's computation without communication, on all ranks at once
T_c     the collectives without computation, one after the other; if none are given, the bytes that ours sends
loaded  T_g while as many bytes as ours sends pass unrelated; only between hosts
R     = ours / max(T_g, T_c)
waits   share of a turn in which the computing thread waited for peers, by the ledger
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import pyruntime
from bench.common.measuring import Sample, start_together
from bench.common.traffic import Traffic, sent_by

Turn = Callable[[], object]
LEAST_BYTES = 100_000  # if fewer left a host in a turn, all ranks are on one host
ENTERED = 3  # turns with a ledger


@dataclass(frozen=True)
class Figure:
    """A median over all rounds and its spread."""

    median: float
    spread: float
    """Half the distance between the quartiles, as a share of the median."""

    @classmethod
    def of(cls, sample: Sample, share: float = 1.0) -> Figure:
        """Returns the figure of a sample, times `share`."""
        return cls(sample.median * share, sample.spread if sample.median else 0.0)


@dataclass(frozen=True)
class Limits:
    """One contender's limits, in seconds a step except R, over_loaded and waits. None: one host."""

    T_g: Figure
    T_c: Figure | None
    loaded: Figure | None
    ours: Figure
    R: Figure
    over_loaded: Figure | None
    """Our time divided by the loaded limit, round by round."""
    waits: Figure
    """Waits of the rank that waited most."""
    sent_bytes: float
    """Bytes that leave a host in a step of ours, headers included."""
    T_c_bytes: float
    """Bytes that leave a host in the operation timed as T_c."""


LIMITS_HEAD = ["T_c ms", "R", "loaded ms", "over loaded", "waits"]


def limits_cells(limits: Mapping[str, Any] | None) -> list[str]:
    """Returns the table cells of `Limits` read from JSON, below that head; empty cells for None."""
    if limits is None:
        return [""] * len(LIMITS_HEAD)
    comm, loaded, over = limits["T_c"], limits["loaded"], limits["over_loaded"]
    return [
        f"{comm['median'] * 1e3:.1f}" if comm else "",
        f"{limits['R']['median']:.3f}",
        f"{loaded['median'] * 1e3:.1f}" if loaded else "",
        f"{over['median']:.3f}" if over else "",
        f"{limits['waits']['median']:.1%}",
    ]


class Held:
    """One of `turns` and its limits, which it adds to the turns. All ranks make it, after each turn ran once.

    Args:
        turns: the functions that take turns, by name.
        ours: the name of the contender.
        alone: names of turns that compute T_g and exchange nothing; the fastest counts.
        collectives: names of turns that are timed as T_c; the fastest counts.
        shares: the number of ranks whose work in a turn of ours one turn of `alone` computes.
        steps: steps in a turn of each.
    """

    def __init__(
        self,
        turns: MutableMapping[str, Turn],
        ours: str,
        alone: Sequence[str],
        collectives: Sequence[str] = (),
        shares: int = 1,
        steps: int = 1,
    ) -> None:
        self._ours, self._alone, self._turn = ours, alone, turns[ours]
        self._shares, self._steps = shares, steps
        self._sent = sent_by(self._turn)
        self._loaded: list[str] = []
        self._comm = {name: sent_by(turns[name]) for name in collectives}
        if self._sent <= LEAST_BYTES:
            return
        traffic = Traffic(self._sent * shares)
        for name in alone:
            self._loaded.append(f"{name}, beside the bytes of {ours}")
            turns[self._loaded[-1]] = traffic.beside(turns[name])
        if not collectives:
            self._comm = {f"the bytes of {ours}": self._sent}
            own = traffic if shares == 1 else Traffic(self._sent)
            turns[f"the bytes of {ours}"] = own.alone

    def limits(self, samples: dict[str, Sample]) -> Limits:
        """Returns the limits from timed samples and from turns with a ledger, taken now by all ranks."""

        def fastest(names: Sequence[str]) -> str:
            return min(names, key=lambda name: samples[name].median)

        ours, alone = samples[self._ours], samples[fastest(self._alone)]
        share = 1 / self._shares / self._steps
        comm = fastest(list(self._comm)) if self._comm else None
        loaded = samples[fastest(self._loaded)] if self._loaded else None
        bound, of_bound = alone, 1 / self._shares
        if comm is not None and samples[comm].median > alone.median * of_bound:
            bound, of_bound = samples[comm], 1.0
        return Limits(
            Figure.of(alone, share),
            Figure.of(samples[comm], 1 / self._steps) if comm is not None else None,
            Figure.of(loaded, share) if loaded else None,
            Figure.of(ours, 1 / self._steps),
            Figure(ours.median / bound.median / of_bound, ours.over(bound).spread),
            Figure.of(ours.over(loaded), self._shares) if loaded else None,
            Figure.of(waits_of(self._turn)),
            self._sent / self._steps,
            self._comm[comm] / self._steps if comm is not None else 0.0,
        )


def waits_of(turn: Turn) -> Sample:
    """Takes some turns with a ledger and returns, for each, the share in which the computing thread waited
    for peers, on the rank that waited most. All ranks call it together.

    Raises RuntimeError if the ledger has no room for a turn."""
    shares = []
    for _ in range(ENTERED):
        start_together()
        with pyruntime.ledger() as ledger:
            turn()
        account = ledger.account()
        if account.lost:
            raise RuntimeError(f"The ledger had no room for {account.lost} entries; measure a shorter turn.")
        shares.append(account.exposed_s / account.seconds)
    most = torch.tensor(shares, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return Sample(tuple(most.tolist()))
