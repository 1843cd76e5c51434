"""Messages from one rank of a group to another, in the order in which they are sent.

A channel is an edge of a group (`companions.py`): through shared memory where both ranks are on one host,
otherwise over the group's c10d backend, in chunks and in the channel's class of traffic. The receiver makes
room ahead, so that a message leaves as soon as it is sent; the sender goes on at once and waits only for
room, when four messages have not been received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from pyruntime.choices import WireFormat
from pyruntime.comm.companions import companion
from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, group_rank
from pyruntime.comm.wire import Wire

ROOM = 4
"""Messages of a channel that may be under way."""
AHEAD = 3
"""Messages that a receiver has made room for before it asks for them."""


class Channels:
    """The channels of this rank among `edges` (sender, receiver) of a group, for messages of up to
    [rows, width] of one dtype, which travel as `wire` says.

    Every rank of the group makes them alike, with all edges; where two ranks meet for the first time they
    wait for each other. Raises CommTimeout and PeerLost, as its methods do.
    """

    def __init__(
        self,
        group: Group,
        traffic_class: str,
        edges: Iterable[tuple[int, int]],
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        wire: WireFormat = "same",
    ):
        self._device, self._wire = str(device), Wire(wire, width, dtype, device)
        rank = group_rank(group)
        # In one order on all ranks, so that no wait of two ranks for each other goes round.
        self._edges = {
            edge: companion(group, traffic_class, edge) for edge in sorted(set(edges)) if rank in edge
        }
        self._posted: dict[int, deque[_C.LineSend]] = {
            sender: deque() for sender, to in self._edges if to == rank
        }
        self._expected: dict[int, deque[int]] = {sender: deque() for sender in self._posted}
        self._rank = rank
        for edge in self._edges:
            self._grow(edge, rows)

    def _grow(self, edge: tuple[int, int], rows: int) -> None:
        """Claims the memory of all messages that may be under way, which both ranks do together."""
        for _ in range(ROOM):
            message = self._message(edge, rows)
            if edge[0] == self._rank:
                message.publish()
            else:
                message.wait()
            message.finish()

    def _message(self, edge: tuple[int, int], rows: int) -> _C.LineSend:
        wire = self._wire
        return self._edges[edge].send(rows, wire.travelling_width, wire.travels_as, self._device)

    def expect(self, sender: int, rows: Iterable[int]) -> None:
        """Messages of so many rows each will come from that rank, and receive() will take them."""
        self._expected[sender].extend(rows)
        self._post(sender)

    def _post(self, sender: int) -> None:
        posted, expected = self._posted[sender], self._expected[sender]
        while expected and len(posted) < AHEAD:
            posted.append(self._message((sender, self._rank), expected.popleft()))

    def send(self, receiver: int, x: Tensor) -> None:
        """x, of any shape with the channel's width last, is on its way when this returns."""
        rows = x.reshape(-1, self._wire.width)
        message = self._message((self._rank, receiver), len(rows))
        self._wire.write(rows, message.memory())
        message.publish()
        message.finish()

    def has_come(self, sender: int) -> bool:
        """Whether receive() would not wait; false also where that cannot be told."""
        return self._posted[sender][0].has_come()

    def note_failed_pass(self) -> None:
        """This rank has left out a pass: what it sends and receives next is of another one than its peers'
        and raises ValueError, on all ranks, unless they have left out as many."""
        for edge in self._edges.values():
            _C.note_failed_pass(edge.name)

    def stats(self) -> list[_C.CommStats]:
        """Of this rank's channels, as `pyruntime.comm.stats`."""
        return [_C.stats(edge.name) for edge in self._edges.values()]

    def receive(self, sender: int) -> Tensor:
        """The next message from that rank, [rows, width], in memory of its own."""
        message = self._posted[sender].popleft()
        message.wait()
        memory = message.memory()
        x = torch.empty(len(memory), self._wire.width, dtype=self._wire.dtype, device=memory.device)
        self._wire.read(memory, x)
        message.finish()
        self._post(sender)
        return x
