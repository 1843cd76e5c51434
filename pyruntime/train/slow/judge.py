"""Decides which rank computes longer than its peers, and which link sends slower than the others.

Pure functions of measurements that all ranks have, so all decide alike. After each window of steps a rank is
late if its seconds (per layer, in a pipeline, or per micro-batch where these may move) exceed the median of
its peers by FACTOR, and by more than ERRORS standard errors of both. It is slow after WINDOWS late windows in
a row, until as many are in time. Measuring computation and links separately is from FALCON (Wu et al. 2024,
arXiv 2410.12588). Malleus (Li et al. 2024, arXiv 2410.13333) plans by how many times as long as others a rank
computes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

FACTOR = 1.3
"""Least ratio of a slow rank's seconds to its peers'."""
LINK_FACTOR = 2.0
"""Least ratio of a slow link's seconds per byte to the lower quartile of the others. Not to the median: one
slow host slows four links of a ring, both ways to either neighbour."""
WINDOWS = 3
"""Late windows in a row after which a rank or link is slow; as many that are not late end that."""
ERRORS = 4.0
"""Least distance of two medians, in standard errors."""
WORSE = 1.5
"""Ratio to the last reported slowness at which it is reported again."""


@dataclasses.dataclass(frozen=True)
class HostLink:
    """A link over which a rank sends to another host, in one traffic class."""

    to: int
    """The receiving rank of the job."""
    seconds_per_byte: float


@dataclasses.dataclass(frozen=True)
class Window:
    """One rank's measurements over the steps of a window."""

    layer_s: float
    """Median over the steps of the seconds in which the rank did not wait for peers, copy or sum: in a
    pipeline per layer that it holds, else per step, or per micro-batch if these may move."""
    error_s: float = 0.0
    """Standard error of that median."""
    rest_s: float = 0.0
    """If work may move, seconds beside it: in a pipeline embedding, head and loss; weights, reading text."""
    waited_for: int = -1
    """The rank of the job that this one waited for most; -1: none."""
    waited_s: float = 0.0
    """Seconds it waited for that rank since the last window."""
    links: Mapping[str, Sequence[HostLink]] = dataclasses.field(default_factory=dict)
    """For each traffic class the slowest and the fastest link; a ring has no others."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A new finding about a rank or a link, for people and for metrics.jsonl."""

    rank: int
    """The rank that computes or sends."""
    host: str
    times: float
    """Ratio to the median of its peers, over the last WINDOWS windows."""
    sentence: str
    is_slow: bool = True
    """False: it no longer is."""
    to: int | None = None
    """For one link: the rank at its other end."""
    traffic: str | None = None
    """For links: their class. Without `to` the finding is about all links of the rank, both ways."""


class _Lateness:
    """The history of one rank or link."""

    def __init__(self) -> None:
        self.times: collections.deque[float] = collections.deque(maxlen=WINDOWS)
        self._late = self._in_time = 0
        self.is_slow, self._said = False, 0.0

    def add(self, times: float, is_late: bool) -> bool:
        """Adds a window. Returns whether there is something to report."""
        self.times.append(times)
        self._late = self._late + 1 if is_late else 0
        self._in_time = 0 if is_late else self._in_time + 1
        if self.is_slow and self._in_time >= WINDOWS:
            self.is_slow = False
            return True
        if self._late < WINDOWS or (self.is_slow and median(self.times) < WORSE * self._said):
            return False
        self.is_slow, self._said = True, median(self.times)
        return True


class _Others:
    """Sorted numbers, for the median of all others of each one without looking at them one by one."""

    def __init__(self, numbers: Iterable[float]):
        self._ordered = sorted(numbers)

    def median(self, of: float) -> float:
        """Returns the median of all numbers except `of`, which is one of at least two."""
        last = len(self._ordered) - 2
        return (self._at(last // 2, of) + self._at((last + 1) // 2, of)) / 2

    def lower_quartile(self, of: float) -> float:
        return self._at((len(self._ordered) - 2) // 4, of)

    def _at(self, place: int, of: float) -> float:
        return self._ordered[place + (place >= bisect_left(self._ordered, of))]


class Judge:
    """Finds slow ranks and links. hosts: host names, by rank. roles: groups of ranks that are compared.
    every: steps of a window. unit: the name of what seconds are given for, "layer" or "micro-batch"; empty:
    a whole step. places: where ranks are, for sentences."""

    def __init__(
        self,
        hosts: Sequence[str],
        roles: Sequence[Sequence[int]],
        every: int,
        unit: str = "",
        places: Sequence[str] = (),
    ):
        self.hosts, self._roles, self._steps, self._unit = hosts, roles, WINDOWS * every, unit
        self._places = places
        self._ranks = [_Lateness() for _ in hosts]
        self._links: collections.defaultdict[tuple[str, int, int], _Lateness] = collections.defaultdict(
            _Lateness
        )

    @property
    def slow_ranks(self) -> list[int]:
        """Ranks that are slow as of the last window."""
        return [rank for rank, seen in enumerate(self._ranks) if seen.is_slow]

    def add(self, windows: Sequence[Window]) -> list[Finding]:
        """Adds the next window of every rank, by rank. Returns new findings."""
        found = []
        late = set()
        for role in self._roles:
            seconds = _Others(windows[rank].layer_s for rank in role)
            errors = _Others(windows[rank].error_s for rank in role)
            for rank in role if len(role) > 1 else ():
                window = windows[rank]
                usual = seconds.median(window.layer_s)
                beyond = ERRORS * math.hypot(window.error_s, errors.median(window.error_s))
                is_late = window.layer_s > max(FACTOR * usual, usual + beyond)
                if is_late:
                    late.add(rank)
                if self._ranks[rank].add(window.layer_s / usual if usual > 0 else 1.0, is_late):
                    found.append(self._of_rank(rank, windows, usual))
        return found + self._look_at_links(windows, late)

    def _look_at_links(self, windows: Sequence[Window], late: set[int]) -> list[Finding]:
        """late: ranks that compute for long, so that their links wait for them."""
        found = []
        for traffic in sorted({name for window in windows for name in window.links}):
            links = {
                (rank, link.to): link.seconds_per_byte
                for rank, window in enumerate(windows)
                for link in window.links.get(traffic, ())
            }
            seconds = _Others(links.values())
            news: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
            for ends, own in links.items() if len(links) > 1 else ():
                usual, seen = seconds.lower_quartile(own), self._links[traffic, *ends]
                is_late = own > LINK_FACTOR * usual and not late.intersection(ends)
                if seen.add(own / usual, is_late):
                    news[seen.is_slow][ends] = usual
            for is_slow, of_links in news.items():
                found += self._of_links(traffic, links, of_links, is_slow)
        return found

    def _of_links(
        self,
        traffic: str,
        links: Mapping[tuple[int, int], float],
        news: Mapping[tuple[int, int], float],
        is_slow: bool,
    ) -> list[Finding]:
        """Returns one finding for a rank all of whose links are new, both ways, and one for each other new
        link. links: seconds per byte of all. news: what each new one is compared with."""
        found, told = [], set()
        for rank in sorted({end for ends in news for end in ends}):
            own = [ends for ends in links if rank in ends]
            if len(own) > 2 and all(ends in news for ends in own):
                told.update(own)
                found.append(self._of_link(traffic, own, links, news, is_slow, rank))
        for ends in news:
            if ends not in told:
                found.append(self._of_link(traffic, [ends], links, news, is_slow, ends[0], ends[1]))
        return found

    def _of_rank(self, rank: int, windows: Sequence[Window], usual: float) -> Finding:
        seen, host = self._ranks[rank], self.hosts[rank]
        times = median(seen.times)
        if not seen.is_slow:
            sentence = (
                f"{self.name_of(rank)} computes {times:.1f} times as long as its peers over the last "
                f"{self._steps} steps, and is no longer slow."
            )
            return Finding(rank, host, times, sentence, is_slow=False)
        per = f"a step and {self._unit}" if self._unit else "a step"
        waits = [
            (each.waited_s, other) for other, each in enumerate(windows) if each.waited_for == rank != other
        ]
        seconds, waiting = max(waits, default=(0.0, -1))
        waited = (
            f"; {self.name_of(waiting)} waited {seconds:.3g} s for it since the last look" if waits else ""
        )
        sentence = (
            f"{self.name_of(rank)} computes {times:.1f} times as long as its peers over the last "
            f"{self._steps} steps: {windows[rank].layer_s:.3g} s {per} without waiting, where they take "
            f"{usual:.3g} s{waited}."
        )
        return Finding(rank, host, times, sentence)

    def name_of(self, rank: int) -> str:
        """Returns a name such as: rank 3 (tp 1, dp 1; host b)."""
        place = self._places[rank] if rank < len(self._places) else ""
        return f"rank {rank} ({place}{'; ' if place else ''}host {self.hosts[rank]})"

    def _of_link(
        self,
        traffic: str,
        told: Sequence[tuple[int, int]],
        links: Mapping[tuple[int, int], float],
        news: Mapping[tuple[int, int], float],
        is_slow: bool,
        rank: int,
        to: int | None = None,
    ) -> Finding:
        times = median(median(self._links[traffic, *ends].times) for ends in told)
        # This is no bandwidth: seconds of chunks that overlap on a link are added up.
        own, others = (1e6 * median(each[ends] for ends in told) for each in (links, news))
        host, again = self.hosts[rank], "" if is_slow else ", and no longer slow"
        what = f"all links of {self.name_of(rank)}, both ways, take"
        if to is not None:
            what = f"the link from {self.name_of(rank)} to {self.name_of(to)} takes"
        sentence = (
            f"{what} {times:.1f} times as long as others for a byte of {traffic} over the last {self._steps} "
            f"steps: {own:.3g} s for a MB until it is acknowledged, where others take {others:.3g} s"
            f"{again}."
        )
        return Finding(rank, host, times, sentence, is_slow, to, traffic)
