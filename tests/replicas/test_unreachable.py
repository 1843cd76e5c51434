"""A member that nobody reaches, as of a host that has lost power: it is named, and those that call it are not
put out with it. And who calls a member and says nothing keeps no other caller waiting."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
import torch

from pyruntime.replicas import OuterOptimizer, local_sgd
from pyruntime.replicas import member as members
from pyruntime.replicas.connection import ALIVE_S
from pyruntime.replicas.coordinator import Phase
from pyruntime.replicas.donated import OuterState
from pyruntime.replicas.member import Member
from tests.replicas.simulation import DEADLINE_S, World


@pytest.fixture
def hole():
    """An address that answers no call: nobody accepts, and all that may wait to be accepted are there."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            caller = held.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield list(listener.getsockname())


@pytest.fixture
def member():
    """(a member, the service's end of its connection)"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Member(
            f"127.0.0.1:{listener.getsockname()[1]}", "mine", {"tau": 1, "rounds": 1}, deadline_s=2.5
        )
        end, _ = listener.accept()
        made._sums = torch.zeros(10)
        with end:
            yield made, end
        made.close()


def order(hole: list) -> dict:
    return {"type": "exchange", "attempt": 1, "members": [["hole", hole], ["mine", ["127.0.0.1", 1]]]}


def told(end: socket.socket) -> list[dict]:
    return [json.loads(line) for line in end.recv(1 << 16).splitlines()]


def test_one_whose_coming_ends_in_an_exception_gives_no_more_signs_of_life(member, monkeypatch):
    """Others would wait for it for ever."""
    mine, _ = member

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(mine, "_come", interrupted)
    outer = OuterOptimizer(torch.nn.Linear(2, 2), None, local_sgd(1), sums=mine)
    with pytest.raises(KeyboardInterrupt):
        mine.join(OuterState(outer), *outer.travelling(), 0, [0])
    mine._life.join(2 * ALIVE_S)
    assert not mine._life.is_alive()
    outer.close()


def test_who_calls_it_names_it_at_the_deadline(hole, member):
    mine, end = member
    mine._take_part(order(hole), torch.ones(10))
    assert told(end) == [{"type": "failed", "attempt": 1, "peer": "hole"}]


def test_an_order_of_the_service_ends_the_call(hole, member):
    mine, end = member
    threading.Timer(0.3, end.sendall, [b'{"type": "exchange", "attempt": 2, "members": []}\n']).start()
    began = time.monotonic()
    mine._take_part(order(hole), torch.ones(10))
    assert time.monotonic() - began < 2.4  # below the deadline
    assert mine._next()["attempt"] == 2


def call(mine, data: bytes) -> socket.socket:
    caller = socket.create_connection(mine._door.address, 5)
    caller.sendall(data)
    return caller


def found(mine, attempt: int, name: str) -> socket.socket:
    end = time.monotonic() + 5
    while (connection := mine._door.caller(attempt, name)) is None:
        assert time.monotonic() < end, "it was not let in"
        time.sleep(0.01)
    return connection


def test_callers_that_say_nothing_keep_nobody_waiting_and_are_sent_away(member, monkeypatch):
    monkeypatch.setattr(members, "HEADER_S", 3.0)
    mine, _ = member
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(call(mine, data)) for data in (b"", b'{"type": "exch', b"{")]
        began = time.monotonic()
        message = {"type": "exchange", "attempt": 3, "from": "other"}
        held.enter_context(call(mine, json.dumps(message).encode() + b"\nwhat follows"))
        connection = held.enter_context(found(mine, 3, "other"))
        assert time.monotonic() - began < 2.5  # below HEADER_S
        connection.settimeout(5)
        assert connection.recv(100) == b"what follows", "nothing past the message is read"
        silent[2].sendall(b"}")  # still no whole message, and no more time for it
        for each in silent:
            each.settimeout(10)
            assert each.recv(1) == b""


def test_of_callers_that_say_nothing_the_oldest_go_first(member, monkeypatch):
    monkeypatch.setattr(members, "MOST_CALLERS", 4)
    mine, _ = member
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(call(mine, b"")) for _ in range(12)]
        for each in silent[:8]:
            each.settimeout(2.0)  # below HEADER_S
            assert each.recv(1) == b""
        with call(mine, b'{"type": "exchange", "attempt": 1, "from": "x"}\n'), found(mine, 1, "x"):
            mine._door.keep(2, [])


def test_callers_whose_message_is_none_are_sent_away(member):
    mine, _ = member
    strange = [
        {"type": "exchange", "attempt": [1], "from": "x"},
        {"type": "exchange", "attempt": 1, "from": 2},
    ]
    strange += [{"type": "exchange", "attempt": "1", "from": "x"}, {"type": "other"}]
    for data in [b"3\n", b"\xff\n", b"x" * 5000, b"\n", *(json.dumps(s).encode() + b"\n" for s in strange)]:
        with call(mine, data) as caller:
            caller.settimeout(5)
            with contextlib.suppress(ConnectionResetError):  # it was closed with bytes that nobody has read
                assert caller.recv(1) == b""
    with call(mine, b'{"type": "exchange", "attempt": 1, "from": "x"}\n'), found(mine, 1, "x"):
        mine._door.keep(2, [])


def test_those_that_are_silent_in_an_exchange_leave_and_the_others_go_on():
    one = World(7, replicas=4, quorum=2, rounds=1)
    while one.coordinator.phase is not Phase.EXCHANGING:
        one.move()
    service = one.coordinator
    names = list(service.replicas)
    for now in (one.now + second for second in range(int(DEADLINE_S) + 2)):
        for name in (names[0], names[2]):
            service.hear(name, 0, {"type": "alive"}, now)
    service.tick(now)
    assert list(service.replicas) == [names[0], names[2]]
    assert service.phase is Phase.EXCHANGING
