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
"""Most bytes of a message."""
PART = 1 << 20
"""Most bytes handed to the system at once."""
ALIVE_S = 1.0
"""Seconds between two signs of life, of a rank to the service and of the service to those that wait."""

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept() for lack of descriptors or memory; the next call would fail again at once."""


class Ended(ConnectionError):
    """The other process closed the connection."""


def encode(message: dict[str, Any]) -> bytes:
    """Returns the message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


class Messages:
    """Splits the bytes of a connection into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Returns the messages completed by `data`. Raises ValueError for an invalid one."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise ValueError(f"a message of more than {LONGEST} bytes")
        try:
            found = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a line that is nested too deeply") from error
        if not all(isinstance(message, dict) and "type" in message for message in found):
            raise ValueError("a line that is no message")
        return found


def read_message(connection: socket.socket) -> dict[str, Any]:
    """Reads one message and nothing past it. Raises Ended, TimeoutError, OSError, or ValueError for an
    invalid message."""
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
    """Returns the memory of a contiguous CPU tensor."""
    flat = tensor.detach().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(bytearray())


def readable(connection: socket.socket, seconds: float) -> bool:
    """Whether something can be read within `seconds`. Unlike select.select, takes any descriptor number."""
    waits = select.poll()
    waits.register(connection, select.POLLIN)
    return bool(waits.poll(seconds * 1000))


def write(connection: socket.socket, data: memoryview) -> None:
    """Writes all of `data`. The connection's timeout bounds the wait for each part; in sendall it would bound
    the whole. Raises TimeoutError or OSError."""
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
