"""Measures the links between a job's hosts, and numbers the ranks so that fast links join neighbours.

Launchers number hosts as they come. On a cluster with two kinds of links (islands of fast network that a thin
one joins) ranks of a tensor- or data-parallel group may then lie in different islands. Axes are counted with
tp fastest and pp slowest, so if the hosts of an island follow each other, the slow links carry the axis that
sends least.

Source: Holmes (arXiv 2312.03549, section 4): data parallelism inside one kind of network, the pipeline
across. There a person says which hosts have which; here it is measured.
"""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from pyruntime.comm.core import _C
from pyruntime.comm.exchange import gather, named_failures

BYTES = (1 << 16, 1 << 19, 1 << 23)
"""Messages: the largest that a link carries in LONGEST_S shows its rate."""
TIMES = 3
"""Times that each is sent; the fastest counts."""
LONGEST_S = 0.2
"""Seconds of a message there and back after which no larger one is sent, and this one once more at most."""
GAP = 2.0
"""Least ratio of the slowest link in an island to the fastest between islands."""

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HostLinks:
    """The links between hosts, the same on every rank."""

    names: tuple[str, ...]
    """The hosts' names, by the number of their first rank."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each host."""
    bytes_per_s: Table
    """Rate of a long message; infinite from a host to itself."""

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """The hosts, by number, that fast links join; one island if all links are alike."""
        return islands(self.bytes_per_s)

    @property
    def order(self) -> tuple[int, ...]:
        """The hosts, island by island."""
        return tuple(itertools.chain.from_iterable(self.islands))

    def number_of(self, rank: int) -> int:
        """Returns the number of `rank` if ranks are numbered by `order`. Rank 0 keeps its number; if links
        are alike, all do. Raises ValueError if there are islands, and hosts have unequal numbers of ranks."""
        if len(self.islands) == 1:
            return rank
        counts = {len(ranks) for ranks in self.ranks}
        if len(counts) > 1:
            raise ValueError(
                f"The hosts have {', '.join(str(len(ranks)) for ranks in self.ranks)} ranks; to number them "
                "by their links, start equally many on each, or leave the numbers as they were started."
            )
        by_order = [rank for host in self.order for rank in self.ranks[host]]
        return by_order.index(rank)

    def words(self) -> str:
        """Says what was found, and which numbers follow."""
        names = " | ".join(" ".join(self.names[host] for host in island) for island in self.islands)
        where = {host: number for number, island in enumerate(self.islands) for host in island}
        pairs = list(itertools.permutations(where, 2))
        inside = [self.bytes_per_s[a][b] for a, b in pairs if where[a] == where[b]]
        between = [self.bytes_per_s[a][b] for a, b in pairs if where[a] != where[b]]
        if not between:
            rates = f" of {_gbit(inside)}" if inside else ""
            return f"{len(where)} host(s) with links alike{rates}; ranks keep their numbers"
        within = f"{_gbit(inside)} inside, " if inside else ""
        return f"islands of hosts {names}: {within}{_gbit(between)} between; ranks are numbered in this order"


def islands(bytes_per_s: Table) -> tuple[tuple[int, ...], ...]:
    """Returns groups of hosts that fast links join: links above the widest gap between two rates of all gaps
    of at least GAP that separate hosts. All hosts are one group if there is none. Groups that less slow links
    join follow each other, also inside a group."""
    hosts = tuple(range(len(bytes_per_s)))
    rate = {pair: min(bytes_per_s[a][b], bytes_per_s[b][a]) for pair in _pairs(hosts) for a, b in [pair]}
    rates = sorted(rate.values())
    gaps = [(high / low, high) for low, high in itertools.pairwise(rates) if high >= GAP * low > 0]

    def in_order(some: tuple[int, ...]) -> tuple[int, ...]:
        for _, fast in gaps:  # from the slowest links on
            if len(found := _joined(some, rate, fast)) > 1:
                return tuple(itertools.chain.from_iterable(map(in_order, found)))
        return some

    order = in_order(hosts)
    for _, fast in sorted(gaps, reverse=True):
        if len(found := _joined(order, rate, fast)) > 1:
            return found
    return (hosts,)


def _pairs(hosts: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.combinations(sorted(hosts), 2))


def _joined(
    hosts: tuple[int, ...], rate: Mapping[tuple[int, int], float], fast: float
) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of `hosts`, in their order, that links of at least `fast` join."""
    of = {host: host for host in hosts}
    for one, other in _pairs(hosts):
        if rate[one, other] >= fast and of[one] != of[other]:
            old, new = of[other], of[one]
            of = {host: new if group == old else group for host, group in of.items()}
    return tuple(tuple(host for host in hosts if of[host] == group) for group in dict.fromkeys(of.values()))


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Returns rounds of disjoint pairs in which each two hosts meet once (the circle method)."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def measure(group: dist.ProcessGroup, device: torch.device) -> HostLinks:
    """Measures the links between the hosts of `group`; all its ranks call it. One rank of each host sends
    messages of BYTES to that of each other host and gets them back; pairs of a round do so at once. Raises
    CommTimeout and PeerLost.

    device: where messages lie, so that they take the network that tensors there take.
    """
    doing = "Measuring the links between hosts"
    told_hosts = gather(group, doing, (_C.host_identity(), socket.gethostname()), tuple[str, str])
    hosts = list(dict.fromkeys(told_hosts))
    ranks = tuple(tuple(r for r, other in enumerate(told_hosts) if other == host) for host in hosts)
    own, mine = group.rank(), hosts.index(told_hosts[group.rank()])
    found: list[tuple[int, float]] = []
    with named_failures(group, doing):
        for pairs in rounds(len(hosts)):
            dist.barrier(group)
            for pair in pairs:
                if mine in pair and own == ranks[mine][0]:
                    other = pair[mine == pair[0]]
                    found.append((other, _rate(group, device, ranks[other][0], mine < other)))
    told = gather(group, doing, found, list[tuple[int, float]])
    rate = [[math.inf] * len(hosts) for _ in hosts]
    for host, own_ranks in enumerate(ranks):
        for other, bytes_per_s in told[own_ranks[0]]:
            rate[host][other] = bytes_per_s
    return HostLinks(tuple(name for _, name in hosts), ranks, tuple(map(tuple, rate)))


def _rate(group: dist.ProcessGroup, device: torch.device, peer: int, is_first: bool) -> float:
    """Returns the bytes/s of a long message to `peer`."""
    found = 0.0
    for nbytes in BYTES:
        seconds, is_enough = _seconds(group, device, nbytes, peer, is_first)
        found = nbytes / seconds
        if is_enough:
            break
    return found


def _seconds(
    group: dist.ProcessGroup, device: torch.device, nbytes: int, peer: int, is_first: bool
) -> tuple[float, bool]:
    """Returns half of the fastest way there and back, and whether no larger message should follow. What the
    first rank writes into its last message decides for both."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    verbs = (dist.send, dist.recv) if is_first else (dist.recv, dist.send)
    peer = dist.get_global_rank(group, peer)
    times: list[float] = []
    goes_on, is_last, is_enough = 0, 1, 2
    while message[0] == goes_on:
        if is_first and times:  # the first one opens the connection
            is_slow = times[-1] > LONGEST_S
            message[0] = is_enough if is_slow else is_last if len(times) == TIMES else goes_on
        begin = time.perf_counter()
        for verb in verbs:
            verb(message, peer, group=group)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:]) / 2, int(message[0]) == is_enough


def _gbit(bytes_per_s: Sequence[float]) -> str:
    """Returns the least and the largest of these rates in words."""
    low, high = (f"{8e-9 * rate:.3g}" for rate in (min(bytes_per_s), max(bytes_per_s)))
    return f"{low} Gbit/s" if low == high else f"{low} to {high} Gbit/s"
