"""Decides for the service of replicas that come and go: events in, orders out, without a socket or a clock.

The docstring of `pyruntime.replicas` has the protocol. A replica has `places` ranks. Each rank has a
connection of its own and sums with the ranks at the same place of other replicas; all ranks of a replica get
the same orders. A replica counts as arrived, done or ready when all its places are. It is lost with its first
lost rank.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from pyruntime.replicas.address import is_loopback
from pyruntime.replicas.connection import ALIVE_S
from pyruntime.replicas.deal import Deal

SIGNS = 3
"""Signs of life that a rank must miss, at least, before it counts as silent."""
OUTAGE = 10
"""Factor on the wait while nobody at all is heard: the service's own link may be down."""
SETTLES_S = 2.0
"""Seconds after a failed connection between two members in which a death may still be reported."""


class ReplicaState(enum.Enum):
    """The state of a replica in the protocol."""

    COMING = "coming"
    """Some of its ranks are not connected yet."""
    NEW = "new"
    """It waits, with the state that it was started with."""
    FETCHING = "fetching"
    """It receives its state from a donor."""
    READY = "ready"
    """It has the state at the beginning of a round."""
    ENTERING = "entering"
    """It is to take part in the round, and may still wait for sums from its donor."""
    MEMBER = "member"
    LEAVING = "leaving"
    """It has been told that the run is over."""


@dataclasses.dataclass(frozen=True)
class Own:
    """The state that a rank has at the beginning of a round."""

    step: int
    """Steps in that state."""
    weights: int
    """A checksum."""
    deal: list[int]
    """Blocks dealt by then, as `Deal.to_list`."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Own:
        return cls(message["step"], message["weights"], list(message["deal"]))


@dataclasses.dataclass
class Replica:
    name: str
    label: str
    """Its host, for people to read."""
    places: int
    job: dict[str, Any]
    """Settings that must be equal on all replicas."""
    own: dict[int, Own] = dataclasses.field(default_factory=dict)
    """Its state, by place."""
    addresses: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    """Addresses at which its ranks answer other replicas, by place."""
    state: ReplicaState = ReplicaState.COMING
    donor: str | None = None
    broken: str | None = None
    """A donor that failed."""
    blocks: list[int | None] = dataclasses.field(default_factory=list)
    """Blocks that have not counted: of the current round, and of the next if averages are a round late. None:
    the replica joined too late for that round and adds zeros to its sum."""
    ready: dict[int, int] = dataclasses.field(default_factory=dict)
    """By place, the round whose beginning its state belongs to."""
    said: set[int] = dataclasses.field(default_factory=set)
    """Places that have reported what is awaited: begun, arrived, or done."""
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    """By place, the peer with which an exchange failed."""
    came: float = 0.0
    """Time when its first rank connected."""
    heard: dict[int, float] = dataclasses.field(default_factory=dict)
    """Time of its last message, by place."""

    @property
    def silent_since(self) -> float:
        """Last time of the rank that has been silent for longest; a rank that never connected counts."""
        return self.came if len(self.heard) < self.places else min(self.heard.values())

    @property
    def has_said(self) -> bool:
        return len(self.said) == self.places

    @property
    def step(self) -> int:
        """Steps of its state; -1 if its ranks have states of different rounds."""
        steps = {own.step for own in self.own.values()}
        return steps.pop() if len(steps) == 1 else -1

    @property
    def is_local(self) -> bool:
        """Whether only processes of its own host can reach it."""
        return any(is_loopback(host) for host, _ in self.addresses.values())

    def has_what(self, other: Replica) -> bool:
        """Whether it has the same state as `other`."""
        return self.step == other.step >= 0 and all(
            own.weights == other.own[place].weights for place, own in self.own.items()
        )


def _late(replica: Replica) -> int:
    """Returns the rounds between sending a displacement and using its average."""
    return replica.job.get("late", 0)


class Phase(enum.Enum):
    GATHERING = "gathering"
    """Before the first round, or after all members have gone."""
    COMPUTING = "computing"
    EXCHANGING = "exchanging"
    OVER = "over"
    """The last round has been committed."""


@dataclasses.dataclass(frozen=True)
class Order:
    """A message for all ranks of a replica, or for one place."""

    replica: str
    message: dict[str, Any]
    place: int | None = None


class Coordinator:
    """Decides which replicas take part in a round and when it counts.

    replicas: number that the first round waits for. quorum: least number of members of a round that counts.
    deadline_s: the longest wait of arrived members for another one, and the longest silence of a replica
    (OUTAGE times as long while nobody is heard). Once the quorum is there, the first round waits as long for
    the others.

    `now` is a time in seconds. The caller empties `orders`, the messages to send, and `events`, which go to
    the record.
    """

    def __init__(self, replicas: int, quorum: int, deadline_s: float):
        self._wanted, self.quorum, self._deadline_s = replicas, quorum, deadline_s
        self._silence_s = max(deadline_s, SIGNS * ALIVE_S)
        self._heard = 0.0
        """Time of the last message from any rank."""
        self.replicas: dict[str, Replica] = {}
        """All connected replicas, in the order in which they came."""
        self.phase, self.round = Phase.GATHERING, 0
        self._deal = Deal()
        self._attempt = 0
        self._since = 0.0
        """Time when a member arrived last, or in GATHERING when a replica came."""
        self._failed_at: float | None = None
        self._lacked = False
        """Whether the missing quorum has been recorded."""
        self.orders: list[Order] = []
        self.events: list[dict[str, Any]] = []

    @property
    def members(self) -> list[Replica]:
        """The members of the round."""
        return [
            each
            for each in self.replicas.values()
            if each.state in (ReplicaState.ENTERING, ReplicaState.MEMBER)
        ]

    @property
    def incomplete(self) -> list[str]:
        """Replicas with unconnected ranks, in the order in which they came."""
        return [each.name for each in self.replicas.values() if len(each.addresses) < each.places]

    @property
    def waiting(self) -> list[str]:
        """Replicas that wait for an order and need signs of life from the service."""
        computing = {
            each.name
            for each in self.replicas.values()
            if self.phase is Phase.COMPUTING and each.state is ReplicaState.MEMBER and not each.said
        }
        return [name for name in self.replicas if name not in computing]

    def hello(self, name: str, place: int, facts: Mapping[str, Any], now: float) -> None:
        """Registers a rank that has connected."""
        self._anybody_is_heard(now)
        own = Own.of(facts)
        made = Replica(name, facts["label"], facts["places"], facts["job"], came=now)
        replica = self.replicas.setdefault(name, made)
        replica.addresses[place], replica.own[place] = tuple(facts["address"]), own
        replica.heard[place] = now
        if len(replica.addresses) == replica.places:
            self._is_here(replica, now)
            self._tell_event("come", replica)
            self._refuse_another_job(replica, now)
            self._refuse_unreachable(replica, now)
        self._settle(now)

    def why_not(self, name: str, place: int, facts: Mapping[str, Any]) -> str:
        """Returns why a rank cannot belong to that replica, in words; empty if it can."""
        known = self.replicas.get(name)
        if known is None:
            return ""
        if facts["places"] != known.places:
            return f"it says that its replica has {facts['places']} ranks, and another one {known.places}"
        return f"rank {place} of its replica is connected already" if place in known.addresses else ""

    def _is_here(self, replica: Replica, now: float) -> None:
        replica.state = ReplicaState.NEW
        self._since = now if self.phase is Phase.GATHERING else self._since

    def _anybody_is_heard(self, now: float) -> None:
        """Forgives the time in which nobody was heard: no replica is to blame for that silence."""
        silence = now - self._heard
        if silence > SIGNS * ALIVE_S:
            for each in self.replicas.values():
                each.came += silence
                each.heard = {place: at + silence for place, at in each.heard.items()}
        self._heard = now

    def hear(self, name: str, place: int, message: Mapping[str, Any], now: float) -> None:
        """Handles a message of a rank. Messages of a replica that has left are ignored."""
        self._anybody_is_heard(now)
        replica = self.replicas.get(name)
        if replica is None:
            return
        replica.heard[place] = now
        kind = message["type"]
        if kind == "ready" and replica.state in (ReplicaState.FETCHING, ReplicaState.READY):
            replica.ready[place] = message["round"]
            if len(replica.ready) == replica.places:
                replica.state = ReplicaState.READY
        elif kind == "here" and replica.state is ReplicaState.COMING:
            replica.own[place] = Own.of(message)
            if len(replica.own) == replica.places:
                self._is_here(replica, now)
        elif kind == "broken" and message["donor"] == replica.donor:
            replica.broken = replica.donor
            self._start_over(replica)
        elif kind == "begun" and replica.state is ReplicaState.ENTERING and message["round"] == self.round:
            self._said(replica, place)
            if replica.has_said:
                replica.state, replica.donor, replica.said = ReplicaState.MEMBER, None, set()
                self._order(replica, {"type": "go"})
        elif kind == "arrived" and replica.state is ReplicaState.MEMBER and message["round"] == self.round:
            self._said(replica, place)
            self._since = now
        elif kind == "done" and self._is_of_attempt(message):
            self._said(replica, place)
            if all(each.has_said for each in self.members):
                self._commit(now)
        elif kind == "failed" and self._is_of_attempt(message):
            replica.failed[place] = message["peer"]
            self._failed_at = now if self._failed_at is None else self._failed_at
        self._settle(now)

    def lost(self, name: str, reason: str, now: float) -> None:
        """Removes a replica: the connection to one of its ranks has ended."""
        replica = self.replicas.pop(name, None)
        if replica is None:
            return
        if len(replica.addresses) == replica.places:
            event = "left" if self.phase is Phase.OVER else "lost"
            self._tell_event(event, replica, reason=reason)
        has_ended = self.phase is Phase.OVER and replica.state in (ReplicaState.MEMBER, ReplicaState.LEAVING)
        if not has_ended:  # else its other ranks have all they need and read no more
            self._order(replica, {"type": "expelled", "reason": f"its replica left: {reason}"})
        was_member = replica.state in (ReplicaState.ENTERING, ReplicaState.MEMBER)
        self._free(replica)
        if was_member and self.phase is Phase.EXCHANGING:
            self._begin_anew()
        if self.phase in (Phase.COMPUTING, Phase.EXCHANGING) and not self.members:
            self._enter_now(set(self.replicas))  # ready replicas need no donor
        for other in self.replicas.values():
            if other.donor == name:
                self._start_over(other)
        self._settle(now)

    def is_late(self, now: float) -> bool:
        """Whether the deadline has passed since the last arrival of a member or the last commit."""
        return now - self._since > self._deadline_s

    def tick(self, now: float) -> None:
        """Looks for deadlines that have passed; call it a few times a second, after everything received
        before `now` has been handled."""
        if self.phase is not Phase.OVER:
            is_outage = now - self._heard > SIGNS * ALIVE_S
            most = OUTAGE * self._silence_s if is_outage else self._silence_s
            for each in list(self.replicas.values()):
                if now - each.silent_since > most:
                    self._expel(each, f"nothing was heard from it for {most:g} s", now)
        late = self.is_late(now)
        if self.phase is Phase.GATHERING:
            if late and len(self._whole()) >= self.quorum:
                self._start(now)
        elif self.phase is Phase.COMPUTING:
            members = self.members
            missing = [each for each in members if not self._has_arrived(each)]
            ready = sum(map(self._is_ready, self.replicas.values()))  # each can replace a missing member
            if late and len(missing) < len(members) and len(members) - len(missing) + ready >= self.quorum:
                for each in missing:
                    self._expel(each, f"it did not reach the end of round {self.round} in time", now)
        elif (
            self.phase is Phase.EXCHANGING
            and self._failed_at is not None
            and now - self._failed_at > SETTLES_S
        ):
            self._expel(self._blamed(), "others made no progress with it in an exchange", now)
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Takes the steps that the replicas' states now allow."""
        if self.phase is Phase.GATHERING:
            if len(self._whole()) >= self._wanted:
                self._start(now)
        elif self.phase is Phase.OVER:
            for each in self._whole():
                if each.state is not ReplicaState.MEMBER:
                    self._order(each, {"type": "over"})
                    each.state = ReplicaState.LEAVING
        if self.phase is Phase.COMPUTING:
            if len(self.members) < self.quorum:
                self._enter_now({each.name for each in self.replicas.values()})
            if not self.members:
                self._gather_anew(now)
                return
            self._find_donors()
            lacks = len(self.members) < self.quorum
            if lacks and not self._lacked:
                self.events.append({"event": "waits", "round": self.round, "members": len(self.members)})
            self._lacked = lacks
            if not lacks and all(self._has_arrived(each) for each in self.members):
                self._exchange(now)

    def _whole(self) -> list[Replica]:
        left_out = (ReplicaState.COMING, ReplicaState.LEAVING)
        return [each for each in self.replicas.values() if each.state not in left_out]

    def _has_arrived(self, replica: Replica) -> bool:
        return replica.state is ReplicaState.MEMBER and replica.has_said

    def _refuse_another_job(self, replica: Replica, now: float) -> None:
        """Expels a replica whose job differs from that of the replica that came first."""
        others = self._others(replica)
        if not others:
            return
        job, own = (each.job | {"ranks": each.places} for each in (others[0], replica))
        for key in [*job, *own]:
            if job.get(key) != own.get(key):
                self._expel(
                    replica,
                    f"it was started with {key}={own.get(key)}, but the replicas here with "
                    f"{key}={job.get(key)}",
                    now,
                )
                return

    def _others(self, replica: Replica) -> list[Replica]:
        """Returns the other replicas whose ranks are all connected."""
        return [
            each
            for each in self.replicas.values()
            if each is not replica and len(each.addresses) == each.places
        ]

    def _refuse_unreachable(self, replica: Replica, now: float) -> None:
        """Expels a replica if only it or only the others have a loopback address: calls would reach the
        caller's own host."""
        others = self._others(replica)
        if replica.name not in self.replicas or not others or replica.is_local == others[0].is_local:
            return
        (local, other) = ("it", "others") if replica.is_local else (others[0].label, "it")
        self._expel(
            replica,
            f"{local} reached the service at a loopback address, at which {other} cannot call back; set "
            "--data_parallel.members to the address that other hosts use, on the service's host too",
            now,
        )

    def _start(self, now: float) -> None:
        """Begins the first round with the replicas whose state is furthest; the others fetch that state."""
        first = max(self._whole(), key=lambda each: each.step)  # among equals the one that came first
        if first.step < 0:
            for each in self._whole():
                self._expel(each, "its ranks have states of different rounds, as in every other replica", now)
            return
        first_block, *again = next(iter(first.own.values())).deal
        self.round, self._deal, self._since = first.step // first.job["tau"], Deal(first_block, again), now
        if self.round >= first.job["rounds"]:
            self.phase = Phase.OVER
            return
        self.phase = Phase.COMPUTING
        self._enter([each for each in self._whole() if each.has_what(first)], behind=False)
        self.events.append({"event": "start", "round": self.round, "members": len(self.members)})
        self._find_donors()

    def _gather_anew(self, now: float) -> None:
        """Returns to GATHERING: nobody is left who has the state of the round."""
        self.phase, self._since = Phase.GATHERING, now
        for each in self._whole():  # the state they came with may have changed
            self._start_over(each)
            each.state, each.own = ReplicaState.COMING, {}
            self._order(each, {"type": "again"})
        self.events.append({"event": "waits", "round": self.round, "members": 0})

    def _enter_now(self, names: set[str]) -> None:
        """Makes members of those named replicas that have the state at this round's beginning."""
        ready = [each for each in self.replicas.values() if each.name in names and self._is_ready(each)]
        self._enter(ready, behind=bool(self.members))
        for each in ready:
            each.donor = None

    def _is_ready(self, replica: Replica) -> bool:
        return replica.state is ReplicaState.READY and set(replica.ready.values()) == {self.round}

    def _enter(self, replicas: Sequence[Replica], behind: bool) -> None:
        """behind: others may have displacements already. If averages are late, those were not measured from
        the state that these replicas have."""
        for each in replicas:
            each.blocks = [None] if behind and _late(each) else [self._deal.take()]
            each.state, each.said = ReplicaState.ENTERING, set()
        for each in replicas:
            if _late(each) and self.round + 1 < each.job["rounds"]:
                each.blocks.append(self._deal.take())
        for each in replicas:
            blocks = [block for block in each.blocks if block is not None]
            message = {
                "type": "enter", "round": self.round, "blocks": blocks, "behind": each.blocks[0] is None,
                **self._dealt(),
            }  # fmt: skip
            self._order(each, message)
            self._tell_event("enter", each, round=self.round, blocks=blocks)

    def _dealt(self) -> dict[str, Any]:
        """Returns what has been dealt, for a checkpoint of the state at the round's beginning. A block dealt
        a moment later is at or above the first number of the list, or in the list."""
        in_work = [block for each in self.members for block in each.blocks if block is not None]
        return {"deal": self._deal.to_list(in_work)}

    def _free(self, replica: Replica) -> None:
        """Gives back its blocks, which have not counted."""
        for block in replica.blocks:
            if block is not None:
                self._deal.give_back(block)
        replica.blocks = []

    def _start_over(self, replica: Replica) -> None:
        """Makes it fetch its state from another donor."""
        self._free(replica)
        replica.state, replica.donor, replica.ready, replica.said = ReplicaState.NEW, None, {}, set()

    def _find_donors(self) -> None:
        donors = [each for each in self.replicas.values() if each.state is ReplicaState.MEMBER]
        for each in self.replicas.values():
            if each.state is ReplicaState.NEW and donors:
                fetching = collections.Counter(other.donor for other in self.replicas.values())
                broken = each.broken
                donor = min(donors, key=lambda one: (one.name == broken, fetching[one.name]))
                each.donor, each.state, each.ready = donor.name, ReplicaState.FETCHING, {}
                for place, address in donor.addresses.items():
                    message = {"type": "fetch", "donor": donor.name, "address": address}
                    self._order(each, message, place)

    def _exchange(self, now: float) -> None:
        members = self.members
        self.phase, self._attempt, self._failed_at = Phase.EXCHANGING, self._attempt + 1, None
        for each in members:
            each.said, each.failed = set(), {}
        for each in members:
            for place in range(each.places):
                message = {
                    "type": "exchange",
                    "attempt": self._attempt,
                    "members": [[other.name, other.addresses[place]] for other in members],
                }
                self._order(each, message, place)

    def _begin_anew(self) -> None:
        """Ends the exchange without a result; all remaining members have arrived."""
        self.phase = Phase.COMPUTING
        for each in self.members:
            each.said = set(range(each.places))

    def _is_of_attempt(self, message: Mapping[str, Any]) -> bool:
        return self.phase is Phase.EXCHANGING and message["attempt"] == self._attempt

    def _said(self, replica: Replica, place: int) -> None:
        replica.said.add(place)

    def _commit(self, now: float) -> None:
        members = self.members
        counted = [(each.label, block) for each in members if (block := each.blocks.pop(0)) is not None]
        self.events.append(
            {"event": "round", "round": self.round, "blocks": dict(counted), "attempt": self._attempt}
        )
        late, rounds = _late(members[0]), members[0].job["rounds"]
        coming = [
            each
            for each in self.replicas.values()
            if each.state is ReplicaState.READY and min(each.ready.values()) >= self.round - late
        ]
        self.round, self.phase, self._since = self.round + 1, Phase.COMPUTING, now
        has_more = self.round + late < rounds
        dealt = {each.name: [self._deal.take()] if has_more else [] for each in members}
        for each in members:
            each.blocks += dealt[each.name]
            each.said = set()
        if self.round == rounds:
            self.phase = Phase.OVER
        commit = {"type": "commit", "round": self.round, "count": len(counted), **self._dealt()}
        for each in members:
            self._order(each, commit | {"blocks": dealt[each.name]})
        self._enter(coming if has_more else [], behind=True)

    def _blamed(self) -> Replica:
        """Returns the member that most exchanges failed with; among equals the one that came last."""
        blames = collections.Counter(peer for each in self.members for peer in each.failed.values())
        return max(self.members, key=lambda each: (blames[each.name], self.members.index(each)))

    def _expel(self, replica: Replica, reason: str, now: float) -> None:
        self._order(replica, {"type": "expelled", "reason": reason})
        self.lost(replica.name, reason, now)

    def _order(self, replica: Replica, message: dict[str, Any], place: int | None = None) -> None:
        self.orders.append(Order(replica.name, message, place))

    def _tell_event(self, event: str, replica: Replica, **more: Any) -> None:
        self.events.append({"event": event, "replica": replica.label, **more})
