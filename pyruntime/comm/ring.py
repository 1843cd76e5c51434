"""Every rank sends to the next one of its group and receives from the one before.

What two neighbours exchange travels in a group of their own: through shared memory where both are on one
host, otherwise over the group's c10d backend, in chunks and in the class of traffic of the ring. All ranks
begin their sends edge by edge in one order, so that no wait can go round the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyruntime.comm.companions import companion, line_send
from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, group_rank, group_size


class Ring:
    """The ranks of a group in a ring, with the group's transport and deadline of this moment."""

    def __init__(self, group: Group, traffic_class: str, agreement: int = 0):
        """agreement: a number that must be the same on all ranks, or what they send raises ValueError."""
        self.rank, self.size = group_rank(group), group_size(group)
        self._agreement = agreement
        before, own = (self.rank - 1) % self.size, self.rank
        # Edge e leads from rank e to the next one.
        self._edges = {
            edge: companion(group, traffic_class, (edge, (edge + 1) % self.size)).name
            for edge in sorted({before, own})
            if self.size > 1
        }

    def shift(self, lines: int, width: int, dtype: torch.dtype, device: torch.device) -> Shift:
        """Makes room for a tensor [lines, width] that goes one rank on. All ranks call it alike; at most four
        may be open. The first one is collective.

        Raises CommTimeout where a neighbour still reads what went before, and PeerLost.
        """
        sends = {
            edge: line_send(name, lines, width, dtype, str(device), self._agreement)
            for edge, name in self._edges.items()
        }
        return Shift(sends[self.rank], sends[(self.rank - 1) % self.size])


class Shift:
    """A tensor on its way to the next rank, and one on its way here."""

    def __init__(self, outgoing: _C.LineSend, incoming: _C.LineSend):
        self._outgoing, self._incoming = outgoing, incoming
        self.outgoing: Tensor = outgoing.memory()
        """To be written before send()."""

    def send(self) -> None:
        """The next rank may have what was written."""
        self._outgoing.publish()
        self._outgoing.finish()

    def receive(self) -> Tensor:
        """What the rank before has sent, where it lies, until finish(). Raises CommTimeout or PeerLost."""
        self._incoming.wait()
        return self._incoming.memory()

    def finish(self) -> None:
        """It has been read."""
        self._incoming.finish()
