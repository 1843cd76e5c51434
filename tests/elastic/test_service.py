"""When the service ends, and what strangers send it."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from pyruntime.elastic.address import split_address
from pyruntime.elastic.member import Member
from pyruntime.elastic.state import OuterState
from pyruntime.outer import local_sgd
from pyruntime.outer.optimizer import OuterOptimizer
from tests.elastic import replicas


def take_the_only_round(address: str) -> Member:
    module = torch.nn.Linear(2, 2)
    mine = Member(address, "mine", {"tau": 1, "rounds": 1}, deadline_s=5.0)
    outer = OuterOptimizer(module, None, local_sgd(1), sums=mine)
    assert mine.join(OuterState(outer), *outer.travelling(), 0, [0])
    outer.begin_anew()
    outer.step()
    outer.finish()
    assert mine.round == 1
    return mine


def test_a_stranger_does_not_keep_it_alive(tmp_path):
    with replicas.service(tmp_path, 1) as address, socket.create_connection(split_address(address)):
        take_the_only_round(address).close()


def test_a_replica_that_does_not_leave_keeps_it_alive_until_the_deadline(tmp_path):
    began = time.monotonic()
    with replicas.service(tmp_path, 1, deadline_s=1.0) as address:
        mine = take_the_only_round(address)
    assert 1.0 < time.monotonic() - began < 10
    mine.close()


@pytest.mark.parametrize("line", [b"[" * 100_000 + b"\n", b"3\n", b"\xff\n", b'{"type": "hello"}\n'])
def test_a_line_that_is_no_message_ends_its_connection_alone(tmp_path, line):
    with replicas.service(tmp_path, 1) as address:
        with socket.create_connection(split_address(address), 5) as stranger:
            stranger.sendall(line)
            assert stranger.recv(1) == b""
        take_the_only_round(address).close()
