"""Times this rank's own work in every step, and exchanges the times of all ranks once per window.

A step costs two readings of a clock, on a device two events and two for each wait of its stream. Every
train.slow_every steps the ranks exchange a few numbers, under the usual deadline.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from pyruntime import comm, ops
from pyruntime.comm import Peer, Runtime
from pyruntime.comm.exchange import gather
from pyruntime.train.slow.judge import WINDOWS, Finding, HostLink, Judge, Window
from pyruntime.train.slow.own_clock import OwnClock, PassSpans, Span

AXES = ("tp", "cp", "pp", "dp")
"""Traffic classes whose links are watched."""
OF_AXIS = 2
"""Links per class that a rank reports."""
EVERY = 20
"""Steps of a window, unless train.slow_every sets them."""
LEAST_BYTES = 1 << 20
"""Bytes that a window must send over a link to be judged: fewer bytes only show the latency."""
FEWEST = 5
"""Fewest steps for a median."""


class SlowReport:
    """Looks for slow ranks and links. Every rank of a run makes one.

    every: steps of a window. clock: by which to time steps. units: the layers that this pipeline rank holds,
    each by the share of the micro-batches that go through it, or the micro-batches of this data-parallel
    rank;
    unit: their name; empty: a whole step. take_spans:
    returns what it did by that clock since the last call. by_place: context-parallel ranks have
    different amounts of work, so ranks are compared only with those of the same place on that axis.
    """

    def __init__(
        self,
        runtime: Runtime,
        every: int,
        clock: OwnClock,
        units: float = 1,
        unit: str = "",
        take_spans: Callable[[], PassSpans] | None = None,
        by_place: bool = False,
    ):
        self._runtime, self.every, self._clock = runtime, every, clock
        self._units, self._unit, self._take_spans, self._by_place = units, unit, take_spans, by_place
        self._unread: deque[tuple[Span, PassSpans | None]] = deque()
        """Steps that a device may not have taken yet."""
        self._steps: list[tuple[float, float]] = []
        """Own seconds of each step, per unit and for the rest."""
        self._is_first = True
        self._before = comm.peers()
        self._judge: Judge | None = None
        self.windows: deque[list[Window]] = deque(maxlen=WINDOWS)
        """The last windows, each of all ranks."""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds a step, without validation and checkpoint. Leaves out the first step, which opens groups
        and makes buffers."""
        if self._take_spans is not None:
            self._take_spans()  # drops those of a validation since the last step
        began = self._clock.now()
        yield
        step = began, self._clock.now()
        spans = None if self._take_spans is None else self._take_spans()
        if not self._is_first:
            self._unread.append((step, spans))
        self._is_first = False
        while self._unread and self._clock.has_passed(self._unread[0][0][1]):
            self._read()

    def _read(self) -> None:
        """Reads the seconds of the oldest step that is not read."""
        step, spans = self._unread.popleft()
        own = self._clock.seconds([step])
        of_units = own if spans is None else spans.layer_seconds(self._clock)
        self._steps.append((of_units / self._units, own - of_units))

    def close(self) -> None:
        """Stops its clock."""
        self._clock.close()

    @property
    def slow_ranks(self) -> list[int]:
        """The slow ranks, the same on all ranks."""
        return [] if self._judge is None else self._judge.slow_ranks

    @property
    def names(self) -> Sequence[str]:
        """Names of the ranks in sentences; only after the first window."""
        assert self._judge is not None
        return [self._judge.name_of(rank) for rank in range(len(self._judge.hosts))]

    def look(self) -> list[Finding]:
        """Returns new findings from the steps since the last look; the same on all ranks, which all call it.
        Empty for fewer than FEWEST steps. Waits for the device. Raises CommTimeout and PeerLost."""
        while self._unread:
            self._read()
        if len(self._steps) < FEWEST:
            return []
        told = ops.all_gather_stats(
            torch.tensor(_numbers(self._window()), dtype=torch.float64), comm.group_name(self._runtime.world)
        )
        if self._judge is None:
            hosts = gather(self._runtime.world, "Naming the hosts", socket.gethostname(), str)
            self._judge = Judge(hosts, self._roles(), self.every, self._unit, self._runtime.places)
        self.windows.append([_window(each) for each in told.tolist()])
        return self._judge.add(self.windows[-1])

    def _window(self) -> Window:
        """Returns this rank's window, and begins the next one."""
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
        """Returns the groups of ranks that are compared with each other."""
        grid = self._runtime.by_axes(torch.arange(self._runtime.world.size()))
        return [each.flatten().tolist() for each in (grid.unbind(2) if self._by_place else [grid])]


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the median and its standard error for any distribution: a quarter of the distance between the
    values sqrt(n) places below and above the middle of the sorted ones. These are two standard errors away,
    as the number of n values below the median varies like the heads of n coin tosses."""
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
    """Packs `window` into the numbers that ranks exchange."""
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
