"""Seconds of a layer's experts on GPUs, counted as the program runs them: csrc/ops/experts, nn/router.py.

A rank's T rows are gathered from all P ranks of the group before one launch picks the M = k T rows of its
experts, so no product hides the gather. Each expert has a GEMM for each of its products; gating and sums are
passes over memory. Sums leave in P chunks, one for each owner. In the backward pass dY and X are gathered
(between hosts only dY: the picked rows of X were kept), and the weights' gradients are multiplied while the
sums of dX travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pyruntime.plan.cluster import Cluster
from pyruntime.plan.communication import Link
from pyruntime.plan.models import ModelShape

SCORE, ELEMENT, ROUTE, INDEX = 4, 2, 6, 8
"""Bytes of a score, of an element of a row, of a route that the host reads, of a number that it writes."""
GATING, GATING_BACKWARD = (3 * ELEMENT, 1), (6 * ELEMENT, 1)
"""Bytes read and written for an element of an expert's width, and launches (csrc/cuda/portable/layers)."""
ROUTER, ROUTER_BACKWARD = (64, 53), (48, 24)
"""Bytes read and written for a score, and launches, of a router with its losses."""
SLOT = 12, 2
"""The same of the choice of one of a row's experts."""
OF_TABLE, OF_TABLE_BACKWARD = 8, 9
"""Launches beside the passes: for the routes, for waits, and for the ends of flights."""


@dataclass(frozen=True)
class ExpertSeconds:
    """Seconds of one layer's router and experts on one rank, for one micro-batch."""

    forward: float
    """Compute, as are the next two."""
    backward_input: float
    backward_weight: float
    waits_forward: float
    """Exposed, as is the next."""
    waits_backward: float
    travels_forward: float
    """Transfers take so long, exposed or not; the next too."""
    travels_backward: float


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer on one rank of a cluster's GPUs.

    tokens: T, rows of each rank. over: the group of the experts. counted: the groups over which routers sum
    their counts, one after the other."""

    model: ModelShape
    cluster: Cluster
    tokens: float
    over: Link
    counted: Sequence[Link]

    def seconds(self) -> ExpertSeconds:
        score, unscore = self._router()
        hidden, width, held, ranks = self.model.hidden, self.model.expert_ffn, self._held, self.over.size
        routed = self.tokens * ranks * self.model.per_token * held / self.model.experts  # M
        rows, gemm = routed / held, self.cluster.gemm_seconds
        pick = self._touch(2 * ELEMENT * routed * hidden)
        sums = self._touch(ELEMENT * hidden * (routed + ranks * self.tokens)) + ranks * self._chunk
        table = self._to_host(ROUTE * self.model.per_token * ranks * self.tokens)
        table += self._to_host(INDEX * (3 * routed + ranks * self.tokens))
        cut = self._touch(2 * self._bytes), self._touch((ranks + 1) * self._bytes)  # published; summed
        publish, reduce = cut if ranks > 1 else (0.0, 0.0)
        times = 1 if self.over.crosses else 2  # gathers of a backward pass
        gating, ungating = (
            self._touch(nbytes * routed * width, launches) for nbytes, launches in (GATING, GATING_BACKWARD)
        )
        weights = held * (gemm(2 * width, hidden, rows) + gemm(width, hidden, rows))
        gather, late = self._to_all(self._bytes), self._late
        # X travels behind dY, under the reading of routes and under the picking of dY's rows.
        again = max(gather - table, times * gather - table - (times - 1) * pick, 0.0)
        return ExpertSeconds(
            forward=score
            + publish
            + self._touch(0, OF_TABLE)
            + table
            + pick
            + held * (gemm(rows, 2 * width, hidden) + gemm(rows, hidden, width))
            + gating
            + sums
            + reduce,
            backward_input=unscore
            + self._touch(0, OF_TABLE_BACKWARD)
            + table
            + times * (publish + pick)
            + held * (gemm(rows, width, hidden) + gemm(rows, hidden, 2 * width))
            + ungating
            + sums
            + reduce,
            backward_weight=weights,
            waits_forward=sum(self._to_all(INDEX * self.model.experts, each) for each in self.counted)
            + gather
            + self._to_all(2 * SCORE * self.model.per_token * self.tokens)
            + late,
            waits_backward=again
            + max(0.0, late - weights)
            + self._to_all(SCORE * self.model.per_token * self.tokens),
            travels_forward=gather + self._scatter,
            travels_backward=times * gather + self._scatter,
        )

    @property
    def _held(self) -> int:
        """Experts of the rank with most."""
        return -(-self.model.experts // self.over.size)

    @property
    def _bytes(self) -> float:
        """Bytes of a rank's own rows."""
        return ELEMENT * self.tokens * self.model.hidden

    @property
    def _chunk(self) -> float:
        """Seconds in which sums for one owner are copied to where they leave from."""
        return self._touch(2 * self._bytes)

    @cached_property
    def _scatter(self) -> float:
        """Seconds in which the sums reach their owners, each announced by itself."""
        return self._to_all(self._bytes, signals=2 * (self.over.size - 1))

    @property
    def _late(self) -> float:
        """Seconds that they take longer than what is copied meanwhile."""
        return max(0.0, self._scatter - (self.over.size - 1) * self._chunk)

    def _router(self) -> tuple[float, float]:
        """Returns the seconds of the router, forward and backward: fp32 scores of the own rows."""
        model, gemm = self.model, self.cluster.gemm_seconds
        scores, slots = self.tokens * model.experts, model.per_token
        wide = (SCORE + ELEMENT) * self.tokens * model.hidden  # a copy of rows in another type
        (forward, launches), (backward, launches_backward) = ROUTER, ROUTER_BACKWARD
        score = self._touch(wide + (forward + SLOT[0] * slots) * scores, launches + SLOT[1] * slots)
        unscore = self._touch(3 * wide + backward * scores, launches_backward)
        return (
            score + gemm(self.tokens, model.experts, model.hidden, SCORE),
            unscore
            + gemm(self.tokens, model.hidden, model.experts, SCORE)
            + gemm(model.experts, model.hidden, self.tokens, SCORE),
        )

    def _touch(self, nbytes: float, launches: int = 1) -> float:
        """Returns the seconds of launches that read or write so many bytes of memory together."""
        return launches * self.cluster.launch + nbytes / self.cluster.memory_bandwidth

    def _to_host(self, nbytes: float) -> float:
        """Returns the seconds of a copy between the GPU and its host."""
        return self.cluster.launch + (nbytes / self.cluster.to_host if self.cluster.to_host else 0.0)

    def _to_all(self, nbytes: float, over: Link | None = None, signals: int = 2) -> float:
        """Returns the seconds until all ranks have `nbytes` of each other. signals: launches that await leave
        or tell of bytes; within a host each message is a launch too."""
        over = self.over if over is None else over
        if over.size == 1:
            return 0.0
        peers = over.size - 1
        launches = 1 if over.crosses else signals + peers
        return launches * self.cluster.launch + peers * nbytes / over.bandwidth + over.latency
