"""Sockets of the service that joins replicas which come and go; `coordinator.py` decides."""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from pyruntime.replicas.connection import ALIVE_S, NO_DESCRIPTOR, Messages, encode
from pyruntime.replicas.coordinator import Coordinator, Phase
from pyruntime.replicas.message_checks import check

TICK_S = 0.1
MOST_UNSENT = 1 << 22
"""Most bytes that a connection may leave unread before it counts as lost."""
MOST_STRANGERS = 64
"""Most connections without a hello; above that, the oldest are closed."""
MOST_RANKS = 4096
"""Most connections with a hello, if there are descriptors for them. Above that, the oldest incomplete replica
is refused."""
SPARE = 32
"""Descriptors left for everything else."""
HELLO_S = 5.0
"""Seconds in which a connection must send its whole hello, or when ending must read the reason."""
REST_S = 0.5
"""Seconds without accepting after descriptors ran out, because the listening socket stays readable."""


class Connection:
    """The connection of one rank."""

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        self.socket = connected
        self.messages = Messages()
        self.unsent = b""
        self.name = ""
        """Its replica; empty before the hello."""
        self.place = 0
        self.is_ending = False
        """Whether to close it once all is sent."""
        self.end = time.monotonic() + HELLO_S
        """Time until which it may stay without a name."""


class Service:
    """Listens on `port` of `host` (0: a free one) and serves one run.

    record: a file to which every event is appended as a line of JSON. say: prints a line. Raises OSError if
    it cannot open the port or the record.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        host: str = "",
        port: int = 0,
        record: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self._coordinator, self._say = coordinator, say
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._record: TextIO | None = (
            None if record is None else open(record, "a", encoding="utf-8")  # noqa: SIM115 - closed by close
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: list[Connection] = []
        self._last_alive = 0.0
        self._rests_until: float | None = None
        """Time until which nobody is accepted; None: accepting."""
        self._has_lacked = False
        """Whether the lack of descriptors has been recorded."""
        self._stopped = False

    def run(self) -> None:
        """Serves until the last round has been committed and all replicas have left or the deadline has
        passed since, or until stop()."""
        while not (self._stopped or self._is_over()):
            began = time.monotonic()  # what came before this is handled before anybody counts as silent
            for key, events in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                if events & selectors.EVENT_READ:
                    self._read(key.data)
                if events & selectors.EVENT_WRITE:
                    self._send(key.data)
            self._shed_strangers()
            self._coordinator.tick(began)
            self._carry_out()
            self._show_life()

    def _is_over(self) -> bool:
        """Whether the run has ended; connections without a hello do not count."""
        has_left = not any(connection.name for connection in self._connections)
        coordinator = self._coordinator
        return coordinator.phase is Phase.OVER and (has_left or coordinator.is_late(time.monotonic()))

    def stop(self) -> None:
        """Ends run() within a moment; call it from another thread."""
        self._stopped = True

    def close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        if self._record is not None:
            self._record.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                self._rest(error)
            return  # other errors: the caller has gone already
        connection = Connection(accepted)
        self._connections.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _rest(self, error: OSError) -> None:
        """Handles a lack of descriptors: closes half of the connections without a hello and stops accepting
        for a moment, because the listening socket stays readable."""
        if not self._has_lacked:
            self._has_lacked = True
            self._enter({"event": "crowded", "reason": error.strerror, "connections": len(self._connections)})
        strangers = self._strangers()
        for connection in strangers[: (len(strangers) + 1) // 2]:
            self._drop(connection)
        self._selector.unregister(self._listener)
        self._rests_until = time.monotonic() + REST_S

    def _strangers(self) -> list[Connection]:
        """Returns the connections without a name, the oldest first."""
        return [connection for connection in self._connections if not connection.name]

    def _shed_strangers(self) -> None:
        now = time.monotonic()
        strangers = self._strangers()
        for index, connection in enumerate(strangers):
            if now > connection.end or len(strangers) - index > MOST_STRANGERS:
                self._drop(connection)
        for connection in [each for each in self._connections if each.is_ending and now > each.end]:
            self._drop(connection)
        if self._rests_until is not None and now > self._rests_until:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("its process ended")
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, error.strerror or str(error))
            return
        if connection.is_ending:
            return  # it has been told why it was put out
        try:
            for message in connection.messages.feed(data):
                self._hear(connection, message)
        except ValueError as error:
            self._refuse(connection, f"it sent an invalid message: {error}")

    def _hear(self, connection: Connection, message: dict[str, Any]) -> None:
        """Handles a message. Raises ValueError for one that no rank sends."""
        if connection.is_ending:
            return
        check(message)
        now = time.monotonic()
        if (message["type"] == "hello") == bool(connection.name):
            raise ValueError("hello must be its first message, and sent once")
        if connection.name:
            self._coordinator.hear(connection.name, connection.place, message, now)
        elif reason := (
            self._coordinator.why_not(message["replica"], message["place"], message)
            or self._why_full(message["replica"])
        ):
            self._refuse(connection, reason)
        else:
            connection.name, connection.place = message["replica"], message["place"]
            self._coordinator.hello(connection.name, connection.place, message, now)
        self._carry_out()

    def _why_full(self, newcomer: str) -> str:
        """Returns why there is no room for one more rank, in words; empty if there is or was made room."""
        here = sum(bool(each.name) and not each.is_ending for each in self._connections)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        others = min(MOST_STRANGERS, descriptors // 4) + min(SPARE, descriptors // 4)
        if here < min(MOST_RANKS, descriptors - others):
            return ""
        full = f"{here} ranks are connected, as many as the service accepts"
        if other := next((name for name in self._coordinator.incomplete if name != newcomer), ""):
            first = next(each for each in self._connections if each.name == other)
            self._refuse(first, f"{full}, and its replica is not complete")
            return ""
        return f"{full}; start it with more descriptors (ulimit -n), and check who else uses its port"

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Sends the reason to the rank; its replica, if it has one, is lost."""
        name, connection.name = connection.name, ""
        connection.end = time.monotonic() + HELLO_S
        connection.unsent += encode({"type": "expelled", "reason": reason})
        connection.is_ending = True
        self._send(connection)
        if name:
            self._coordinator.lost(name, reason, time.monotonic())
            self._carry_out()

    def _carry_out(self) -> None:
        """Records the coordinator's events and sends its orders."""
        coordinator = self._coordinator
        while coordinator.orders or coordinator.events:
            events, coordinator.events = coordinator.events, []
            orders, coordinator.orders = coordinator.orders, []
            for event in events:
                self._enter(event)
            for order in orders:
                for connection in list(self._connections):
                    if connection.name == order.replica and order.place in (None, connection.place):
                        connection.unsent += encode(order.message)
                        if order.message["type"] == "expelled":
                            connection.is_ending = True
                            connection.end = time.monotonic() + HELLO_S
                        self._send(connection)

    def _enter(self, event: dict[str, Any]) -> None:
        line = json.dumps({"time": time.time(), **event})
        if self._record is not None:
            self._record.write(line + "\n")
            self._record.flush()
        if event["event"] != "round":
            self._say(line)

    def _show_life(self) -> None:
        now = time.monotonic()
        if now - self._last_alive < ALIVE_S:
            return
        self._last_alive = now
        waiting = set(self._coordinator.waiting)
        for connection in list(self._connections):
            if connection.name in waiting and not connection.unsent:
                connection.unsent = encode({"type": "alive"})
                self._send(connection)

    def _send(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        try:
            while connection.unsent:
                connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        except BlockingIOError:
            if len(connection.unsent) > MOST_UNSENT:
                self._lose(connection, "it does not read its messages")
                return
        except OSError as error:
            self._lose(connection, error.strerror or str(error))
            return
        if connection.is_ending and not connection.unsent:
            self._drop(connection)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, wanted, connection)

    def _lose(self, connection: Connection, reason: str) -> None:
        if connection in self._connections:
            self._drop(connection)
            if connection.name and not connection.is_ending:
                self._coordinator.lost(connection.name, reason, time.monotonic())

    def _drop(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()


def say(text: str) -> None:
    """Prints on stdout at once; a closed reader does not end the service."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stdout, flush=True)
