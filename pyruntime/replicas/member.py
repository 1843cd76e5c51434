"""A rank's side of replicas that come and go: takes the sums for `OuterOptimizer`."""

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
from pyruntime.replicas.host_copy import HostCopy, host_memory_like
from pyruntime.replicas.member_sums import Interrupted, PeerFailed, meet, sum_over
from pyruntime.replicas.transfer import Stream, Taken, fetch, fetch_sums, sizes

HEADER_S = 5.0
"""Seconds for the whole first message of another replica's connection."""
MOST_HEADER = 1 << 12
"""Most bytes of such a message."""
MOST_CALLERS = 64
"""Most connections without a first message; above that, the oldest are closed."""
LOOK_S = 0.05


class Expelled(PeerLost):
    """The service has put this replica out of the run."""


class Member:
    """This rank of a replica, connected to the service at `address` (HOST:PORT).

    replica: a name that its ranks share and no other replica has. place: number of this rank, of `places`.
    job: settings that must be equal on all replicas. It holds tau, rounds (of the run) and late, the rounds
    between sending a displacement and using its average (`Method.rounds_late`). deadline_s: longest silence
    of the service, and longest time in which others may make no progress.

    From `begin` until the round has counted, a thread takes part in the exchange and only it talks to the
    service. Between `wait` and `begin` the caller's thread does. Another thread sends signs of life from
    `join` on, until this process is stopped or ends.

    Its methods and the constructor raise ValueError for an invalid address, PeerLost if the service does not
    answer, CommTimeout if it is silent, `Expelled` if it puts this replica out.
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
        """Replicas in the last sum."""
        self.round = 0
        """The round whose displacements are summed next, or now."""
        self.block = -1
        """The block of sequences for this replica's steps; -1 after the last block."""
        self.is_behind = False
        """Whether it joined while others had displacements under way, to whose sum it adds zeros."""
        self._blocks: collections.deque[int] = collections.deque()
        """Blocks of its next rounds."""
        self._begun = 0
        """Rounds of steps before the one under way."""
        self._held, self._deal = 0, [0]
        """Rounds in the outer iterate, and the blocks dealt when the last of them counted."""
        self._landed: dict[str, Any] | None = None
        """The commit of the round whose sum has arrived and is not used yet."""
        self._seconds, self._bytes = 0.0, 0
        self._taken: Taken | None = None
        self._flight: concurrent.futures.Future[dict[str, Any]] | None = None
        """The exchange in its thread; its result is the commit."""
        self._sums: Tensor | None = None
        """The sums on the host."""
        self._leaving: Tensor | None = None
        """The displacements on the host, if the replica is on a device."""
        self._beside: torch.Stream | None = None
        """The stream on which they leave the device."""
        self._streams: list[Stream] = []
        self._inbox: collections.deque[dict[str, Any]] = collections.deque()
        self._messages = Messages()
        self._control = self._connected()
        self._telling, self._has_left = threading.Lock(), threading.Event()
        self._life: threading.Thread | None = None
        self._heard = time.monotonic()
        self._door = _Door(self._control.getsockname()[0], self._control.family)

    def _connected(self) -> socket.socket:
        """Returns a connection to the service."""
        try:
            control = socket.create_connection(split_address(self._address), self._deadline_s)
        except OSError as error:
            raise PeerLost(
                f"The service of replicas at {self._address} (--data_parallel.members) does not answer: "
                f"{error.strerror or error}; start it with `python -m pyruntime members`, or correct the "
                "address."
            ) from error
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return control

    # The methods of `Sums`, for OuterOptimizer.

    @property
    def is_busy(self) -> bool:
        return self._flight is not None

    def begin(self, tensor: Tensor) -> None:
        """Ends the round for this replica and starts to sum its displacements. Nobody may write `tensor`
        until `wait` returns."""
        self._tell({"type": "arrived", "round": self.round})
        flight: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._flight = flight
        leaving = self._leave(tensor)

        def fly() -> None:
            try:
                flight.set_result(self._summed(tensor if leaving is None else leaving.take()[0]))
            except BaseException as error:
                flight.set_exception(error)  # raised in the caller's next call

        threading.Thread(target=fly, daemon=True, name="pyr-members").start()
        if self._is_late:
            self._begin_round()

    def _leave(self, tensor: Tensor) -> HostCopy | None:
        """Begins to copy displacements to the host, beside the steps. None: they are there."""
        if self._beside is None or self._leaving is None:
            return None
        self._beside.wait_stream(torch.accelerator.current_stream(tensor.device))
        tensor.record_stream(self._beside)
        with self._beside:  # after the copy of the sums before, whose memory is written next
            return HostCopy([tensor], into=[self._leaving])

    def _summed(self, tensor: Tensor) -> dict[str, Any]:
        """Takes part in exchanges until the round counts. Returns the commit; the sum is in `_sums`."""
        while (message := self._next())["type"] != "commit":
            if message["type"] == "exchange":
                self._take_part(message, tensor)
        return message

    def pump(self) -> None:
        """Call it between two steps: sends the state to replicas that have asked for it."""
        if self._flight is None or self._flight.done():
            if self._flight is not None:
                self._flight.result()
            self._read_control(0.0)
            self._refuse_expulsion()
        self._donate()

    def wait(self, tensor: Tensor) -> None:
        """Returns when `tensor` holds the sums of `size` replicas; the caller then takes a step (`used`)."""
        if self._flight is None:
            return
        began = time.perf_counter()
        while not self._flight.done():
            concurrent.futures.wait([self._flight], LOOK_S)
            self._donate()
        message = self._flight.result()
        assert self._sums is not None
        tensor.copy_(self._sums, non_blocking=True)
        self._flight, self._landed = None, message
        self.round, self.size = message["round"], message["count"]
        self._blocks += message["blocks"]
        if not self._is_late:
            self._begin_round()
        self._door.forget()
        self._seconds += time.perf_counter() - began

    def used(self, tensor: Tensor, scale: float | Tensor | None) -> None:
        """Sends the step to joining replicas; only then the host reads a scale that is on a device. Sums from
        a checkpoint are sent to nobody."""
        if self._landed is None:
            return
        if self._streams:
            told = None if scale is None else float(scale)
            head = {"type": "sums", "round": self._held, "scale": told, "deal": self._landed["deal"]}
            sums = HostCopy([tensor])
            for stream in self._streams:
                stream.add(head, sums)
        self._streams = [stream for stream in self._streams if not stream.is_over]
        self._held, self._deal, self._landed = self._held + 1, self._landed["deal"], None

    def close(self) -> None:
        """Leaves the run. State under way to a joining replica is still sent."""
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
        """Returns two totals since the start: seconds in `wait`, and bytes received from other replicas."""
        return self._seconds, self._bytes

    @property
    def step(self) -> int:
        """Steps of a replica before the current round of steps."""
        return self._begun * self._job["tau"]

    @property
    def deal(self) -> list[int]:
        """Blocks dealt when the last round counted whose sum has arrived, as `Deal.to_list`; for a checkpoint
        with that sum."""
        return self._deal if self._landed is None else self._landed["deal"]

    @property
    def _is_late(self) -> bool:
        return self._job.get("late", 0) > 0

    def _begin_round(self) -> None:
        """Begins a round of steps."""
        self._begun += 1
        self.block = self._blocks.popleft() if self._blocks else -1

    def step_of_data(self, step: int) -> int:
        """Returns the step of a single replica's run whose sequences belong to `step`, both from 1."""
        return step_of_data(self.block, step, self._job["tau"])

    # Joining.

    def join(self, taken: Taken, sums: Tensor, step: int, deal: list[int]) -> bool:
        """Returns True when this replica is a member: `taken` has the state at the beginning of `round`, and
        the outer optimizer must begin anew. Returns False if the run is over.

        sums: a tensor like those to be summed. step, deal: the steps that the present state has (a round's
        beginning), and what had been dealt by then.
        """
        self._taken, self._sums = taken, host_memory_like(sums)
        if sums.device.type != "cpu":
            self._leaving, self._beside = host_memory_like(sums), torch.Stream(sums.device)
        self._has(step // self._job["tau"], deal)
        own = self._own(taken)
        # The service may have closed the first connection: loading can take longer than it waits for a hello.
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
            self._has_left.set()  # no signs of life without a successful join
            raise

    def _has(self, round_: int, deal: list[int]) -> None:
        """Records that the present state belongs to the beginning of that round."""
        self.round = self._held = round_
        self._deal = deal

    def _own(self, taken: Taken) -> dict[str, Any]:
        """Describes the present state."""
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
                if not self.is_behind:  # else its first round begins in `begin`
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

    # Helping another replica to join.

    def _donate(self) -> None:
        assert self._taken is not None
        for connection in self._door.asking():
            tensors = self._taken.tensors()
            head = {"type": "state", "round": self._held, "sizes": sizes(tensors), "deal": self._deal}
            self._streams.append(Stream(connection, head, HostCopy(tensors), self._deadline_s))

    # Exchanges.

    def _take_part(self, order: dict[str, Any], tensor: Tensor) -> None:
        """Takes part in one attempt until it is done or failed, or the service orders something else."""
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
        """Fills `peers` with a connection to every other member: calls those before this one and is called by
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
        """Connects as `meet`; an order of the service interrupts it. Raises Interrupted too."""
        return meet(address, header, self._deadline_s, lambda: self._look(0.0))

    def _look(self, seconds: float) -> None:
        """Reads orders while another replica is awaited. Raises Interrupted if there is one."""
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
        with contextlib.suppress(OSError):  # the thread that waits for the service reports it
            while not self._has_left.wait(ALIVE_S):
                self._send({"type": "alive"})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._send(message)
        except OSError as error:
            self._read_control(0.0)  # the service may have sent the reason
            self._refuse_expulsion()
            raise self._lost(error.strerror or str(error)) from error

    def _next(self, stream: socket.socket | None = None) -> Any:
        """Returns the next message of the service, or None if `stream` is readable before that."""
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
                    "check whether it runs."
                )

    def _read_control(self, seconds: float) -> None:
        """Reads what the service has sent; waits up to `seconds` for something."""
        while readable(self._control, seconds):
            try:
                data = self._control.recv(1 << 16)
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from error
            if not data:
                self._refuse_expulsion()
                if self._inbox:
                    return  # messages sent before the end come first
                raise self._lost("its process ended")
            self._heard, seconds = time.monotonic(), 0.0
            self._inbox.extend(each for each in self._messages.feed(data) if each["type"] != "alive")

    def _refuse_expulsion(self) -> None:
        for message in self._inbox:
            if message["type"] == "expelled":
                raise Expelled(
                    f"This replica was put out of the run in round {self.round}: {message['reason']}. If "
                    "it can continue, start it again: it takes its state from the others."
                )

    def _lost(self, why: str) -> PeerLost:
        return PeerLost(
            f"The service of replicas at {self._address} is lost: {why}. Start it again, then the "
            "replicas from their checkpoints."
        )


class _Caller:
    """A connection whose first message has not arrived."""

    def __init__(self, connection: socket.socket):
        self.connection, self.end = connection, time.monotonic() + HEADER_S
        self._line = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> dict[str, Any] | None:
        """Returns its message and reads nothing past it; None while it is incomplete. Raises OSError, or
        ValueError for an invalid message."""
        while not self._line.endswith(b"\n"):
            try:
                byte = self.connection.recv(1)
            except BlockingIOError:
                return None
            if not byte or len(self._line) > MOST_HEADER:
                raise ValueError("the connection ended, or its message is too long")
            self._line += byte
        (message,) = Messages().feed(bytes(self._line))
        return message


def _key(message: Mapping[str, Any]) -> tuple[int, str]:
    """Returns attempt and caller of an exchange. Raises ValueError for another message."""
    attempt, name = message.get("attempt"), message.get("from")
    if message["type"] != "exchange" or type(attempt) is not int or type(name) is not str:
        raise ValueError("the message is no exchange")
    return attempt, name


class _Door:
    """Accepts calls of other replicas, for an exchange or for the state."""

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
        """Reads first messages of all callers at once, so that a silent caller delays nobody."""
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
                    except OSError as error:  # other errors: the caller has gone already
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
        """Registers a caller once its first message is complete; an invalid one closes its connection."""
        try:
            message = caller.read()
            key = None if message is None or message["type"] == "state" else _key(message)
        except (OSError, ValueError):
            caller.end = 0.0
            return
        if message is None:
            return
        selector.unregister(caller.connection)  # its next owner may close it
        with self._lock:
            if key is None:
                self._asking.append(caller.connection)
            else:
                self._callers[key] = caller.connection

    def asking(self) -> list[socket.socket]:
        """Returns the connections that ask for the state; the caller owns them from here on."""
        with self._lock:
            found, self._asking = self._asking, []
        return found

    def caller(self, attempt: int, name: str) -> socket.socket | None:
        with self._lock:
            return self._callers.pop((attempt, name), None)

    def keep(self, attempt: int, connections: list[socket.socket]) -> None:
        """Keeps connections open until a later attempt, so that nobody takes their end for a failure."""
        with self._lock:
            old = [each for number, each in self._kept if number < attempt]
            old += [self._callers.pop(key) for key in list(self._callers) if key[0] < attempt]
            self._kept = [each for each in self._kept if each[0] >= attempt]
            self._kept += [(attempt, each) for each in connections]
        for each in old:
            each.close()

    def forget(self) -> None:
        """Closes kept connections after the round: nobody reads from them any more."""
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
