"""Sockets of the service that replicas which come and go are joined by; `coordinator.py` decides."""

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
"""Bytes that a connection may leave unread before it counts as lost."""
MOST_STRANGERS = 64
"""Connections that may have said no hello; of more, the oldest are closed."""
MOST_RANKS = 4096
"""Connections that may have said hello, or as many as there are descriptors for; of more, the oldest replica
goes whose ranks are not all here."""
SPARE = 32
"""Descriptors that are left for everything else."""
HELLO_S = 5.0
"""For a connection to say hello, all of it, and for one that is ending to read why."""
REST_S = 0.5
"""Nobody is accepted for so long where descriptors have run out: the listening socket stays readable."""


class Connection:
    """Of a rank of a replica."""

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        self.socket = connected
        self.messages = Messages()
        self.unsent = b""
        self.name = ""
        """Of its replica; empty before it has said so."""
        self.place = 0
        self.is_ending = False
        """To be closed once all is sent."""
        self.end = time.monotonic() + HELLO_S
        """Until when it may stay without a name."""


class Service:
    """Listens on `port` of `host` (0: a free one) and serves one run.

    record: a file that gets a line of JSON for everything that happens. say: prints a line. Raises OSError
    where the port or the record cannot be had.
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
        """While nobody is accepted."""
        self._has_lacked = False
        """Whether it has been said that descriptors ran out."""
        self._stopped = False

    def run(self) -> None:
        """Until the last round has been committed and all replicas have left, or the deadline has passed
        since; or stop()."""
        while not (self._stopped or self._is_over()):
            began = time.monotonic()  # what has come by then is heard before anybody counts as silent
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
        """Nobody waits for those who have never said who they are."""
        has_left = not any(connection.name for connection in self._connections)
        coordinator = self._coordinator
        return coordinator.phase is Phase.OVER and (has_left or coordinator.is_late(time.monotonic()))

    def stop(self) -> None:
        """Ends run() within a moment; called by another thread."""
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
            return  # else it has gone before it was let in
        connection = Connection(accepted)
        self._connections.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _rest(self, error: OSError) -> None:
        """Descriptors have run out: those of strangers become free, and the listening socket, which stays
        readable, is left alone for a moment."""
        if not self._has_lacked:
            self._has_lacked = True
            self._enter({"event": "crowded", "reason": error.strerror, "connections": len(self._connections)})
        strangers = self._strangers()
        for connection in strangers[: (len(strangers) + 1) // 2]:
            self._drop(connection)
        self._selector.unregister(self._listener)
        self._rests_until = time.monotonic() + REST_S

    def _strangers(self) -> list[Connection]:
        """Those without a name, the oldest first."""
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
            return  # it has been told why nobody listens any more
        try:
            for message in connection.messages.feed(data):
                self._hear(connection, message)
        except ValueError as error:
            self._refuse(connection, f"it sent what is no message of a replica: {error}")

    def _hear(self, connection: Connection, message: dict[str, Any]) -> None:
        """Raises ValueError for what no rank sends."""
        if connection.is_ending:
            return
        check(message)
        now = time.monotonic()
        if (message["type"] == "hello") == bool(connection.name):
            raise ValueError("its first message is hello, and no other one")
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
        """Why there is no room for one more rank, in words; empty where there is, or was made."""
        here = sum(bool(each.name) and not each.is_ending for each in self._connections)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        others = min(MOST_STRANGERS, descriptors // 4) + min(SPARE, descriptors // 4)
        if here < min(MOST_RANKS, descriptors - others):
            return ""
        full = f"{here} ranks are here, as many as the service takes"
        if other := next((name for name in self._coordinator.incomplete if name != newcomer), ""):
            first = next(each for each in self._connections if each.name == other)
            self._refuse(first, f"{full}, and not all of its replica's are")
            return ""
        return f"{full}; start it with more descriptors (ulimit -n), and see who else reaches its port"

    def _refuse(self, connection: Connection, reason: str) -> None:
        """It is told why, and its replica, where it is of one, has lost it."""
        name, connection.name = connection.name, ""
        connection.end = time.monotonic() + HELLO_S
        connection.unsent += encode({"type": "expelled", "reason": reason})
        connection.is_ending = True
        self._send(connection)
        if name:
            self._coordinator.lost(name, reason, time.monotonic())
            self._carry_out()

    def _carry_out(self) -> None:
        """What the coordinator has decided."""
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
                self._lose(connection, "it does not read what it is told")
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
    """On stdout, at once; a reader that has gone does not end the service."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stdout, flush=True)
