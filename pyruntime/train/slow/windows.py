"""Times this rank's own work in every step, and tells all ranks of it every so many steps.

In a step two looks at a clock; every train.slow_every steps one exchange of a few numbers, in which a wait is
bounded by the deadline of all waits.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from pyruntime import comm, ops
from pyruntime.comm import Peer, Runtime
from pyruntime.comm.exchange import gather
from pyruntime.train.slow.judge import WINDOWS, Finding, HostLink, Judge, Window

AXES = ("tp", "cp", "pp", "dp")
"""Classes of traffic whose links are looked at."""
OF_AXIS = 2
"""Links of a class that a rank tells of."""
EVERY = 20
"""Steps of a window, unless train.slow_every says otherwise."""
LEAST_BYTES = 1 << 20
"""That a window sends over a link which is looked at: of few bytes the latency is all there is."""
FEWEST = 5
"""Steps of which a median is taken."""


def own_seconds() -> float:
    """A clock that stands still while this rank waits for peers, copies or sums what travels."""
    return time.perf_counter() - comm.exposed_s()


class SlowReport:
    """Of a run whose ranks make one each.

    every: steps of a window. layers, layer_seconds: of a pipeline, how many layers this rank holds, and what
    it did for them since that was asked last, in seconds of `own_seconds`. by_place: ranks of the
    context-parallel axis have work of their own size, and are compared with those of their place alone.
    """

    def __init__(
        self,
        runtime: Runtime,
        every: int,
        layers: int = 1,
        layer_seconds: Callable[[], float] | None = None,
        by_place: bool = False,
    ):
        self._runtime, self.every = runtime, every
        self._layers, self._layer_seconds, self._by_place = layers, layer_seconds, by_place
        self._steps: list[tuple[float, float]] = []
        """Own seconds of each for a layer, and for the rest."""
        self._is_first = True
        self._before = comm.peers()
        self._judge: Judge | None = None
        self.windows: deque[list[Window]] = deque(maxlen=WINDOWS)
        """The last ones, of all ranks."""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, without validation and checkpoint. The first one opens groups and makes buffers: it
        is left out."""
        if self._layer_seconds is not None:
            self._layer_seconds()  # what validation did since the last step
        began = own_seconds()
        yield
        own = own_seconds() - began
        of_layers = own if self._layer_seconds is None else self._layer_seconds()
        if not self._is_first:
            self._steps.append((of_layers / self._layers, own - of_layers))
        self._is_first = False

    @property
    def slow_ranks(self) -> list[int]:
        """The same on all ranks."""
        return [] if self._judge is None else self._judge.slow_ranks

    @property
    def names(self) -> Sequence[str]:
        """What sentences call the ranks, once there was a window."""
        assert self._judge is not None
        return [self._judge.name_of(rank) for rank in range(len(self._judge.hosts))]

    def look(self) -> list[Finding]:
        """What is new with the steps since the last look; the same on all ranks, which all call it. Nothing
        for fewer than FEWEST steps. Raises CommTimeout and PeerLost."""
        if len(self._steps) < FEWEST:
            return []
        told = ops.all_gather_stats(
            torch.tensor(_numbers(self._window()), dtype=torch.float64), comm.group_name(self._runtime.world)
        )
        if self._judge is None:
            hosts = gather(self._runtime.world, "Naming the hosts", socket.gethostname(), str)
            self._judge = Judge(
                hosts, self._roles(), self.every, self._runtime.pp.mesh is not None, self._runtime.places
            )
        self.windows.append([_window(each) for each in told.tolist()])
        return self._judge.add(self.windows[-1])

    def _window(self) -> Window:
        """Of this rank; the next one begins."""
        steps, self._steps = self._steps, []
        of_layer, rest = zip(*steps, strict=True)
        middle, error = median_and_error(of_layer)
        now, before = comm.peers(), self._before
        self._before = now
        since = {key: _less(each, before.get(key, Peer())) for key, each in now.items()}
        waits = {rank: 0.0 for _, rank in since}
        for (_, rank), each in since.items():
            waits[rank] += each.waiting_s
        most = max(waits, key=waits.__getitem__, default=-1)
        links = {}
        for axis in AXES:
            rates = sorted(
                (each.transfer_s / each.bytes_sent, rank)
                for (name, rank), each in since.items()
                if name == axis and each.bytes_sent >= LEAST_BYTES
            )
            links[axis] = [HostLink(rank, seconds) for seconds, rank in dict.fromkeys(rates[:1] + rates[-1:])]
        return Window(middle, error, median(rest), most, waits.get(most, 0.0), links)

    def _roles(self) -> list[list[int]]:
        """Ranks that are compared with each other."""
        grid = self._runtime.by_axes(torch.arange(self._runtime.world.size()))
        return [each.flatten().tolist() for each in (grid.unbind(2) if self._by_place else [grid])]


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error, whatever the values' distribution: a quarter of what lies between
    the values that stand two standard errors below it and above it, sqrt(n) places of the sorted ones (as
    many of n values are below the median as of n tosses are heads)."""
    ordered, middle, places = sorted(values), (len(values) - 1) / 2, math.sqrt(len(values))
    low, high = max(0, math.floor(middle - places)), min(len(values) - 1, math.ceil(middle + places))
    return median(ordered), (ordered[high] - ordered[low]) / 4


def _less(now: Peer, before: Peer) -> Peer:
    return Peer(
        now.waiting_s - before.waiting_s,
        now.bytes_sent - before.bytes_sent,
        now.transfer_s - before.transfer_s,
    )


def _numbers(window: Window) -> list[float]:
    """`window` as ranks tell it each other."""
    own = [window.layer_s, window.error_s, window.rest_s, window.waited_for, window.waited_s]
    none = [HostLink(-1, 0.0)] * OF_AXIS
    links = [link for axis in AXES for link in [*window.links[axis], *none][:OF_AXIS]]
    return own + [number for link in links for number in (link.to, link.seconds_per_byte)]


def _window(numbers: Sequence[float]) -> Window:
    layer_s, error_s, rest_s, waited_for, waited_s, *of_links = numbers
    told = [HostLink(int(to), seconds) for to, seconds in zip(of_links[::2], of_links[1::2], strict=True)]
    links = {
        axis: [link for link in told[OF_AXIS * at : OF_AXIS * (at + 1)] if link.to >= 0]
        for at, axis in enumerate(AXES)
    }
    return Window(layer_s, error_s, rest_s, int(waited_for), waited_s, links)
