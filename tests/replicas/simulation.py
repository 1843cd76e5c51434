"""Replicas that come and go, without processes: the real coordinator, ranks that do what `Member` does, and a
scheduler that delivers messages in any order that connections allow, and kills whom it likes.

The outer iterate is the list of rounds that made it: [(round, blocks that were summed)]. So two ranks that
have the same list have the same iterate, and what is counted, and how often, can be read in it. What is
summed has to be measured from one iterate, and where averages are a round late (`late`) from the one before.
"""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass, field
from typing import Any

from pyruntime.replicas.coordinator import Coordinator, Phase

DEADLINE_S = 10.0
TAU = 2


@dataclass(eq=False)
class Rank:
    """One rank of a replica."""

    replica: str
    place: int
    places: int
    rounds: int
    late: int = 0
    iterate: list = field(default_factory=list)
    moved: bool = False
    """Whether the last round in it had any blocks since the run began, or began anew."""
    inbox: collections.deque = field(default_factory=collections.deque)
    outbox: collections.deque = field(default_factory=collections.deque)
    is_alive: bool = True
    is_stopped: bool = False
    """It does nothing, and its connections are open."""
    is_silent: bool = False
    """It gives no signs of life."""
    is_member: bool = False
    is_finished: bool = False
    expelled: str = ""
    blocks: collections.deque = field(default_factory=collections.deque)
    """To take, the first of them now."""
    base: int = 0
    """Rounds in the iterate from which it takes its steps."""
    deal: list = field(default_factory=lambda: [0])
    sent: tuple | None = None
    """(block, base) of the displacement on its way; block None: of one that takes part with nothing."""
    landed: dict | None = None
    """The message that the round of it counts."""
    steps: int = 0
    attempt: tuple | None = None
    """(number, names) of the exchange that it takes part in."""
    result: list | None = None
    donor: Rank | None = None
    entered: dict | None = None
    items: collections.deque = field(default_factory=collections.deque)
    """Rounds of its donor's that it has not taken yet."""
    asking: list[Rank] = field(default_factory=list)
    """Those who want its state."""
    taking: list[Rank] = field(default_factory=list)
    """Those who have it, and are sent the sums of the rounds that follow."""

    @property
    def round(self) -> int:
        return len(self.iterate)

    @property
    def is_computing(self) -> bool:
        return self.is_member and bool(self.blocks) and (self.late > 0 or self.sent is None)

    @property
    def is_flying(self) -> bool:
        return self.sent is not None and self.landed is None

    def own(self) -> dict[str, Any]:
        """The state that it has. Shards of several places differ."""
        weights = hash((str(self.iterate), self.place))
        return {"step": TAU * self.round, "weights": weights, "deal": self.deal}

    def tell(self, **message: Any) -> None:
        self.outbox.append(message)


class World:
    def __init__(self, seed: int, replicas: int, quorum: int, rounds: int, places: int = 1, late: int = 0):
        self.random = random.Random(seed)
        self.coordinator = Coordinator(replicas, quorum, DEADLINE_S)
        self.rounds, self.places, self.late = rounds, places, late
        self.now, self.moves = 0.0, 0
        self.ranks: list[Rank] = []
        self.posted: dict[tuple[int, str, int], tuple] = {}
        """By attempt, replica and place, block and base of the displacement that it has given to the
        others."""
        self.born = 0
        for _ in range(replicas):
            self.start()

    # Replicas.

    def start(self) -> str:
        self.born += 1
        name = f"replica-{self.born}"
        for place in range(self.places):
            rank = Rank(name, place, self.places, self.rounds, self.late)
            job = {"tau": TAU, "rounds": self.rounds, "late": self.late}
            rank.tell(
                type="hello", label=name, places=self.places, address=[name, place], job=job, **rank.own()
            )
            self.ranks.append(rank)
        return name

    def of(self, name: str) -> list[Rank]:
        return [rank for rank in self.ranks if rank.replica == name]

    def alive(self) -> list[str]:
        return list(dict.fromkeys(r.replica for r in self.ranks if r.is_alive and not r.is_finished))

    def kill(self, name: str) -> None:
        for rank in self.of(name):
            rank.is_alive = False
        self.coordinator.lost(name, "killed", self.now)
        self.carry_out()

    def stop(self, name: str, is_silent: bool = True) -> None:
        for rank in self.of(name):
            rank.is_stopped, rank.is_silent = True, is_silent

    # What may happen next.

    def possible(self) -> list[tuple[str, Rank]]:
        found = []
        for rank in self.ranks:
            if not rank.is_alive:
                continue
            if rank.outbox:
                found.append(("send", rank))
            if rank.is_stopped or rank.is_finished:
                continue
            if rank.inbox and (rank.is_flying or not rank.is_member):
                found.append(("hear", rank))
            if rank.is_computing and rank.steps < TAU:
                found.append(("step", rank))
            if rank.is_computing and rank.steps == TAU and not rank.is_flying:
                found.append(("meet", rank))
            if rank.landed is not None and not rank.is_computing:
                found.append(("use", rank))
            if rank.donor is not None and (rank.items or not rank.donor.is_alive):
                found.append(("take", rank))
            if rank.asking and rank.is_member:
                found.append(("give", rank))
            if rank.attempt is not None and self.can_sum(rank):
                found.append(("sum", rank))
        return found

    def can_sum(self, rank: Rank) -> bool:
        number, names = rank.attempt
        if any((number, name, rank.place) not in self.posted for name in names):
            return any(not each.is_alive for name in names for each in self.of(name))
        return True

    def move(self, but: tuple[str, str] = ("", "")) -> bool:
        """Something happens; False where nothing can but time passes. but: (what, replica) does not."""
        possible = [(what, rank) for what, rank in self.possible() if (what, rank.replica) != but]
        if not possible:
            return False
        self.moves += 1
        what, rank = self.random.choice(possible)
        getattr(self, what)(rank)
        self.carry_out()
        return True

    def send(self, rank: Rank) -> None:
        message = rank.outbox.popleft()
        if message["type"] == "hello":
            self.coordinator.hello(rank.replica, rank.place, message, self.now)
        else:
            self.coordinator.hear(rank.replica, rank.place, message, self.now)

    def step(self, rank: Rank) -> None:
        rank.steps += 1

    def meet(self, rank: Rank) -> None:
        """Its round of steps has ended, and the average of the one before has come, where there is one."""
        base = rank.base
        if rank.landed is not None:
            self.use(rank)
        self.launch(rank, (rank.blocks.popleft(), base))

    def launch(self, rank: Rank, sent: tuple) -> None:
        rank.tell(type="arrived", round=rank.round)
        rank.sent, rank.steps, rank.base = sent, 0, rank.round

    def use(self, rank: Rank) -> None:
        """The outer step."""
        message, blocks = rank.landed, tuple(block for block, _ in rank.result)
        bases = {base for _, base in rank.result}
        assert len(bases) <= 1, "displacements are measured from one iterate"
        if rank.late:
            for base in bases:  # what the penalty for staleness takes for a fact
                between = rank.iterate[base:]
                assert len(between) <= 1 and rank.moved == any(blocks for _, blocks in between)
        rank.iterate.append((rank.round, blocks))
        rank.moved = bool(blocks)
        for other in rank.taking:
            if other.donor is rank:
                other.items.append(("sums", rank.iterate[-1], message["deal"]))
        rank.blocks.extend(message["blocks"])
        rank.sent = rank.landed = rank.result = None
        rank.deal, rank.base = message["deal"], rank.round
        rank.is_finished = rank.round == rank.rounds

    def give(self, rank: Rank) -> None:
        """Between two steps, or while it waits at the end of a round."""
        other = rank.asking.pop(0)
        if other.donor is rank:
            other.items.append(("state", (list(rank.iterate), rank.moved), rank.deal))
            rank.taking.append(other)

    def take(self, rank: Rank) -> None:
        """What the donor has sent."""
        if not rank.items:
            rank.tell(type="broken", donor=rank.donor.replica)
            rank.donor = None
            return
        kind, value, deal = rank.items.popleft()
        if kind == "state":
            rank.iterate, rank.moved = list(value[0]), value[1]
        else:
            rank.iterate, rank.moved = [*rank.iterate, value], bool(value[1])
        rank.deal = deal
        rank.tell(type="ready", round=rank.round)
        self.begin_if_there(rank)

    def begin_if_there(self, rank: Rank) -> None:
        if rank.entered is not None and rank.entered["round"] == rank.round:
            rank.tell(type="begun", round=rank.round)

    def sum(self, rank: Rank) -> None:
        number, names = rank.attempt
        found = [self.posted.get((number, name, rank.place)) for name in names]
        rank.attempt = None
        if None in found:
            rank.tell(type="failed", attempt=number, peer=names[found.index(None)])
        else:
            rank.result = sorted(each for each in found if each[0] is not None)
            rank.tell(type="done", attempt=number)

    def hear(self, rank: Rank) -> None:
        message = rank.inbox.popleft()
        kind = message["type"]
        if kind == "expelled":
            rank.is_alive, rank.expelled = False, message["reason"]
        elif kind == "over":
            rank.is_finished = True
        elif kind == "again":
            rank.donor, rank.entered = None, None
            rank.items.clear()
            rank.tell(type="here", **rank.own())
        elif kind == "fetch":
            donor = next(each for each in self.of(message["donor"]) if each.place == rank.place)
            rank.donor, rank.entered = donor, None
            rank.items.clear()
            donor.asking.append(rank)
        elif kind == "enter":
            rank.entered = message
            self.begin_if_there(rank)
        elif kind == "go":
            assert rank.entered["round"] == rank.round
            rank.is_member, rank.deal, rank.donor = True, rank.entered["deal"], None
            rank.blocks.extend(rank.entered["blocks"])
            rank.base = rank.round
            if rank.entered["behind"]:
                self.launch(rank, (None, rank.round))
            else:
                rank.moved = False
        elif kind == "exchange":
            assert rank.is_flying
            names = [name for name, _ in message["members"]]
            assert rank.replica in names
            rank.attempt, rank.result = (message["attempt"], names), None
            self.posted[message["attempt"], rank.replica, rank.place] = rank.sent
        elif kind == "commit":
            assert rank.result is not None, "a round counts for those who have its sum"
            assert message["count"] == len(rank.result)
            assert message["round"] == rank.round + 1
            rank.landed, rank.attempt = message, None
        else:
            raise AssertionError(message)

    def carry_out(self) -> None:
        for order in self.coordinator.orders:
            for rank in self.of(order.replica):
                if order.place in (None, rank.place):
                    rank.inbox.append(order.message)
        self.coordinator.orders = []

    def pass_time(self, seconds: float) -> None:
        """So long, or until somebody has something to do. Those that live say so."""
        end = self.now + seconds
        while self.now < end and not self.possible():
            self.now += 1.0
            for rank in self.ranks:
                if rank.is_alive and not rank.is_silent:
                    self.coordinator.hear(rank.replica, rank.place, {"type": "alive"}, self.now)
            self.coordinator.tick(self.now)
            self.carry_out()

    def run(self, most: int = 20_000) -> None:
        """To the end of the run."""
        for _ in range(most):
            if not self.move():
                if self.coordinator.phase is Phase.OVER:
                    return
                before = self.now
                self.pass_time(DEADLINE_S + 3)
                self.blame_the_silent()
                assert self.now > before
        raise AssertionError(f"no end after {most} moves in {self.coordinator.phase}: {self.ranks}")

    def blame_the_silent(self) -> None:
        """Who has waited for the deadline in an exchange, or for a donor, says so."""
        for rank in self.ranks:
            if not rank.is_alive or rank.is_stopped or rank.is_finished:
                continue
            if rank.attempt is not None:
                number, names = rank.attempt
                missing = [name for name in names if (number, name, rank.place) not in self.posted]
                if missing:
                    rank.attempt = None
                    rank.tell(type="failed", attempt=number, peer=missing[0])
            elif rank.donor is not None and rank.donor.is_stopped and not rank.items:
                rank.tell(type="broken", donor=rank.donor.replica)
                rank.donor = None

    # What must hold.

    def check(self) -> list[int]:
        """The blocks that counted, in the end: each once, and all below the first that was not dealt but for
        those that are to be dealt again. All replicas have the same."""
        done = [rank for rank in self.ranks if rank.is_finished and rank.is_alive and rank.is_member]
        assert done, "somebody ends the run"
        starts = sum(event["event"] == "start" for event in self.coordinator.events)
        for (
            rank
        ) in self.ranks:  # a prefix, also of those that died, unless what they had is lost with them all
            if rank.is_alive or starts == 1:
                assert rank.iterate == done[0].iterate[: rank.round]
        assert [number for number, _ in done[0].iterate] == list(range(self.rounds))
        counted = [block for _, blocks in done[0].iterate for block in blocks]
        assert len(counted) == len(set(counted)), f"a block counted twice: {counted}"
        first, *again = done[0].deal
        assert sorted([*counted, *again]) == list(range(first)), "a block is lost"
        return counted
