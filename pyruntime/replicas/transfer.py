"""The state of a replica on its way to one that comes, and the sums of the rounds that follow.

First a message that names round, sizes and what has been dealt, with the bytes of all tensors behind it.
Then, for every round whose sum the donor takes an outer step with, a message and the bytes of the sum.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pyruntime.replicas.connection import bytes_of, encode, read_into, read_message, write


class Taken(Protocol):
    """What a replica that comes takes over, on one rank. Nothing here talks to other ranks."""

    def tensors(self) -> list[Tensor]:
        """What is copied, contiguous, on the CPU: the outer state of the round under way, and the inner
        optimizer's of this moment. The same sizes and dtypes on every replica."""

    def advance(self, sums: Tensor, scale: float | None) -> None:
        """The donor's next outer step is with these sums times `scale`; None: with none."""

    def checksum(self) -> int:
        """Of what all replicas have in common."""


class Stream:
    """Sends `snapshot` on `connection` from a thread, and after it the rounds that `add` names. Drops all of
    it once the other side has closed."""

    def __init__(
        self, connection: socket.socket, head: dict[str, Any], snapshot: Sequence[Tensor], seconds: float
    ):
        connection.settimeout(seconds)
        self._connection = connection
        self._items: queue.SimpleQueue[tuple[dict[str, Any], Sequence[Tensor]] | None] = queue.SimpleQueue()
        self._items.put((head, snapshot))
        self.is_over = False
        threading.Thread(target=self._work, daemon=True, name="pyr-donor").start()

    def add(self, head: dict[str, Any], sums: Tensor) -> None:
        """sums: in memory that nobody writes."""
        self._items.put((head, [sums]))

    def close(self) -> None:
        """Once what was added has gone."""
        self._items.put(None)

    def _work(self) -> None:
        with self._connection, contextlib.suppress(OSError):
            while (item := self._items.get()) is not None:
                head, tensors = item
                self._connection.sendall(encode(head))
                for tensor in tensors:
                    write(self._connection, bytes_of(tensor))
        self.is_over = True


def sizes(tensors: Sequence[Tensor]) -> list[list]:
    """What two replicas compare before bytes are taken for tensors."""
    return [[str(tensor.dtype), tensor.numel()] for tensor in tensors]


def fetch(connection: socket.socket, taken: Taken) -> dict[str, Any]:
    """Takes a snapshot over, all of it or nothing, and returns its message. Raises OSError or ValueError."""
    head = read_message(connection)
    tensors = taken.tensors()
    if head["type"] != "state" or head["sizes"] != sizes(tensors):
        raise ValueError(f"the donor's tensors are {str(head.get('sizes'))[:200]}, not those of this replica")
    come = [torch.empty_like(tensor) for tensor in tensors]
    for tensor in come:
        read_into(connection, tensor)
    with torch.no_grad():
        for tensor, found in zip(tensors, come, strict=True):
            tensor.copy_(found)
    return head


def fetch_sums(connection: socket.socket, taken: Taken, like: Tensor) -> dict[str, Any]:
    """Takes the next round's sums, `like` that tensor, and returns their message. Raises OSError or
    ValueError."""
    head = read_message(connection)
    if head["type"] != "sums":
        raise ValueError(f"a message {head['type']} in place of sums")
    sums = torch.empty_like(like)
    read_into(connection, sums)
    taken.advance(sums, head["scale"])
    return head
