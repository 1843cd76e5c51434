"""Seconds of a layer's experts on GPUs, counted as the program runs them: csrc/ops/experts, nn/router.py.

A rank's T rows go to the ranks of the group that need them, or, if these are nearly all, are gathered. One
launch picks the M = k T rows of a rank's experts, so no product hides the way of the rows. Each expert has a
GEMM for each of its products; gating and sums are passes over memory. Sums return as the rows came. In the
backward pass dY and X travel (between hosts only dY: the picked rows of X were kept), and the weights'
gradients are multiplied while the sums of dX travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pyruntime.plan.cluster import Cluster
from pyruntime.plan.communication import Link, near_ranks, straight
from pyruntime.plan.models import ModelShape

SCORE, ELEMENT, INDEX = 4, 2, 8
"""Bytes of a score, of an element of a row, of a number that the host reads."""
GATING, GATING_BACKWARD = (3 * ELEMENT, 1), (6 * ELEMENT, 1)
"""Bytes read and written for an element of an expert's width, and launches (csrc/cuda/portable/layers)."""
ROUTER, ROUTER_BACKWARD = (64, 53), (48, 24)
"""Bytes read and written for a score, and launches, of a router with its losses."""
SLOT = 12, 2
"""The same of the choice of one of a row's experts."""
OF_TABLE, OF_TABLE_BACKWARD = 8, 9
"""Launches beside the passes: for the routes, for waits, and for the ends of flights."""
SORT, OF_ROUTED = (12, 3), 20
"""Bytes for a place of the routes, and launches, of their order; bytes for a place in it."""
DEALT, OF_MARK = (28, 14), 3
"""Bytes for a place, and launches, that find where dealt rows go; bytes for a row and rank."""


def share_of_rows(experts: int, ranks: int, per_token: int) -> float:
    """Returns the share of all rows that a rank needs, 1 - C(E - E/P, k) / C(E, k) if all experts are as
    likely."""
    others = experts - -(-experts // ranks)
    return 1 - math.comb(others, per_token) / math.comb(experts, per_token)


def deals_share(share: float, ranks_of_rail: int) -> bool:
    """Returns whether rows of which each rank needs such a share go only to the ranks that need them, as
    csrc/ops/experts/dealt_routes.h decides. ranks_of_rail: a host's, where rows go by rails, else 1."""
    return share < 0.9 if ranks_of_rail == 1 else share * ranks_of_rail < 1


def dealt_share(model: ModelShape, cluster: Cluster, inner: int, ranks: int) -> float:
    """Returns the share of all rows that come to each of so many ranks of experts, whose faster-varying axes
    have `inner` ranks together (csrc/ops/experts/dealt_routes.h); 1 if rows are gathered, as on CPUs."""
    if ranks == 1 or not cluster.is_of_gpus:
        return 1.0
    share = share_of_rows(model.experts, ranks, model.per_token)
    near = 1 if cluster.fits(inner, ranks) else near_ranks(cluster, inner, ranks)
    return share if deals_share(share, near) else 1.0


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
class _WayOfRows:
    """Seconds in which rows come to experts, and sums return."""

    plan: float
    """Compute, as are the next two: finding which rows go where."""
    publish: float
    """Copying rows to where they leave from."""
    sums: float
    """Summing over a rank's experts and over ranks."""
    there: float
    """Travelling, as is the next."""
    back: float
    late: float
    """Of `back`, what no copy hides."""


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer on one rank of a cluster's GPUs.

    tokens: T, rows of each rank. over: the group of the experts. inner: the ranks that its faster-varying
    axes have together. counted: the groups over which routers sum their counts, one after the other."""

    model: ModelShape
    cluster: Cluster
    tokens: float
    over: Link
    inner: int
    counted: Sequence[Link]

    def seconds(self) -> ExpertSeconds:
        score, unscore = self._router()
        hidden, width, held, ranks = self.model.hidden, self.model.expert_ffn, self._held, self.over.size
        routed = self.tokens * ranks * self.model.per_token * held / self.model.experts  # M
        rows, gemm, dw = routed / held, self.cluster.experts_seconds, self.cluster.experts_gradients_seconds
        pick = self._touch(2 * ELEMENT * routed * hidden)
        places = self.model.per_token * ranks * self.tokens
        table = self._touch(SORT[0] * places + OF_ROUTED * routed, SORT[1]) + self._to_host(INDEX * held)
        way = self._dealt(routed) if self._share < 1 else self._gathered(routed)
        times = 1 if self.over.crosses else 2  # operands that travel in a backward pass
        gating, ungating = (
            self._touch(nbytes * routed * width, launches) for nbytes, launches in (GATING, GATING_BACKWARD)
        )
        weights = dw(held, rows, 2 * width, hidden) + dw(held, rows, hidden, width)
        # X travels behind dY, under the order of routes and under the picking of dY's rows.
        there = way.there
        again = max(there - table, times * there - table - (times - 1) * pick, 0.0)
        first = max(there - table, 0.0) if self._share < 1 else there
        return ExpertSeconds(
            forward=score
            + way.plan
            + way.publish
            + self._touch(0, OF_TABLE)
            + table
            + pick
            + gemm(held, rows, 2 * width, hidden)
            + gemm(held, rows, hidden, width)
            + gating
            + way.sums,
            backward_input=unscore
            + self._touch(0, OF_TABLE_BACKWARD)
            + way.plan
            + table
            + times * (way.publish + pick)
            + gemm(held, rows, width, hidden)
            + gemm(held, rows, hidden, 2 * width)
            + ungating
            + way.sums,
            backward_weight=weights,
            waits_forward=sum(self._to_all(INDEX * self.model.experts, each) for each in self.counted)
            + first
            + self._to_all(2 * SCORE * self.model.per_token * self.tokens)
            + way.late,
            waits_backward=again
            + max(0.0, way.late - weights)
            + self._to_all(SCORE * self.model.per_token * self.tokens),
            travels_forward=there + way.back,
            travels_backward=times * there + way.back,
        )

    def _gathered(self, routed: float) -> _WayOfRows:
        """Returns the way of rows that all ranks get. Sums leave in P chunks, one for each owner."""
        ranks, own = self.over.size, self._bytes
        chunk = self._touch(ELEMENT * self.model.hidden * (routed / ranks + self.tokens))
        if ranks == 1:
            return _WayOfRows(0.0, 0.0, chunk, 0.0, 0.0, 0.0)
        back = self._to_all(own, signals=2 * (ranks - 1))
        return _WayOfRows(
            plan=0.0,
            publish=self._touch(2 * own),
            sums=ranks * chunk + self._touch((ranks + 1) * own),
            there=self._to_all(own),
            back=back,
            late=max(0.0, back - (ranks - 1) * chunk),
        )

    def _dealt(self, routed: float) -> _WayOfRows:
        """Returns the way of rows that go only to ranks with one of their experts, and of a sum from each."""
        ranks, share, own = self.over.size, self._share, self._bytes
        rows = ranks * self.tokens
        come = share * ranks * own  # bytes, as many as leave
        way = self._to_all(share * own, straight(self.cluster, self.inner, ranks))
        plan = self._touch((DEALT[0] * self.model.per_token + OF_MARK * ranks) * rows, DEALT[1])
        return _WayOfRows(
            plan=plan + self._to_host(INDEX * ranks**2),
            publish=self._touch(2 * come + 2 * share * own, 2),
            sums=self._touch(ELEMENT * self.model.hidden * routed + 2 * come + 2 * share * own + own, 3),
            there=way,
            back=way,
            late=way,
        )

    @cached_property
    def _share(self) -> float:
        return dealt_share(self.model, self.cluster, self.inner, self.over.size)

    @property
    def _held(self) -> int:
        """Experts of the rank with most."""
        return -(-self.model.experts // self.over.size)

    @property
    def _bytes(self) -> float:
        """Bytes of a rank's own rows."""
        return ELEMENT * self.tokens * self.model.hidden

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
