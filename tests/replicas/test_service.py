"""When the service ends, and what strangers send it."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyruntime.cli import main
from pyruntime.replicas import local_sgd
from pyruntime.replicas import service as services
from pyruntime.replicas.address import split_address
from pyruntime.replicas.coordinator import Coordinator
from pyruntime.replicas.donated import OuterState
from pyruntime.replicas.member import Member
from pyruntime.replicas.message_checks import check
from pyruntime.replicas.outer_optimizer import OuterOptimizer
from tests.replicas import processes


def take_the_only_round(address: str, loads_s: float = 0.0) -> Member:
    module = torch.nn.Linear(2, 2)
    mine = Member(address, "mine", {"tau": 1, "rounds": 1}, deadline_s=5.0)
    time.sleep(loads_s)
    outer = OuterOptimizer(module, None, local_sgd(1), sums=mine)
    assert mine.join(OuterState(outer), *outer.travelling(), 0, [0])
    outer.begin_anew(mine.is_behind)
    outer.step()
    outer.finish()
    assert mine.round == 1
    return mine


def test_a_stranger_does_not_keep_it_alive(tmp_path):
    with processes.service(tmp_path, 1) as address, socket.create_connection(split_address(address)):
        take_the_only_round(address).close()


def test_a_replica_that_does_not_leave_keeps_it_alive_until_the_deadline(tmp_path):
    began = time.monotonic()
    with processes.service(tmp_path, 1, deadline_s=1.0) as address:
        mine = take_the_only_round(address)
    assert 1.0 < time.monotonic() - began < 10
    mine.close()


HELLO = {
    "type": "hello", "replica": "stranger", "label": "stranger", "place": 0, "places": 2, "step": 0,
    "address": ["127.0.0.1", 9], "job": {"tau": 1, "rounds": 1}, "weights": 0, "deal": [0],
}  # fmt: skip


def answer(address: str, *lines: bytes) -> str:
    """What the service says before it closes: one sentence."""
    with socket.create_connection(split_address(address), 5) as stranger:
        stranger.sendall(b"".join(lines))
        stranger.settimeout(5)
        told = b""
        while part := stranger.recv(1 << 16):
            told += part
    messages = [json.loads(line) for line in told.splitlines()]
    (refusal,) = [each for each in messages if each["type"] not in ("alive", "fetch")]
    assert refusal["type"] == "expelled"
    return refusal["reason"]


def line(message: dict) -> bytes:
    return json.dumps(message).encode() + b"\n"


def test_what_is_no_message_ends_its_connection_alone_in_a_sentence(tmp_path):
    with processes.service(tmp_path, 1) as address:
        for sent in (b"[" * 100_000 + b"\n", b"3\n", b"\xff\n", b"GET / HTTP/1.1\r\n"):
            assert answer(address, sent).startswith("it sent an invalid message: ")
        for change, sentence in (
            ({"deal": []}, "its hello says deal=[]"),
            ({"deal": [1, 2]}, "its hello says deal=[1, 2]"),
            ({"deal": None}, "its hello says deal=None"),
            ({"step": "3"}, "its hello says step='3'"),
            ({"step": 9}, "its hello says step=9, more than its run has"),
            ({"weights": True}, "its hello says weights=True"),
            ({"place": 2}, "its hello says place=2 of places=2"),
            ({"places": 0}, "its hello says places=0"),
            ({"address": ["a..b", 1]}, "its hello says address=['a..b', 1]"),
            ({"address": 5}, "its hello says address=5"),
            ({"job": {"tau": 0, "rounds": 1}}, "its hello says job={'tau': 0, 'rounds': 1}"),
            ({"label": ["x"] * 100}, "its hello says label=['x', "),
            ({"type": ["x"]}, "unknown message type ['x']; start it with the service's version"),
        ):
            assert sentence in answer(address, line(HELLO | change))
        assert "hello must be its first message" in answer(address, line({"type": "alive"}))
        assert "hello must be its first message" in answer(address, line(HELLO), line(HELLO))
        assert "its failed says peer=[]" in answer(
            address, line(HELLO), line({"type": "failed", "attempt": 1, "peer": []})
        )
        take_the_only_round(address).close()


def test_one_that_is_frozen_is_put_out_and_one_that_computes_for_long_is_not(tmp_path):
    """Its thread that computes says nothing meanwhile, and nobody waits for either."""
    with processes.service(tmp_path, 1, deadline_s=1.0) as address:
        mine = Member(address, "mine", {"tau": 1, "rounds": 1}, deadline_s=5.0)
        outer = OuterOptimizer(torch.nn.Linear(2, 2), None, local_sgd(1), sums=mine)
        assert mine.join(OuterState(outer), *outer.travelling(), 0, [0])
        outer.begin_anew(mine.is_behind)
        frozen = HELLO | {"places": 1}
        assert answer(address, line(frozen)) == "nothing was heard from it for 3 s"
        outer.step()
        outer.finish()
        assert mine.round == 1
        mine.close()


def test_who_says_that_it_is_a_rank_that_is_here_is_refused_and_that_one_stays(tmp_path):
    with processes.service(tmp_path, 1) as address:
        with socket.create_connection(split_address(address), 5) as first:
            first.sendall(line(HELLO))
            assert json.loads(first.makefile().readline())["type"] == "alive"
            assert answer(address, line(HELLO)) == "rank 0 of its replica is connected already"
            other = answer(address, line(HELLO | {"place": 1, "places": 3}))
            assert other == "it says that its replica has 3 ranks, and another one 2"
            assert json.loads(first.makefile().readline())["type"] == "alive"
        take_the_only_round(address).close()


def test_a_replica_that_loads_for_longer_than_a_hello_may_take_gets_in(tmp_path, monkeypatch):
    monkeypatch.setattr(services, "HELLO_S", 0.5)
    with processes.service(tmp_path, 1) as address:
        take_the_only_round(address, loads_s=1.5).close()


def test_silent_connections_are_closed_the_oldest_first(tmp_path, monkeypatch):
    """Those that say a byte now and then too; the oldest go first, and the rest after their time."""
    monkeypatch.setattr(services, "MOST_STRANGERS", 5)
    monkeypatch.setattr(services, "HELLO_S", 1.0)
    with processes.service(tmp_path, 1) as address, contextlib.ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(split_address(address))) for _ in range(20)]
        for each in silent:
            each.settimeout(0.8)
        assert all(each.recv(1) == b"" for each in silent[:15])
        silent[-1].sendall(b"{")
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
        for each in silent[15:]:
            each.settimeout(5)
            assert each.recv(1) == b""
        take_the_only_round(address).close()


FLOODED = """
import resource, socket, sys, threading, time
from pyruntime.replicas.coordinator import Coordinator
from pyruntime.replicas.service import Service
made = Service(Coordinator(1, 1, 30.0), "127.0.0.1", 0, None, print)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(made.port, flush=True)
began, cpu = time.monotonic(), time.process_time()
made.run()
print((time.process_time() - cpu) / (time.monotonic() - began))
"""


def test_where_descriptors_run_out_replicas_get_in_and_no_core_is_spent(tmp_path):
    with (
        subprocess.Popen([sys.executable, "-c", FLOODED], stdout=subprocess.PIPE, text=True) as service,
        contextlib.ExitStack() as held,
    ):
        address = f"127.0.0.1:{int(service.stdout.readline())}"
        for _ in range(100):
            held.enter_context(socket.create_connection(split_address(address)))
        time.sleep(2)
        take_the_only_round(address).close()
        *said, share = service.stdout.read().splitlines()
    assert service.returncode == 0
    assert sum('"crowded"' in each for each in said) == 1
    assert float(share) < 0.3


def named(number: int, **change) -> bytes:
    """The hello of a rank whose replica has another one, which never comes."""
    return line(HELLO | {"replica": f"stranger {number}"} | change)


def test_ranks_of_replicas_that_are_not_whole_go_the_oldest_first(tmp_path, monkeypatch):
    """They say hello, and that they live for as long as they are let."""
    monkeypatch.setattr(services, "MOST_RANKS", 5)
    with processes.service(tmp_path, 1) as address, contextlib.ExitStack() as held:
        said = []
        for number in range(300):
            said.append(held.enter_context(socket.create_connection(split_address(address), 5)))
            said[-1].sendall(named(number) + line({"type": "alive"}))
        for each in said[:295]:
            told = b"".join(iter(lambda each=each: each.recv(1 << 16), b""))
            assert b"as many as the service accepts, and its replica is not complete" in told
        take_the_only_round(address).close()
        assert said[-1].recv(1 << 16)  # still there


def test_where_all_replicas_are_whole_one_more_is_refused_and_they_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(services, "MOST_RANKS", 2)
    with processes.service(tmp_path, 3, ends=False) as address, contextlib.ExitStack() as held:
        first, second = (
            held.enter_context(socket.create_connection(split_address(address), 5)) for _ in range(2)
        )
        for place, each in enumerate((first, second)):
            each.sendall(named(0, place=place))
            assert json.loads(each.makefile().readline())["type"] == "alive"
        refused = answer(address, named(1))
        assert refused.startswith("2 ranks are connected, as many as the service accepts; start it with more")
        for each in (first, second):
            assert each.recv(1 << 16)
        first.close()
        assert "its replica left" in second.makefile().read()


@pytest.mark.second_tier
def test_where_descriptors_run_out_by_hellos_replicas_get_in_and_no_core_is_spent(tmp_path):
    program = FLOODED.replace("30.0", "3.0")  # so long it waits for them in the end
    with (
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as service,
        contextlib.ExitStack() as held,
    ):
        address = f"127.0.0.1:{int(service.stdout.readline())}"
        for number in range(300):
            with contextlib.suppress(ConnectionError):  # its turn to be put out
                stranger = held.enter_context(socket.create_connection(split_address(address)))
                stranger.sendall(named(number))
            time.sleep(0.005)  # a connection that finds the queue full tries again after seconds
        time.sleep(2)
        take_the_only_round(address).close()
        *_, share = service.stdout.read().splitlines()
    assert service.returncode == 0
    assert float(share) < 0.5


def test_noise_does_not_keep_it_from_its_work(tmp_path):
    """Whatever bytes, and messages with some of them changed."""
    draw = random.Random(0)
    with processes.service(tmp_path, 1) as address:
        for _ in range(100):
            data = bytearray(line(HELLO) + line({"type": "ready", "round": 3}))
            for _ in range(draw.randrange(1, 5)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            noise = draw.randbytes(draw.randrange(200)) if draw.random() < 0.3 else bytes(data)
            with socket.create_connection(split_address(address), 5) as stranger:
                stranger.sendall(noise)
        time.sleep(0.5)  # what they were is over
        take_the_only_round(address).close()


NAMES = st.sampled_from(["a", "b", "c"])
SMALL = st.integers(0, 3)
SAID = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["ready", "begun", "arrived"]), "round": SMALL}),
    st.fixed_dictionaries({"type": st.just("done"), "attempt": SMALL}),
    st.fixed_dictionaries({"type": st.just("failed"), "attempt": SMALL, "peer": NAMES}),
    st.fixed_dictionaries({"type": st.just("broken"), "donor": NAMES}),
    st.fixed_dictionaries(
        {"type": st.just("here"), "step": SMALL, "weights": SMALL, "deal": st.just([5, 1])}
    ),
    st.just({"type": "alive"}),
)
HELLOS = st.fixed_dictionaries(
    {
        "type": st.just("hello"), "replica": NAMES, "label": NAMES, "places": st.integers(1, 2),
        "place": st.integers(0, 1), "address": st.just(["127.0.0.1", 1]), "step": SMALL, "weights": SMALL,
        "deal": st.sampled_from([[0], [3, 1], [9, 0, 4]]),
        "job": st.fixed_dictionaries(
            {"tau": st.integers(1, 2), "rounds": SMALL, "late": st.integers(0, 1)}
        ),
    }
)  # fmt: skip
MOVES = st.one_of(
    HELLOS,
    st.tuples(NAMES, st.integers(0, 1), SAID),
    st.sampled_from(["obey"] * 4 + ["lost", "tick"]),
)


def places_of(coordinator: Coordinator, name: str) -> list[int]:
    """Of its ranks that are here."""
    return list(coordinator.replicas[name].addresses) if name in coordinator.replicas else []


@settings(max_examples=200, deadline=None)
@given(st.lists(MOVES, max_size=60), st.integers(1, 2), st.randoms(use_true_random=False))
def test_whatever_ranks_say_the_coordinator_goes_on(moves, quorum, draw):
    """What is well-formed, in any order; some of it is what was asked for."""
    made, now, orders = Coordinator(2, quorum, 5.0), 0.0, []
    replies = {"enter": ("begun", "round"), "exchange": ("done", "attempt"), "commit": ("arrived", "round")}
    for move in moves:
        now += 0.5
        for name in draw.sample("abc", 2):  # else all are silent after a while
            for place in places_of(made, name):
                made.hear(name, place, {"type": "alive"}, now)
        if move == "tick":
            now += draw.choice([4.0, 6.0])
        elif move == "lost":
            made.lost(draw.choice("abc"), "", now)
        elif move == "obey" and orders:
            order = orders.pop(0)
            message = order.message
            kind, key = replies.get(message["type"], ("arrived", ""))
            value = message.get(key, made.round)
            for place in places_of(made, order.replica):
                made.hear(order.replica, place, {"type": kind, key or "round": value}, now)
        elif isinstance(move, tuple):
            name, place, message = move
            check(message)
            if place in places_of(made, name):
                made.hear(name, place, message, now)
        elif isinstance(move, dict):
            try:
                check(move)
            except ValueError:
                continue
            if not made.why_not(move["replica"], move["place"], move):
                made.hello(move["replica"], move["place"], move, now)
        made.tick(now)
        orders, made.orders = orders + made.orders, []


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "host.."])
def test_what_can_be_no_host_is_refused_in_a_sentence(capsys, host):
    assert main(["members", "--replicas", "1", "--port", "0", "--host", host]) == 2
    assert f"--host={host} is neither a host name nor an address; correct it." in capsys.readouterr().err
    with pytest.raises(ValueError, match="is no address; write HOST:PORT"):
        split_address(f"{host}:29600")
