"""A rank's side of replicas that come and go: what `OuterOptimizer` sums over."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyruntime.comm.errors import CommTimeout, PeerLost
from pyruntime.replicas.address import split_address
from pyruntime.replicas.connection import ALIVE_S, NO_DESCRIPTOR, Messages, encode, readable
from pyruntime.replicas.deal import step_of_data
from pyruntime.replicas.member_sums import Interrupted, PeerFailed, meet, sum_over
from pyruntime.replicas.transfer import Stream, Taken, fetch, fetch_sums, sizes

HEADER_S = 5.0
"""For the first message of a connection from another replica, all of it."""
MOST_HEADER = 1 << 12
"""Bytes of such a message."""
MOST_CALLERS = 64
"""Connections that may not have said why they call; of more, the oldest are closed."""
LOOK_S = 0.05


class Expelled(PeerLost):
    """The service has put this replica out of the run."""


class Member:
    """This rank of a replica, at the service at `address` (HOST:PORT).

    replica: a name that its ranks share and no other replica has; place: this rank among `places`. job: what
    has to be the same for all replicas, with tau, rounds, the number of them in the run, and late, the rounds
    from when a displacement leaves until its average is used (`Method.rounds_late`). deadline_s: how long the
    service may be silent, and others may make no progress.

    From `begin` on a thread of its own takes part in the exchange, and is alone in talking to the service,
    until the round has counted; between `wait` and `begin` the caller's thread is. But for signs of life: a
    thread gives them from `join` on, whatever the others do, until this process is stopped or ends.

    Raises ValueError for what is no address, PeerLost where the service does not answer, CommTimeout where it
    is silent, `Expelled` where it puts this replica out, as its methods do.
    """

    rank, name = 0, ""

    def __init__(
        self,
        address: str,
        replica: str,
        job: Mapping[str, Any],
        *,
        place: int = 0,
        places: int = 1,
        label: str = "",
        deadline_s: float = 120.0,
    ):
        self._address, self._replica, self._job = address, replica, dict(job)
        self._place, self._places, self._label = place, places, label or replica
        self._deadline_s = deadline_s
        self.size = 1
        """Replicas whose displacements the last sum is of."""
        self.round = 0
        """Whose displacements are summed next, or now."""
        self.block = -1
        """Of the sequences of this replica's steps; -1: it has taken the last of them."""
        self.is_behind = False
        """Of one that has joined: whether the others have displacements on their way, to whose sum it adds
        nothing."""
        self._blocks: collections.deque[int] = collections.deque()
        """Of its rounds that follow."""
        self._begun = 0
        """Rounds of steps before the one under way."""
        self._held, self._deal = 0, [0]
        """Rounds whose sums the outer iterate has, and what had been dealt when the last of them counted."""
        self._landed: dict[str, Any] | None = None
        """The message that the round counts whose sum has come and has not been used."""
        self._seconds, self._bytes = 0.0, 0
        self._taken: Taken | None = None
        self._flight: concurrent.futures.Future[dict[str, Any]] | None = None
        """What the thread finds that takes part in an exchange."""
        self._sums: Tensor | None = None
        self._streams: list[Stream] = []
        self._inbox: collections.deque[dict[str, Any]] = collections.deque()
        self._messages = Messages()
        self._control = self._connected()
        self._telling, self._has_left = threading.Lock(), threading.Event()
        self._life: threading.Thread | None = None
        self._heard = time.monotonic()
        self._door = _Door(self._control.getsockname()[0], self._control.family)

    def _connected(self) -> socket.socket:
        """To the service."""
        try:
            control = socket.create_connection(split_address(self._address), self._deadline_s)
        except OSError as error:
            raise PeerLost(
                f"The service of replicas at {self._address} (data_parallel.members) does not answer: "
                f"{error.strerror or error}; start it with python -m pyruntime members, or correct the "
                "address."
            ) from error
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return control

    # What OuterOptimizer asks of the sums over replicas.

    @property
    def is_busy(self) -> bool:
        return self._flight is not None

    def begin(self, tensor: Tensor) -> None:
        """The round has ended for this replica; these are its displacements, which nobody writes until they
        have been waited for."""
        self._tell({"type": "arrived", "round": self.round})
        flight: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._flight = flight

        def fly() -> None:
            try:
                flight.set_result(self._summed(tensor))
            except BaseException as error:
                flight.set_exception(error)  # raised where the caller looks next

        threading.Thread(target=fly, daemon=True, name="pyr-members").start()
        if self._is_late:
            self._begin_round()

    def _summed(self, tensor: Tensor) -> dict[str, Any]:
        """The message that the round counts; the sum is in `_sums`."""
        while (message := self._next())["type"] != "commit":
            if message["type"] == "exchange":
                self._take_part(message, tensor)
        return message

    def pump(self) -> None:
        """Between two steps: sends the state to replicas that have asked for it."""
        if self._flight is None or self._flight.done():
            if self._flight is not None:
                self._flight.result()
            self._read_control(0.0)
            self._refuse_expulsion()
        self._donate()

    def wait(self, tensor: Tensor) -> None:
        """`tensor` holds the sums, of `size` replicas, of which the caller makes a step next (`used`)."""
        if self._flight is None:
            return
        began = time.perf_counter()
        while not self._flight.done():
            concurrent.futures.wait([self._flight], LOOK_S)
            self._donate()
        message = self._flight.result()
        assert self._sums is not None
        tensor.copy_(self._sums)
        self._flight, self._landed = None, message
        self.round, self.size = message["round"], message["count"]
        self._blocks += message["blocks"]
        if not self._is_late:
            self._begin_round()
        self._door.forget()
        self._seconds += time.perf_counter() - began

    def used(self, tensor: Tensor, scale: float | None) -> None:
        """Those that come are sent the step. Of sums that a checkpoint held, nobody has to know."""
        if self._landed is None:
            return
        for stream in self._streams:
            head = {"type": "sums", "round": self._held, "scale": scale, "deal": self._landed["deal"]}
            stream.add(head, tensor.clone())
        self._streams = [stream for stream in self._streams if not stream.is_over]
        self._held, self._deal, self._landed = self._held + 1, self._landed["deal"], None

    def close(self) -> None:
        """This replica leaves. What it sends to one that comes still goes."""
        for stream in self._streams:
            stream.close()
        if self._flight is not None and not self._flight.done():
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)  # which ends the thread
            concurrent.futures.wait([self._flight], self._deadline_s)
        self._has_left.set()
        if self._life is not None:
            self._life.join()
        self._door.close()
        self._control.close()

    def stats(self) -> tuple[float, int]:
        """Since the start, seconds in `wait`, and bytes that came from other replicas there."""
        return self._seconds, self._bytes

    @property
    def step(self) -> int:
        """Steps of a replica before the round of steps under way."""
        return self._begun * self._job["tau"]

    @property
    def deal(self) -> list[int]:
        """What had been dealt when the last round counted whose sum has come, as `Deal.to_list`: for a
        checkpoint with that sum."""
        return self._deal if self._landed is None else self._landed["deal"]

    @property
    def _is_late(self) -> bool:
        return self._job.get("late", 0) > 0

    def _begin_round(self) -> None:
        """Of steps."""
        self._begun += 1
        self.block = self._blocks.popleft() if self._blocks else -1

    def step_of_data(self, step: int) -> int:
        """Whose sequences this replica takes in its `step`, from 1."""
        return step_of_data(self.block, step, self._job["tau"])

    # How a replica comes.

    def join(self, taken: Taken, sums: Tensor, step: int, deal: list[int]) -> bool:
        """Returns when this replica is a member; `taken` has the state at the beginning of `round`. False:
        the run is over. The outer optimizer begins anew then.

        sums: a tensor like those that will be summed. step, deal: of the state that is there, which is a
        round's beginning: its steps, and what had been dealt.
        """
        self._taken, self._sums = taken, torch.empty_like(sums)
        self._has(step // self._job["tau"], deal)
        own = self._own(taken)
        # The service has closed the first one, where loading took longer than it waits for a hello.
        self._control.close()
        self._control = self._connected()
        self._tell(
            {
                "type": "hello",
                "replica": self._replica,
                "label": self._label,
                "place": self._place,
                "places": self._places,
                "address": self._door.address,
                "job": self._job,
                **own,
            }
        )
        self._life = threading.Thread(target=self._show_life, daemon=True, name="pyr-alive")
        self._life.start()
        try:
            with contextlib.ExitStack() as connections:
                return self._come(taken, sums, connections)
        except BaseException:
            self._has_left.set()  # no sign of life of what nobody has joined
            raise

    def _has(self, round_: int, deal: list[int]) -> None:
        """The state that is there is of the beginning of that round."""
        self.round = self._held = round_
        self._deal = deal

    def _own(self, taken: Taken) -> dict[str, Any]:
        """The state that is there."""
        step = self.round * self._job["tau"]
        return {"step": step, "weights": taken.checksum(), "deal": self._deal}

    def _come(self, taken: Taken, sums: Tensor, connections: contextlib.ExitStack) -> bool:
        donor, stream = "", None
        entered: dict[str, Any] | None = None
        while True:
            message = self._next(stream)
            kind = None if message is None else message["type"]
            if kind == "over":
                return False
            if kind == "again":
                connections.close()
                entered, stream = None, None
                self._tell({"type": "here", **self._own(taken)})
            if kind == "go" and entered is not None:
                self._blocks.extend(entered["blocks"])
                self._deal, self.is_behind = entered["deal"], entered["behind"]
                self._begun = self.round
                if not self.is_behind:  # else its first round begins once it has said that it has arrived
                    self._begun -= 1
                    self._begin_round()
                return True
            try:
                if message is not None and kind == "fetch":
                    connections.close()
                    donor, entered, stream = message["donor"], None, None
                    header = encode({"type": "state"})
                    stream = connections.enter_context(self._call(message["address"], header))
                    head = fetch(stream, taken)
                    self._has(head["round"], head["deal"])
                    self._tell({"type": "ready", "round": self.round})
                elif message is None and stream is not None:
                    head = fetch_sums(stream, taken, sums)
                    self._has(head["round"] + 1, head["deal"])
                    self._tell({"type": "ready", "round": self.round})
            except (OSError, ValueError, Interrupted):
                stream = None
                self._tell({"type": "broken", "donor": donor})
            if kind == "enter":
                entered = message
            if entered is not None and kind in ("enter", None) and entered["round"] == self.round:
                self._tell({"type": "begun", "round": self.round})

    # How a replica helps another one to come.

    def _donate(self) -> None:
        assert self._taken is not None
        for connection in self._door.asking():
            tensors = self._taken.tensors()
            head = {"type": "state", "round": self._held, "sizes": sizes(tensors), "deal": self._deal}
            copies = [tensor.detach().clone() for tensor in tensors]
            self._streams.append(Stream(connection, head, copies, self._deadline_s))

    # Exchanges.

    def _take_part(self, order: dict[str, Any], tensor: Tensor) -> None:
        """In one attempt, until it is done, failed, or something else is ordered."""
        assert self._sums is not None
        attempt, members = order["attempt"], order["members"]
        names = [name for name, _ in members]
        peers: dict[int, socket.socket] = {}
        try:
            self._meet_all(attempt, members, peers)
            self._bytes += sum_over(
                tensor,
                self._sums,
                names.index(self._replica),
                peers,
                self._control,
                self._is_interrupted,
                self._deadline_s,
            )
        except Interrupted:
            return
        except PeerFailed as failure:
            self._tell({"type": "failed", "attempt": attempt, "peer": names[failure.index]})
            return
        finally:
            self._door.keep(attempt, list(peers.values()))
        self._tell({"type": "done", "attempt": attempt})

    def _meet_all(self, attempt: int, members: list, peers: dict[int, socket.socket]) -> None:
        """Into `peers`, a connection to every other member: this one calls those before it, and is called by
        those after it."""
        mine = [name for name, _ in members].index(self._replica)
        header = encode({"type": "exchange", "attempt": attempt, "from": self._replica})
        end = time.monotonic() + self._deadline_s
        for index, (name, address) in enumerate(members):
            if index < mine:
                try:
                    peers[index] = self._call(address, header)
                except OSError as error:
                    raise PeerFailed(index, str(error)) from error
            elif index > mine:
                while (found := self._door.caller(attempt, name)) is None:
                    self._look(0.02)
                    if time.monotonic() > end:
                        raise PeerFailed(index, "it did not call")
                peers[index] = found
        for connection in peers.values():
            connection.setblocking(False)

    def _call(self, address: list, header: bytes) -> socket.socket:
        """As `meet`; what the service orders meanwhile ends it. Raises Interrupted too."""
        return meet(address, header, self._deadline_s, lambda: self._look(0.0))

    def _look(self, seconds: float) -> None:
        """While another replica is waited for. Raises Interrupted where the service has ordered something."""
        self._read_control(seconds)
        if self._inbox:
            raise Interrupted

    def _is_interrupted(self) -> bool:
        self._read_control(0.0)
        return bool(self._inbox)

    # The connection to the service.

    def _send(self, message: dict[str, Any]) -> None:
        with self._telling:
            self._control.sendall(encode(message))

    def _show_life(self) -> None:
        with contextlib.suppress(OSError):  # which the thread finds that waits for the service
            while not self._has_left.wait(ALIVE_S):
                self._send({"type": "alive"})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._send(message)
        except OSError as error:
            self._read_control(0.0)  # why, where the service has said so
            self._refuse_expulsion()
            raise self._lost(error.strerror or str(error)) from error

    def _next(self, stream: socket.socket | None = None) -> Any:
        """The next message of the service; None where `stream` has something before that."""
        self._heard = time.monotonic()
        while True:
            self._refuse_expulsion()
            if self._inbox:
                return self._inbox.popleft()
            if stream is not None and readable(stream, 0.0):
                return None
            self._read_control(LOOK_S)
            if time.monotonic() - self._heard > self._deadline_s:
                raise CommTimeout(
                    f"The service of replicas at {self._address} has been silent for {self._deadline_s:g} s; "
                    "see whether it runs."
                )

    def _read_control(self, seconds: float) -> None:
        """Takes what the service has said, waiting so long for something."""
        while readable(self._control, seconds):
            try:
                data = self._control.recv(1 << 16)
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from error
            if not data:
                self._refuse_expulsion()
                if self._inbox:
                    return  # what it has said before it ended comes first
                raise self._lost("its process ended")
            self._heard, seconds = time.monotonic(), 0.0
            self._inbox.extend(each for each in self._messages.feed(data) if each["type"] != "alive")

    def _refuse_expulsion(self) -> None:
        for message in self._inbox:
            if message["type"] == "expelled":
                raise Expelled(
                    f"This replica was put out of the run in round {self.round}: {message['reason']}. Where "
                    "it can go on, start it again: it takes its state from the others."
                )

    def _lost(self, why: str) -> PeerLost:
        return PeerLost(
            f"The service of replicas at {self._address} is lost: {why}. Start it again, and the replicas "
            "from their checkpoints."
        )


class _Caller:
    """One that has connected, until its first message is there."""

    def __init__(self, connection: socket.socket):
        self.connection, self.end = connection, time.monotonic() + HEADER_S
        self._line = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> dict[str, Any] | None:
        """Its message, with nothing read past it; None where all of it has not come. Raises OSError, or
        ValueError for what is no message."""
        while not self._line.endswith(b"\n"):
            try:
                byte = self.connection.recv(1)
            except BlockingIOError:
                return None
            if not byte or len(self._line) > MOST_HEADER:
                raise ValueError("it ended, or is too long")
            self._line += byte
        (message,) = Messages().feed(bytes(self._line))
        return message


def _key(message: Mapping[str, Any]) -> tuple[int, str]:
    """Of an exchange: attempt, and who calls. Raises ValueError for another message."""
    attempt, name = message.get("attempt"), message.get("from")
    if message["type"] != "exchange" or type(attempt) is not int or type(name) is not str:
        raise ValueError("no message of a replica")
    return attempt, name


class _Door:
    """Where other replicas call: for an exchange, or for the state."""

    def __init__(self, host: str, family: int):
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self._is_closed = False
        self.address = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._callers: dict[tuple[int, str], socket.socket] = {}
        self._asking: list[socket.socket] = []
        self._kept: list[tuple[int, socket.socket]] = []
        self._thread = threading.Thread(target=self._work, daemon=True, name="pyr-door")
        self._thread.start()

    def _work(self) -> None:
        """Nobody who has called and not yet said why keeps another one waiting."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closed:
                most = MOST_CALLERS
                for key, _ in selector.select(LOOK_S):
                    if key.data is not None:
                        self._let_in(key.data, selector)
                        continue
                    try:
                        caller = _Caller(self._listener.accept()[0])
                        selector.register(caller.connection, selectors.EVENT_READ, caller)
                    except OSError as error:  # else it has gone before it was let in
                        if error.errno in NO_DESCRIPTOR:
                            most = len(selector.get_map()) // 2
                            time.sleep(LOOK_S)  # the listening socket stays readable
                now = time.monotonic()
                waiting = [each.data for each in selector.get_map().values() if each.data]
                for index, caller in enumerate(waiting):
                    if now > caller.end or len(waiting) - index > most or self._is_closed:
                        selector.unregister(caller.connection)
                        caller.connection.close()

    def _let_in(self, caller: _Caller, selector: selectors.BaseSelector) -> None:
        """Once its first message is there; it is sent away where that is none, and hears of it."""
        try:
            message = caller.read()
            key = None if message is None or message["type"] == "state" else _key(message)
        except (OSError, ValueError):
            caller.end = 0.0
            return
        if message is None:
            return
        selector.unregister(caller.connection)  # who takes it may close it
        with self._lock:
            if key is None:
                self._asking.append(caller.connection)
            else:
                self._callers[key] = caller.connection

    def asking(self) -> list[socket.socket]:
        """Those who want the state, who are the caller's from here on."""
        with self._lock:
            found, self._asking = self._asking, []
        return found

    def caller(self, attempt: int, name: str) -> socket.socket | None:
        with self._lock:
            return self._callers.pop((attempt, name), None)

    def keep(self, attempt: int, connections: list[socket.socket]) -> None:
        """Open until a later attempt, in which nobody takes their end for a failure."""
        with self._lock:
            old = [each for number, each in self._kept if number < attempt]
            old += [self._callers.pop(key) for key in list(self._callers) if key[0] < attempt]
            self._kept = [each for each in self._kept if each[0] >= attempt]
            self._kept += [(attempt, each) for each in connections]
        for each in old:
            each.close()

    def forget(self) -> None:
        """The round is over: nobody reads from the connections of its attempts any more."""
        with self._lock:
            old, self._kept = [each for _, each in self._kept], []
        for each in old:
            each.close()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._listener.close()
        self.forget()
        with self._lock:
            left = [*self._callers.values(), *self._asking]
        for each in left:
            each.close()
