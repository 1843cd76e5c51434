"""Whether messages between devices of several hosts can make ranks wait for each other for ever.

`Program` is what one rank asks of its devices: `Recorder` stands for the companions of edges, and notes it
while the product's own code runs. `run` executes the programs of all ranks by the rules of NCCL:

  - A rank's compute stream does its steps in order, and may wait for a message.
  - A communicator does its sends and receives in the order in which the rank began them. It starts one when
    the compute stream has come to the place where it was begun and the one before has ended.
  - A send and its receive end together. Nothing is buffered.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

SLOTS = 4
"""Of a transport, kSlots in the core: message n is begun when the compute stream has waited for n - 4."""
Edge = tuple[int, int]
"""Sender and receiver."""


@dataclass(frozen=True)
class Message:
    edge: Edge
    number: int

    def __str__(self) -> str:
        return f"message {self.number} from rank {self.edge[0]} to rank {self.edge[1]}"


@dataclass(frozen=True)
class Begin:
    """Of this rank's part of a message, a send or a receive."""

    message: Message


@dataclass(frozen=True)
class Wait:
    """Of the compute stream, for the end of a message."""

    message: Message


Program = list[Begin | Wait]


@dataclass
class Recorder:
    """The companions of one rank, whose ops add to `program`. What is received is zeros."""

    rank: int
    device: str = "cuda:0"
    """What the product's code is told; it needs none."""
    program: Program = field(default_factory=list)
    edges: dict[Edge, _Companion] = field(default_factory=dict)

    def companion(self, group: object, traffic_class: str, edge: Edge) -> _Companion:
        return self.edges.setdefault(edge, _Companion(self, edge))


@dataclass
class _Companion:
    recorder: Recorder
    edge: Edge
    begun: int = 0
    name = "an edge"

    def send(self, rows: int, width: int, dtype: torch.dtype, device: str, agreement: int = 0) -> _Send:
        message = Message(self.edge, self.begun)
        if self.begun >= SLOTS:
            self.recorder.program.append(Wait(Message(self.edge, self.begun - SLOTS)))
        if self.recorder.rank == self.edge[1]:
            self.recorder.program.append(Begin(message))
        self.begun += 1
        return _Send(self.recorder, message, torch.zeros(rows, width, dtype=dtype))


@dataclass
class _Send:
    recorder: Recorder
    message: Message
    rows: torch.Tensor

    def memory(self) -> torch.Tensor:
        return self.rows

    def publish(self) -> None:
        self.recorder.program.append(Begin(self.message))

    def wait(self) -> None:
        self.recorder.program.append(Wait(self.message))

    def finish(self) -> None:
        pass


class Deadlock(Exception):
    """The ranks wait for each other. The message says what each of them waits for."""


def run(programs: Sequence[Program], communicator: Callable[[Edge], Hashable]) -> int:
    """Executes the programs, by rank, and returns the number of messages. `communicator`: the one in which
    the messages of an edge travel. Raises Deadlock."""
    place = [0] * len(programs)
    queues: defaultdict[tuple[int, Hashable], deque[tuple[int, Message]]] = defaultdict(deque)
    for rank, program in enumerate(programs):
        for at, step in enumerate(program):
            if isinstance(step, Begin):
                queues[rank, communicator(step.message.edge)].append((at, step.message))
    ended: set[Message] = set()

    def advance(rank: int) -> bool:
        start, program = place[rank], programs[rank]
        while place[rank] < len(program):
            step = program[place[rank]]
            if isinstance(step, Wait) and step.message not in ended:
                break
            place[rank] += 1
        return place[rank] > start

    def first(rank: int, own: Hashable) -> Message | None:
        """What a rank's communicator is at."""
        queue = queues[rank, own]
        return queue[0][1] if queue and queue[0][0] < place[rank] else None

    def transfer(rank: int, own: Hashable) -> bool:
        message = first(rank, own)
        if message is None or any(first(end, own) != message for end in message.edge):
            return False
        for end in message.edge:
            queues[end, own].popleft()
        ended.add(message)
        return True

    while any([*map(advance, range(len(programs))), *(transfer(*each) for each in list(queues))]):
        pass
    stuck = [
        f"rank {rank} waits for {step.message}"
        for rank, (program, at) in enumerate(zip(programs, place, strict=True))
        if at < len(program) and isinstance(step := program[at], Wait)
    ]
    left = {message for queue in queues.values() for _, message in queue}
    if stuck or left:
        raise Deadlock("; ".join(stuck) or f"{min(map(str, left))} never ends")
    return len(ended)
