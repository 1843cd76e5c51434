"""The sum of a tensor over the members of a round, over a connection between every two.

Each of n members sums one n-th part: it receives that part from all others and sends them the sum. So a
member sends and receives 2 (n - 1) / n of the tensor. All get the same bits, because each part is summed by
one member, in the order of members, in fp32 (fp64 for doubles), and rounded once.

The service may interrupt a sum at any moment: whenever its connection is readable, `interrupted` is called.
The tensor itself is never written. Connections stay open after a failure. Otherwise other members would take
the closing for this member's failure and miss the real one.
"""

from __future__ import annotations

import errno
import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pyruntime.replicas.connection import bytes_of

LOOK_S = 0.2
MEET_LOOK_S = 0.02


class Interrupted(Exception):
    """The service has ordered something else."""


class PeerFailed(Exception):
    """The exchange cannot continue with member `index`."""

    def __init__(self, index: int, why: str):
        self.index = index
        super().__init__(why)


def sum_over(
    tensor: Tensor,
    sums: Tensor,
    mine: int,
    peers: Mapping[int, socket.socket],
    control: socket.socket,
    interrupted: Callable[[], bool],
    deadline_s: float,
) -> int:
    """Writes into `sums` the sum of all members' `tensor`; both 1-D and contiguous. Returns the bytes
    received.

    mine: number of this member. peers: non-blocking connections to the others, by their numbers. control: the
    connection to the service; when it is readable, `interrupted` reads it. Raises Interrupted, or PeerFailed
    if a connection fails or nothing moves on it for `deadline_s` seconds.
    """
    count = len(peers) + 1
    parts, results = tensor.tensor_split(count), sums.tensor_split(count)
    come = {peer: torch.empty_like(parts[mine]) for peer in peers}
    flow = _Flow(peers, control, interrupted, deadline_s)
    flow.run({peer: parts[peer] for peer in peers}, come)
    exact = torch.zeros_like(parts[mine], dtype=torch.promote_types(tensor.dtype, torch.float32))
    for member in range(count):
        exact += parts[mine] if member == mine else come[member]
    results[mine].copy_(exact)
    flow.run({peer: results[mine] for peer in peers}, {peer: results[peer] for peer in peers})
    return flow.received


class _Flow:
    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        control: socket.socket,
        interrupted: Callable[[], bool],
        deadline_s: float,
    ):
        self._peers, self._control = peers, control
        self._interrupted, self._deadline_s = interrupted, deadline_s
        self.received = 0

    def run(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Returns when all tensors have been sent and received."""
        out = {peer: bytes_of(tensor) for peer, tensor in outgoing.items() if tensor.numel()}
        come = {peer: bytes_of(tensor) for peer, tensor in incoming.items() if tensor.numel()}
        moved = dict.fromkeys(self._peers, time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while out or come:
                _watch(selector, self._peers, out, come)
                for key, events in selector.select(LOOK_S):
                    if key.fileobj is self._control:
                        if self._interrupted():
                            raise Interrupted
                        continue
                    peer = key.data
                    self._move(peer, events, out, come)
                    moved[peer] = time.monotonic()
                for peer in {*out, *come}:
                    if time.monotonic() - moved[peer] > self._deadline_s:
                        raise PeerFailed(peer, f"nothing passed for {self._deadline_s:g} s")

    def _move(self, peer: int, events: int, out: dict[int, memoryview], come: dict[int, memoryview]) -> None:
        """Sends and receives what can pass without waiting."""
        connection = self._peers[peer]
        try:
            if events & selectors.EVENT_WRITE and peer in out:
                out[peer] = out[peer][connection.send(out[peer]) :]
            if events & selectors.EVENT_READ and peer in come:
                count = connection.recv_into(come[peer])
                if not count:
                    raise PeerFailed(peer, "the connection was closed")
                self.received += count
                come[peer] = come[peer][count:]
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerFailed(peer, error.strerror or str(error)) from error
        for left in (out, come):
            if peer in left and not left[peer]:
                del left[peer]


def _watch(
    selector: selectors.BaseSelector,
    peers: Mapping[int, socket.socket],
    out: Mapping[int, memoryview],
    come: Mapping[int, memoryview],
) -> None:
    known = selector.get_map()
    for peer, connection in peers.items():
        wanted = (selectors.EVENT_WRITE if peer in out else 0) | (selectors.EVENT_READ if peer in come else 0)
        key = known.get(connection)
        if key is None and wanted:
            selector.register(connection, wanted, peer)
        elif key is not None and not wanted:
            selector.unregister(connection)
        elif key is not None and key.events != wanted:
            selector.modify(connection, wanted, peer)


def meet(address: Sequence, header: bytes, deadline_s: float, meanwhile: Callable[[], None]) -> socket.socket:
    """Returns a connection to another replica, with `header` sent as first message and timeout `deadline_s`.

    meanwhile: called every few hundredths of a second until connected; an exception from it ends the wait.
    Raises OSError, and TimeoutError after `deadline_s` seconds without an answer (a host without power, say).
    """
    family, kind, protocol, _, where = socket.getaddrinfo(
        address[0], int(address[1]), type=socket.SOCK_STREAM
    )[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        found = connection.connect_ex(where)
        if found == errno.EINPROGRESS:
            _wait_for_answer(connection, time.monotonic() + deadline_s, meanwhile)
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if found:
            raise OSError(found, os.strerror(found))
        connection.settimeout(deadline_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(header)
    except BaseException:
        connection.close()
        raise
    return connection


def _wait_for_answer(connection: socket.socket, end: float, meanwhile: Callable[[], None]) -> None:
    waits = select.poll()
    waits.register(connection, select.POLLOUT)
    while not waits.poll(MEET_LOOK_S * 1000):
        meanwhile()
        if time.monotonic() > end:
            raise TimeoutError("it did not answer")
