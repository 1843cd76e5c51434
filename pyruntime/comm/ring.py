"""Sends to one neighbour and receives from the other, on every rank of a group.

What two neighbours exchange travels in a group of their own, in the traffic class of the ring. It uses shared
memory if both are on one host, otherwise the group's c10d backend, in chunks. All ranks begin their sends
edge by edge in one order, so that their waits form no cycle. A ring of the other direction has its own edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyruntime.comm.companions import companion
from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, group_rank, group_size


class Ring:
    """The ranks of a group in a ring, with the group's present transport and deadline."""

    def __init__(self, group: Group, traffic_class: str, agreement: int = 0, step: int = 1):
        """agreement: a number that must be the same on all ranks, or what they send raises ValueError.
        step: 1, every rank sends to the next one; -1, to the one before."""
        self.rank, self.size = group_rank(group), group_size(group)
        self._agreement = agreement
        self._source = (self.rank - step) % self.size
        # Edge e leads from rank e to its neighbour.
        self._edges = {
            edge: companion(group, traffic_class, (edge, (edge + step) % self.size))
            for edge in sorted({self._source, self.rank})
            if self.size > 1
        }

    def shift(
        self, outgoing: int, incoming: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Shift:
        """Makes room for rows [outgoing, width] that leave here and [incoming, width] that arrive. Either may
        be 0: nothing travels on that edge. Both ends of an edge call it alike; at most four may be open. The
        first one of an edge is collective.

        Raises CommTimeout if a neighbour still reads what went before, and PeerLost.
        """
        rows = {self._source: incoming, self.rank: outgoing}
        sends = {
            edge: ends.send(rows[edge], width, dtype, str(device), self._agreement)
            for edge, ends in self._edges.items()
            if rows[edge] > 0
        }
        empty = torch.empty(0, width, dtype=dtype, device=device)
        return Shift(sends.get(self.rank), sends.get(self._source), empty)


class Shift:
    """A tensor on its way to a neighbour, and one on its way here; empty if there is none."""

    def __init__(self, outgoing: _C.LineSend | None, incoming: _C.LineSend | None, empty: Tensor):
        self._outgoing, self._incoming, self._empty = outgoing, incoming, empty
        self.outgoing: Tensor = empty if outgoing is None else outgoing.memory()
        """Memory to write before send()."""

    def send(self) -> None:
        """Sends what was written to the neighbour."""
        if self._outgoing is not None:
            self._outgoing.publish()
            self._outgoing.finish()

    def receive(self) -> Tensor:
        """Waits for what the other neighbour has sent, and returns it in place, until finish(). Raises
        CommTimeout, PeerLost."""
        if self._incoming is None:
            return self._empty
        self._incoming.wait()
        return self._incoming.memory()

    def finish(self) -> None:
        """Says that what was received has been read."""
        if self._incoming is not None:
            self._incoming.finish()
