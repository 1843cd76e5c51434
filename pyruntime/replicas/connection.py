"""Messages and tensors on a connection between two processes."""

from __future__ import annotations

import errno
import json
import select
import socket
from typing import Any

import torch
from torch import Tensor

LONGEST = 1 << 20
"""Bytes of a message."""
PART = 1 << 20
"""Bytes that are handed to the system at once."""
ALIVE_S = 1.0
"""Between two signs of life, of a rank to the service and of the service to those that wait."""

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept() for want of descriptors or memory, which the next call would meet again at once."""


class Ended(ConnectionError):
    """The other process closed the connection."""


def encode(message: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return json.dumps(message).encode() + b"\n"


class Messages:
    """Takes the bytes of a connection apart into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Raises ValueError for what is no message."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise ValueError(f"a message of more than {LONGEST} bytes")
        try:
            found = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a line that is too deep") from error
        if not all(isinstance(message, dict) and "type" in message for message in found):
            raise ValueError("a line that is no message")
        return found


def read_message(connection: socket.socket) -> dict[str, Any]:
    """One message, with nothing read past it. Raises Ended, TimeoutError, OSError, or ValueError for what is
    no message."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise Ended("the connection was closed")
        line += byte
        if len(line) > LONGEST:
            raise ValueError(f"a message of more than {LONGEST} bytes")
    (message,) = Messages().feed(bytes(line))
    return message


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat = tensor.detach().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(bytearray())


def readable(connection: socket.socket, seconds: float) -> bool:
    """Whether something can be read within so long. Unlike select.select, for any number of descriptors."""
    waits = select.poll()
    waits.register(connection, select.POLLIN)
    return bool(waits.poll(seconds * 1000))


def write(connection: socket.socket, data: memoryview) -> None:
    """All of it. The connection's timeout bounds the wait for a part to pass; of sendall it bounds the whole.
    Raises TimeoutError or OSError."""
    while data:
        data = data[connection.send(data[:PART]) :]


def read_into(connection: socket.socket, tensor: Tensor) -> None:
    """Fills a contiguous tensor. Raises Ended, TimeoutError or OSError."""
    left = bytes_of(tensor)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise Ended("the connection was closed")
        left = left[count:]
