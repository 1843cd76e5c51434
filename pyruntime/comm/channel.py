"""Sends messages from one rank of a group to another, in order.

A channel is an edge of a group (`companions.py`). It uses shared memory if both ranks are on one host,
otherwise the group's c10d backend, in chunks and in the channel's traffic class. The receiver makes room
ahead, so that a message leaves as soon as it is sent. The sender goes on at once; it waits for room only
while four messages have not been received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from pyruntime.choices import WireFormat
from pyruntime.comm.companions import companion
from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, crosses_hosts, group_rank
from pyruntime.comm.wire import Wire

ROOM = 4
"""Messages of a channel that may be under way."""
AHEAD = 3
"""Messages for which a receiver makes room before it asks for them; on devices of several hosts none."""


class Channels:
    """This rank's channels among `edges` (sender, receiver) of a group, for messages of up to [rows, width]
    of one dtype, which travel as `wire` says.

    Every rank of the group makes them alike, with all edges. Two ranks that meet for the first time wait for
    each other. Raises CommTimeout and PeerLost, as its methods do.
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
        # In one order on all ranks, so that the waits of ranks for each other form no cycle.
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
        # A device receives from another host in a stream of its own, once it is asked to. What waits for the
        # whole device meanwhile, as mapping memory for another group does, would wait for a message that its
        # sender may not come to before this rank goes on.
        self._ahead = {
            sender: 0 if self._device != "cpu" and self._crosses_hosts(sender) else AHEAD
            for sender in self._posted
        }

    def _crosses_hosts(self, sender: int) -> bool:
        return crosses_hosts(self._edges[sender, self._rank].name, self._device)

    def _grow(self, edge: tuple[int, int], rows: int) -> None:
        """Claims the memory of all messages that may be under way; both ranks do it together."""
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
        """Announces messages from that rank, of so many rows each, which receive() will take."""
        self._expected[sender].extend(rows)
        self._post(sender)

    def _post(self, sender: int) -> None:
        while self._expected[sender] and len(self._posted[sender]) < self._ahead[sender]:
            self._post_next(sender)

    def _post_next(self, sender: int) -> None:
        message = self._message((sender, self._rank), self._expected[sender].popleft())
        self._posted[sender].append(message)

    def send(self, receiver: int, x: Tensor) -> None:
        """Sends x, of any shape with the channel's width last; it is on its way when this returns."""
        rows = x.reshape(-1, self._wire.width)
        message = self._message((self._rank, receiver), len(rows))
        self._wire.write(rows, message.memory())
        message.publish()
        message.finish()

    def has_come(self, sender: int) -> bool:
        """Whether receive() would not wait; also false if that cannot be told."""
        posted = self._posted[sender]
        return bool(posted) and posted[0].has_come()

    def note_failed_pass(self) -> None:
        """Notes that this rank has left out a pass. What it sends and receives next is of another pass than
        its peers' and raises ValueError, on all ranks, unless they have left out as many."""
        for edge in self._edges.values():
            _C.note_failed_pass(edge.name)

    def stats(self) -> list[_C.CommStats]:
        """Returns the figures of this rank's channels, as `pyruntime.comm.stats` does."""
        return [_C.stats(edge.name) for edge in self._edges.values()]

    def receive(self, sender: int) -> Tensor:
        """Returns the next message from that rank, [rows, width], in memory of its own."""
        if not self._posted[sender]:
            self._post_next(sender)
        message = self._posted[sender].popleft()
        message.wait()
        memory = message.memory()
        x = torch.empty(len(memory), self._wire.width, dtype=self._wire.dtype, device=memory.device)
        self._wire.read(memory, x)
        message.finish()
        self._post(sender)
        return x
