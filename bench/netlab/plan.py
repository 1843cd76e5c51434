"""The options of bench/netlab as data: rates, faults, and the environment of every rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.netlab.network import INTERFACE, MOST_HOSTS, address

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 1_000_000, 100_000_000_000  # bits/s; beyond, tbf's burst or this machine sets the pace
MASTER_PORT = 29500  # always free, because every run has its own network


def parse_rate(text: str) -> int:
    """Returns the bits per second of `300mbit`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if not found:
        raise ValueError(
            f"{text!r} is not a rate; write a number and kbit, mbit or gbit (bits per second), "
            "such as 300mbit or 2.5gbit."
        )
    rate = round(float(found[1]) * UNITS[found[2]])
    if not SLOWEST <= rate <= FASTEST:
        raise ValueError(f"{text} is outside netlab's range; use a rate from 1mbit to 100gbit.")
    return rate


def parse_rate_of_host(text: str) -> tuple[int, int]:
    """Returns host and bits per second of `2=300mbit`. Raises ValueError."""
    host, equals, rate = text.partition("=")
    if not equals or not host.isdecimal():
        raise ValueError(f"{text!r} is not a host's rate; write HOST=RATE, such as 2=300mbit.")
    return int(host), parse_rate(rate)


def parse_islands(text: str) -> tuple[tuple[int, ...], ...]:
    """Returns the hosts of each island of `0,2/1,3`. Raises ValueError."""
    islands = [island.split(",") for island in text.split("/")]
    if not all(host.isdecimal() for island in islands for host in island):
        raise ValueError(f"{text!r} names no islands; write the hosts of each, such as 0,2/1,3.")
    return tuple(tuple(map(int, island)) for island in islands)


def parse_seconds(text: str) -> float:
    """Returns the seconds of `30s` or `0.5`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)s?", text)
    if not found:
        raise ValueError(f"{text!r} is not a time; write seconds, such as 30s or 0.5s.")
    return float(found[1])


@dataclass(frozen=True)
class Fault:
    text: str
    kind: str
    """link, kill or stop."""
    target: int
    """A host for link, otherwise a rank."""
    at_s: float
    """Seconds after the start of all ranks, or after the plan's `ready` file."""
    for_s: float | None
    """Seconds that it lasts; None: to the end."""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parses `link:HOST@TIME[+TIME]`, `kill:rankR@TIME` or `stop:rankR@TIME[+TIME]`. Raises
        ValueError."""
        time = r"(\d+(?:\.\d+)?)s"
        found = re.fullmatch(rf"(?:(link):(\d+)|(kill|stop):rank(\d+))@{time}(?:\+{time})?", text)
        if not found or (found[3] == "kill" and found[6]):
            raise ValueError(
                f"{text!r} is not a fault; write link:HOST@TIME, stop:rankR@TIME (both may end: @5s+3s) or "
                "kill:rankR@TIME, such as link:1@5s, stop:rank1@5s+3s or kill:rank2@2.5s."
            )
        duration = float(found[6]) if found[6] else None
        return cls(text, found[1] or found[3], int(found[2] or found[4]), float(found[5]), duration)


@dataclass(frozen=True)
class Plan:
    hosts: int
    ranks_per_host: int
    rates: tuple[int, ...]
    """Bits per second of each host's link, in each direction."""
    islands: tuple[tuple[int, ...], ...]
    """Hosts of each island; empty: one network."""
    between: int
    """Bits per second of the link that joins an island to the others; 0 without islands."""
    faults: tuple[Fault, ...]
    ready: Path | None
    """File from whose creation the times of faults count; None: from the start of all ranks."""
    grace_s: float
    log_dir: Path | None
    counters: Path | None
    command: tuple[str, ...]

    @classmethod
    def make(
        cls,
        hosts: int,
        ranks_per_host: int,
        rate: int,
        rate_of_host: Mapping[int, int],
        islands: tuple[tuple[int, ...], ...],
        between: int,
        faults: tuple[Fault, ...],
        ready: Path | None,
        grace_s: float,
        log_dir: Path | None,
        counters: Path | None,
        command: tuple[str, ...],
    ) -> Plan:
        """Makes a plan. Raises ValueError if the numbers do not fit each other."""
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"--hosts {hosts} is not possible; use 1 to {MOST_HOSTS}.")
        if ranks_per_host < 1:
            raise ValueError(f"--ranks-per-host {ranks_per_host} is not possible; use at least 1.")
        for host in rate_of_host:
            if host >= hosts:
                raise ValueError(f"--rate-host names host {host}; the hosts are 0 to {hosts - 1}.")
        for fault in faults:
            what, many = ("host", hosts) if fault.kind == "link" else ("rank", hosts * ranks_per_host)
            if fault.target >= many:
                raise ValueError(
                    f"--fail {fault.text} names {what} {fault.target}; the {what}s are 0 to {many - 1}."
                )
        if bool(islands) != bool(between):
            raise ValueError("--islands and --between belong together; give both, or leave both out.")
        if islands and sorted(host for island in islands for host in island) != list(range(hosts)):
            raise ValueError(f"--islands must name each of the hosts 0 to {hosts - 1} once.")
        rates = tuple(rate_of_host.get(host, rate) for host in range(hosts))
        return cls(
            hosts, ranks_per_host, rates, islands, between, faults, ready, grace_s, log_dir, counters, command
        )

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)

    def environment(self, rank: int, outside: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment `outside` with torchrun's variables for a rank that is not restarted."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.ranks_per_host),
            "GROUP_RANK": str(self.host_of(rank)),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "TORCHELASTIC_RUN_ID": "netlab",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # there is no agent: rank 0 opens the store
            "OMP_NUM_THREADS": outside.get("OMP_NUM_THREADS", "1"),
            # The only interface; an inherited value would name one of this machine's.
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }
