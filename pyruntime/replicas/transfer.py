"""Sends the state of a replica to a joining one, then the sums of the following rounds.

The first message names round, sizes and what has been dealt; the bytes of all tensors follow it. Then, for
every round in which the donor takes an outer step, there is a message and the bytes of the sum.
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
from pyruntime.replicas.host_copy import HostCopy, host_memory_like


class Taken(Protocol):
    """State that a joining replica takes over, on one rank. Its methods never talk to other ranks."""

    def tensors(self) -> list[Tensor]:
        """Returns the tensors to copy, contiguous: the outer state of the current round, and
        the inner optimizer's state of this moment. Sizes and dtypes are the same on every replica."""

    def advance(self, sums: Tensor, scale: float | None) -> None:
        """Repeats the donor's outer step with these sums times `scale`; None: without sums."""

    def checksum(self) -> int:
        """Returns a checksum of what all replicas have in common."""


class Stream:
    """Sends `snapshot` on `connection` from a thread, then the sums that `add` queues. Drops all of them once
    the other side has closed."""

    def __init__(self, connection: socket.socket, head: dict[str, Any], snapshot: HostCopy, seconds: float):
        connection.settimeout(seconds)
        self._connection = connection
        self._items: queue.SimpleQueue[tuple[dict[str, Any], HostCopy] | None] = queue.SimpleQueue()
        self._items.put((head, snapshot))
        self.is_over = False
        threading.Thread(target=self._work, daemon=True, name="pyr-donor").start()

    def add(self, head: dict[str, Any], sums: HostCopy) -> None:
        """Queues sums."""
        self._items.put((head, sums))

    def close(self) -> None:
        """Ends the stream once what was queued has been sent."""
        self._items.put(None)

    def _work(self) -> None:
        with self._connection, contextlib.suppress(OSError):
            while (item := self._items.get()) is not None:
                head, copies = item
                self._connection.sendall(encode(head))
                for tensor in copies.take():
                    write(self._connection, bytes_of(tensor))
        self.is_over = True


def sizes(tensors: Sequence[Tensor]) -> list[list]:
    """Returns dtypes and sizes, which two replicas compare before they exchange raw bytes."""
    return [[str(tensor.dtype), tensor.numel()] for tensor in tensors]


def fetch(connection: socket.socket, taken: Taken) -> dict[str, Any]:
    """Receives a snapshot, all of it or nothing, and returns its message. Raises OSError or ValueError."""
    head = read_message(connection)
    tensors = taken.tensors()
    if head["type"] != "state" or head["sizes"] != sizes(tensors):
        raise ValueError(f"the donor's tensors are {str(head.get('sizes'))[:200]}, not those of this replica")
    come = [host_memory_like(tensor) for tensor in tensors]
    for tensor in come:
        read_into(connection, tensor)
    with torch.no_grad():
        for tensor, found in zip(tensors, come, strict=True):
            tensor.copy_(found)
    return head


def fetch_sums(connection: socket.socket, taken: Taken, like: Tensor) -> dict[str, Any]:
    """Receives the next round's sums, a tensor like `like`, and returns their message. Raises OSError or
    ValueError."""
    head = read_message(connection)
    if head["type"] != "sums":
        raise ValueError(f"found a message {head['type']} in place of sums")
    sums = host_memory_like(like)
    read_into(connection, sums)
    taken.advance(sums, head["scale"])
    return head
